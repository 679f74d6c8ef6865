"""Tests of weights of 8 bits in tiles, and of the arithmetic that widens them in registers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Int, Num

from pallas_kernels.experts.eight_bits import tile_numbers, tiles, untiled
from pallas_kernels.quantized import Kind, Quantized, dequantized, quantize

KINDS: tuple[Kind, ...] = ("int8", "fp8")
BFLOAT16 = ml_dtypes.bfloat16
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


def bf16(bits: Int[np.ndarray, "*n"]) -> Num[np.ndarray, "*n"]:
    """Return the numbers of the low 16 bits in float64."""
    return np.asarray((bits & 0xFFFF).astype(np.uint16).view(BFLOAT16), np.float64)


def widened(kind: Kind, words: Int[np.ndarray, " W"], h: int) -> list[Num[np.ndarray, " W"]]:
    """Return both numbers of the pair h of words as the kernel's PTX computes them. No step rounds."""
    if kind == "int8":
        word = words >> (8 * h)
        number, base = ((word & mask) | 0x43004300 for mask in (0x007F007F, 0x00800080))
        return [bf16(number >> 16 * which) - bf16(base >> 16 * which) for which in (0, 1)]
    bits = (words >> 4 if h else words << 4) & 0x07F007F0
    bits |= (words if h else words << 8) & 0x80008000
    return [bf16(bits >> 16 * which) * bf16(np.array(0x7B80)) for which in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_thread_widens_its_part_of_the_operand(kind: Kind) -> None:
    """Masks, shifts and differences give the left operand of a WGMMA as PTX defines it, for every number exactly."""
    values = every_number(kind)
    codes = np.asarray(tiles(Quantized(jnp.asarray(values), jnp.ones(64))).codes[0, 0])
    words = codes.reshape(2, 128, 16).view(np.uint32).astype(np.int64)  # half, thread, j
    operand = np.full((64, 64), np.nan)
    for row, thread, j, h in np.ndindex(2, 128, 4, 2):
        warp, lane = divmod(thread, 32)
        first = 16 * j + 8 * h + 2 * (lane % 4)
        pair = widened(kind, words[row, thread, j : j + 1], h)
        operand[16 * warp + lane // 4 + 8 * row, first : first + 2] = np.concatenate(pair)
    np.testing.assert_array_equal(operand, numbers_of(values).T)
    np.testing.assert_array_equal(operand, np.asarray(tile_numbers(jnp.asarray(codes)), np.float64))


def test_an_output_with_nan_is_nan_as_in_xla() -> None:
    """The kernel would read e4m3's NaN as 480, so the scale says it."""
    values = np.array(every_number("fp8"))
    values[5, 7], values[6, 8] = NAN, 0x80 | NAN
    scales = np.asarray(tiles(Quantized(jnp.asarray(values), jnp.full(64, 0.5))).scales)
    assert np.flatnonzero(np.isnan(scales)).tolist() == [7, 8]
    assert (scales[:7] == 0.5).all()


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (64, 96)])
def test_partial_tiles_are_an_error(outputs: int, inputs: int) -> None:
    """Tiles are 64 by 64."""
    weights = Quantized(jnp.zeros((inputs, outputs), jnp.int8), jnp.ones(outputs))
    with pytest.raises(ValueError, match=f"weights of {outputs} by {inputs}: tiles need multiples of 64"):
        tiles(weights)
