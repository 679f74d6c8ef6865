"""What a form of a matrix is: the arrays that hold it, and the matrix that the model gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array

from jswa.forms.base.names import Linear


class Place(NamedTuple):
    """Where a matrix of the model is, and who multiplies by it.

    Attributes:
        name: of the parameter.
        shape: in the model: [K, C], [E, K, C] for the stack of a mixture's experts, or [V, K] for an embedding. Arrays
            with an axis more lie in panels.
        sms: multiprocessors of the device; None: as many as an H200 has.
        linear: the implementation of linear layers.
        alone: whether it has the routers and the head too, as in an engine whose rows are computed alone.
    """

    name: str
    shape: tuple[int, ...]
    sms: int | None = None
    linear: Linear = "xla"
    alone: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether it is the stack of a mixture's experts."""
        return len(self.shape) == 3


@dataclass(frozen=True)
class Form:
    """A form of a matrix N.

    Attributes:
        ends: N.end is an array of it, for each of these; "" is N itself.
        bound: from a place and the arrays by their ends, returns the matrix as the model reads it.
        optional: ends of arrays that it may have too.
    """

    ends: tuple[str, ...]
    bound: Callable[[Place, Mapping[str, Array]], Any]
    optional: tuple[str, ...] = ()

    def arrays(self, name: str, params: Mapping[str, Array]) -> dict[str, Array] | None:
        """Return the arrays of a matrix by their ends; None if it is not held in this form."""
        if not all(key_of(name, end) in params for end in self.ends):
            return None
        ends = (*self.ends, *self.optional)
        return {end: params[key_of(name, end)] for end in ends if key_of(name, end) in params}


def key_of(name: str, end: str) -> str:
    """Return the name of an array of a matrix."""
    return f"{name}.{end}" if end else name
