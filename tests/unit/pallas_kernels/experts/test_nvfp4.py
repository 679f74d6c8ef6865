"""Tests of weights in NVFP4: their numbers and products against float64, and the tiles that a warpgroup reads."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Float, UInt8

from pallas_kernels.experts.hopper.mxfp4 import SHIFTS, UNPACK
from pallas_kernels.experts.hopper.nvfp4 import SCALE, SELECT
from pallas_kernels.experts.mxfp4 import SHIFT
from pallas_kernels.experts.nvfp4 import Nvfp4, dequantized, matmul, numbers, product, quantize
from pallas_kernels.experts.nvfp4_tiles import BIAS, fits, tiles, untiled
from tests.support.kernels import ptx

FLOAT32 = jnp.dtype("float32")
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
IS_NAN = np.isnan(SCALES)


def exact(weights: Nvfp4) -> Float[np.ndarray, "*E K C"]:
    """Return code · scale · factor in float64, by look-up: at most 30 significant bits, which float64 has."""
    codes, scales, factors = (np.asarray(array) for array in weights)
    *lead, half, columns = codes.shape
    pairs = np.stack([codes & 15, codes >> 4], axis=-2).reshape(*lead, 2 * half, columns)
    wide: Float[np.ndarray, "*E K C"] = NUMBERS[pairs] * np.repeat(SCALES[scales], 16, axis=-2)
    wide *= factors[..., None, :]
    return wide


def of(codes: UInt8[np.ndarray, "..."], scales: UInt8[np.ndarray, "..."], factors: Float[np.ndarray, "..."]) -> Nvfp4:
    return Nvfp4(jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(factors, jnp.float32))


def every_number(factors: Float[np.ndarray, " 256"]) -> Nvfp4:
    """Return all 16 codes with each of the 256 scales, which is an output's."""
    codes = np.broadcast_to((np.arange(8, dtype=np.uint8) * 0x22 + 0x10)[:, None], (8, 256))
    return of(codes, np.arange(256, dtype=np.uint8)[None], factors)


def random_weights(*shape: int, nan: bool = False) -> Nvfp4:
    """Return random codes, scales of all values (but NaN unless `nan`), and factors of all fractions."""
    *lead, inputs, outputs = shape
    rng = np.random.default_rng(sum(shape))
    scales = rng.integers(0, 256, (*lead, inputs // 16, outputs)).astype(np.uint8)
    scales[IS_NAN[scales]] = 0x7F if nan else 1
    codes = rng.integers(0, 256, (*lead, inputs // 2, outputs)).astype(np.uint8)
    return of(codes, scales, np.ldexp(rng.uniform(1, 2, (*lead, outputs)), rng.integers(-20, 3, (*lead, outputs))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_code_at_every_scale_is_exact(dtype: str) -> None:
    """Without the factor: in all types with which the engine computes, negative scales and zeros' signs too."""
    weights = every_number(np.ones(256))
    assert sorted({*np.asarray(weights.codes[:, 0] & 15), *np.asarray(weights.codes[:, 0] >> 4)}) == list(range(16))
    found = np.asarray(numbers(weights, jnp.dtype(dtype)))
    assert found.dtype == jnp.dtype(dtype)
    wide = found.astype(np.float64)
    np.testing.assert_array_equal(wide, exact(weights))
    np.testing.assert_array_equal(np.signbit(wide[:, ~IS_NAN]), np.signbit(exact(weights)[:, ~IS_NAN]))


def test_the_two_scales_that_are_nan_make_their_weights_nan() -> None:
    """0x7f and 0xff, and no others; even of codes of zero."""
    found = np.isnan(np.asarray(dequantized(every_number(np.ones(256)), FLOAT32)))
    np.testing.assert_array_equal(found.all(axis=0), IS_NAN)
    np.testing.assert_array_equal(found.any(axis=0), IS_NAN)
    assert [*np.flatnonzero(IS_NAN)] == [0x7F, 0xFF]


@pytest.mark.parametrize("shape", [(16, 256), (3, 48, 7), (2, 2, 128, 64)])
def test_a_weight_is_rounded_once_to_float32(shape: tuple[int, ...]) -> None:
    """To the bit of float64's product rounded to float32; bfloat16 is that number rounded."""
    weights = random_weights(*shape)
    expected = exact(weights).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(dequantized(weights, FLOAT32)), expected)
    narrow = np.asarray(dequantized(weights, jnp.dtype("bfloat16")))
    np.testing.assert_array_equal(narrow, expected.astype(ml_dtypes.bfloat16))


def test_every_code_at_every_scale_is_rounded_once() -> None:
    """With a factor of 24 significant bits for each scale."""
    factors = np.random.default_rng(0).uniform(1e-4, 2e-4, 256).astype(np.float32)
    weights = every_number(factors)
    np.testing.assert_array_equal(np.asarray(dequantized(weights, FLOAT32)), exact(weights).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(16, 7), (48, 513), (32, 1100), (1024, 64)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_round_no_weight(tokens: int, shape: tuple[int, int], dtype: str) -> None:
    """But for sums in float32, and in blocks of outputs that do not divide them."""
    weights = random_weights(*shape)
    weights = weights._replace(scales=weights.scales & 0xBF)  # below 2, so that sums fit float16
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, shape[0])), dtype)
    wide, matrix = np.asarray(x.astype(FLOAT32)).astype(np.float64), exact(weights)
    allowed = 2.0**-24 * np.sqrt(shape[0]) * 4 * (np.abs(wide) @ np.abs(matrix)) + 1e-30
    out = product(x, weights)
    assert out.dtype == FLOAT32
    assert (np.abs(np.asarray(out, np.float64) - wide @ matrix) <= allowed).all()
    np.testing.assert_array_equal(matmul(x, weights), out.astype(dtype))


def test_a_product_holds_no_array_of_all_numbers() -> None:
    """On a CPU: beside its result, a program takes less than the numbers of a quarter of the outputs."""
    weights, x = random_weights(256, 8192), jnp.zeros((1, 256), jnp.bfloat16)
    memory = jax.jit(matmul).lower(x, weights).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 8192 * 256 * 4 / 4


def nearest(x: float) -> float:
    """Return the nearest number of e2m1, of two equally near the one whose code is even."""
    distances = np.abs(NUMBERS[:8] - abs(x))
    code = min(range(8), key=lambda index: (distances[index], index % 2))
    return float(np.copysign(NUMBERS[code], x))


def test_rounding_takes_the_nearest_code() -> None:
    """Ties go to the even one; the largest weight is 6 times the largest scale."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = np.array([6, *ties, *(-tie for tie in ties), -0.1]) * 448
    found = quantize(jnp.asarray(row[:, None], jnp.float32))
    assert np.asarray(found.factors) == 1
    np.testing.assert_array_equal(np.asarray(dequantized(found, FLOAT32))[:, 0], [nearest(x / 448) * 448 for x in row])


@pytest.mark.parametrize("shape", [(32, 5), (2, 64, 3)])
def test_rounding_is_near(shape: tuple[int, ...]) -> None:
    """An error is at most half a step of the code, and e4m3's of the scale; matrices have factors of their own."""
    sizes = np.arange(1, 1 + shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    weights = np.random.default_rng(2).standard_normal(shape) * sizes
    found = quantize(jnp.asarray(weights, jnp.float32))
    assert np.asarray(found.factors).shape == (*shape[:-2], shape[-1])
    assert (np.ptp(np.asarray(found.factors), axis=-1) == 0).all()
    largest = np.abs(weights).reshape(*shape[:-2], -1, 16, shape[-1]).max(axis=-2)
    bound = np.repeat(largest, 16, axis=-2) / 6 * (1 + 2.0**-4)
    assert (np.abs(np.asarray(dequantized(found, FLOAT32)) - weights) <= bound).all()


def test_zeros_stay_zeros() -> None:
    """Of a matrix without other numbers, and of a group whose scale is too small."""
    assert not np.asarray(dequantized(quantize(jnp.zeros((32, 4))), FLOAT32)).any()
    weights = np.ones((32, 1), np.float32)
    weights[:16] = 1e-6
    np.testing.assert_array_equal(np.asarray(dequantized(quantize(jnp.asarray(weights)), FLOAT32))[:16], 0)


def test_inputs_of_no_whole_groups_are_an_error() -> None:
    with pytest.raises(ValueError, match="weights of 40 inputs: NVFP4 needs a multiple of 16"):
        quantize(jnp.zeros((40, 4)))


def test_tiles_hold_the_bits_of_dequantized_weights() -> None:
    """Of experts, with scales of all values and both signs."""
    weights = random_weights(2, 192, 128)
    found = np.asarray(untiled(tiles(weights))).swapaxes(1, 2)
    np.testing.assert_array_equal(found, exact(weights).astype(np.float32))


def test_tiles_hold_every_code_at_every_scale() -> None:
    """An output with a scale of NaN is NaN as a whole, as its sum would be."""
    weights = every_number(np.ones(256))
    codes, scales = (np.tile(np.asarray(array), (4, 1)) for array in weights[:2])
    wide = of(codes, scales, np.ones(256))
    np.testing.assert_array_equal(np.asarray(untiled(tiles(wide))).T, exact(wide).astype(np.float32))
    mixed = wide._replace(scales=wide.scales.at[1:].set(0x38))
    found = np.asarray(untiled(tiles(mixed))).T
    assert np.isnan(found[:, IS_NAN]).all()
    np.testing.assert_array_equal(found[:, ~IS_NAN], exact(mixed)[:, ~IS_NAN])


def test_each_thread_unpacks_its_part_of_the_operand() -> None:
    """The kernel's PTX gives the left operand of a WGMMA as PTX defines it, and its numbers are exact."""
    weights = random_weights(64, 64)._replace(factors=jnp.ones(64))
    lines = np.asarray(tiles(weights).tiles[0, 0])
    words, scales = lines[:16].reshape(128, 8).view(np.uint32), lines[16:].view(np.uint16).astype(int)
    operand = np.full((64, 64), np.nan)
    for thread, row, half, index in np.ndindex(128, 2, 2, 4):
        warp, lane = divmod(thread, 32)
        output, first = 16 * warp + lane // 4 + 8 * row, 32 * half + 8 * index + 2 * (lane % 4)
        text = SCALE.format(select=SELECT[index // 2], bias=BIAS * 0x0001_0001)
        scale = ptx.run(text, int(scales[half, output]))
        unpacked = ptx.run(UNPACK.format(shift=SHIFTS[index], index=index), int(words[thread, 2 * row + half]), scale)
        operand[output, first : first + 2] = ptx.pair(unpacked)
    np.testing.assert_array_equal(operand * 2.0**SHIFT, exact(weights).T)


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (64, 96), (128, 64)])
def test_what_fits_tiles(outputs: int, inputs: int) -> None:
    """Whole tiles of 64 by 64; others are an error."""
    whole = (outputs, inputs) == (128, 64)
    assert fits(inputs, outputs) == whole
    if not whole:
        with pytest.raises(ValueError, match=f"weights of {outputs} by {inputs}: tiles need multiples of 64"):
            tiles(random_weights(inputs, outputs))
