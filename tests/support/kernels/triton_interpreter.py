"""`jax_triton.triton_call` for a CPU: a callback runs the kernel's source through Triton's interpreter.

Only for test processes: importing this module imports Triton in its interpreted form, which cannot compile.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton's decorators

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl
from jaxtyping import Array
from triton.runtime import interpreter

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64", "uint16": "u16"}


@dataclass(frozen=True)
class _Tensor:
    """An array with the interface that the interpreter expects of a tensor."""

    array: np.ndarray

    @property
    def dtype(self) -> str:
        return _TYPES[self.array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def triton_call(
    *, kernel: Any, out_type: list[Any], grid: tuple[int, ...], backend_options: Any, **arguments: Any
) -> list[Array]:
    """Run a kernel, with the arguments of `jax_triton.triton_call` that are used; a `jax.Ref` is written, too.

    Until they are written, outputs are NaN, or of integers the least there is.
    """
    refs = {name: value for name, value in arguments.items() if isinstance(value, jax.Ref)}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}
    arrays |= {name: ref[...] for name, ref in refs.items()}
    static = {name: value for name, value in arguments.items() if name not in arrays}
    missing = [name for name in kernel.arg_names if name not in arguments][: len(out_type)]
    outputs = [*missing, *refs]
    shapes = [*out_type, *(jax.typeof(arrays[name]) for name in refs)]

    def run(given: dict[str, Any]) -> list[np.ndarray]:
        held = {name: np.array(value) for name, value in given.items()}
        for name, out in zip(missing, out_type, strict=True):
            held[name] = np.full(out.shape, _unwritten(out.dtype), out.dtype)
        execute(kernel, grid, held, static)
        return [held[name] for name in outputs]

    found: list[Array] = jax.pure_callback(run, shapes, arrays)
    for ref, value in zip(refs.values(), found[len(out_type) :], strict=True):
        ref[...] = value
    return found[: len(out_type)]


def _unwritten(dtype: np.dtype) -> float:
    return np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else np.nan


READS: Counter[str] = Counter()  # elements loaded from each argument; tests clear and read it
# Of each argument that the last kernel wrote, how often each element was.
WRITES: dict[str, np.ndarray] = {}


def execute(kernel: Any, grid: tuple[int, ...], arrays: dict[str, np.ndarray], static: dict[str, Any]) -> None:
    """Run the kernel on arrays, in place.

    Raises IndexError, wrapped in the interpreter's own error, if it reads or writes outside of them.
    """
    executor = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, grid)
    # The arrays are on the host already, so the executor must not copy them there and back as tensors of torch.
    executor._init_args_hst = lambda args, options: (args, options)
    executor._restore_args_dev = lambda *_: None
    bounds = {name: (array.ctypes.data, array.ctypes.data + array.nbytes) for name, array in arrays.items()}
    WRITES.clear()
    with _patched(bounds):
        executor(**static, **{name: _Tensor(array) for name, array in arrays.items()})


@contextmanager
def _patched(bounds: dict[str, tuple[int, int]]) -> Iterator[None]:
    """Make the interpreter round to bfloat16 and multiply it as GPUs do, and check all addresses."""
    builder = interpreter.InterpreterBuilder
    methods = _numbers(builder) | _memory(builder, bounds)
    with pytest.MonkeyPatch.context() as patch:
        for name, method in methods.items():
            patch.setattr(builder, name, method)
        patch.setattr(interpreter, "_patch_lang", _once(interpreter._patch_lang))
        yield


def _once(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `prepare`, which gives Triton's language its interpreted functions, with one run for each module.

    The interpreter prepares the language again in each call of a device function, which takes half of its time.
    """
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in prepared:
            return interpreter._LangPatchScope()
        prepared.add(module)
        return prepare(function)

    return prepare_once


def _numbers(builder: Any) -> dict[str, Any]:
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, value: Any, kind: Any) -> Any:
        if value.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:  # the interpreter itself would truncate
            return interpreter.TensorHandle(value.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, value, kind)

    def create_dot(self: Any, a: Any, b: Any, start: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:  # the interpreter itself would multiply the integers that it stores them in
            a, b = (cast(self, operand, tl.float32) for operand in (a, b))
        if start.data.dtype != np.float32 or a.dtype.primitive_bitwidth == 8:
            return dot(self, a, b, start, *options)
        # Some BLAS libraries add the products of a row in an order that depends on the row's place; a GPU does not. In
        # float64 the order makes no difference, except to the last bit of very few sums.
        wide = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(wide.astype(np.float32) + start.data, start.dtype.scalar)

    return {"cast_impl": cast_impl, "create_dot": create_dot}


def _memory(builder: Any, bounds: dict[str, tuple[int, int]]) -> dict[str, Any]:
    load, store = builder.create_masked_load, builder.create_masked_store

    def array_of(pointers: Any, mask: Any) -> tuple[str, int]:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        used = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for name, (begin, end) in bounds.items():
            if not used.size or (begin <= used.min() and used.max() + size <= end):
                return name, used.size
        raise IndexError(f"{used.size} addresses of {size} bytes reach beyond an array")

    def create_masked_load(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        name, count = array_of(pointers, mask)
        READS[name] += count
        return load(self, pointers, mask, *options)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        name, count = array_of(pointers, mask)
        if count:
            size, (begin, end) = pointers.get_element_ty().primitive_bitwidth // 8, bounds[name]
            shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
            used = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape)]
            written = WRITES.setdefault(name, np.zeros((end - begin) // size, np.int64))
            np.add.at(written, (used - begin) // size, 1)
        return store(self, pointers, value, mask, *options)

    return {"create_masked_load": create_masked_load, "create_masked_store": create_masked_store}
