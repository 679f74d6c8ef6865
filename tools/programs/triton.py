"""Lowers calls of Triton kernels without compiling them: a call holds the kernel's text in place of its code.

So neither a GPU nor its compiler is needed, only the packages jax-triton and triton.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

TARGET = "triton_kernel_call_ffi"


def installed() -> bool:
    """Return whether calls of Triton kernels can be lowered here."""
    return importlib.util.find_spec("jax_triton") is not None


@contextmanager
def uncompiled(capability: int) -> Iterator[None]:
    """Have jax-triton put texts into the calls that are lowered inside, for a GPU of this compute capability (90: 9.0).

    What it compiles for other callers is neither used nor changed.
    """
    if not installed():
        yield
        return
    library: Any = importlib.import_module("jax_triton.triton_lib")
    kernels: dict[Any, dict[Any, Any]] = {}
    texts: list[str] = []

    def take(module: Any, *_: Any) -> Any:
        texts.append(module.str_nodebug())
        return library.CompilationResult("", "", 0, "", "")

    def call(kernel: tuple[str, ...], *launch: Any) -> Any:
        return SimpleNamespace(to_proto=lambda name, metadata: "\n".join([*kernel, repr(launch)]).encode())

    bindings = SimpleNamespace(
        get_compute_capability=lambda device: capability,
        # of: name, warps, thread blocks of a cluster, shared memory, code, text, architecture
        TritonKernel=lambda *given: (f"{given[1]} warps, clusters of {given[2]}, {given[6]}", texts[-1]),
        TritonKernelCall=call,
        create_array_parameter=lambda *given: ("array", *given),
        create_scalar_parameter=lambda *given: ("scalar", *given),
    )
    own = property(lambda function: kernels.setdefault(function.fn, {}))
    with (
        mock.patch.object(library, "compile_ttir_inplace", take),
        mock.patch.object(library, "triton_kernel_call_lib", bindings),
        mock.patch.object(library.TritonFunction, "_kernel_cache", own),
    ):
        yield
