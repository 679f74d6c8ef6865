"""The table of forms: the one list of how a matrix may be held."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from jswa.forms.base.form import Form, MatrixPlace, key_of
from jswa.forms.base.names import LINEAR
from jswa.forms.blocks import BLOCK_TILES, BLOCKS
from jswa.forms.eight_bits import EIGHT_BIT_ROWS, EIGHT_BIT_TILES, EIGHT_BITS
from jswa.forms.int4 import IN_INT4_TILES, INT4
from jswa.forms.int8_groups import INT8_GROUPS
from jswa.forms.mxfp4 import MXFP4, MXFP4_JOINED, MXFP4_TILES
from jswa.forms.nvfp4 import IN_NVFP4_TILES, NVFP4
from jswa.forms.plain import PLAIN

# A matrix has the first form whose arrays are all among the parameters.
FORMS: tuple[Form, ...] = (
    PLAIN,
    EIGHT_BITS,
    EIGHT_BIT_TILES,
    EIGHT_BIT_ROWS,
    BLOCKS,
    BLOCK_TILES,
    INT8_GROUPS,
    INT4,
    IN_INT4_TILES,
    NVFP4,
    IN_NVFP4_TILES,
    MXFP4,
    MXFP4_TILES,
    MXFP4_JOINED,
)
# The ends of the names of all arrays but of plain ones.
ENDS_OF_ARRAYS = frozenset(end for form in FORMS for end in (*form.ends, *form.optional) if end)


def matrix_at(place: MatrixPlace, params: Mapping[str, Array]) -> Any:
    """Return a parameter as the model reads it: an array, or the record of its form.

    Raises KeyError if `params` lacks it.
    """
    form, arrays = form_at(place.name, params)
    return form.bound(place, arrays)


def form_at[A](name: str, params: Mapping[str, A]) -> tuple[Form, dict[str, A]]:
    """Return the form of a matrix, and its arrays by their ends. Raises KeyError if `params` lacks it."""
    for form in FORMS:
        arrays = form.arrays(name, params)
        if arrays is not None:
            return form, arrays
    raise KeyError(name)


def linear_in_tiles(params: Mapping[str, Array]) -> list[str]:
    """Return the names of the linear layers' matrices that are held in tiles; experts are none."""
    found = ((form, name) for form in FORMS if form.in_tiles for name in form.names(params))
    return [name for form, name in found if LINEAR.search(name) and params[key_of(name, form.ends[0])].ndim == 4]
