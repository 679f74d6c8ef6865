"""Matrices in integers of 4 bits with a scale and a zero point for each output and group of inputs.

They are N.codes, N.group_scales and N.group_zeros, and N.group_of where groups are no runs of neighbouring inputs; or
N.int4_tiles for Hopper's kernels.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import FLOATS, LINEARS, NO_DEFAULTS, Counts, Form, Place, Spec
from jswa.forms.base.names import CODES, GROUP_OF, INT4_TILES, SCALES, ZEROS
from pallas_kernels.cpu.products import Panels
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.int4 import Int4


def _bound(place: Place, arrays: Mapping[str, Array]) -> Any:
    matrix = Int4(arrays[CODES], arrays[SCALES], arrays[ZEROS], arrays.get(GROUP_OF))
    return Panels(matrix, place.shape[-1]) if matrix.codes.ndim > len(place.shape) else matrix


def _bound_tiles(place: Place, arrays: Mapping[str, Array]) -> Any:
    tiles = Int4Tiles(arrays[INT4_TILES])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(_: str, shape: tuple[int, ...], counts: Counts) -> dict[str, Spec] | None:
    *lead, inputs, outputs = shape
    if not 0 < counts.groups <= inputs or inputs % 2:
        return None
    groups = (*lead, counts.groups, outputs)
    specs = {
        CODES: Spec((*lead, inputs // 2, outputs), ("uint8",)),
        SCALES: Spec(groups, FLOATS),
        ZEROS: Spec(groups, ("uint8",)),
    }
    by_table = counts.by_table or inputs % counts.groups != 0
    return specs | {GROUP_OF: Spec((*lead, inputs), ("int32",))} if by_table else specs


INT4 = Form(
    (CODES, SCALES, ZEROS),
    _bound,
    (GROUP_OF,),
    specs=_specs,
    scheme="int4",
    counted=SCALES,
    linear=LINEARS,
    experts=NO_DEFAULTS,
)
IN_INT4_TILES = Form((INT4_TILES,), _bound_tiles)
