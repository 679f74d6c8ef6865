"""What a form of a matrix is: the arrays that hold it, and the matrix that the model gets."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jswa.forms.base.panels import Room
from jswa.forms.base.tiles import Shards
from pallas_kernels import Linear

FLOATS = ("float32", "bfloat16", "float16")
LINEARS = ("xla", "cpu", "mosaic", "fp8")
NO_DEFAULTS = ("reference", "xla", "cpu", "mosaic_overlap")


class MatrixPlace(NamedTuple):
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


class ScaleCounts(NamedTuple):
    """How many scales a matrix has, if its form does not say so.

    Attributes:
        groups: of inputs that share one; 0: not told.
        shares: of outputs that share one; 0: not told.
        by_table: whether the group of each input is listed.
    """

    groups: int = 0
    shares: int = 0
    by_table: bool = False


_UNTOLD = ScaleCounts()


class Spec(NamedTuple):
    """Shape of an array, and the types that it may have."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The least bytes that it takes."""
        return math.prod(self.shape) * min(jnp.dtype(kind).itemsize for kind in self.kinds)


@dataclass(frozen=True)
class Form:
    """A form of a matrix N.

    Attributes:
        ends: N.end is an array of it, for each of these; "" is N itself.
        bound: from a place and the arrays by their ends, returns the matrix as the model reads it.
        optional: ends of arrays that it may have too.
        specs: from the name and the shape of a matrix, returns what its arrays are by their ends; None if there can be
            none.
        scheme: the name by which `jswa.model.hf.schemes` knows that a checkpoint has it; "" for what is laid out for a
            kernel.
        counted: the end of the array whose last two axes are the `ScaleCounts`.
        linear, experts: the implementations for which matrices of linear layers, and stacks of experts, stay in this
            form if a checkpoint has it; for others they are widened to the type of the activations. No GPU has timed
            stacks of 8 bits and of integers, so those of "mosaic", a default, are widened.
        outer: the implementations of linear layers for which embedding and head stay in it if a checkpoint has it.
        named: the implementations for which stacks of experts stay in it too if the mode names it.
        unpacked: from inputs and outputs, returns whether such stacks make "mosaic_overlap" the default on Hopper.
        modes: from the arrays, returns the values of `quantization` that name the form, besides "auto", which takes
            every form as it is; the first is what errors call it.
        rounded_for: the implementations of experts for which the numbers are rounded again.
        stacked: from the name of a stack of experts, its arrays by their ends and the implementation of experts,
            returns its parameters as that reads them. Raises ConfigError or CheckpointError if it cannot. None: they
            stay.
        panelled: replaces arrays of a matrix by panels in a `Room`, and returns the names of those. None: no panels.
        tiled: replaces the arrays of a linear layer's matrix by tiles for Hopper's kernel. Raises ConfigError if a
            device's part does not fit. None: it has no tiles.
        in_tiles: whether it is what `tiled` makes.
    """

    ends: tuple[str, ...]
    bound: Callable[[MatrixPlace, Mapping[str, Array]], Any]
    optional: tuple[str, ...] = ()
    specs: Callable[[str, tuple[int, ...], ScaleCounts], dict[str, Spec] | None] = lambda *_: None
    scheme: str = ""
    counted: str = ""
    linear: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    unpacked: Callable[[int, int], bool] = lambda *_: False
    modes: Callable[[Mapping[str, Array]], tuple[str, ...]] = lambda _: ()
    rounded_for: tuple[str, ...] = ()
    stacked: Callable[[str, Mapping[str, Array], str, Shards], dict[str, Array]] | None = None
    panelled: Callable[[str, dict[str, Array], Room], tuple[str, ...]] | None = None
    tiled: Callable[[str, dict[str, Array]], None] | None = None
    in_tiles: bool = False

    def names(self, params: Mapping[str, Array]) -> list[str]:
        """Return the names of the parameters that are held in this form."""
        first = f".{self.ends[0]}" if self.ends[0] else ""
        found = (name.removesuffix(first) for name in params if name.endswith(first))
        return [name for name in found if self.arrays(name, params) is not None]

    def nbytes(self, name: str, shape: tuple[int, ...], counts: ScaleCounts = _UNTOLD) -> int:
        """Return the least bytes that a matrix of this form takes; without scales that `counts` does not tell."""
        specs = self.specs(name, shape, counts)
        assert specs is not None
        return sum(spec.nbytes for spec in specs.values())

    def arrays[A](self, name: str, params: Mapping[str, A]) -> dict[str, A] | None:
        """Return the arrays of a matrix by their ends; None if it is not held in this form."""
        if not all(key_of(name, end) in params for end in self.ends):
            return None
        ends = (*self.ends, *self.optional)
        return {end: params[key_of(name, end)] for end in ends if key_of(name, end) in params}


def key_of(name: str, end: str) -> str:
    """Return the name of an array of a matrix."""
    return f"{name}.{end}" if end else name
