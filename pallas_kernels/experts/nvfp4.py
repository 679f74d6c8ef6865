"""Weights in NVFP4: numbers of 4 bits, a scale in float8 e4m3 for each 16 inputs, a float32 factor for each output.

    weight = code · scale · factor
    code     e2m1, a sign, two bits of exponent and one of fraction: ±0, ½, 1, 1½, 2, 3, 4, 6
    scale    e4m3: a sign, four bits of exponent and three of fraction; 0x7f and 0xff are NaN
    factor   one per matrix in checkpoints; here one per output, so that matrices with different factors can be joined

code · scale has at most six significant bits, from 2^-10 to 2688: float32, bfloat16 and float16 represent it exactly.
So products are those of the numbers code · scale, added in float32, and a factor multiplies its output's sum: no weight
is rounded. Where the matrix itself is asked for, a weight is (code · scale) · factor, rounded once to float32, and from
there to the type that is asked for.

`experts.nvfp4_tiles` lays the same weights out for Hopper. Activations are not quantized.

Shape letters: T rows, K inputs, C outputs; E leading axes, such as experts.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from pallas_kernels.experts.glu import Glu

GROUP = 16  # inputs that share a scale
MOST_CODE, MOST_SCALE = 6, 448  # the largest numbers of e2m1 and e4m3
_OUTPUTS = 512  # that XLA on a CPU multiplies at a time
_NAN = 0x7F  # of e4m3, without its sign


class Nvfp4(NamedTuple):
    """Weights, inputs first.

    Attributes:
        codes: two inputs per byte, the first in the low bits.
        scales: the bits of e4m3, one for each `GROUP` inputs. (As bytes: see `quantized.Quantized`.)
        factors: one per output.
    """

    codes: UInt8[Array, "*E half C"]
    scales: UInt8[Array, "*E G C"]
    factors: Float32[Array, "*E C"]

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
        return "nvfp4", [self.codes, self.scales, self.factors]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in NVFP4"

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
        """Return x · the matrix of an expert in x's type; its factors multiply the sums in float32."""
        own = Nvfp4(self.codes[index], self.scales[index], self.factors[index])
        return product(x, own, precision).astype(x.dtype)


def codes_of(packed: UInt8[Array, "*E half C"]) -> Int32[Array, "*E K C"]:
    """Return the 4 bits of each number."""
    *lead, half, columns = packed.shape
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-2).astype(jnp.int32)
    return pairs.reshape(*lead, 2 * half, columns)


def e2m1(codes: Int[Array, "*n"]) -> Float32[Array, "*n"]:
    """Return the numbers of codes. ½ is the only one without an implicit leading bit."""
    magnitude = codes & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)
    wide = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(codes > 7, -wide, wide)


def scale_numbers(scales: UInt8[Array, "*n"]) -> Float32[Array, "*n"]:
    """Return the numbers of scales."""
    return lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32)


def is_nan(scales: UInt8[Array, "*n"]) -> Array:
    """Return which scales are NaN."""
    return (scales & _NAN) == _NAN


def numbers(weights: Nvfp4, dtype: jnp.dtype) -> Float[Array, "*E K C"]:
    """Return code · scale, exactly in float32, bfloat16 and float16. NaN if the scale is."""
    wide = e2m1(codes_of(weights.codes))
    *lead, groups, columns = weights.scales.shape
    grouped = wide.reshape(*lead, groups, GROUP, columns) * scale_numbers(weights.scales)[..., None, :]
    out: Array = grouped.reshape(wide.shape).astype(dtype)
    return out


def dequantized(weights: Nvfp4, dtype: jnp.dtype) -> Float[Array, "*E K C"]:
    """Return all of the weights as one array, each rounded to float32 and from there to `dtype`."""
    return (numbers(weights, jnp.dtype(jnp.float32)) * weights.factors[..., None, :]).astype(dtype)


def quantize(weights: Float[Array, "*E K C"]) -> Nvfp4:
    """Round weights to NVFP4 with one factor per matrix.

    The factor makes e4m3's largest number of the largest scale, and a scale e2m1's largest number of its group's
    largest weight. Ties go to the even code. Groups whose scale would be less than the least one are zeros.

    Raises ValueError if the inputs are no multiple of 16.
    """
    *lead, inputs, outputs = weights.shape
    if inputs % GROUP:
        raise ValueError(f"weights of {inputs} inputs: NVFP4 needs a multiple of {GROUP}")
    wide = weights.astype(jnp.float32).reshape(*lead, inputs // GROUP, GROUP, outputs)
    largest = jnp.abs(wide).max(axis=-2)
    whole = largest.max(axis=(-2, -1))
    factors = jnp.where(whole == 0, 1.0, whole / (MOST_CODE * MOST_SCALE))
    wanted = jnp.minimum(largest / MOST_CODE / factors[..., None, None], MOST_SCALE).astype(jnp.float8_e4m3fn)
    unit = (wanted.astype(jnp.float32) * factors[..., None, None])[..., None, :]
    scaled = jnp.where(unit == 0, 0.0, wide / jnp.where(unit == 0, 1.0, unit))
    codes = _nearest(scaled).reshape(*lead, inputs // 2, 2, outputs)
    packed = codes[..., 0, :] | (codes[..., 1, :] << 4)
    scales = lax.bitcast_convert_type(wanted, jnp.uint8)
    return Nvfp4(packed, scales, jnp.broadcast_to(factors[..., None], (*lead, outputs)))


def _nearest(scaled: Float32[Array, "*n"]) -> UInt8[Array, "*n"]:
    """Return the codes of the nearest numbers of e2m1: how many midpoints between its numbers lie below."""
    size, below = jnp.abs(scaled), jnp.zeros(scaled.shape, jnp.uint8)
    for middle in (0.25, 1.25, 2.5, 5.0):
        below += (size > middle).astype(jnp.uint8)
    for middle in (0.75, 1.75, 3.5):  # the code above is even
        below += (size >= middle).astype(jnp.uint8)
    return jnp.where((scaled < 0) & (below > 0), below + 8, below).astype(jnp.uint8)


def matmul(x: Float[Array, "T K"], weights: Nvfp4) -> Float[Array, "T C"]:
    """Return x · weights in x's type; see `product`."""
    return product(x, weights).astype(x.dtype)


def product(x: Float[Array, "T K"], weights: Nvfp4, precision: lax.PrecisionLike = None) -> Float32[Array, "T C"]:
    """Return x · weights in float32, of factors in x's type. XLA on a CPU never holds all numbers."""
    multiply = partial(_product, precision=precision)
    out: Array = lax.platform_dependent(x, weights, cpu=partial(_blocked, multiply), default=multiply)
    return out


def _product(x: Float[Array, "T K"], weights: Nvfp4, *, precision: lax.PrecisionLike) -> Float32[Array, "T C"]:
    matrix = numbers(weights, x.dtype)
    sums = jnp.matmul(x, matrix, precision=precision, preferred_element_type=jnp.float32)
    return sums * weights.factors[None]


def _blocked(multiply: Callable[..., Array], x: Float[Array, "T K"], weights: Nvfp4) -> Float32[Array, "T C"]:
    columns = weights.factors.shape[0]
    size = min(_OUTPUTS, columns)

    def block(index: Array, out: Float32[Array, "T C"]) -> Float32[Array, "T C"]:
        # If the columns are no multiple, the last block overlaps the one before, and writes the same numbers again.
        start = jnp.minimum(index * size, columns - size)
        part = multiply(x, Nvfp4(*(lax.dynamic_slice_in_dim(array, start, size, axis=-1) for array in weights)))
        return lax.dynamic_update_slice_in_dim(out, part, start, axis=1)

    out: Array = lax.fori_loop(0, -(-columns // size), block, jnp.zeros((len(x), columns), jnp.float32))
    return out
