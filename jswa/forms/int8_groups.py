"""Matrices in int8 with a scale for each output and group of neighbouring inputs: N.values and N.group_scales.

The embedding has its groups in a row: [V, K] and [V, G].
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import FLOATS, Form, MatrixPlace, ScaleCounts, Spec
from jswa.forms.base.names import LINEAR, SCALES
from jswa.forms.base.panels import Room, in_byte_quads, in_panels
from pallas_kernels.cpu.products import BLOCK, Panels, RowMajor, fits_quads
from pallas_kernels.int8_groups import Int8GroupRows, Int8Groups


def _bound(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    if place.name == "embed":
        rows = Int8GroupRows(arrays["values"], arrays[SCALES])
        return RowMajor(rows) if place.linear == "cpu" else rows
    matrix = Int8Groups(arrays["values"], arrays[SCALES])
    return Panels(matrix, place.shape[-1]) if matrix.values.ndim > len(place.shape) else matrix


def _specs(name: str, shape: tuple[int, ...], counts: ScaleCounts) -> dict[str, Spec] | None:
    if name == "embed":
        return _of_rows(shape, counts.shares)  # the last axis is that of inputs
    inputs, groups = shape[-2], counts.groups
    if not (LINEAR.search(name) or name == "lm_head") or len(shape) != 2 or not 0 < groups <= inputs or inputs % groups:
        return None
    return {"values": Spec(shape, ("int8",)), SCALES: Spec((groups, shape[-1]), FLOATS)}


def _of_rows(shape: tuple[int, ...], groups: int) -> dict[str, Spec] | None:
    """Return the arrays of an embedding. The CPU's products need groups of whole blocks."""
    outputs, inputs = shape
    if not groups or inputs % (groups * BLOCK):
        return None
    return {"values": Spec(shape, ("int8",)), SCALES: Spec((outputs, groups), FLOATS)}


def _panelled(name: str, params: dict[str, Array], room: Room) -> tuple[str, ...]:
    """Lay values out in panels [P, K, 32].

    Where the processor multiplies bytes they become quads [P, K / 4, 128], and scales [P, G, 32].
    """
    values, scales = f"{name}.values", f"{name}.{SCALES}"
    if not fits_quads(params[values].shape[0], params[scales].shape[0]):
        params[values] = in_panels(params.pop(values), room)
        return (values,)
    params[values] = in_byte_quads(params.pop(values), room)
    params[scales] = in_panels(params.pop(scales), room)
    return values, scales


INT8_GROUPS = Form(
    ("values", SCALES),
    _bound,
    specs=_specs,
    scheme="int8 groups",
    counted=SCALES,
    linear=("xla", "cpu"),
    outer=("xla", "cpu"),
    modes=lambda _: ("int8",),
    panelled=_panelled,
)
