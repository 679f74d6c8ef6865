"""The grouped product as a Triton kernel, for GPUs that Mosaic does not serve: make the list of tiles, run the kernel.

The call goes through jax-triton, an optional package.
"""

from typing import Any, get_args

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.experts.glu import Activation, Glu
from pallas_kernels.experts.groups import Groups, list_tiles
from pallas_kernels.experts.triton.tuning import Shape, Tuning, check_tuning, default_tuning


def grouped_matmul(
    x: Float[Array, "R K"],
    weights: Float[Array, "E K C"],
    groups: Groups,
    bias: Float[Array, "E C"] | None,
    gated: Glu | None,
    *,
    tiles: Int[Array, "B 4"] | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "R N"]:
    """See `api.grouped_matmul`. The grid and the length of the list of tiles are static; how many count is data.

    Raises ImportError if jax-triton is missing, NoExpertKernel if the kernel cannot serve the shapes, and ValueError if
    the tuning cannot be compiled.
    """
    shape = Shape.of(x, weights, bias, gated)
    tuning = tuning or default_tuning(shape)
    check_tuning(shape, tuning)
    if tiles is None:
        tiles = list_tiles(groups, shape.tiling(tuning), shape.rows)
    triton.load()
    from pallas_kernels.experts.triton import kernel  # imports Triton

    (out,) = triton.call(
        kernel.multiply,
        {"x": x, "weights": weights, "tiles": tiles, "bias": bias},
        [jax.ShapeDtypeStruct((shape.rows, shape.outputs), shape.dtype)],  # type: ignore[no-untyped-call]
        (shape.grid(tuning),),
        _constants(shape, tuning),
        warps=tuning.warps,
        stages=tuning.stages,
    )
    return out


def _constants(shape: Shape, tuning: Tuning) -> dict[str, Any]:
    gated = shape.gated or Glu("silu")
    return {
        "K": shape.inputs,
        "C": shape.outputs if shape.gated is None else 2 * shape.outputs,
        "N": shape.outputs,
        "ROWS": tuning.rows,
        "COLUMNS": tuning.columns,
        "DEPTH": tuning.depth,
        "MOST": shape.tiling(tuning).most,
        "BAND": tuning.band,
        "GATED": shape.gated is not None,
        "ACTIVATION": get_args(Activation).index(gated.activation),
        "CLAMP": float(gated.clamp or 0.0),
        "ALPHA": float(gated.alpha or 0.0),
        "PRECISION": "ieee",  # of products in float32; 16-bit types have only one
    }
