"""Matrices in integers of 4 bits with a scale and a zero point for each output and group of inputs.

They are N.codes, N.group_scales and N.group_zeros, and N.group_of where groups are no runs of neighbouring inputs; or
N.int4_tiles for Hopper's kernels.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jswa.forms.base.form import FLOATS, LINEARS, NO_DEFAULTS, Form, MatrixPlace, ScaleCounts, Spec
from jswa.forms.base.names import CODES, GROUP_OF, INT4_TILES, SCALES, ZEROS
from jswa.forms.base.panels import Room, in_panels, placed
from jswa.forms.base.tiles import Shards, expert_by_expert, joined, on_devices, own_sides, refuse_linear, refuse_stack
from jswa.kernels import refused
from pallas_kernels.cpu.products import PANEL, QUAD, Panels, fits_quads, panel_count, to_quads
from pallas_kernels.experts import int4_tiles
from pallas_kernels.experts.api import HOPPER
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.mxfp4 import BLOCK, TILE
from pallas_kernels.int4 import Int4


def _bound(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    matrix = Int4(arrays[CODES], arrays[SCALES], arrays[ZEROS], arrays.get(GROUP_OF))
    return Panels(matrix, place.shape[-1]) if matrix.codes.ndim > len(place.shape) else matrix


def _bound_tiles(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    tiles = Int4Tiles(arrays[INT4_TILES])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(_: str, shape: tuple[int, ...], counts: ScaleCounts) -> dict[str, Spec] | None:
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


def _stacked(name: str, arrays: Mapping[str, Array], experts: str, place: Shards) -> dict[str, Array]:
    codes, scales, zeros = (arrays[end] for end in (CODES, SCALES, ZEROS))
    if experts not in NO_DEFAULTS:
        raise refused("experts", experts, f"{name} is stored in 4-bit integers: must be xla or mosaic_overlap")
    if experts not in HOPPER:
        return {f"{name}.{end}": array for end, array in arrays.items()}
    sides = 2 * codes.shape[1], codes.shape[2]
    refuse_stack(name, experts, _limit(sides, scales.shape[1], place.shards(scales), act_order=GROUP_OF in arrays))
    shards = zip(*map(place.shards, (codes, scales, zeros)), strict=True)
    tiled: list[Int4Tiles] = [expert_by_expert(int4_tiles.tiles, Int4(*shard)) for shard in shards]
    return place.from_each((f"{name}.{INT4_TILES}",), tiled)


def _panelled(name: str, params: dict[str, Array], room: Room) -> tuple[str, ...]:
    """Lay codes out in panels [*E, P, K / 2, 32].

    Where the processor multiplies bytes they become quads [*E, P, K / 8, 128], and scales and zeros [*E, P, G, 32].
    """
    codes, scales, zeros = (f"{name}.{end}" for end in (CODES, SCALES, ZEROS))
    inputs, groups = 2 * params[codes].shape[-2], params[scales].shape[-2]
    if not fits_quads(inputs, groups, table=f"{name}.{GROUP_OF}" in params):
        params[codes] = in_panels(params.pop(codes), room)
        return (codes,)
    matrix = params.pop(codes)
    *lead, rows, outputs = matrix.shape
    out = room.empty((*lead, panel_count(outputs), rows // QUAD, QUAD * PANEL), np.dtype(matrix.dtype))
    to_quads(np.asarray(matrix), out)
    params[codes] = placed(out, matrix)
    for field in (scales, zeros):
        params[field] = in_panels(params.pop(field), room)
    return codes, scales, zeros


def _tiled(name: str, params: dict[str, Array]) -> None:
    codes, scales, zeros = (params[f"{name}.{end}"] for end in (CODES, SCALES, ZEROS))
    (half, outputs), (groups, _) = own_sides(codes), own_sides(scales)
    act_order = f"{name}.{GROUP_OF}" in params
    refuse_linear(name, _limit((2 * half, outputs), groups, on_devices(scales), act_order=act_order))
    tiled: list[Int4Tiles] = [_in_tiles(part) for part in map(Int4, *map(on_devices, (codes, scales, zeros)))]
    params[f"{name}.{INT4_TILES}"] = joined(codes, [one.tiles for one in tiled])
    for end in (CODES, SCALES, ZEROS):
        del params[f"{name}.{end}"]


def _limit(sides: tuple[int, int], groups: int, scales: list[Array], *, act_order: bool) -> str | None:
    """Return why a matrix, or each of a stack, has no tiles; None if it has.

    Args:
        sides: inputs and outputs.
        groups: of inputs that share a scale.
        scales: on each device of this host.
    """
    if act_order:
        return "orders its groups by act-order"
    if not int4_tiles.fits(*sides, groups):
        return f"{list(sides)} in {groups} groups does not fit multiples of {TILE} and of {BLOCK} inputs a group"
    if not all(bool(_scales_fit(shard)) for shard in scales):
        return f"has scales in {scales[0].dtype} that are no sums of two numbers of bfloat16"
    return None


_in_tiles, _scales_fit = jax.jit(int4_tiles.tiles), jax.jit(int4_tiles.scales_fit)
INT4 = Form(
    (CODES, SCALES, ZEROS),
    _bound,
    (GROUP_OF,),
    specs=_specs,
    scheme="int4",
    counted=SCALES,
    linear=LINEARS,
    experts=NO_DEFAULTS,
    modes=lambda _: ("int4", "mxfp4"),
    stacked=_stacked,
    panelled=_panelled,
    tiled=_tiled,
)
IN_INT4_TILES = Form((INT4_TILES,), _bound_tiles, in_tiles=True)
