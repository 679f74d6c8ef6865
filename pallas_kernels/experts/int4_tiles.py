"""Weights in integers of 4 bits (`pallas_kernels.int4`) in the tiles that the Hopper kernel reads.

A weight is (code - zero) · scale, rounded once to bfloat16: the kernel's numbers are those of `int4.dequantized`, bit
for bit. Scales of bfloat16 are held as they are. Others, such as float16's, are held as the sum of two: the nearest
number of bfloat16, and the rest.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float, Int, Int16, Int32

from pallas_kernels.experts.mxfp4 import BLOCK, TILE, WORD_LINES, tile_codes, tile_words
from pallas_kernels.int4 import Int4

LINES = WORD_LINES + 3
WIDE_LINES = LINES + 2  # with the rests of scales


class Int4Tiles(NamedTuple):
    """Tiles of 64 outputs by 64 inputs, each with its scales and zero points, so that one copy brings all.

    Attributes:
        tiles: 16 lines of words, as those of `Mxfp4Joined`; two lines of scales, bits of bfloat16, for the first and
            the second 32 inputs of each output; a line of zero points, two bytes for each output; and if scales are
            sums, two lines of their rests.
    """

    tiles: Int16[Array, "*E across along lines 64"]

    @property
    def wide(self) -> bool:
        """Whether scales are sums of two."""
        return self.tiles.shape[-2] == WIDE_LINES

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in integers of 4 bits, in tiles"

    @property
    def readers(self) -> tuple[str, ...]:
        """Hopper's kernels."""
        return ("mosaic", "mosaic_overlap")

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return "int4_wide" if self.wide else "int4"

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

    def across(self, at: Int[Array, " n"]) -> "Int4Tiles":
        """Return the tiles of some outputs of one matrix, by the number of 64 outputs."""
        return Int4Tiles(self.tiles[at])


def fits(inputs: int, outputs: int, groups: int) -> bool:
    """Return whether a matrix can be cut into tiles: sides are multiples of 64, and groups of inputs of 32."""
    return not (inputs % TILE or outputs % TILE or inputs % groups or (inputs // groups) % BLOCK)


def scales_fit(scales: Float[Array, "..."]) -> Bool[Array, ""]:
    """Return whether all scales are sums of two numbers of bfloat16, which those of float16 are."""
    first, rest = _parts(scales)
    return jnp.all(first.astype(jnp.float32) + rest.astype(jnp.float32) == scales.astype(jnp.float32))


def _parts(scales: Float[Array, "*n"]) -> tuple[BFloat16[Array, "*n"], BFloat16[Array, "*n"]]:
    """Return the nearest number of bfloat16, and what is left."""
    wide = scales.astype(jnp.float32)
    # No cast to bfloat16 and back, which XLA leaves out.
    first = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    return first.astype(jnp.bfloat16), (wide - first).astype(jnp.bfloat16)


def tiles(weights: Int4) -> Int4Tiles:
    """Lay weights out for the Hopper kernel, once, when they are loaded. See `mxfp4.tiles` for the words.

    Raises ValueError if outputs or inputs are no multiple of 64, groups no multiple of 32 inputs, or `group_of` is
    given. Scales that are no sums of two numbers are rounded: see `scales_fit`.
    """
    *lead, half, outputs = weights.codes.shape
    inputs, groups = 2 * half, weights.scales.shape[-2]
    if weights.group_of is not None:
        raise ValueError("groups that are not neighbouring inputs (act-order): tiles need group_of = None")
    if not fits(inputs, outputs, groups):
        raise ValueError(
            f"weights of {outputs} by {inputs} in {groups} groups: tiles need multiples of {TILE}, groups of {BLOCK}"
        )
    across, along = outputs // TILE, inputs // TILE
    codes = jnp.stack([weights.codes & 15, weights.codes >> 4], axis=-2).astype(jnp.int32)
    codes = jnp.swapaxes(codes.reshape(*lead, inputs, outputs), -1, -2)
    words = lax.bitcast_convert_type(tile_words(codes), jnp.int16).reshape(*lead, across, along, WORD_LINES, TILE)

    def by_half(table: Array) -> Array:
        """Return a number per group for each half of each tile, [..., across, along, 2, 64]."""
        wide = jnp.repeat(table, inputs // groups // BLOCK, axis=-2).reshape(*lead, along, 2, across, TILE)
        return jnp.moveaxis(wide, -2, len(lead))

    scales, rests = (lax.bitcast_convert_type(by_half(part), jnp.int16) for part in _parts(weights.scales))
    zeros = by_half(weights.zeros.astype(jnp.int16))
    zeros = zeros[..., :1, :] | (zeros[..., 1:, :] << 8)
    lines = [words, scales, zeros] if weights.scales.dtype == jnp.bfloat16 else [words, scales, zeros, rests]
    return Int4Tiles(jnp.concatenate(lines, axis=-2))


def tile_numbers(lines: Int16[Array, "lines 64"]) -> Float[Array, "64 64"]:
    """Return a tile's numbers in bfloat16, outputs by inputs, by plain arithmetic; the kernel does it in registers."""
    words = lax.bitcast_convert_type(lines[:WORD_LINES].reshape(4, 128, 2), jnp.int32)
    scales = lax.bitcast_convert_type(lines[WORD_LINES : WORD_LINES + 2], jnp.bfloat16).astype(jnp.float32)
    if len(lines) == WIDE_LINES:
        scales += lax.bitcast_convert_type(lines[LINES:], jnp.bfloat16).astype(jnp.float32)
    both = lines[WORD_LINES + 2].astype(jnp.int32)
    zeros = jnp.stack([both & 255, both >> 8])

    def wide(of_halves: Float[Array, "2 64"] | Int32[Array, "2 64"]) -> Array:
        return jnp.repeat(of_halves.T, BLOCK, axis=1)

    codes: Int[Array, "64 64"] = tile_codes(words)
    return ((codes - wide(zeros)).astype(jnp.float32) * wide(scales)).astype(jnp.bfloat16)


def untiled(weights: Int4Tiles) -> Float[Array, "*E C K"]:
    """Return the numbers of tiles in float32: for checks, since it makes eight times the bytes."""
    *lead, across, along, lines, _ = weights.tiles.shape
    each = lax.map(tile_numbers, weights.tiles.reshape(-1, lines, TILE)).astype(jnp.float32)
    numbers = jnp.swapaxes(each.reshape(*lead, across, along, TILE, TILE), -3, -2)
    return numbers.reshape(*lead, across * TILE, along * TILE)
