"""`grouped_matmul`: each row times its expert's matrix. One signature, several implementations.

An implementation is imported where it is chosen, as in `attention.api`.

Shape letters: R rows, E experts, K inputs, N outputs; C columns of weights: N, or 2N (gates, then ups) with a `Glu`.
"""

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import Experts
from pallas_kernels.experts.glu import Glu, glu
from pallas_kernels.experts.groups import Groups, Tiling
from pallas_kernels.experts.stacks import Stack, read_by

Implementation = Experts
HOPPER = ("mosaic", "mosaic_overlap")
Weights = Float[Array, "E K C"] | Stack
TILE_ROWS = 16  # rows per turn of the XLA loop


@runtime_checkable
class Widened(Protocol):
    """What "reference" and "xla" read of weights: the product with one expert's matrix."""

    @property
    def columns(self) -> int:
        """C."""
        ...

    def product(
        self, x: Float[Array, "R K"], index: Int[Array, ""] | int, precision: lax.PrecisionLike
    ) -> Float[Array, "R C"]:
        """Return x · the matrix of an expert in x's type."""
        ...


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Weights,
    groups: Groups,
    *,
    bias: Float[Array, "E C"] | None = None,
    gated: Glu | None = None,
    implementation: Implementation = "xla",
    sms: int | None = None,
    tiles: Int[Array, "B 4"] | None = None,
) -> Float[Array, "R N"]:
    """Return x · weights[e] + bias[e] for the rows of each expert e, after the activation if there is one.

    Rows that belong to no expert may hold anything, NaN too, in x and in the result. Weights of experts without rows
    are not read.

    Args:
        x: rows, sorted by expert.
        weights: in x's type; or in MXFP4, as `Mxfp4Tiles` for "mosaic", `Mxfp4Joined` for "mosaic_overlap" and `Mxfp4`
            for the others but "triton"; or of 8 bits, `Int4` or `Nvfp4`, for the first two as `Tiles8`,
            `BlockTiles8`, `Int4Tiles` or `Nvfp4Tiles`, but not for "triton"; with scales of blocks, not for "cpu".
        groups: the rows of each expert; see `group_rows`.
        bias: one number per expert and column of the weights.
        gated: the activation.
        implementation: "reference" (float32, every expert for every row: for tests), "xla" (any device; a loop, which
            no CUDA graph can hold), "cpu" (the library of `pallas_kernels.cpu`; weights as `Panels` or `Mxfp4`),
            "mosaic" (Hopper; 16-bit types; no loop outside of the kernel), "mosaic_overlap" (the same for weights of
            8 and 4 bits alone, unpacked while the product before runs), "triton" (NVIDIA since Ampere, with
            jax-triton; no loop outside of the kernel).
        sms: multiprocessors of the device, for Hopper. None: as many as an H200 has.
        tiles: the list of tiles of `tiling_of`, for Hopper and Triton; None: it is made from the groups.

    Raises:
        ImportError: the implementation is "triton", and jax-triton is missing.
        NoExpertKernel: the implementation cannot serve these shapes or types.
        ValueError: there is no such implementation.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation = {implementation!r}: must be one of {sorted(get_args(Implementation))}")
    out: Array
    stack = read_by(implementation, weights)
    if implementation in HOPPER:
        from pallas_kernels.experts.hopper import call as mosaic

        out = mosaic.grouped_matmul(x, stack, groups, bias, gated, sms=sms, tiles=tiles)
    elif implementation == "triton":
        from pallas_kernels.experts.triton import call as triton

        out = triton.grouped_matmul(x, stack.values, groups, bias, gated, tiles=tiles)
    elif implementation == "cpu":
        from pallas_kernels.cpu.experts import grouped_products

        out = grouped_products(x, stack, groups, bias)
        out = out if gated is None else glu(gated, *jnp.split(out, 2, axis=-1))
    else:
        out = (_reference if implementation == "reference" else _xla)(x, stack, groups, bias, gated)
    return out


def tiling_of(
    x: Float[Array | jax.ShapeDtypeStruct, "R K"],
    weights: Weights,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
    implementation: Implementation,
    sms: int | None = None,
) -> Tiling | None:
    """Return how a call cuts rows into tiles of which it reads a list; None if it reads none.

    Only shapes and types are read. Raises NoExpertKernel if the kernel cannot serve them.
    """
    if implementation == "triton":
        from pallas_kernels.experts.triton import tuning as triton_tuning

        own = triton_tuning.Shape.of(x, read_by(implementation, weights).values, bias, gated)
        return own.tiling(triton_tuning.default_tuning(own))
    if implementation not in HOPPER:
        return None
    from pallas_kernels.experts.hopper.call import plan_of
    from pallas_kernels.experts.hopper.launch import Shape

    return plan_of(Shape.of(x, read_by(implementation, weights), bias, gated), sms).tiling


def variant(
    x: Float[Array | jax.ShapeDtypeStruct, "R K"],
    weights: Weights,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
    implementation: Implementation,
    sms: int | None = None,
) -> Hashable:
    """Return what tells the kernels of calls apart: equal for calls that run the same code, but for the number of rows.

    Only shapes and types are read. Raises NoExpertKernel if the kernel cannot serve them.
    """
    if implementation == "triton":
        from pallas_kernels.experts.triton import tuning as triton_tuning

        own = triton_tuning.Shape.of(x, read_by(implementation, weights).values, bias, gated)
        return replace(own, rows=0), triton_tuning.default_tuning(own)
    if implementation not in HOPPER:
        return implementation
    from pallas_kernels.experts.hopper.call import plan_of
    from pallas_kernels.experts.hopper.launch import Shape

    shape = Shape.of(x, read_by(implementation, weights), bias, gated)
    return (
        shape.experts,
        shape.inputs,
        shape.outputs,
        shape.dtype,
        shape.held,
        shape.bias,
        plan_of(shape, sms).tuning,
    )


def _outputs(weights: Widened, gated: Glu | None) -> int:
    return weights.columns if gated is None else weights.columns // 2


def _finish(out: Float[Array, "R C"], bias: Float[Array, " C"] | None, gated: Glu | None) -> Float[Array, "R N"]:
    out = out if bias is None else out + bias[None]
    return out if gated is None else glu(gated, *jnp.split(out, 2, axis=-1))


@partial(jax.jit, static_argnames="gated", inline=True)
def _reference(
    x: Float[Array, "R K"],
    weights: Widened,
    groups: Groups,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
) -> Float[Array, "R N"]:
    """Compute in float32. Rows that belong to no expert are zeros."""
    row = jnp.arange(len(x))
    out = jnp.zeros((len(x), _outputs(weights, gated)), jnp.float32)
    for expert in range(len(groups.sizes)):
        product = weights.product(x.astype(jnp.float32), expert, "highest")
        own_bias = None if bias is None else bias[expert].astype(jnp.float32)
        start, size = groups.starts[expert], groups.sizes[expert]
        mine = (row >= start) & (row < start + size)
        out = jnp.where(mine[:, None], _finish(product, own_bias, gated), out)
    return out.astype(x.dtype)


@partial(jax.jit, static_argnames="gated", inline=True)
def _xla(
    x: Float[Array, "R K"],
    weights: Widened,
    groups: Groups,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
) -> Float[Array, "R N"]:
    """Cut each expert's rows into tiles, and compute tile by tile."""
    starts, sizes = groups
    tiles = (sizes + TILE_ROWS - 1) // TILE_ROWS
    ends = jnp.cumsum(tiles)
    # Room for a whole tile behind the last row: at the end of x a slice would begin earlier, in another tile's rows.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # else a GPU multiplies float32 in TF32
    padded = jnp.concatenate([x, jnp.zeros((TILE_ROWS, x.shape[1]), x.dtype)])

    def tile(index: Int[Array, ""], out: Float[Array, "R2 N"]) -> Float[Array, "R2 N"]:
        expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        start = starts[expert] + (index - (ends[expert] - tiles[expert])) * TILE_ROWS
        rows = lax.dynamic_slice_in_dim(padded, start, TILE_ROWS)
        product = weights.product(rows, expert, precision)
        result = _finish(product, None if bias is None else bias[expert], gated)
        # Tiles come in order, so rows that this one writes past its expert's last row are overwritten by the next.
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    out: Array = lax.fori_loop(0, ends[-1], tile, jnp.zeros((len(padded), _outputs(weights, gated)), x.dtype))
    return out[: len(x)]
