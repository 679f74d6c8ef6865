"""Shapes of `grouped_matmul`'s arguments for a layer of `tools.cases.kernels.experts`: to lower, compile, or fill."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Sharding

from pallas_kernels.experts import int4_tiles, nvfp4_tiles
from pallas_kernels.experts.eight_bits import DEEP, LINE, LINES, BlockTiles8, Tiles8
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import Groups, row_count
from pallas_kernels.experts.hopper.launch import OnHopper
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.mxfp4 import TILE, WORD_LINES, Mxfp4Joined, Mxfp4Tiles
from pallas_kernels.experts.nvfp4_tiles import Nvfp4Tiles
from tools.cases.kernels.experts import Layer

Matrix = Literal["up", "down"]
MATRICES: tuple[Matrix, ...] = ("up", "down")


class Arguments(NamedTuple):
    """Shapes of the arrays, and the activation."""

    x: jax.ShapeDtypeStruct
    weights: jax.ShapeDtypeStruct | OnHopper
    groups: Groups
    bias: jax.ShapeDtypeStruct | None
    gated: Glu | None


def arguments(layer: Layer, matrix: Matrix, tokens: int, sharding: Sharding | None = None) -> Arguments:
    """Return the arguments for a layer's first matrix (gates and ups) or its second, in bfloat16.

    `tokens`: of the step.
    """

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    experts, inputs = layer.experts, layer.d_model if matrix == "up" else layer.hidden
    columns = 2 * layer.hidden if matrix == "up" else layer.d_model
    return Arguments(
        array(row_count(tokens * layer.top_k, experts), inputs),
        array(experts, inputs, columns) if layer.form == "plain" else _tiles(array, layer, inputs, columns),
        Groups(array(experts, dtype="int32"), array(experts, dtype="int32")),
        array(experts, columns) if layer.bias else None,
        layer.gated if matrix == "up" else None,
    )


def _tiles(array: Callable[..., Any], layer: Layer, inputs: int, columns: int) -> OnHopper:
    tiles = layer.experts, columns // TILE, inputs // TILE
    if layer.form in ("int8", "fp8"):
        codes = array(*tiles, LINES, LINE, dtype="int8" if layer.form == "int8" else "uint8")
        return Tiles8(codes, array(layer.experts, columns, dtype="float32"))
    if layer.form == "fp8_blocks":
        scales = array(layer.experts, columns // TILE, inputs // DEEP, dtype="float32")
        return BlockTiles8(array(*tiles, LINES, LINE, dtype="uint8"), scales)
    if layer.form in ("int4", "int4_wide"):
        lines = int4_tiles.LINES if layer.form == "int4" else int4_tiles.WIDE_LINES
        return Int4Tiles(array(*tiles, lines, TILE, dtype="int16"))
    if layer.form == "nvfp4":
        lines = array(*tiles, nvfp4_tiles.LINES, TILE, dtype="int16")
        return Nvfp4Tiles(lines, array(layer.experts, columns, dtype="float32"))
    if layer.overlap:
        return Mxfp4Joined(array(*tiles, WORD_LINES + 1, TILE, dtype="int16"))
    return Mxfp4Tiles(array(*tiles, 4, 128, dtype="int32"), array(*tiles, TILE, dtype="int16"))
