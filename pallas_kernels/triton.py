"""Calls of Triton kernels through jax-triton, an optional package."""

from types import ModuleType
from typing import Any

import jax
from jaxtyping import Array

_PTX_VERSION = 88  # of CUDA 12.9. Triton would choose the newest that its own ptxas knows; the plugin's may be older.


def load() -> ModuleType:
    """Return jax-triton, without which no module of Triton kernels can be imported. Raises ImportError."""
    try:
        import jax_triton  # imported here since it is optional, and loads Triton's compiler, which takes time
    except ImportError as error:
        raise ImportError("kernels on Triton need the package jax-triton: pip install jax-triton") from error
    module: ModuleType = jax_triton
    return module


def call(
    kernel: Any,
    operands: dict[str, Any],
    outputs: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: dict[str, Any],
    *,
    warps: int,
    stages: int | None = None,
) -> list[Array]:
    """Return the outputs of a kernel.

    Args:
        operands: by the names of the kernel's arguments; None for one that there is not, a `jax.Ref` for one that the
            kernel writes too.
        outputs: in the order of the kernel's arguments that neither operands nor constants name.

    Raises ImportError if jax-triton is missing.
    """
    found: list[Array] = load().triton_call(
        kernel=kernel,
        out_type=outputs,
        grid=grid,
        num_warps=warps,
        **({} if stages is None else {"num_stages": stages}),
        backend_options={"ptx_version": _PTX_VERSION, "enable_fp_fusion": True},
        **operands,
        **constants,
    )
    return found
