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
        raise ImportError(
            "kernels on Triton need the package jax-triton: install jswa[cuda12] or jswa[cuda13]"
        ) from error
    module: ModuleType = jax_triton
    return module


def call(
    kernel: Any,
    operands: dict[str, Array | int | None],
    outputs: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: dict[str, Any],
    *,
    warps: int,
    stages: int | None = None,
    in_place: str | None = None,
) -> list[Array]:
    """Return the outputs of a kernel.

    Args:
        operands: by the names of the kernel's arguments; None for one that there is not.
        outputs: in the order of the kernel's arguments that neither operands nor constants name.
        in_place: the operand that the kernel also writes, if there is one; it is the last of the results.

    Raises ImportError if jax-triton is missing.
    """
    shared = {}
    if in_place is not None:
        written = operands[in_place]
        assert isinstance(written, jax.Array)
        # The runtime hands the kernel the operands and then the results, in order: so this one must be the last.
        shared = {"input_output_aliases": {_number(kernel, operands, in_place): len(outputs)}}
        outputs = [*outputs, jax.ShapeDtypeStruct(written.shape, written.dtype)]  # type: ignore[no-untyped-call]
    found: list[Array] = load().triton_call(
        kernel=kernel,
        out_type=outputs,
        grid=grid,
        num_warps=warps,
        **({} if stages is None else {"num_stages": stages}),
        **shared,
        backend_options={"ptx_version": _PTX_VERSION, "enable_fp_fusion": True},
        **operands,
        **constants,
    )
    return found


def _number(kernel: Any, operands: dict[str, Array | int | None], name: str) -> int:
    """Return which of the operands that there are, in the order of the kernel's arguments, has this name."""
    return [each for each in kernel.arg_names if operands.get(each) is not None].index(name)
