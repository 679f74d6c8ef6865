"""Matrices in e4m3 with a scale for each block of inputs and outputs: N.values and N.block_scales.

For Hopper's kernels N.tiles takes the place of N.values, and a scale is that of a tile's outputs.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import Form, Place
from jswa.forms.base.names import BLOCK_SCALES, TILES
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import BlockTiles8
from pallas_kernels.quantized import QuantizedBlocks


def _bound_tiles(place: Place, arrays: Mapping[str, Array]) -> Any:
    tiles = BlockTiles8(arrays[TILES], arrays[BLOCK_SCALES])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


BLOCKS = Form(("values", BLOCK_SCALES), lambda _, arrays: QuantizedBlocks(arrays["values"], arrays[BLOCK_SCALES]))
BLOCK_TILES = Form((TILES, BLOCK_SCALES), _bound_tiles)
