"""Tests of weights of 8 bits in tiles, and of the arithmetic that widens them in registers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Num

from pallas_kernels.experts.eight_bits import block_tiles, tile_numbers, tiles, untiled
from pallas_kernels.experts.hopper.eight_bits import FACTOR, WIDEN
from pallas_kernels.quantized import Kind, Quantized, QuantizedBlocks, dequantized, dequantized_blocks, quantize
from tests.support.kernels import ptx

KINDS: tuple[Kind, ...] = ("int8", "fp8")
NAN = 0x7F


def every_number(kind: Kind) -> Num[np.ndarray, "64 64"]:
    """Return all codes but e4m3's NaN in one tile [K, C], shuffled."""
    codes = np.tile(np.arange(256, dtype=np.uint8), 16)
    if kind == "fp8":
        codes = np.where((codes & NAN) == NAN, np.uint8(0), codes)
    return np.random.default_rng(0).permutation(codes).reshape(64, 64).view(np.int8 if kind == "int8" else np.uint8)


def numbers_of(codes: Num[np.ndarray, "*n"]) -> Num[np.ndarray, "*n"]:
    """Return the numbers of codes in float64, by NumPy's own types."""
    wide = codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)
    return wide.astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_undone_exactly(kind: Kind) -> None:
    """Of several experts, outputs first, with the scales of the outputs."""
    normal = np.random.default_rng(0).standard_normal((2, 192, 128)).astype(np.float32)
    weights = quantize(jnp.asarray(normal), kind)
    tiled = tiles(weights)
    assert tiled.kind == kind
    np.testing.assert_array_equal(untiled(tiled), dequantized(weights, jnp.dtype("float32")).transpose(0, 2, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_each_thread_widens_its_part_of_the_operand(kind: Kind) -> None:
    """The kernel's PTX gives the left operand of a WGMMA as its manual defines it, for every number exactly."""
    values = every_number(kind)
    codes = np.asarray(tiles(Quantized(jnp.asarray(values), jnp.ones(64))).codes[0, 0])
    words = codes.reshape(2, 128, 16).view(np.uint32)  # half, thread, j
    operand = np.full((64, 64), np.nan)
    for row, thread, j, h in np.ndindex(2, 128, 4, 2):
        warp, lane = divmod(thread, 32)
        first = 16 * j + 8 * h + 2 * (lane % 4)
        pair = ptx.pair(ptx.run(WIDEN[kind][h], int(words[row, thread, j]), FACTOR))
        operand[16 * warp + lane // 4 + 8 * row, first : first + 2] = pair
    np.testing.assert_array_equal(operand, numbers_of(values).T)
    np.testing.assert_array_equal(operand, np.asarray(tile_numbers(jnp.asarray(codes)), np.float64))


def test_an_output_with_nan_is_nan_as_in_xla() -> None:
    """The kernel would read e4m3's NaN as 480, so the scale says it."""
    values = np.array(every_number("fp8"))
    values[5, 7], values[6, 8] = NAN, 0x80 | NAN
    scales = np.asarray(tiles(Quantized(jnp.asarray(values), jnp.full(64, 0.5))).scales)
    assert np.flatnonzero(np.isnan(scales)).tolist() == [7, 8]
    assert (scales[:7] == 0.5).all()


def test_tiles_of_blocks_are_undone_exactly() -> None:
    """Blocks of 256 inputs by 128 outputs, and the scales of a tile's outputs for each 128 inputs."""
    rng = np.random.default_rng(0)
    values = quantize(jnp.asarray(rng.standard_normal((2, 512, 384)).astype(np.float32)), "fp8").values
    weights = QuantizedBlocks(values, jnp.asarray(rng.uniform(0.5, 2, (2, 2, 3)).astype(np.float32)))
    tiled = block_tiles(weights)
    assert tiled.scales.shape == (2, 6, 4)
    np.testing.assert_array_equal(untiled(tiled), dequantized_blocks(weights, jnp.dtype("float32")).transpose(0, 2, 1))


def test_a_block_of_a_tile_with_nan_is_nan() -> None:
    """The kernel would read e4m3's NaN as 480, so the scale says it, of 64 outputs and 128 inputs."""
    values = np.zeros((256, 128), np.uint8)
    values[5, 70], values[200, 3] = NAN, 0x80 | NAN
    scales = block_tiles(QuantizedBlocks(jnp.asarray(values), jnp.full((2, 1), 0.5))).scales
    np.testing.assert_array_equal(scales, [[0.5, np.nan], [np.nan, 0.5]])


@pytest.mark.parametrize(
    ("inputs", "outputs", "blocks"), [(128, 96, (1, 1)), (192, 64, (1, 1)), (128, 64, (2, 1)), (128, 128, (1, 4))]
)
def test_blocks_that_cross_tiles_are_an_error(inputs: int, outputs: int, blocks: tuple[int, int]) -> None:
    """A tile's outputs have one scale for 128 inputs."""
    weights = QuantizedBlocks(jnp.zeros((inputs, outputs), jnp.uint8), jnp.ones(blocks))
    with pytest.raises(ValueError, match=f"weights of {outputs} by {inputs} in .* need blocks of multiples of 64 by"):
        block_tiles(weights)


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (64, 96)])
def test_partial_tiles_are_an_error(outputs: int, inputs: int) -> None:
    """Tiles are 64 by 64."""
    weights = Quantized(jnp.zeros((inputs, outputs), jnp.int8), jnp.ones(outputs))
    with pytest.raises(ValueError, match=f"weights of {outputs} by {inputs}: tiles need multiples of 64"):
        tiles(weights)
