"""Matrices in NVFP4: N.nvfp4_codes, N.nvfp4_scales for each 16 inputs, and N.nvfp4_output_scales.

An output has the factor of its tensor in the checkpoint, so q, k and v, or gates and ups, keep factors of their own.
For Hopper's kernels N.nvfp4_tiles takes the place of codes and scales.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from jswa.forms.base.form import LINEARS, NO_DEFAULTS, Form, MatrixPlace, ScaleCounts, Spec
from jswa.forms.base.panels import Room, in_panels
from jswa.forms.base.tiles import Shards, expert_by_expert, joined, on_devices, own_sides, refuse_linear, refuse_stack
from jswa.kernels import refused
from pallas_kernels.cpu.products import Panels
from pallas_kernels.experts import nvfp4_tiles
from pallas_kernels.experts.api import HOPPER
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.mxfp4 import TILE
from pallas_kernels.experts.nvfp4 import GROUP, Nvfp4
from pallas_kernels.experts.nvfp4_tiles import Nvfp4Tiles

CODES, SCALES, FACTORS, TILES = "nvfp4_codes", "nvfp4_scales", "nvfp4_output_scales", "nvfp4_tiles"
ENDS = CODES, SCALES, FACTORS


def _bound(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    matrix = Nvfp4(*(arrays[end] for end in ENDS))
    return Panels(matrix, place.shape[-1]) if matrix.codes.ndim > len(place.shape) else matrix


def _bound_tiles(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    tiles = Nvfp4Tiles(arrays[TILES], arrays[FACTORS])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(_: str, shape: tuple[int, ...], __: ScaleCounts) -> dict[str, Spec]:
    *lead, inputs, outputs = shape
    return {
        CODES: Spec((*lead, inputs // 2, outputs), ("uint8",)),
        SCALES: Spec((*lead, inputs // GROUP, outputs), ("uint8",)),
        FACTORS: Spec((*lead, outputs), ("float32",)),
    }


def _stacked(name: str, arrays: Mapping[str, Array], experts: str, place: Shards) -> dict[str, Array]:
    if experts not in NO_DEFAULTS:
        raise refused("experts", experts, f"{name} is stored in NVFP4: must be xla or mosaic_overlap")
    held = [arrays[end] for end in ENDS]
    if experts not in HOPPER:
        return {f"{name}.{end}": array for end, array in arrays.items()}
    refuse_stack(name, experts, _limit((2 * held[0].shape[1], held[0].shape[2])))
    shards = zip(*map(place.shards, held), strict=True)
    tiled: list[Nvfp4Tiles] = [expert_by_expert(nvfp4_tiles.tiles, Nvfp4(*shard)) for shard in shards]
    return place.from_each((f"{name}.{TILES}", f"{name}.{FACTORS}"), tiled)


def _panelled(name: str, params: dict[str, Array], room: Room) -> tuple[str, ...]:
    """Lay codes and the scales of groups out in panels [*E, P, K / 2, 32] and [*E, P, G, 32]."""
    names = f"{name}.{CODES}", f"{name}.{SCALES}"
    for own in names:
        params[own] = in_panels(params.pop(own), room)
    return names


def _tiled(name: str, params: dict[str, Array]) -> None:
    codes, scales, factors = (params[f"{name}.{end}"] for end in ENDS)
    half, outputs = own_sides(codes)
    refuse_linear(name, _limit((2 * half, outputs)))
    tiled: list[Nvfp4Tiles] = [_in_tiles(part) for part in map(Nvfp4, *map(on_devices, (codes, scales, factors)))]
    params[f"{name}.{TILES}"] = joined(codes, [one.tiles for one in tiled])
    by_device = jax.make_array_from_single_device_arrays
    params[f"{name}.{FACTORS}"] = by_device(factors.shape, factors.sharding, [one.factors for one in tiled])
    for end in (CODES, SCALES):
        del params[f"{name}.{end}"]


def _limit(sides: tuple[int, int]) -> str | None:
    """Return why a matrix of these inputs and outputs, or each of a stack, has no tiles; None if it has."""
    return None if nvfp4_tiles.fits(*sides) else f"{list(sides)} in NVFP4 does not fit multiples of {TILE}"


_in_tiles = jax.jit(nvfp4_tiles.tiles)
NVFP4 = Form(
    ENDS,
    _bound,
    specs=_specs,
    scheme="nvfp4",
    linear=LINEARS,
    experts=NO_DEFAULTS,
    unpacked=nvfp4_tiles.fits,
    modes=lambda _: ("nvfp4", "mxfp4"),
    stacked=_stacked,
    panelled=_panelled,
    tiled=_tiled,
)
IN_NVFP4_TILES = Form((TILES, FACTORS), _bound_tiles, in_tiles=True)
