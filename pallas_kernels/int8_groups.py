"""Weights in int8 with a scale for each output and group of neighbouring inputs (GGUF's Q8_0, W8A16 in groups).

A weight is value · scale in float32, rounded once to the type of the product: the same number, bit for bit, as if the
weights had been dequantized before.

Shape letters: T rows, K inputs, C outputs, G groups; E leading axes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

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

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """No kernel computes gates, ups and their unit."""

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrix, and its arrays."""
        return "grouped", [self.values, self.scales]

    @property
    def columns(self) -> int:
        """C."""
        return int(self.values.shape[-1])


def dequantized(weights: Int8Groups, dtype: jnp.dtype) -> Float[Array, "K C"]:
    """Return all weights of one matrix as one array."""
    values, scales = weights
    grouped = values.reshape(len(scales), -1, values.shape[1]).astype(jnp.float32)
    return (grouped * scales[:, None].astype(jnp.float32)).reshape(values.shape).astype(dtype)
