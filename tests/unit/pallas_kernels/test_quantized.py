"""Tests of weights of 8 bits: rounding, products against float64, no copy of the weights in compiled programs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pallas_kernels.experts.api import Implementation, grouped_matmul
from pallas_kernels.experts.groups import group_rows
from pallas_kernels.quantized import (
    Kind,
    Quantized,
    dequantized,
    matmul,
    matmul_rows,
    product,
    quantize,
    quantize_rows,
    rows_of,
)
from tests.support.kernels.calls import roundoff

KINDS: tuple[Kind, ...] = ("int8", "fp8")


def exact(weights: Quantized) -> np.ndarray:
    """Return the numbers in float64, by NumPy."""
    values = np.asarray(weights.values)
    if values.dtype == np.uint8:
        values = values.view(jnp.float8_e4m3fn)
    return values.astype(np.float64) * np.asarray(weights.scales, np.float64)[..., None, :]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_to_the_nearest(kind: Kind) -> None:
    """The error is at most half a step for int8, and 1/16 of the number for float8. Zeros and signs are kept."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, 64, 24)).astype(np.float32) * 2.0 ** rng.integers(-8, 8, (2, 1, 24))
    weights[0, :, 3] = 0
    made = quantize(jnp.asarray(weights, jnp.float32), kind)
    assert made.values.shape == weights.shape
    scales = np.asarray(made.scales)[:, None]
    error = np.abs(exact(made) - weights)
    bound = scales / 2 if kind == "int8" else np.maximum(np.abs(weights) / 16, scales * 2.0**-10)
    assert (error <= bound * 1.001).all()
    np.testing.assert_allclose(dequantized(made, jnp.dtype("float32")), exact(made), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 511, 512, 1300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_agree_with_float64(kind: Kind, columns: int, dtype: str) -> None:
    """Whether columns are a multiple of the block or not."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((5, 96)), dtype)
    weights = quantize(jnp.asarray(rng.standard_normal((96, columns)), jnp.float32), kind)
    got = jax.jit(matmul)(x, weights)
    assert got.dtype == x.dtype
    want = np.asarray(x, np.float64) @ exact(weights)
    if dtype == "float32":
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-4)
        return
    sums = 96 * roundoff("float32") * (np.abs(np.asarray(x, np.float64)) @ np.abs(exact(weights)))
    assert (np.abs(np.asarray(got, np.float64) - want) <= roundoff(dtype) * np.abs(want) + sums).all()


@pytest.mark.optimized
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 64])
def test_no_copy_of_the_weights_is_made(kind: Kind, rows: int) -> None:
    """The compiler reports small temporaries on a CPU. A plain conversion would need as much as the weights."""
    inputs, columns = 2048, 8192
    weights = jax.eval_shape(lambda: quantize(jnp.zeros((inputs, columns)), kind))
    x = jax.eval_shape(lambda: jnp.zeros((rows, inputs)))

    def temporaries(function: Callable[[Array, Quantized], Array]) -> int:
        memory = jax.jit(function).lower(x, weights).compile().memory_analysis()
        assert memory is not None
        return int(memory.temp_size_in_bytes)

    blocks = 4 * (inputs * 512 + 2 * rows * columns)
    assert temporaries(matmul) <= blocks + 2**16
    assert temporaries(lambda x, w: x @ dequantized(w, jnp.dtype("float32"))) >= 4 * inputs * columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 512, 700])
def test_embeddings_are_looked_up_and_multiplied(kind: Kind, rows: int) -> None:
    """Each row, a token's, has a scale. Logits are float32, whatever the type of x."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((5, 96)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((rows, 96)) * 2.0 ** rng.integers(-8, 8, (rows, 1)), jnp.float32)
    held, turned = quantize_rows(weights, kind), quantize(weights.T, kind)
    want = exact(turned).T
    ids = np.array([rows - 1, 0, 0, 2])
    np.testing.assert_allclose(rows_of(held, jnp.asarray(ids), jnp.dtype("float32")), want[ids], rtol=1e-6)
    assert rows_of(held, jnp.asarray(ids), jnp.dtype("bfloat16")).dtype == jnp.bfloat16
    got, same = jax.jit(matmul_rows)(x, held), jax.jit(product)(x, turned)
    assert got.dtype == same.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ want.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(got, same, rtol=1e-4, atol=1e-3)


@pytest.mark.optimized
def test_no_copy_of_the_embeddings_is_made() -> None:
    """The temporaries are a widened block of rows."""
    inputs, vocab = 2048, 8192
    for kind in KINDS:
        weights = jax.eval_shape(lambda kind=kind: quantize_rows(jnp.zeros((vocab, inputs)), kind))
        x = jax.eval_shape(lambda: jnp.zeros((4, inputs)))
        memory = jax.jit(matmul_rows).lower(x, weights).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes <= 4 * (2 * inputs * 512 + 3 * 4 * vocab) + 2**16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_experts_may_have_8_bits(kind: Kind, implementation: Implementation) -> None:
    """The result is that of their numbers in float32."""
    rng = np.random.default_rng(2)
    weights = quantize(jnp.asarray(rng.standard_normal((3, 32, 16)), jnp.float32), kind)
    groups, rows, pair = group_rows(jnp.asarray(rng.integers(0, 3, (20, 2)), jnp.int32), 3)
    x = jnp.asarray(rng.standard_normal((20, 32)), jnp.float32)[pair // 2]
    plain = jnp.asarray(exact(weights), jnp.float32)
    got, want = (grouped_matmul(x, w, groups, implementation=implementation)[rows] for w in (weights, plain))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_the_hopper_kernel_refuses_experts_of_8_bits() -> None:
    """As they lie for XLA, not in tiles; the error says so."""
    weights = quantize(jnp.ones((3, 64, 64)), "int8")
    groups, _, pair = group_rows(jnp.zeros((4, 1), jnp.int32), 3)
    with pytest.raises(ValueError, match="'mosaic' takes no weights of 8 bits: must be 'xla'"):
        grouped_matmul(jnp.ones((len(pair), 64)), weights, groups, implementation="mosaic")
