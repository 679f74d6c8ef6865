"""Weights in int8 with a scale for each output and group of neighbouring inputs (GGUF's Q8_0, W8A16 in groups).

A weight is value · scale in float32, rounded once to the type of the product: the same number, bit for bit, as if the
weights had been dequantized before.

Embeddings [V, K] have their groups in a row: a row is looked up, and is an output if the matrix is the head.

Shape letters: T rows, K inputs, C outputs, V rows of an embedding, G groups; E leading axes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int8

from pallas_kernels.blocked import blocked
from pallas_kernels.experts.glu import Glu


class Int8Groups(NamedTuple):
    """Weights: values · scales.

    Attributes:
        scales: in the checkpoint's type; each is that of K / G neighbouring inputs.
    """

    values: Int8[Array, "*E K C"]
    scales: Float[Array, "*E G C"]

    @property
    def native(self) -> bool:
        """XLA multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weights in x's type."""
        return blocked(x, self, dequantized)

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T C"]:
        """Return x · weights in float32."""
        return blocked(x, self, dequantized, jnp.dtype(jnp.float32))

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """No kernel computes gates, ups and their unit."""

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrix, and its arrays."""
        return "grouped", [self.values, self.scales]

    @property
    def columns(self) -> int:
        """C."""
        return int(self.values.shape[-1])


class Int8GroupRows(NamedTuple):
    """Weights: values · scales, of a matrix with a row per output. Otherwise as `Int8Groups`."""

    values: Int8[Array, "V K"]
    scales: Float[Array, "V G"]

    def rows(self, ids: Int[Array, " T"], dtype: jnp.dtype) -> Float[Array, "T K"]:
        """Return rows by their indices."""
        return dequantized_rows(Int8GroupRows(self.values[ids], self.scales[ids]), dtype)

    def scores(self, x: Float[Array, "T K"]) -> Float32[Array, "T V"]:
        """Return x · weightsᵀ in float32."""
        return blocked(x, self, dequantized_rows, jnp.dtype(jnp.float32), by_row=True)

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrix, and its arrays."""
        return "grouped", [self.values, self.scales]


def dequantized(weights: Int8Groups, dtype: jnp.dtype) -> Float[Array, "K C"]:
    """Return all weights of one matrix as one array."""
    values, scales = weights
    grouped = values.reshape(len(scales), -1, values.shape[1]).astype(jnp.float32)
    return (grouped * scales[:, None].astype(jnp.float32)).reshape(values.shape).astype(dtype)


def dequantized_rows(weights: Int8GroupRows, dtype: jnp.dtype) -> Float[Array, "V K"]:
    """Return all weights of an embedding, or of some of its rows, as one array."""
    values, scales = weights
    grouped = values.reshape(*scales.shape, -1).astype(jnp.float32)
    return (grouped * scales[..., None].astype(jnp.float32)).reshape(values.shape).astype(dtype)
