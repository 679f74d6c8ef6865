"""Weights in NVFP4 (`experts.nvfp4`) in the tiles that the Hopper kernel reads.

A tile holds code · scale times 2^-`SHIFT`, which bfloat16 represents exactly; the kernel multiplies the float32 sums by
2^`SHIFT` and by the factors. e4m3's scales lie there as e5m3 without a sign, whose bits become those of bfloat16 by a
shift and a sum: a scale's sign goes to its codes, and the codes of a scale of zero become zeros.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int16, Int32, UInt8

from pallas_kernels.experts.mxfp4 import SHIFT, TILE, WORD_LINES, tile_codes, tile_words
from pallas_kernels.experts.nvfp4 import GROUP, Nvfp4, codes_of, e2m1, is_nan, scale_numbers

LINES = WORD_LINES + 2
LEAST = 117  # float32's exponent less that of e5m3, in which e4m3's least number, 2^-9, has the exponent 1
# Added to e5m3's bits in their place in bfloat16: makes 2^(126 - SHIFT) times the scale. With e2m1's bits at the end of
# bfloat16's exponent, which makes a code 2^-126 times as large, that is 2^-SHIFT.
BIAS = (LEAST + 126 - SHIFT) << 7
_GROUPS = TILE // GROUP  # of a tile's output


class Nvfp4Tiles(NamedTuple):
    """Tiles of 64 outputs by 64 inputs, each with its scales, so that one copy brings all.

    Attributes:
        tiles: 16 lines of words, as those of `Mxfp4Joined`; and two lines of scales, of the first and the second 32
            inputs of each output: two bytes, the first 16 inputs' in the low one.
        factors: one per output. An output that has a scale of NaN has the factor NaN.
    """

    tiles: Int16[Array, "*E across along 18 64"]
    factors: Float32[Array, "*E C"]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in NVFP4, in tiles"

    @property
    def readers(self) -> tuple[str, ...]:
        """Hopper's kernels."""
        return ("mosaic", "mosaic_overlap")

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return "nvfp4"

    @property
    def inputs(self) -> int:
        """K."""
        return TILE * int(self.tiles.shape[-3])

    @property
    def columns(self) -> int:
        """C."""
        return TILE * int(self.tiles.shape[-4])

    def numbers(self) -> Float[Array, "*E K C"]:
        """Return the weights in float32: for checks, since it makes many times the bytes."""
        return jnp.swapaxes(untiled(self), -1, -2)

    def across(self, at: Int[Array, " n"]) -> "Nvfp4Tiles":
        """Return the tiles of some outputs of one matrix, by the number of 64 outputs."""
        return Nvfp4Tiles(self.tiles[at], self.factors.reshape(-1, TILE)[at].reshape(-1))


def fits(inputs: int, outputs: int) -> bool:
    """Return whether a matrix can be cut into tiles: its sides are multiples of 64."""
    return not (inputs % TILE or outputs % TILE)


def tiles(weights: Nvfp4) -> Nvfp4Tiles:
    """Lay weights out for the Hopper kernel, once, when they are loaded. See `mxfp4.tiles` for the words.

    Raises ValueError if outputs or inputs are no multiple of 64.
    """
    *lead, half, outputs = weights.codes.shape
    if not fits(2 * half, outputs):
        raise ValueError(f"weights of {outputs} by {2 * half}: tiles need multiples of {TILE}")
    across, along, first = outputs // TILE, 2 * half // TILE, len(lead)
    words = lax.bitcast_convert_type(tile_words(jnp.swapaxes(_signed(weights), -1, -2)), jnp.int16)
    words = words.reshape(*lead, across, along, WORD_LINES, TILE)
    pairs = _e5m3(weights.scales).reshape(*lead, along, _GROUPS // 2, 2, across, TILE)
    scales = (pairs[..., 0, :, :] | (pairs[..., 1, :, :] << 8)).astype(jnp.uint16).astype(jnp.int16)
    scales = jnp.moveaxis(scales, first + 2, first)
    has_nan = is_nan(weights.scales).any(axis=-2)
    return Nvfp4Tiles(jnp.concatenate([words, scales], axis=-2), jnp.where(has_nan, jnp.nan, weights.factors))


def _signed(weights: Nvfp4) -> Int32[Array, "*E K C"]:
    """Return codes whose scales are not negative: their signs turn where the scale's is set. Zeros have no sign."""
    *lead, groups, outputs = weights.scales.shape
    codes = codes_of(weights.codes).reshape(*lead, groups, GROUP, outputs)
    scales = weights.scales[..., None, :].astype(jnp.int32)
    turned = codes ^ (scales >> 7 << 3)
    return jnp.where((scales & 0x7F) == 0, 0, turned).reshape(*lead, groups * GROUP, outputs)


def _e5m3(scales: UInt8[Array, "*n"]) -> Int32[Array, "*n"]:
    """Return the magnitudes of scales as e5m3: exactly, as e4m3's least numbers have fewer bits of fraction."""
    magnitude = jnp.abs(scale_numbers(jnp.where(is_nan(scales), jnp.uint8(0), scales)))
    bits = lax.bitcast_convert_type(magnitude, jnp.int32) >> 20
    return jnp.where(magnitude == 0, 0, bits - (LEAST << 3))


def tile_numbers(lines: Int16[Array, "18 64"]) -> Float[Array, "64 64"]:
    """Return a tile's code · scale times 2^-SHIFT, outputs by inputs, by plain arithmetic; the kernel unpacks them."""
    words = lax.bitcast_convert_type(lines[:WORD_LINES].reshape(4, 128, 2), jnp.int32)
    codes: Int[Array, "64 64"] = tile_codes(words)
    both = lines[WORD_LINES:].astype(jnp.int32).T  # outputs by halves of the inputs
    scales = jnp.stack([both & 255, (both >> 8) & 255], axis=-1).reshape(TILE, _GROUPS)
    # e5m3's bits in their place in float32.
    shifted = lax.bitcast_convert_type((scales << 20) + ((LEAST - SHIFT) << 23), jnp.float32)
    return (e2m1(codes) * jnp.repeat(shifted, GROUP, axis=1)).astype(jnp.bfloat16)


def untiled(weights: Nvfp4Tiles) -> Float[Array, "*E C K"]:
    """Return the weights of tiles in float32: for checks, since it makes eight times the bytes."""
    *lead, across, along, _, _ = weights.tiles.shape
    each = lax.map(tile_numbers, weights.tiles.reshape(-1, LINES, TILE)).astype(jnp.float32) * 2.0**SHIFT
    wide = jnp.swapaxes(each.reshape(*lead, across, along, TILE, TILE), -3, -2)
    return wide.reshape(*lead, across * TILE, along * TILE) * weights.factors[..., None]
