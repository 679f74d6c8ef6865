"""Weights of 4 bits: 32 consecutive numbers along the inputs share a power of two (OCP MX v1.0, MXFP4).

A number is e2m1, a sign, two bits of exponent and one of fraction: ±0, ½, 1, 1½, 2, 3, 4, 6. A scale s is e8m0 and
stands for 2^(s - 127); 255 is NaN. Checkpoints store `Mxfp4` (gpt-oss), the Hopper kernel reads `Mxfp4Tiles`, and the
one that overlaps its work `Mxfp4Joined`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num, UInt, UInt8

BLOCK = 32  # numbers that share a scale
TILE = 64  # inputs and outputs of a tile
WORD_LINES = TILE * TILE // 4 // TILE  # of 64 numbers of 16 bits, which hold a tile's words
SHIFT = 32  # tiles hold their numbers times 2^-SHIFT, so that bfloat16 can represent every number and scale
_LEAST, _MOST = SHIFT + 2, SHIFT + 128  # scales that a tile can hold


class Mxfp4(NamedTuple):
    """Weights [E, C, K], outputs first.

    Attributes:
        blocks: two numbers per byte, the first in the low bits.
        scales: one per `BLOCK` inputs.
    """

    blocks: UInt8[Array, "*E C half"]
    scales: UInt8[Array, "*E C groups"]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in MXFP4"

    @property
    def readers(self) -> tuple[str, ...]:
        """XLA and a CPU; Hopper's kernels have it in tiles."""
        return ("xla", "cpu")

    @property
    def columns(self) -> int:
        """C."""
        return int(self.blocks.shape[-2])

    @property
    def by_rows(self) -> bool:
        """Outputs are rows."""
        return True

    def product(
        self, x: Float[Array, "R K"], index: Int[Array, ""] | int, precision: lax.PrecisionLike
    ) -> Float[Array, "R C"]:
        """Return x · the matrix of an expert in x's type."""
        own = Mxfp4(self.blocks[index], self.scales[index])
        return jnp.matmul(x, unpack(own, x.dtype).T, precision=precision)

    def operands(self) -> tuple[str, list[Array]]:
        """Return how the CPU's library reads the matrices, and their arrays."""
        return "mxfp4", [self.blocks, self.scales]


class Mxfp4Tiles(NamedTuple):
    """The same weights in tiles of 64 outputs by 64 inputs, as the threads of a warpgroup hold them: see `tiles`.

    Attributes:
        words: eight numbers each; 16 bytes for each of a warpgroup's 128 threads.
        scales: of each of a tile's outputs two bytes, for the first and the second 32 inputs.
    """

    words: Int[Array, "*E across along 4 128"]
    scales: Int[Array, "*E across along 64"]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in MXFP4 in tiles"

    @property
    def readers(self) -> tuple[str, ...]:
        """One of Hopper's kernels."""
        return ("mosaic",)

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return "mxfp4"

    @property
    def inputs(self) -> int:
        """K."""
        return TILE * int(self.words.shape[-3])

    @property
    def columns(self) -> int:
        """C."""
        return TILE * int(self.words.shape[-4])

    def numbers(self) -> Float[Array, "*E K C"]:
        """Return the weights in float32: for checks, since it makes many times the bytes."""
        return jnp.swapaxes(untiled(self), -1, -2)


class Mxfp4Joined(NamedTuple):
    """`Mxfp4Tiles` whose scales lie behind their words, so that one copy brings both.

    Attributes:
        tiles: 16 lines of words, each of two numbers of 16 bits, the low one first; and a line of scales.
    """

    tiles: Int[Array, "*E across along 17 64"]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "in MXFP4 in tiles with their scales"

    @property
    def readers(self) -> tuple[str, ...]:
        """One of Hopper's kernels."""
        return ("mosaic_overlap",)

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return "mxfp4_joined"

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
        return jnp.swapaxes(untiled(parted(self)), -1, -2)


def unpack(weights: Mxfp4, dtype: jnp.dtype) -> Float[Array, "*E C K"]:
    """Return the numbers, exactly if `dtype` can represent them. Numbers below 2^-126 are zero."""
    scales = jnp.repeat(weights.scales.astype(jnp.int32), BLOCK, axis=-1)
    return _numbers(_codes(weights.blocks), scales).astype(dtype)


def _numbers(codes: Int[Array, "... K"], scales: Int[Array, "... K"]) -> Float[Array, "... K"]:
    """Return the numbers of codes and scales in float32. ½ is the only number without an implicit leading bit."""
    magnitude = codes & 7
    exponent = scales + jnp.where(magnitude == 1, 0, magnitude >> 1) - 1
    fraction = jnp.where(magnitude == 1, 0, magnitude & 1)
    bits = jnp.where(exponent >= 255, 255 << 23, (exponent << 23) | (fraction << 22))
    bits = jnp.where((magnitude == 0) | (exponent <= 0), 0, bits) | (codes >> 3 << 31)
    return lax.bitcast_convert_type(jnp.where(scales == 255, 0x7FC00000, bits), jnp.float32)


def _codes(blocks: UInt8[Array, "... half_K"]) -> Int[Array, "... K"]:
    """Return the 4 bits of each number."""
    pairs = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.int32)
    return pairs.reshape(*blocks.shape[:-1], -1)


def tiles(weights: Mxfp4) -> Mxfp4Tiles:
    """Lay weights out for the Hopper kernel, once, when they are loaded.

    A tile is the left operand of four WGMMAs of 16 inputs. Thread 32w + 4g + q holds, of the rows 16w + g and
    16w + g + 8, the inputs 16j + 8h + 2q and the next one, for j < 4 and h < 2. Its four words are (row, half of the
    tile's inputs). In each word, a shift to the left by four times a pair's number, 2(j mod 2) + h, brings the pair to
    the top of both halves of the word: the first input in the low half, the second in the high half.

    Raises ValueError if outputs or inputs are no multiple of 64. Scales outside of 2^-93 to 2^33 give wrong numbers:
    see `tiles_hold`.
    """
    *lead, outputs, half = weights.blocks.shape
    if outputs % TILE or (2 * half) % TILE:
        raise ValueError(f"weights of {outputs} by {2 * half}: tiles need multiples of {TILE}")
    across, along = outputs // TILE, 2 * half // TILE
    scales = jnp.moveaxis(weights.scales.reshape(*lead, across, TILE, along, 2), -2, -3)
    return Mxfp4Tiles(tile_words(_codes(weights.blocks)), tile_scales(scales))


def tile_words(codes: Int[Array, "*E C K"]) -> Int[Array, "*E across along 4 128"]:
    """Return the words of tiles; see `tiles`. C and K are multiples of 64."""
    *lead, outputs, inputs = codes.shape
    across, along = outputs // TILE, inputs // TILE
    # Outputs: block, warp, row's half, g. Inputs: block, half of it, j mod 2, h, q, which of two.
    codes = codes.reshape(*lead, across, 4, 2, 8, along, 2, 2, 2, 4, 2)
    first, axes = len(lead), range(10)
    block, warp, row, g, deep, part, j, h, q, which = (first + axis for axis in axes)
    order = (*range(first), block, deep, warp, g, q, row, part, which, j, h)
    codes = codes.transpose(order).reshape(-1, 8).astype(jnp.uint32)
    words = (codes << _first_bits()[None]).sum(axis=1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).reshape(*lead, across, along, 4, 128)


def tile_codes(words: Int[Array, "4 128"]) -> Int[Array, "64 64"]:
    """Return the codes of a tile's words, outputs by inputs."""
    codes = (lax.bitcast_convert_type(words, jnp.uint32).reshape(-1, 1) >> _first_bits()[None]).astype(jnp.int32) & 15
    codes = codes.reshape(4, 8, 4, 2, 2, 2, 2, 2)  # warp, g, q, row, half, which, j, h
    return codes.transpose(0, 3, 1, 4, 6, 7, 2, 5).reshape(TILE, TILE)


def tile_scales(scales: Num[Array, "*E across along 64 2"]) -> Int[Array, "*E across along 64"]:
    """Return the scales of tiles as the Hopper kernel reads them, from those of the first and the second 32 inputs."""
    wide = scales.astype(jnp.int32) + (126 - SHIFT)
    return (wide[..., 0] | (wide[..., 1] << 8)).astype(jnp.uint16).astype(jnp.int16)


def joined(weights: Mxfp4Tiles) -> Mxfp4Joined:
    """Return the same tiles with the scales of each behind its words."""
    words = lax.bitcast_convert_type(weights.words, jnp.int16).reshape(*weights.scales.shape[:-1], -1, TILE)
    return Mxfp4Joined(jnp.concatenate([words, weights.scales[..., None, :]], axis=-2))


def parted(weights: Mxfp4Joined) -> Mxfp4Tiles:
    """Return the same tiles with words and scales in arrays of their own."""
    words = weights.tiles[..., :WORD_LINES, :]
    pairs = words.reshape(*words.shape[:-2], 4, 128, 2)
    return Mxfp4Tiles(lax.bitcast_convert_type(pairs, jnp.int32), weights.tiles[..., WORD_LINES, :])


def untiled(weights: Mxfp4Tiles) -> Float[Array, "*E C K"]:
    """Return the numbers of tiles in float32, exactly: for checks, since it makes eight times the bytes."""
    *lead, across, along, _ = weights.scales.shape
    each = jax.vmap(tile_numbers)(weights.words.reshape(-1, 4, 128), weights.scales.reshape(-1, TILE))
    numbers = each.astype(jnp.float32).reshape(*lead, across, along, TILE, TILE) * 2.0**SHIFT
    return jnp.swapaxes(numbers, -3, -2).reshape(*lead, across * TILE, along * TILE)


def _first_bits() -> UInt[Array, " 8"]:
    """Return the bits at which a word's numbers begin: pair i is nibble 3 - i of the low and of the high half."""
    index = jnp.arange(8, dtype=jnp.uint32)
    return 12 - 4 * (index % 4) + 16 * (index // 4)


def tiles_hold(scales: UInt8[Array, "..."]) -> Array:
    """Return whether tiles can represent all numbers with these scales."""
    return jnp.all((scales >= _LEAST) & (scales <= _MOST))


def tile_numbers(words: Int[Array, "4 128"], scales: Int[Array, " 64"]) -> Float[Array, "64 64"]:
    """Return a tile's numbers times 2^-SHIFT in bfloat16, by plain arithmetic; the kernel unpacks them in registers."""
    wide = scales.astype(jnp.int32)
    exponents = jnp.stack([wide & 255, (wide >> 8) & 255], axis=-1)
    return _numbers(tile_codes(words), jnp.repeat(exponents - 126, BLOCK, axis=-1)).astype(jnp.bfloat16)
