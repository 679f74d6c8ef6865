"""Tests of integers of 4 bits in tiles, and of the arithmetic that dequantizes them in registers."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts.hopper.int4 import DEQUANTIZE, DEQUANTIZE_WIDE
from pallas_kernels.experts.int4_tiles import fits, scales_fit, tiles, untiled
from pallas_kernels.int4 import Int4, dequantized
from tests.support.kernels import ptx


def random_weights(inputs: int, outputs: int, groups: int, dtype: str = "bfloat16") -> Int4:
    """Return random codes, zero points of all values, and scales of all fractions of `dtype`."""
    rng = np.random.default_rng(groups)
    codes = rng.integers(0, 256, (inputs // 2, outputs), np.uint8)
    scales = rng.standard_normal((groups, outputs))
    zeros = rng.integers(0, 17, (groups, outputs)).astype(np.uint8)
    return Int4(jnp.asarray(codes), jnp.asarray(scales, dtype), jnp.asarray(zeros))


@pytest.mark.parametrize(
    ("groups", "dtype"), [(1, "bfloat16"), (2, "float16"), (4, "bfloat16"), (8, "bfloat16"), (8, "float16")]
)
def test_tiles_hold_the_bits_of_dequantized_weights(groups: int, dtype: str) -> None:
    """Of groups of 256, 128, 64 and 32 inputs, rounded to bfloat16 once."""
    weights = random_weights(256, 128, groups, dtype)
    assert bool(scales_fit(weights.scales))
    expected = np.asarray(dequantized(weights, jnp.dtype("bfloat16")).astype(jnp.float32)).T
    np.testing.assert_array_equal(untiled(tiles(weights)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_thread_dequantizes_its_part_of_the_operand(dtype: str) -> None:
    """The kernel's PTX, of 128 and the zero point, and of the parts of the scale, in both halves of a word."""
    weights = random_weights(64, 64, 2, dtype)
    tiled = tiles(weights)
    assert tiled.wide == (dtype == "float16")
    text, lines = DEQUANTIZE_WIDE if tiled.wide else DEQUANTIZE, np.asarray(tiled.tiles[0, 0])
    words = lines[:16].reshape(128, 8).view(np.uint32)
    zeros, scales = lines[18].astype(int), np.delete(lines[16:], 2, axis=0).view(np.uint16).astype(int)
    operand = np.full((64, 64), np.nan)
    for thread, row, half, index in np.ndindex(128, 2, 2, 4):
        warp, lane = divmod(thread, 32)
        output, first = 16 * warp + lane // 4 + 8 * row, 32 * half + 8 * index + 2 * (lane % 4)
        base = (zeros[output] >> 8 * half & 255) * 0x0001_0001 + 0x4300_4300
        factors = [int(part) * 0x0001_0001 for part in scales[half::2, output]]
        found = ptx.run(text.format(index=index), int(words[thread, 2 * row + half]), base, *factors)
        operand[output, first : first + 2] = ptx.pair(found)
    expected = np.asarray(dequantized(weights, jnp.dtype("bfloat16")).astype(jnp.float32)).T
    np.testing.assert_array_equal(operand, expected)


def test_scales_that_tiles_can_represent() -> None:
    """All of float16; of float32 those with two short runs of bits."""
    every = np.arange(2**15, dtype=np.uint16).view(np.float16)
    assert scales_fit(jnp.asarray(every[np.isfinite(every)]))
    assert scales_fit(jnp.asarray([1.0 + 2**-12], jnp.float32))
    assert not scales_fit(jnp.asarray([1.0 + 2**-8 + 2**-20], jnp.float32))


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups"), [(96, 64, 3), (64, 96, 2), (64, 64, 4), (192, 64, 5), (128, 64, 4)]
)
def test_what_fits(inputs: int, outputs: int, groups: int) -> None:
    """Sides of whole tiles, and groups of 32 inputs or a multiple; others are an error."""
    held = (inputs, outputs, groups) == (128, 64, 4)
    assert fits(inputs, outputs, groups) == held
    if not held:
        with pytest.raises(ValueError, match=f"{groups} groups: tiles need multiples of 64, groups of 32"):
            tiles(random_weights(inputs, outputs, groups))


def test_act_order_is_an_error() -> None:
    """Inputs that share a scale must be neighbours."""
    weights = random_weights(64, 64, 2)._replace(group_of=jnp.zeros(64, jnp.int32))
    with pytest.raises(ValueError, match="act-order"):
        tiles(weights)
