"""Weights of 4 bits: 32 numbers that follow each other along the inputs share a power of two (OCP MX v1.0, MXFP4).

A number is e2m1: sign, two bits of exponent, one of fraction: ±0, ½, 1, 1½, 2, 3, 4, 6. A scale is e8m0: 2^(s - 127);
255 is NaN. `Mxfp4` is how checkpoints store them (gpt-oss), `Mxfp4Tiles` how the Hopper kernel reads them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt, UInt8

BLOCK = 32  # numbers that share a scale
TILE = 64  # inputs and outputs of a tile
SHIFT = 32  # tiles hold their numbers times 2^-SHIFT, so that each number and scale has a bfloat16
_LEAST, _MOST = SHIFT + 2, SHIFT + 128  # scales that a tile can hold


class Mxfp4(NamedTuple):
    """Weights [E, C, K], outputs first.

    Attributes:
        blocks: two numbers a byte, the first in the low bits.
        scales: one per `BLOCK` inputs.
    """

    blocks: UInt8[Array, "*E C half"]
    scales: UInt8[Array, "*E C groups"]


class Mxfp4Tiles(NamedTuple):
    """The same, in tiles of 64 outputs by 64 inputs, each as the threads of a warpgroup hold it: see `tiles`.

    Attributes:
        words: eight numbers each; 16 bytes for each of 128 threads.
        scales: of a tile's outputs; two bytes, for the first and the second 32 inputs.
    """

    words: Int[Array, "*E across along 4 128"]
    scales: Int[Array, "*E across along 64"]


def unpack(weights: Mxfp4, dtype: jnp.dtype) -> Float[Array, "*E C K"]:
    """The numbers themselves, exact where `dtype` has them. Those below 2^-126 are zero."""
    scales = jnp.repeat(weights.scales.astype(jnp.int32), BLOCK, axis=-1)
    return _numbers(_codes(weights.blocks), scales).astype(dtype)


def _numbers(codes: Int[Array, "... K"], scales: Int[Array, "... K"]) -> Float[Array, "... K"]:
    """Put together as float32. ½ is the one number without a leading bit."""
    magnitude = codes & 7
    exponent = scales + jnp.where(magnitude == 1, 0, magnitude >> 1) - 1
    fraction = jnp.where(magnitude == 1, 0, magnitude & 1)
    bits = jnp.where(exponent >= 255, 255 << 23, (exponent << 23) | (fraction << 22))
    bits = jnp.where((magnitude == 0) | (exponent <= 0), 0, bits) | (codes >> 3 << 31)
    return lax.bitcast_convert_type(jnp.where(scales == 255, 0x7FC00000, bits), jnp.float32)


def _codes(blocks: UInt8[Array, "... half_K"]) -> Int[Array, "... K"]:
    pairs = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)
    return pairs.reshape(*blocks.shape[:-1], -1)


def tiles(weights: Mxfp4) -> Mxfp4Tiles:
    """Lay out for the Hopper kernel; once, when weights are loaded.

    A tile is the left operand of four WGMMAs of 16 inputs. Thread 32w + 4g + q holds of the rows 16w + g and
    16w + g + 8 the inputs 16j + 8h + 2q and the next one, for j < 4 and h < 2. Its four words are (row, half of the
    tile's inputs); in each, pair 2(j mod 2) + h lies in the bits that a shift to the left by four times its number
    brings to the top of both halves of the word: the first input in the low half, the second in the high one.

    Raises ValueError where outputs or inputs are no multiple of 64. Scales outside of 2^-93 to 2^33 give wrong
    numbers: see `tiles_hold`.
    """
    *lead, outputs, half = weights.blocks.shape
    if outputs % TILE or (2 * half) % TILE:
        raise ValueError(f"weights of {outputs} by {2 * half}: tiles need multiples of {TILE}")
    across, along = outputs // TILE, 2 * half // TILE
    # Outputs: block, warp, row's half, g. Inputs: block, half of it, j mod 2, h, q, which of two.
    codes = _codes(weights.blocks).reshape(*lead, across, 4, 2, 8, along, 2, 2, 2, 4, 2)
    first, axes = len(lead), range(10)
    block, warp, row, g, deep, part, j, h, q, which = (first + axis for axis in axes)
    order = (*range(first), block, deep, warp, g, q, row, part, which, j, h)
    codes = codes.transpose(order).reshape(-1, 8).astype(jnp.uint32)
    words = (codes << _places()[None]).sum(axis=1, dtype=jnp.uint32)
    scales = weights.scales.reshape(*lead, across, TILE, along, 2).astype(jnp.int32)
    scales = jnp.moveaxis(scales, -2, -3) + (126 - SHIFT)
    return Mxfp4Tiles(
        lax.bitcast_convert_type(words, jnp.int32).reshape(*lead, across, along, 4, 128),
        (scales[..., 0] | (scales[..., 1] << 8)).astype(jnp.uint16).astype(jnp.int16),
    )


def _places() -> UInt[Array, " 8"]:
    """Bits at which a word's numbers begin: pair i has nibble 3 - i of the low half, then of the high one."""
    index = jnp.arange(8, dtype=jnp.uint32)
    return 12 - 4 * (index % 4) + 16 * (index // 4)


def tiles_hold(scales: UInt8[Array, "..."]) -> Array:
    """Whether all scales are such that tiles can hold their numbers."""
    return jnp.all((scales >= _LEAST) & (scales <= _MOST))


def tile_numbers(words: Int[Array, "4 128"], scales: Int[Array, " 64"]) -> Float[Array, "64 64"]:
    """The numbers of one tile times 2^-SHIFT, in bfloat16: what the kernel makes in registers, by plain arithmetic."""
    codes = (lax.bitcast_convert_type(words, jnp.uint32).reshape(-1, 1) >> _places()[None]).astype(jnp.int32) & 15
    codes = codes.reshape(4, 8, 4, 2, 2, 2, 2, 2)  # warp, g, q, row, half, which, j, h
    codes = codes.transpose(0, 3, 1, 4, 6, 7, 2, 5).reshape(TILE, TILE)
    wide = scales.astype(jnp.int32)
    exponents = jnp.stack([wide & 255, (wide >> 8) & 255], axis=-1)
    return _numbers(codes, jnp.repeat(exponents - 126, BLOCK, axis=-1)).astype(jnp.bfloat16)
