"""A matrix as the model multiplies by it: what every form can do, whoever computes it and however its arrays lie.

The records of forms are in `pallas_kernels`, beside the products that read them; a bare array is `Plain` or
`PlainRows`.

Shape letters: T tokens, K inputs, C outputs, V rows of an embedding; F outputs behind gates and ups.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.experts.glu import Glu


@runtime_checkable
class Matrix(Protocol):
    """The matrix [K, C] of a linear layer."""

    @property
    def native(self) -> bool:
        """Whether the CPU's library multiplies by it."""
        ...

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · matrix in x's type."""
        ...

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> Float[Array, "T F"] | None:
        """Return the unit of x · matrix, which is gates and ups, if one kernel computes both; None if none does."""
        ...


@runtime_checkable
class Head(Protocol):
    """The matrix [K, C] of a router, or of logits."""

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · matrix in float32."""
        ...


@runtime_checkable
class Embedding(Protocol):
    """An embedding [V, K], which may be the head too."""

    def rows(self, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
        """Return rows by their indices, in `dtype` if their own type has 8 bits."""
        ...

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T V"]:
        """Return x · embeddingᵀ in float32."""
        ...


class Plain(NamedTuple):
    """A matrix of floating-point numbers, multiplied by XLA."""

    matrix: Float[Array, "K C"]

    @property
    def native(self) -> bool:
        """XLA multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · matrix."""
        return x @ self.matrix

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """XLA has no kernel for both."""

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · matrix in float32."""
        return _product(x, self.matrix, axis=0)


class PlainRows(NamedTuple):
    """An embedding of floating-point numbers, multiplied by XLA."""

    matrix: Float[Array, "V K"]

    def rows(self, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
        """Return rows by their indices."""
        return self.matrix[ids]

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T V"]:
        """Return x · embeddingᵀ in float32."""
        return _product(x, self.matrix, axis=1)


def _product(x: Float[Array, "T K"], matrix: Float[Array, "_ _"], *, axis: int) -> Float32[Array, "T n"]:
    """Return the product along an axis of the matrix.

    Contracted as it lies: for a few rows, XLA on a CPU makes a transposed copy of the matrix first.
    """
    return lax.dot_general(x, matrix, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def plain_of(held: Any) -> Array | None:
    """Return the array of a parameter, or None if it is held in another form."""
    return held if isinstance(held, Array) else None


def matrix_of(held: Any) -> Matrix:
    """Return a parameter as the matrix of a linear layer."""
    matrix: Matrix = Plain(held) if isinstance(held, Array) else held
    return matrix


def head_of(held: Any) -> Head:
    """Return a parameter as the matrix of a router or of logits."""
    head: Head = Plain(held) if isinstance(held, Array) else held
    return head


def embedding_of(held: Any) -> Embedding:
    """Return a parameter as an embedding."""
    embedding: Embedding = PlainRows(held) if isinstance(held, Array) else held
    return embedding
