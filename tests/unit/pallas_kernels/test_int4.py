"""Tests of weights of 4 bits: numbers and products against float64, experts, no copy of the weights in programs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from pallas_kernels.experts.api import Implementation, grouped_matmul
from pallas_kernels.experts.groups import group_rows
from pallas_kernels.int4 import Int4, dequantized, matmul

TINY = 2.0**-24  # the least float16


def random(
    inputs: int,
    columns: int,
    groups: int,
    *,
    act_order: bool = False,
    scales: str = "float16",
    seed: int = 0,
    short: bool = True,
) -> tuple[Int4, np.ndarray]:
    """Return weights, and their numbers in float64 by a loop. `short`: sums of few numbers are exact in float32."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 16, (inputs, columns))
    codes = np.zeros((inputs // 2, columns), np.uint8)
    for index in range(inputs):
        codes[index // 2] |= (numbers[index] << (4 * (index % 2))).astype(np.uint8)
    zeros = rng.integers(0, 17, (groups, columns)).astype(np.uint8)
    odd = rng.choice([1, 3, 5], (groups, columns)) if short else rng.uniform(1, 4, (groups, columns))
    factors = jnp.asarray(odd * 2.0 ** rng.integers(-6, 0, (groups, columns)), scales)
    table = np.arange(inputs) * groups // inputs
    table = rng.permutation(table) if act_order else table
    exact = np.zeros((inputs, columns))
    for index, group in enumerate(table):
        exact[index] = (numbers[index] - zeros[group].astype(float)) * np.asarray(factors)[group].astype(float)
    order = jnp.asarray(table, jnp.int32) if act_order else None
    return Int4(jnp.asarray(codes), factors, jnp.asarray(zeros), order), exact


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_numbers_are_rounded_once(scales: str, act_order: bool) -> None:
    """float32 has them exactly; 16 bits have the nearest, also of the least scales of float16."""
    weights, exact = random(96, 40, 6, act_order=act_order, scales=scales, short=False)
    if scales == "float16":
        weights = weights._replace(scales=weights.scales.at[0].set(TINY))
        first = np.asarray(weights.group_of == 0) if act_order else np.arange(96) < 16
        codes = np.stack([np.asarray(weights.codes) & 15, np.asarray(weights.codes) >> 4], axis=1).reshape(96, 40)
        exact[first] = (codes[first] - np.asarray(weights.zeros)[0].astype(float)) * TINY
    for dtype in ("float32", "bfloat16", "float16"):
        found = jax.jit(dequantized, static_argnums=1)(weights, jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(found), exact.astype(np.float32).astype(jnp.dtype(dtype)), dtype)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("columns", [1, 511, 1300])
def test_products_are_those_of_the_numbers(columns: int, act_order: bool) -> None:
    """Bit for bit: in whatever order the sums of these numbers are taken, float32 has them exactly."""
    weights, exact = random(96, columns, 3, act_order=act_order)
    rows = np.random.default_rng(1).integers(-8, 9, (5, 96))
    found = jax.jit(matmul)(jnp.asarray(rows, jnp.float32), weights)
    np.testing.assert_array_equal(np.asarray(found, np.float64), rows @ exact)
    short = jax.jit(matmul)(jnp.asarray(rows, jnp.bfloat16), weights)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_array_equal(short, (rows @ exact).astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.optimized
@pytest.mark.parametrize("rows", [1, 64])
def test_no_copy_of_the_weights_is_made(rows: int) -> None:
    """The compiler reports temporaries of a block of columns on a CPU, not of all weights."""
    inputs, columns = 2048, 8192
    weights = jax.eval_shape(
        lambda: Int4(
            jnp.zeros((inputs // 2, columns), jnp.uint8),
            jnp.zeros((16, columns), jnp.float16),
            jnp.zeros((16, columns), jnp.uint8),
        )
    )
    x = jax.eval_shape(lambda: jnp.zeros((rows, inputs)))

    def temporaries(function: Callable[[Array, Int4], Array]) -> int:
        memory = jax.jit(function).lower(x, weights).compile().memory_analysis()
        assert memory is not None
        return int(memory.temp_size_in_bytes)

    assert temporaries(matmul) <= 4 * (inputs * 512 + 2 * rows * columns) + 2**21
    assert temporaries(lambda x, w: x @ dequantized(w, jnp.dtype("float32"))) >= 4 * inputs * columns


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_experts_may_have_4_bits(implementation: Implementation, act_order: bool) -> None:
    """The result is that of their numbers in float32, bit for bit."""
    pairs = [random(32, 16, 2, act_order=act_order, seed=seed) for seed in range(3)]
    weights: Int4 = jax.tree.map(lambda *parts: jnp.stack(parts), *(one for one, _ in pairs))
    plain = jnp.asarray(np.stack([exact for _, exact in pairs]), jnp.float32)
    rng = np.random.default_rng(2)
    groups, rows, pair = group_rows(jnp.asarray(rng.integers(0, 3, (20, 2)), jnp.int32), 3)
    x = jnp.asarray(rng.integers(-8, 9, (20, 32)), jnp.float32)[pair // 2]
    found, wanted = (grouped_matmul(x, w, groups, implementation=implementation)[rows] for w in (weights, plain))
    np.testing.assert_array_equal(found, wanted)


def test_the_hopper_kernel_refuses_experts_of_4_bits() -> None:
    """As the checkpoint has them, not in tiles; the error says so."""
    weights: Int4 = jax.tree.map(lambda part: part[None], random(64, 64, 2)[0])
    groups, _, pair = group_rows(jnp.zeros((4, 1), jnp.int32), 1)
    with pytest.raises(ValueError, match="'mosaic' takes no weights in integers of 4 bits: must be 'xla'"):
        grouped_matmul(jnp.ones((len(pair), 64)), weights, groups, implementation="mosaic")
