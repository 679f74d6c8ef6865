"""Products of two factors in float8 e4m3 ("W8A8"): weights with a scale per output, activations with a scale per token.

A token is rounded where its product is computed: scaled so that its largest magnitude becomes 448, the largest number
of e4m3. Numbers are summed in float32, and both scales multiply the sums. For bfloat16 the sums are stored in it: in
float32 those of a prefill of gates and ups would be as large as twice the result, and be written and read.

Weights lie with outputs first. The 8-bit products of a GPU read both factors along their inputs, so XLA would write a
transposed copy of a matrix with inputs first in every step.

Shape letters: T tokens, K inputs, C outputs.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Float32, UInt8

from pallas_kernels.experts.glu import Glu
from pallas_kernels.quantized import numbers

UNIT = 16  # K and C must be multiples; XLA pads other matrices to one, with a copy in every step
_MOST = 448.0
# Scales of smaller tokens would not be normal numbers, which a GPU takes for 0. Nothing finite becomes larger by it.
_LEAST = 2.0**-100
_BLOCK = 512  # outputs whose weights are widened at a time on a CPU
# The name of the sum makes XLA take cuBLASLt's 8-bit product for this product alone: without it, a Triton kernel with
# tiles that nobody has tuned. Sums are kept in float32; "_FAST_ACCUM" would keep fewer bits on Hopper.
_SUMS = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


class Fp8Rows(NamedTuple):
    """Weights: values · scales, each output in a row.

    Attributes:
        values: the bits of float8 e4m3.
        scales: one per output.
    """

    values: UInt8[Array, "C K"]
    scales: Float32[Array, " C"]

    @property
    def native(self) -> bool:
        """XLA multiplies."""
        return False

    def times(self, x: Float[Array, "T K"]) -> Float[Array, "T C"]:
        """Return x · weightsᵀ in x's type, of x rounded to e4m3."""
        return matmul(x, self)

    def gated(self, x: Float[Array, "T K"], unit: Glu) -> None:
        """No kernel computes gates, ups and their unit."""


def quantize_tokens(x: Float[Array, "T K"]) -> tuple[Float8e4m3fn[Array, "T K"], Float32[Array, " T"]]:
    """Round each token to e4m3; return the numbers and the scales that they are to be multiplied by.

    A token with a number that is not finite becomes NaN, and no other token does.
    """
    wide = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.abs(wide).max(axis=1), _LEAST) / _MOST
    return (wide / scales[:, None]).astype(jnp.float8_e4m3fn), scales


def matmul(x: Float[Array, "T K"], weights: Fp8Rows) -> Float[Array, "T C"]:
    """Return x · weightsᵀ in x's type, of x rounded to e4m3. No copy of the weights is made."""
    codes, scales = quantize_tokens(x)
    stored = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    cpu, default = partial(_blocked, stored=stored), partial(_product, stored=stored)
    sums: Array = lax.platform_dependent(codes, weights.values, cpu=cpu, default=default)
    return (sums.astype(jnp.float32) * scales[:, None] * weights.scales[None]).astype(x.dtype)


def _product(codes: Float8e4m3fn[Array, "T K"], values: UInt8[Array, "C K"], stored: DTypeLike) -> Float[Array, "T C"]:
    tokens = len(codes)
    codes = jnp.pad(codes, ((0, -tokens % UNIT), (0, 0)))  # as XLA would, which it forgets for a single token
    weights = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    contracted = ((1,), (1,)), ((), ())
    sums = lax.dot_general(codes, weights, contracted, precision=_SUMS, preferred_element_type=stored)
    return sums[:tokens]


def _blocked(codes: Float8e4m3fn[Array, "T K"], values: UInt8[Array, "C K"], stored: DTypeLike) -> Float[Array, "T C"]:
    """Return the same on a CPU, which has no such product: products of two numbers of e4m3 are exact in float32."""
    wide, outputs = codes.astype(jnp.float32), len(values)
    size = min(_BLOCK, outputs)

    def block(index: Array, out: Float[Array, "T C"]) -> Float[Array, "T C"]:
        start = jnp.minimum(index * size, outputs - size)  # the last block may overlap the one before
        rows = numbers(lax.dynamic_slice_in_dim(values, start, size), jnp.dtype(jnp.float32))
        part = lax.dot_general(wide, rows, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return lax.dynamic_update_slice_in_dim(out, part.astype(stored), start, axis=1)

    out: Array = lax.fori_loop(0, -(-outputs // size), block, jnp.zeros((len(wide), outputs), stored))
    return out
