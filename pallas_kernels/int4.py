"""Weights of 4 bits with a scale and a zero point for each output and group of inputs (W4A16: AWQ, GPTQ).

A weight is (code - zero) · scale in float32, rounded once to the type of the product: the same number, bit for bit, as
if the weights had been dequantized before.

Shape letters: T rows, K inputs, C outputs, G groups; E leading axes, such as experts.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32, UInt8

from pallas_kernels.blocked import blocked
from pallas_kernels.experts.glu import Glu


class Int4(NamedTuple):
    """Weights: (code - zero) · scale.

    Attributes:
        codes: two inputs per byte, the first in the low bits.
        scales: in the checkpoint's type.
        zeros: from 0 to 16, because GPTQ stores 0 to 15 and adds 1.
        group_of: the group of each input. None: each group has K / G neighbouring inputs.
    """

    codes: UInt8[Array, "*E half C"]
    scales: Float[Array, "*E G C"]
    zeros: UInt8[Array, "*E G C"]
    group_of: Int32[Array, "*E K"] | None = None

    @property
    def native(self) -> bool:
        """XLA multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weights in x's type."""
        return matmul(x, self)

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """No kernel computes gates, ups and their unit."""

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrix, and its arrays."""
        arrays = [self.codes, self.scales, self.zeros]
        return ("codes", arrays) if self.group_of is None else ("codes_by_table", [*arrays, self.group_of])

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in integers of 4 bits"

    @property
    def readers(self) -> tuple[str, ...]:
        """XLA; a CPU has it in panels, Hopper's kernels have it in tiles."""
        return ("xla",)

    @property
    def columns(self) -> int:
        """C."""
        return int(self.codes.shape[-1])

    def product(
        self, x: Float[Array, "R K"], index: Int[Array, ""] | int, precision: lax.PrecisionLike
    ) -> Float[Array, "R C"]:
        """Return x · the matrix of an expert in x's type."""
        table = None if self.group_of is None else self.group_of[index]
        own = Int4(self.codes[index], self.scales[index], self.zeros[index], table)
        return jnp.matmul(x, dequantized(own, x.dtype), precision=precision)


def dequantized(weights: Int4, dtype: jnp.dtype) -> Float[Array, "K C"]:
    """Return all weights of one matrix as one array."""
    codes, scales, zeros, group_of = weights
    inputs, columns = 2 * codes.shape[0], codes.shape[1]
    wide = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(inputs, columns).astype(jnp.float32)
    if group_of is not None:
        own_zeros, own_scales = (table.at[group_of].get(mode="promise_in_bounds") for table in (zeros, scales))
        return ((wide - own_zeros.astype(jnp.float32)) * own_scales.astype(jnp.float32)).astype(dtype)
    grouped = wide.reshape(len(scales), -1, columns)
    grouped = (grouped - zeros[:, None].astype(jnp.float32)) * scales[:, None].astype(jnp.float32)
    return grouped.reshape(inputs, columns).astype(dtype)


def matmul(x: Float[Array, "T K"], weights: Int4) -> Float[Array, "T C"]:
    """Return x · weights in x's type."""
    return blocked(x, weights, dequantized)
