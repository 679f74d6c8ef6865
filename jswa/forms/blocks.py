"""Matrices in e4m3 with a scale for each block of inputs and outputs: N.values and N.block_scales.

For Hopper's kernels N.tiles takes the place of N.values, and a scale is that of a tile's outputs.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import Counts, Form, Place, Spec
from jswa.forms.base.names import BLOCK_SCALES, LINEAR, TILES
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import BlockTiles8
from pallas_kernels.quantized import QuantizedBlocks


def _bound_tiles(place: Place, arrays: Mapping[str, Array]) -> Any:
    tiles = BlockTiles8(arrays[TILES], arrays[BLOCK_SCALES])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(name: str, shape: tuple[int, ...], counts: Counts) -> dict[str, Spec] | None:
    *lead, inputs, outputs = shape
    values, told = {"values": Spec(shape, ("uint8",))}, counts.groups and counts.shares
    if not told:
        return values
    sides = (inputs, counts.groups), (outputs, counts.shares)
    if not LINEAR.search(name) or any(not 0 < count <= side or side % count for side, count in sides):
        return None
    return values | {BLOCK_SCALES: Spec((*lead, counts.groups, counts.shares), ("float32",))}


BLOCKS = Form(
    ("values", BLOCK_SCALES),
    lambda _, arrays: QuantizedBlocks(arrays["values"], arrays[BLOCK_SCALES]),
    specs=_specs,
    scheme="blocks",
    counted=BLOCK_SCALES,
    linear=("mosaic",),
    experts=("mosaic_overlap",),
)
BLOCK_TILES = Form((TILES, BLOCK_SCALES), _bound_tiles)
