"""Matrices in 8 bits, int8 or e4m3, with a scale per output: N.values and N.scales.

For Hopper's kernels N.tiles takes the place of N.values, and N.rows, with outputs first, for products of two factors
of 8 bits. An embedding has a scale per row.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import LINEARS, NO_DEFAULTS, Counts, Form, Place, Spec
from jswa.forms.base.names import TILES
from pallas_kernels.cpu.products import Panels, Rows
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import Tiles8
from pallas_kernels.fp8 import Fp8Rows
from pallas_kernels.quantized import Quantized, QuantizedRows


def _bound(place: Place, arrays: Mapping[str, Array]) -> Any:
    values, scales = arrays["values"], arrays["scales"]
    if place.name == "embed":
        rows = QuantizedRows(values, scales)
        return Rows(rows) if place.linear == "cpu" else rows
    matrix = Quantized(values, scales)
    return Panels(matrix, place.shape[-1]) if values.ndim > len(place.shape) else matrix


def _bound_tiles(place: Place, arrays: Mapping[str, Array]) -> Any:
    tiles = Tiles8(arrays[TILES], arrays["scales"])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(name: str, shape: tuple[int, ...], _: Counts) -> dict[str, Spec]:
    scales = shape[:1] if name == "embed" else (*shape[:-2], shape[-1])
    return {"values": Spec(shape, ("int8", "uint8")), "scales": Spec(scales, ("float32",))}


EIGHT_BITS = Form(("values", "scales"), _bound, specs=_specs, scheme="8 bits", linear=LINEARS, experts=NO_DEFAULTS)
EIGHT_BIT_TILES = Form((TILES, "scales"), _bound_tiles)
EIGHT_BIT_ROWS = Form(("rows", "scales"), lambda _, arrays: Fp8Rows(arrays["rows"], arrays["scales"]))
