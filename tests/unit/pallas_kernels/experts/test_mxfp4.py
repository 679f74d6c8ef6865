"""Tests of weights of 4 bits: their numbers, and the tiles that a warpgroup reads."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, UInt8

from pallas_kernels.experts.hopper.mxfp4 import SHIFTS, UNPACK
from pallas_kernels.experts.mxfp4 import SHIFT, Mxfp4, joined, parted, tile_numbers, tiles, tiles_hold, unpack, untiled
from tests.support.kernels import ptx

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dense(blocks: UInt8[np.ndarray, "E C half"], scales: UInt8[np.ndarray, "E C groups"]) -> Float[np.ndarray, "E C K"]:
    """Return the numbers in float64, by look-up."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    return np.asarray(NUMBERS[codes] * 2.0 ** (np.repeat(scales, 32, axis=-1).astype(np.float64) - 127))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_at_every_scale_is_exact(dtype: str) -> None:
    """So is the sign of zero. Numbers beyond the range are infinite, and those below the normal range zero."""
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (255, 16, 16))
    scales = np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None, None], (255, 16, 1))
    exact = dense(blocks, scales)
    with np.errstate(over="ignore"):
        expected = np.where(np.abs(exact) < 2.0**-126, np.copysign(0, exact), exact).astype(np.dtype(dtype))
    out = np.asarray(unpack(Mxfp4(jnp.asarray(blocks), jnp.asarray(scales)), jnp.dtype(dtype)))
    bits = np.dtype(f"int{8 * expected.dtype.itemsize}")
    np.testing.assert_array_equal(out.view(bits), expected.view(bits))


def test_the_last_scale_is_nan() -> None:
    """The standard says so, although other libraries read it as 2^128."""
    weights = Mxfp4(jnp.zeros((1, 1, 16), jnp.uint8), jnp.full((1, 1, 1), 255, jnp.uint8))
    assert jnp.isnan(unpack(weights, jnp.dtype("bfloat16"))).all()


def random_weights() -> tuple[Mxfp4, Float[np.ndarray, "E C K"]]:
    """Return weights of two experts, 128 by 192, and their numbers in float64."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 128, 96), np.uint8)
    scales = rng.integers(34, 161, (2, 128, 6)).astype(np.uint8)
    return Mxfp4(jnp.asarray(blocks), jnp.asarray(scales)), dense(blocks, scales)


def test_tiles_hold_the_same_numbers() -> None:
    """At all scales that tiles can represent."""
    weights, expected = random_weights()
    words, scales = tiles(weights)
    for expert, across, along in np.ndindex(2, 2, 3):
        numbers = np.asarray(tile_numbers(words[expert, across, along], scales[expert, across, along]), np.float64)
        part = expected[expert, 64 * across :, 64 * along :][:64, :64]
        np.testing.assert_array_equal(numbers * 2.0**SHIFT, part)


def test_tiles_are_undone_exactly() -> None:
    """The numbers of tiles, outputs first."""
    weights, expected = random_weights()
    np.testing.assert_array_equal(np.asarray(untiled(tiles(weights))), expected.astype(np.float32))


def test_joined_tiles_are_the_same_tiles() -> None:
    """Words come first, as pairs of 16 bits, then the scales: the bytes of both arrays in order."""
    weights, expected = random_weights()
    apart = tiles(weights)
    together = joined(apart)
    for expert, across, along in np.ndindex(2, 2, 3):
        words, scales = (np.asarray(part[expert, across, along]).tobytes() for part in apart)
        assert np.asarray(together.tiles[expert, across, along]).tobytes() == words + scales
    for one, other in zip(parted(together), apart, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    np.testing.assert_array_equal(np.asarray(untiled(parted(together))), expected.astype(np.float32))


def test_each_thread_unpacks_its_part_of_the_operand() -> None:
    """The kernel's PTX, thread by thread, gives the left operand of a WGMMA as PTX defines it."""
    weights, expected = random_weights()
    words, scales = (np.asarray(part[1, 0, 2]) for part in tiles(weights))
    words, scales = words.reshape(128, 4).view(np.uint32).astype(np.int64), scales.view(np.uint16).astype(np.int64)
    operand = np.full((64, 64), np.nan)
    for thread, row, half, index in np.ndindex(128, 2, 2, 4):
        warp, lane = divmod(thread, 32)
        output = 16 * warp + lane // 4 + 8 * row
        word = words[thread, 2 * row + half]
        scale = ((int(scales[output]) >> (8 * half)) & 255) * 0x0080_0080
        unpacked = ptx.run(UNPACK.format(shift=SHIFTS[index], index=index), int(word), scale)
        first = 32 * half + 8 * index + 2 * (lane % 4)
        operand[output, first : first + 2] = ptx.pair(unpacked)
    np.testing.assert_array_equal(operand * 2.0**SHIFT, expected[1, :64, 128:])


@pytest.mark.parametrize(("scale", "held"), [(33, False), (34, True), (160, True), (161, False)])
def test_scales_that_tiles_can_represent(scale: int, held: bool) -> None:
    """Other scales would give wrong numbers, so the loader must ask."""
    assert bool(tiles_hold(jnp.array([[120, scale]], jnp.uint8))) == held


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (64, 96)])
def test_partial_tiles_are_an_error(outputs: int, inputs: int) -> None:
    """Tiles are 64 by 64."""
    weights = Mxfp4(jnp.zeros((1, outputs, inputs // 2), jnp.uint8), jnp.zeros((1, outputs, inputs // 32), jnp.uint8))
    with pytest.raises(ValueError, match=f"weights of {outputs} by {inputs}: tiles need multiples of 64"):
        tiles(weights)
