"""Products of two factors in e4m3 against float64 of the same rounded numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxtyping import Array, Float, Float64

from pallas_kernels.fp8 import Fp8Rows, matmul, quantize_tokens
from pallas_kernels.quantized import quantize

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
INPUTS = 96
UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def weights_of(outputs: int, seed: int = 1) -> Fp8Rows:
    """Random weights whose outputs differ in size."""
    rng = np.random.default_rng(seed)
    found = quantize(jnp.asarray(rng.standard_normal((INPUTS, outputs)) * 2.0 ** rng.integers(-8, 3, outputs)), "fp8")
    return Fp8Rows(found.values.T, found.scales)


def rounded(x: Float[np.ndarray, "T K"]) -> Float64[np.ndarray, "T K"]:
    """Each token in e4m3 with a scale, in NumPy."""
    wide = x.astype(np.float32)
    scales = np.abs(wide).max(axis=1, keepdims=True) / np.float32(448)
    numbers: Float64[np.ndarray, "T K"] = (wide / scales).astype(FLOAT8).astype(np.float64) * scales
    return numbers


def matrix_of(weights: Fp8Rows) -> Float64[np.ndarray, "K C"]:
    """The weights as numbers."""
    stored = np.asarray(weights.values).view(FLOAT8).astype(np.float64)
    numbers: Float64[np.ndarray, "K C"] = stored.T * np.asarray(weights.scales, np.float64)
    return numbers


def tokens_of(count: int, dtype: str, seed: int = 0) -> Float[Array, "T K"]:
    """Random tokens of different sizes."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((count, INPUTS)) * 2.0 ** rng.integers(-6, 6, (count, 1)), dtype)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(("count", "outputs"), [(1, 32), (17, 1_040)])
def test_products_are_those_of_the_rounded_numbers(dtype: str, count: int, outputs: int) -> None:
    """Sums are rounded in float32, and stored in bfloat16 if that is the type; the result is rounded once more.

    1,040 outputs are more than two blocks of those that a CPU widens at a time. With the weights of one input left out
    the same bound is broken.
    """
    x, weights = tokens_of(count, dtype), weights_of(outputs)
    factors = rounded(np.asarray(x)), matrix_of(weights)
    expected, sizes = factors[0] @ factors[1], np.abs(factors[0]) @ np.abs(factors[1])
    found = jax.jit(matmul)(x, weights)
    assert found.dtype == x.dtype
    roundings = (2 if dtype == "bfloat16" else 1) * UNITS[dtype]
    bound = 1.01 * roundings * np.abs(expected) + (INPUTS + 8) * 2.0**-24 * sizes
    assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()
    short = Fp8Rows(weights.values.at[:, 5].set(0), weights.scales)
    assert not (np.abs(np.asarray(matmul(x, short), np.float64) - expected) <= bound).all()


def test_tokens_are_rounded_to_nearest() -> None:
    """The largest magnitude becomes 448, and every number the nearest of e4m3."""
    x = tokens_of(33, "float32")
    codes, scales = quantize_tokens(x)
    np.testing.assert_allclose(scales, np.abs(np.asarray(x)).max(axis=1) / 448, rtol=2e-7)
    numbers = np.asarray(codes, np.float32)
    assert (np.abs(numbers).max(axis=1) == 448).all()
    off = np.abs(np.asarray(x) / np.asarray(scales)[:, None] - numbers)
    # Half of the last of three bits, of a normal number; the least step is 2^-9.
    assert (off <= np.maximum(2.0**-4 * np.abs(numbers), 2.0**-10) * 1.001).all()


def test_a_token_is_rounded_alone() -> None:
    """A token has the same bits whatever shares its step; one that is not finite is NaN alone."""
    x, weights, run = tokens_of(16, "float32"), weights_of(32), jax.jit(matmul)
    found = np.asarray(run(x, weights))
    for number, other in ((3, 1e30), (3, np.nan), (3, np.inf), (9, 0.0)):
        among = np.array(run(x.at[number].set(other), weights))
        assert np.isfinite(other) == np.isfinite(among[number]).all()
        among[number] = found[number]
        np.testing.assert_array_equal(among, found)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36, 1e30])
def test_tokens_of_any_size_are_finite(size: float) -> None:
    """Zeros, subnormal numbers, numbers whose scale would be subnormal, and large ones."""
    x, weights = jnp.full((2, INPUTS), size, jnp.float32), weights_of(32)
    found = np.asarray(matmul(x, weights))
    assert np.isfinite(found).all()
    assert size or not found.any()


@pytest.mark.parametrize("count", [1, 64])
def test_a_gpu_multiplies_numbers_of_8_bits(count: int) -> None:
    """The program has one product, of both factors in e4m3 with sums in float32, and turns no matrix."""
    shapes = jax.eval_shape(lambda: (jnp.zeros((count, INPUTS), jnp.bfloat16), weights_of(32)))
    text = jax.jit(matmul).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert "lhs_precision_type = f8E4M3FN" in product
    assert "accumulation_type = f32" in product
    assert f"tensor<{max(count, 16)}x{INPUTS}xf8E4M3FN>, tensor<32x{INPUTS}xf8E4M3FN>" in product
    assert "transpose" not in text
