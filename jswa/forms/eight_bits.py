"""Matrices in 8 bits, int8 or e4m3, with a scale per output: N.values and N.scales.

For Hopper's kernels N.tiles takes the place of N.values, and N.rows, with outputs first, for products of two factors
of 8 bits. An embedding has a scale per row.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from jswa.forms.base.form import LINEARS, NO_DEFAULTS, Form, MatrixPlace, ScaleCounts, Spec
from jswa.forms.base.names import TILES
from jswa.forms.base.panels import Room, in_byte_quads, in_panels
from jswa.forms.base.tiles import Shards, expert_by_expert, joined, on_devices, own_sides, refuse_linear, refuse_stack
from jswa.kernels import refused
from pallas_kernels.cpu.products import Panels, RowMajor, fits_quads
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.api import HOPPER
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import TILE, Tiles8
from pallas_kernels.fp8 import Fp8Rows
from pallas_kernels.int8_groups import Int8Groups
from pallas_kernels.quantized import Quantized, QuantizedRows


def _bound(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    values, scales = arrays["values"], arrays["scales"]
    if place.name == "embed":
        rows = QuantizedRows(values, scales)
        return RowMajor(rows) if place.linear == "cpu" else rows
    if values.ndim == len(place.shape):
        return Quantized(values, scales)
    in_quads = scales.ndim == values.ndim
    return Panels((Int8Groups if in_quads else Quantized)(values, scales), place.shape[-1])


def _bound_tiles(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    tiles = Tiles8(arrays[TILES], arrays["scales"])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(name: str, shape: tuple[int, ...], _: ScaleCounts) -> dict[str, Spec]:
    scales = shape[:1] if name == "embed" else (*shape[:-2], shape[-1])
    return {"values": Spec(shape, ("int8", "uint8")), "scales": Spec(scales, ("float32",))}


def _stacked(name: str, arrays: Mapping[str, Array], experts: str, place: Shards) -> dict[str, Array]:
    values, scales = arrays["values"], arrays["scales"]
    if experts == "triton":
        raise refused("experts", experts, f"{name} is held in 8 bits: must be xla or mosaic")
    if experts not in HOPPER:
        return {f"{name}.values": values, f"{name}.scales": scales}
    refuse_stack(name, experts, _limit(values.shape[1:]))
    shards = zip(*map(place.shards, (values, scales)), strict=True)
    tiled: list[Tiles8] = [expert_by_expert(eight_bits.tiles, Quantized(*shard)) for shard in shards]
    return place.from_each((f"{name}.{TILES}", f"{name}.scales"), tiled)


def _panelled(name: str, params: dict[str, Array], room: Room) -> tuple[str, ...]:
    """Lay values out in panels [*E, P, K, 32].

    Where the processor multiplies bytes, int8 becomes quads [*E, P, K / 4, 128], and scales one group [*E, P, 1, 32].
    """
    values, scales = f"{name}.values", f"{name}.scales"
    if params[values].dtype != "int8" or not fits_quads(params[values].shape[-2], 1):
        params[values] = in_panels(params.pop(values), room)
        return (values,)
    params[values] = in_byte_quads(params.pop(values), room)
    params[scales] = in_panels(params.pop(scales)[..., None, :], room)
    return values, scales


def _tiled(name: str, params: dict[str, Array]) -> None:
    values, scales = params[f"{name}.values"], params[f"{name}.scales"]
    refuse_linear(name, _limit(own_sides(values)))
    tiled: list[Tiles8] = [_in_tiles(part) for part in map(Quantized, *map(on_devices, (values, scales)))]
    params[f"{name}.{TILES}"] = joined(values, [one.codes for one in tiled])
    by_device = jax.make_array_from_single_device_arrays
    params[f"{name}.scales"] = by_device(scales.shape, scales.sharding, [one.scales for one in tiled])
    del params[f"{name}.values"]


def _limit(sides: tuple[int, ...]) -> str | None:
    """Return why a matrix, or each of a stack, has no tiles; None if it has."""
    return f"{list(sides)} in 8 bits does not fit multiples of {TILE}" if any(side % TILE for side in sides) else None


_in_tiles = jax.jit(eight_bits.tiles)
EIGHT_BITS = Form(
    ("values", "scales"),
    _bound,
    specs=_specs,
    scheme="8 bits",
    linear=LINEARS,
    experts=NO_DEFAULTS,
    modes=lambda arrays: ("int8",) if arrays["values"].dtype == "int8" else ("fp8",),
    stacked=_stacked,
    panelled=_panelled,
    tiled=_tiled,
)
EIGHT_BIT_TILES = Form((TILES, "scales"), _bound_tiles, in_tiles=True)
EIGHT_BIT_ROWS = Form(("rows", "scales"), lambda _, arrays: Fp8Rows(arrays["rows"], arrays["scales"]))
