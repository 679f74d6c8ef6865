"""Weights of 8 bits (int8, float8 e4m3) in the tiles that the Hopper kernel reads.

bfloat16 can represent all of their numbers, so they are multiplied as they are, and the scales are applied to the sums:
those of outputs to the whole ones, those of blocks to the sums of each block's inputs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int8, UInt8

from pallas_kernels.quantized import Kind, Quantized, QuantizedBlocks, numbers

TILE = 64  # inputs and outputs of a tile
DEEP = 128  # inputs of a tile's outputs that share a scale, if scales are those of blocks
LINES, LINE = 32, 128  # bytes of a tile
_BFLOAT16 = jnp.dtype(jnp.bfloat16)
_NAN = 0x7F  # of e4m3, without its sign


class Tiles8(NamedTuple):
    """`Quantized` in tiles of 64 outputs by 64 inputs, as the threads of a warpgroup hold them: see `tiles`.

    Attributes:
        codes: of each tile two halves, each of 16 bytes for each of a warpgroup's 128 threads.
        scales: one per output.
    """

    codes: Int8[Array, "*E across along 32 128"] | UInt8[Array, "*E across along 32 128"]
    scales: Float32[Array, "*E C"]

    @property
    def kind(self) -> Kind:
        """The type of the numbers."""
        return "int8" if self.codes.dtype == jnp.int8 else "fp8"

    @property
    def form(self) -> str:
        """What errors call it."""
        return "of 8 bits in tiles"

    @property
    def readers(self) -> tuple[str, ...]:
        """Hopper's kernels."""
        return ("mosaic", "mosaic_overlap")

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return self.kind

    @property
    def inputs(self) -> int:
        """K."""
        return TILE * int(self.codes.shape[-3])

    @property
    def columns(self) -> int:
        """C."""
        return TILE * int(self.codes.shape[-4])

    def numbers(self) -> Float[Array, "*E K C"]:
        """Return the weights in float32: for checks, since it makes many times the bytes."""
        return jnp.swapaxes(untiled(self), -1, -2)

    def wide_scales(self) -> Float32[Array, "*E C 1"]:
        """Return the scale of each weight of an output."""
        return self.scales[..., None]

    def across(self, at: Int[Array, " n"]) -> "Tiles8":
        """Return the tiles of some outputs of one matrix, by the number of 64 outputs."""
        return Tiles8(self.codes[at], self.scales.reshape(-1, TILE)[at].reshape(-1))


class BlockTiles8(NamedTuple):
    """`QuantizedBlocks` in the same tiles.

    Attributes:
        codes: of e4m3.
        scales: of the 64 outputs of a tile one for each 128 inputs.
    """

    codes: UInt8[Array, "*E across along 32 128"]
    scales: Float32[Array, "*E across deep"]

    @property
    def form(self) -> str:
        """What errors call it."""
        return "of 8 bits in blocks, in tiles"

    @property
    def readers(self) -> tuple[str, ...]:
        """Hopper's kernels."""
        return ("mosaic", "mosaic_overlap")

    @property
    def held(self) -> str:
        """The form's name among those of the Hopper kernel."""
        return "fp8_blocks"

    @property
    def inputs(self) -> int:
        """K."""
        return TILE * int(self.codes.shape[-3])

    @property
    def columns(self) -> int:
        """C."""
        return TILE * int(self.codes.shape[-4])

    def numbers(self) -> Float[Array, "*E K C"]:
        """Return the weights in float32: for checks, since it makes many times the bytes."""
        return jnp.swapaxes(untiled(self), -1, -2)

    def wide_scales(self) -> Float32[Array, "*E C K"]:
        """Return the scale of each weight."""
        return jnp.repeat(jnp.repeat(self.scales, TILE, axis=-2), DEEP, axis=-1)

    def across(self, at: Int[Array, " n"]) -> "BlockTiles8":
        """Return the tiles of some outputs of one matrix, by the number of 64 outputs."""
        return BlockTiles8(self.codes[at], self.scales[at])


def tiles(weights: Quantized) -> Tiles8:
    """Lay weights out for the Hopper kernel, once, when they are loaded.

    A tile is the left operand of four WGMMAs of 16 inputs. Thread 32w + 4g + q holds, of the rows 16w + g and
    16w + g + 8, the inputs 16j + 8h + 2q and the next one, for j < 4 and h < 2. A half of the tile has one of the two
    rows, and a thread's 16 bytes there are four words, one for each j. A word has the first inputs of both h in its low
    half, and the next ones in its high half.

    The kernel does not look for e4m3's NaN: an output that has one gets NaN for its scale.

    Raises ValueError if outputs or inputs are no multiple of 64.
    """
    inputs, outputs = weights.values.shape[-2:]
    if outputs % TILE or inputs % TILE:
        raise ValueError(f"weights of {outputs} by {inputs}: tiles need multiples of {TILE}")
    scales = weights.scales
    if weights.values.dtype == jnp.uint8:
        scales = jnp.where(_is_nan(weights.values).any(axis=-2), jnp.nan, scales)
    return Tiles8(_tiled(weights.values), scales)


def blocks_fit(inputs: int, outputs: int, groups: int, shares: int) -> bool:
    """Return whether weights can be cut into tiles with one scale for each 128 inputs of a tile's outputs."""
    whole = not (inputs % groups or outputs % shares)
    return whole and not (inputs // groups % DEEP or outputs // shares % TILE)


def block_tiles(weights: QuantizedBlocks) -> BlockTiles8:
    """Lay weights out for the Hopper kernel; see `tiles`. Where a number is NaN, those that share a tile's scale are.

    Raises ValueError if a block has a number of inputs that is no multiple of 128, or of outputs that is none of 64.
    """
    *lead, inputs, outputs = weights.values.shape
    groups, shares = weights.scales.shape[-2:]
    if not blocks_fit(inputs, outputs, groups, shares):
        raise ValueError(
            f"weights of {outputs} by {inputs} in {shares} by {groups} blocks: tiles need blocks of multiples of "
            f"{TILE} by {DEEP}"
        )
    scales = jnp.repeat(weights.scales, inputs // groups // DEEP, axis=-2)
    scales = jnp.swapaxes(jnp.repeat(scales, outputs // shares // TILE, axis=-1), -1, -2)
    split = _is_nan(weights.values).reshape(*lead, inputs // DEEP, DEEP, outputs // TILE, TILE)
    has_nan = jnp.swapaxes(split.any(axis=(-3, -1)), -1, -2)
    return BlockTiles8(_tiled(weights.values), jnp.where(has_nan, jnp.nan, scales))


def _tiled(values: Array) -> Array:
    """Return values [*E, K, C] in tiles."""
    *lead, inputs, outputs = values.shape
    across, along = outputs // TILE, inputs // TILE
    # Inputs: block, j, h, q, which of two. Outputs: block, warp, row's half, g.
    codes = values.reshape(*lead, along, 4, 2, 4, 2, across, 4, 2, 8)
    first = len(lead)
    deep, j, h, q, which, block, warp, row, g = (first + axis for axis in range(9))
    codes = codes.transpose(*range(first), block, deep, row, warp, g, q, j, which, h)
    return codes.reshape(*lead, across, along, LINES, LINE)


def _is_nan(values: UInt8[Array, "*n"]) -> Bool[Array, "*n"]:
    return (values & _NAN) == _NAN


def tile_numbers(
    codes: Int8[Array, "*T 32 128"] | UInt8[Array, "*T 32 128"], dtype: jnp.dtype = _BFLOAT16
) -> Float[Array, "*T 64 64"]:
    """Return the numbers of tiles, outputs by inputs, by plain arithmetic; the kernel widens them in registers."""
    lead = codes.shape[:-2]
    first = len(lead)
    row, warp, g, q, j, which, h = (first + axis for axis in range(7))
    split = codes.reshape(*lead, 2, 4, 8, 4, 4, 2, 2).transpose(*range(first), warp, row, g, j, h, q, which)
    return numbers(split.reshape(*lead, TILE, TILE), dtype)


def untiled(weights: Tiles8 | BlockTiles8) -> Float[Array, "*E C K"]:
    """Return the weights of tiles in float32: for checks, since it makes four times the bytes."""
    *lead, across, along, _, _ = weights.codes.shape
    wide = lax.map(lambda codes: tile_numbers(codes, jnp.dtype(jnp.float32)), weights.codes.reshape(-1, LINES, LINE))
    wide = jnp.swapaxes(wide.reshape(*lead, across, along, TILE, TILE), -3, -2)
    return wide.reshape(*lead, across * TILE, along * TILE) * weights.wide_scales()
