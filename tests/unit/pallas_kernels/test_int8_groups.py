"""Tests of weights in int8 with group scales: their numbers, and products on XLA, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int8_groups import Int8GroupRows, Int8Groups, dequantized, dequantized_rows


def random(inputs: int, columns: int, groups: int, scales: str = "float16") -> tuple[Int8Groups, np.ndarray]:
    """Return weights, and their numbers in float64; sums of few of them are exact in float32."""
    rng = np.random.default_rng(inputs)
    values = rng.integers(-128, 128, (inputs, columns), np.int8)
    factors = jnp.asarray(2.0 ** rng.integers(-6, 0, (groups, columns)), scales)
    exact = values * np.repeat(np.asarray(factors, np.float64), inputs // groups, axis=0)
    return Int8Groups(jnp.asarray(values), factors), exact


@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_numbers_are_rounded_once(scales: str) -> None:
    weights, _ = random(96, 40, 3, scales)
    factors = jnp.asarray(np.random.default_rng(1).uniform(2.0**-24, 1, (3, 40)), scales)
    weights = weights._replace(scales=factors.at[0].set(2.0**-24))  # the least float16
    exact = np.asarray(weights.values, np.float64) * np.repeat(np.asarray(weights.scales, np.float64), 32, axis=0)
    for dtype in ("float32", "bfloat16", "float16"):
        found = jax.jit(dequantized, static_argnums=1)(weights, jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found), exact.astype(np.float32).astype(jnp.dtype(dtype)), dtype)


@pytest.mark.parametrize("columns", [1, 511, 1300])
def test_products_are_those_of_the_numbers(columns: int) -> None:
    """Bit for bit: in whatever order the sums of these numbers are taken, float32 has them exactly."""
    weights, exact = random(96, columns, 3)
    rows = np.random.default_rng(1).integers(-8, 9, (5, 96))
    found = jax.jit(Int8Groups.times)(weights, jnp.asarray(rows, jnp.float32))
    np.testing.assert_array_equal(np.asarray(found, np.float64), rows @ exact)
    short = jax.jit(Int8Groups.times)(weights, jnp.asarray(rows, jnp.bfloat16))
    assert short.dtype == jnp.bfloat16
    np.testing.assert_array_equal(short, (rows @ exact).astype(np.float32).astype(jnp.bfloat16))
    wide = jax.jit(Int8Groups.scores)(weights, jnp.asarray(rows, jnp.bfloat16))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(wide, np.float64), rows @ exact)


@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_rows_of_an_embedding_are_those_of_the_matrix(scales: str) -> None:
    """Bit for bit, in each type; a row may be asked for twice."""
    weights, _ = random(96, 40, 3, scales)
    rows, ids = Int8GroupRows(weights.values.T, weights.scales.T), jnp.asarray([39, 0, 7, 7])
    for dtype in ("float32", "bfloat16", "float16"):
        whole = dequantized(weights, jnp.dtype(dtype)).T
        np.testing.assert_array_equal(dequantized_rows(rows, jnp.dtype(dtype)), whole)
        found = jax.jit(Int8GroupRows.rows, static_argnums=2)(rows, ids, jnp.dtype(dtype))
        np.testing.assert_array_equal(found, whole[ids])


@pytest.mark.parametrize("vocab", [1, 511, 1300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_those_of_the_numbers(vocab: int, dtype: str) -> None:
    """In float32, bit for bit: float32 has the sums of these numbers exactly."""
    weights, exact = random(96, vocab, 3)
    x = np.random.default_rng(1).integers(-8, 9, (5, 96))
    rows = Int8GroupRows(weights.values.T, weights.scales.T)
    found = jax.jit(Int8GroupRows.scores)(rows, jnp.asarray(x, dtype))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found, np.float64), x @ exact)
