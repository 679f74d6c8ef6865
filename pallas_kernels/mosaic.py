"""What the kernels use of Pallas Mosaic GPU, in one place: its API moves with each JAX release (here 0.11.2).

Kernels call the rest by its own name through `plgpu`. Interpret mode (a simulation of TMA, barriers and warpgroups on a
CPU) has no rule for a WGMMA whose left operand or accumulator lies in registers: `accumulate` is the one place where
the interpreted source differs from the compiled one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int, Num

plgpu: Any = mosaic_gpu  # only partly typed
Ref = Any  # a reference to GMEM, SMEM or a barrier

_LAYOUT = plgpu.Layout.WGMMA
_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


@contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Kernels traced inside run on the CPU, simulated. Uninitialised shared memory holds NaN.

    Each warpgroup blocks a thread of XLA's pool, which has one per core: on few cores a product that wants threads of
    its own waits for ever, unless the environment has PJRT_NPROC=8 before jax first runs.
    """
    interpreter().reset_gpu_interpret_mode_state()  # an earlier failure leaves its state behind
    token = _interpreting.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield
    finally:
        _interpreting.reset(token)


def races_found() -> bool:
    """Whether the last kernel interpreted with `detect_races` had a data race."""
    return bool(interpreter().get_races().races_found)


def interpreter() -> Any:
    """Return JAX's module that interprets Mosaic GPU kernels; tests count its callbacks."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # not exported in 0.11.2

    return interpret_pallas_call


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    outputs: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    grid: dict[str, int],
    num_threads: int,
    scratch: Sequence[Any] | Mapping[str, Any],
) -> Callable[..., list[Array]]:
    """A kernel of `num_threads` warpgroups (axis "thread") on a grid of named axes, the last of which runs fastest.

    `approx_math`: exponentials, logarithms and tanh in one instruction, good to about 2^-11 relative (tanh) and 2^-22.
    No reduction scratch: rows lie within a warp.
    """
    run: Callable[..., list[Array]] = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*output) for output in outputs],  # type: ignore[no-untyped-call]
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_threads,
        thread_name="thread",
        scratch_types=scratch if isinstance(scratch, Mapping) else list(scratch),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    return run


def tiled(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int) -> Any:
    """Shared memory whose last two dimensions WGMMA can read: tiles of 8 rows and `swizzle` bytes."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def full(shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
    """A float32 constant in the registers of a warpgroup: 64 rows of an accumulator, or a number per row."""
    out: Array = plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _layout(shape))
    return out


def iota(shape: tuple[int, ...], axis: int, *, upcast: bool = False) -> Int[Array, "..."]:
    """Indices along an axis, in registers as `full`, or as `load_upcast`."""
    layout = plgpu.Layout.WGMMA_UPCAST_2X if upcast else _layout(shape)
    out: Array = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
    return out


def load(ref: Ref) -> Float[Array, "M N"]:
    """Shared memory in registers as `full`. M must be a multiple of 64."""
    out: Array = plgpu.load(ref, layout=_LAYOUT)
    return out


def load_upcast(ref: Ref, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """Shared memory of 8-bit numbers in registers, four neighbours in each, cast to 16 bits. M as in `load`."""
    out: Array = plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(dtype)
    return out


def rows_to_columns(values: Num[Array, " M"], columns: int) -> Num[Array, "M columns"]:
    """A number per row, repeated along the row."""
    return lax.broadcast_in_dim(values, (values.shape[0], columns), [0])


def product(a: Ref, b: Ref) -> Float[Array, "M N"]:
    """The product a · bᵀ in float32, of shared memory [M, D] and [N, D]."""
    return product_and(a, b, lambda: None)[0]


def product_and[T](a: Ref, b: Ref, meanwhile: Callable[[], T]) -> tuple[Float[Array, "M N"], T]:
    """As `product`, and what `meanwhile` gives, which runs while the product is under way."""

    def multiply(total: Ref) -> tuple[Array, T]:
        plgpu.wgmma(total, a, b.T)
        result = meanwhile()
        return total[...], result

    out: tuple[Array, T] = pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))
    return out


def accumulate(total: Float[Array, "M N"], a: Float[Array, "M K"], b: Ref) -> Float[Array, "M N"]:
    """The sum total + a · b, of `a` in registers and `b` [K, N] in shared memory."""
    if _interpreting.get():
        out = total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the simulated read is an ordinary one, a WGMMA's is not
    else:
        out = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(total))
    return out


def settled(*values: Array) -> tuple[Array, ...]:
    """The values, all computed before what comes after: compilers move arithmetic across waits for barriers."""
    if _interpreting.get():
        return values  # no rule, and no need
    out: tuple[Array, ...] = lax.optimization_barrier(values)  # type: ignore[no-untyped-call]
    return out


def _layout(shape: tuple[int, ...]) -> Any:
    return _LAYOUT if len(shape) == 2 else _LAYOUT.reduce(1)
