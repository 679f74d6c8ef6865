"""Matrices in the type of the activations: N, as the model has them or in panels."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import FLOATS, Form, MatrixPlace, Spec
from jswa.forms.base.names import runs_on_mosaic
from jswa.forms.base.panels import Room, in_panels
from pallas_kernels.cpu.products import Panels, RowMajor
from pallas_kernels.experts.dense import DensePlain, fits


def _bound(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    matrix, shape = arrays[""], place.shape
    if place.name == "embed":
        return _embedding(place, matrix)
    if place.linear == "mosaic" and len(shape) == 2 and runs_on_mosaic(place.name, shape, alone=place.alone):
        return DensePlain(matrix, place.sms)
    return Panels(matrix, shape[-1]) if matrix.ndim > len(shape) else matrix


def _embedding(place: MatrixPlace, matrix: Array) -> Any:
    """Return an embedding for the implementation that multiplies by it if it is the head too."""
    if place.linear == "cpu":
        return RowMajor(matrix)
    on_hopper = place.linear == "mosaic" and place.alone and fits(*place.shape)
    return DensePlain(matrix, place.sms, outputs_first=True) if on_hopper else matrix


def _panelled(name: str, params: dict[str, Array], room: Room) -> tuple[str, ...]:
    params[name] = in_panels(params.pop(name), room)
    return (name,)


PLAIN = Form(("",), _bound, specs=lambda _, shape, __: {"": Spec(shape, FLOATS)}, panelled=_panelled)
