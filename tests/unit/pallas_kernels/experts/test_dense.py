"""Tests of linear layers on Hopper, in 4, 8 and 16 bits: the experts' kernel with one group, interpreted."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from jaxtyping import Float

from pallas_kernels.errors import NoLinearKernel
from pallas_kernels.experts import eight_bits, int4_tiles, nvfp4, nvfp4_tiles
from pallas_kernels.experts.dense import Dense, DensePlain, DenseTiles, fits, gates_fit, matmul
from pallas_kernels.experts.eight_bits import DEEP
from pallas_kernels.experts.glu import glu
from pallas_kernels.experts.hopper.heuristics import default_tuning, dense_tuning, tile_rows
from pallas_kernels.experts.hopper.launch import Shape, Tuning, launch
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.int4 import Int4, dequantized
from pallas_kernels.quantized import Quantized, QuantizedBlocks, dequantized_blocks, quantize
from pallas_kernels.quantized import dequantized as dequantized_8_bits
from tests.support.kernels.device import add_in_order, hopper
from tools.cases.kernels.dense import (
    BLOCK_MATRICES,
    CASES,
    MATRICES,
    PLAIN_MATRICES,
    PLAIN_TOKENS,
    TOKENS,
    Case,
    Matrix,
)

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
PLAIN = ("plain", "rows", "head")
BOUND = 2.0**-6  # of results of about unit size: roundings of a result, and of both factors of a unit


Weights = Int4 | Nvfp4 | Quantized | QuantizedBlocks | Float[jax.Array, "K C"]


def weights_of(case: Case) -> Weights:
    """Return random weights, whose results are of about unit size."""
    rng = np.random.default_rng(case.outputs)
    if case.form in PLAIN:
        return jnp.asarray(rng.standard_normal((case.inputs, case.outputs)) * case.inputs**-0.5, BFLOAT16)
    if case.form in ("int8", "fp8", "fp8_blocks"):
        normal = rng.standard_normal((case.inputs, case.outputs)).astype(np.float32) * case.inputs**-0.5
        found = quantize(jnp.asarray(normal), "int8" if case.form == "int8" else "fp8")
        blocks = rng.uniform(0.5, 2, (case.inputs // DEEP, case.outputs // DEEP)) * case.inputs**-0.5 / 120
        return QuantizedBlocks(found.values, jnp.asarray(blocks, FLOAT32)) if case.form == "fp8_blocks" else found
    if case.form == "nvfp4":
        return nvfp4.quantize(jnp.asarray(rng.standard_normal((case.inputs, case.outputs)) * case.inputs**-0.5))
    codes = rng.integers(0, 256, (case.inputs // 2, case.outputs), np.uint8)
    scales = rng.uniform(0.5, 1, (case.groups, case.outputs)) * case.inputs**-0.5 / 5
    zeros = rng.integers(6, 11, (case.groups, case.outputs)).astype(np.uint8)
    return Int4(
        jnp.asarray(codes), jnp.asarray(scales, "float16" if case.form == "int4_wide" else BFLOAT16), jnp.asarray(zeros)
    )


def held(weights: Weights, case: Case) -> Dense:
    """Return them as the kernel reads them."""
    if isinstance(weights, jax.Array):
        first = case.form in ("rows", "head")
        return DensePlain(weights.T if first else weights, outputs_first=first)
    if isinstance(weights, QuantizedBlocks):
        return DenseTiles(eight_bits.block_tiles(weights))
    if isinstance(weights, Nvfp4):
        return DenseTiles(nvfp4_tiles.tiles(weights))
    return DenseTiles(int4_tiles.tiles(weights) if isinstance(weights, Int4) else eight_bits.tiles(weights))


def tokens_of(case: Case) -> Float[jax.Array, "T K"]:
    """Return random tokens."""
    return jnp.asarray(np.random.default_rng(1).standard_normal((case.tokens, case.inputs)), BFLOAT16)


def expect(x: Float[jax.Array, "T K"], weights: Weights, case: Case) -> Float[np.ndarray, "T N"]:
    """Return the product in float32, of weights in bfloat16 if that is what the kernel multiplies."""
    if isinstance(weights, jax.Array):
        matrix = weights.astype(FLOAT32)
    elif isinstance(weights, Int4):
        matrix = dequantized(weights, BFLOAT16).astype(FLOAT32)
    elif isinstance(weights, Nvfp4):
        matrix = nvfp4.dequantized(weights, FLOAT32)
    elif isinstance(weights, QuantizedBlocks):
        matrix = dequantized_blocks(weights, FLOAT32)
    else:
        matrix = dequantized_8_bits(weights, FLOAT32)
    out = jnp.matmul(x.astype(FLOAT32), matrix, precision="highest")
    return np.asarray(out if case.gated is None else glu(case.gated, *jnp.split(out, 2, axis=1)))


def run(x: Float[jax.Array, "T K"], weights: Dense, case: Case) -> Float[np.ndarray, "T N"]:
    """Run the kernel as `device.hopper` says."""
    with hopper():
        out = matmul(x, weights, case.gated, wide=case.form == "head")
        assert out.dtype == (FLOAT32 if case.form == "head" else BFLOAT16)
        return np.asarray(out.astype(FLOAT32))


def cases(found: Sequence[Case]) -> list[ParameterSet]:
    """Return the cases; the slow ones are for nightly runs."""
    return [pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.nightly) for case in found]


@pytest.mark.parametrize("case", cases(CASES))
def test_tokens_are_multiplied_by_the_matrix(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within rounding of bfloat16, with the same bits in a second call, and the same bits for a token alone."""
    add_in_order(monkeypatch)
    x, weights = tokens_of(case), weights_of(case)
    found = run(x, held(weights, case), case)
    expected = expect(x, weights, case)
    assert found.shape == expected.shape
    bound = 2e-6 * case.inputs if case.form == "head" else BOUND
    assert np.abs(found - expected).max() < bound * max(1.0, np.abs(expected).max())
    np.testing.assert_array_equal(run(x, held(weights, case), case), found)
    np.testing.assert_array_equal(run(x[-1:], held(weights, case), case), found[-1:])


def test_a_missing_input_and_a_wrong_zero_point_are_found() -> None:
    """The bound of the test before is exceeded by one of 128 inputs, and by one of 128 outputs' zero points."""
    case = CASES[2]
    x, weights = tokens_of(case), weights_of(case)
    expected = expect(x, weights, case)
    lost = run(x.at[:, 77].set(0), held(weights, case), case)
    assert isinstance(weights, Int4)
    moved = run(x, held(weights._replace(zeros=weights.zeros.at[1, 5].add(1)), case), case)
    for found in (lost, moved):
        assert np.abs(found - expected).max() > 3 * BOUND


def test_the_scale_of_another_block_is_found() -> None:
    """The bound of the first test is exceeded by scales of two blocks of inputs that have changed places."""
    case = next(case for case in CASES if case.form == "fp8_blocks")
    x, weights = tokens_of(case), weights_of(case)
    assert isinstance(weights, QuantizedBlocks)
    moved = run(x, held(weights._replace(scales=weights.scales[::-1]), case), case)
    assert np.abs(moved - expect(x, weights, case)).max() > 3 * BOUND


def test_nan_in_one_token_stays_there() -> None:
    """It does not reach others of its tile, nor the padding."""
    case = CASES[1]
    x, weights = tokens_of(case), held(weights_of(case), case)
    found, clean = run(x.at[4].set(jnp.nan), weights, case), run(x, weights, case)
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(clean, 4, axis=0))


def test_other_types_are_an_error() -> None:
    """No other implementation takes over."""
    weights = held(weights_of(CASES[0]), CASES[0])
    with pytest.raises(NoLinearKernel, match="need bfloat16, not float16"):
        matmul(jnp.zeros((8, 128), jnp.float16), weights)
    with pytest.raises(NoLinearKernel, match="results in float32: weights must have 16 bits"):
        matmul(jnp.zeros((8, 128), BFLOAT16), weights, wide=True)
    assert not gates_fit(weights)
    assert (fits(128, 192), fits(128, 96), fits(96, 128)) == (True, False, False)
    assert gates_fit(held(weights_of(CASES[2]), CASES[2]))


@pytest.mark.parametrize("matrix", PLAIN_MATRICES, ids=lambda matrix: matrix.name)
@pytest.mark.parametrize("tokens", [*PLAIN_TOKENS, 1, 200, 1_000])
def test_tunings_of_matrices_in_16_bits(matrix: Matrix, tokens: int) -> None:
    """All tokens are one tile up to 128, at least three stages fit, and tiles of results in float32 have all rows."""
    outputs = matrix.outputs // (1 if matrix.gated is None else 2)
    wide, rows = matrix.form != "plain", -(-tokens // 8) * 8
    if wide:
        tile = tile_rows(rows)
        rows = -(-rows // tile) * tile
        assert rows - tokens < 8 * -(-tokens // 128)
    shape = Shape(rows, 1, matrix.inputs, outputs, BFLOAT16, matrix.gated, False, "plain", wide=wide)
    plan = launch(shape, dense_tuning(shape))
    assert plan.tuning.rows == tile_rows(tokens) if wide else plan.tuning.rows == min(128, rows)
    assert plan.tuning.stages >= 3


@pytest.mark.parametrize("matrix", MATRICES, ids=lambda matrix: matrix.name)
@pytest.mark.parametrize("tokens", TOKENS)
def test_tunings_of_released_models(matrix: Any, tokens: int) -> None:
    """All tokens are one tile up to 128; the busiest multiprocessor copies no more than with other tunings."""
    outputs = matrix.outputs // (1 if matrix.gated is None else 2)
    shape = Shape(-(-tokens // 8) * 8, 1, matrix.inputs, outputs, BFLOAT16, matrix.gated, False, "int4")
    plan = launch(shape, default_tuning(shape))
    assert plan.tuning.rows == min(128, shape.rows)
    assert plan.tuning.stages >= 3

    def most(tuning: Tuning) -> float:
        other = launch(shape, tuning)
        count = -(-shape.rows // tuning.rows) * other.columns
        each = tuning.consumers * tuning.parts * 2_432 + tuning.rows * 128
        return max(-(-count // tuning.sms) * each, 2 * count * each / tuning.sms)

    pairs = [(2, 2), (1, 2)] if matrix.gated else [(2, 2), (2, 1), (1, 1)]
    few = [Tuning(plan.tuning.rows, *pair, stages=2) for pair in pairs if pair[0] == 2 or tokens * pair[1] <= 128]
    assert most(plan.tuning._replace(stages=2, depth=1)) == min(map(most, few))


@pytest.mark.parametrize("matrix", BLOCK_MATRICES, ids=lambda matrix: matrix.name)
@pytest.mark.parametrize("tokens", TOKENS)
def test_tunings_of_matrices_with_scales_of_blocks(matrix: Any, tokens: int) -> None:
    """A turn is a block; two parts have 64 tokens at most, and one has 128."""
    outputs = matrix.outputs // (1 if matrix.gated is None else 2)
    shape = Shape(-(-tokens // 8) * 8, 1, matrix.inputs, outputs, BFLOAT16, matrix.gated, False, "fp8_blocks")
    tuning = launch(shape, default_tuning(shape)).tuning
    assert tuning.rows == min(128 if matrix.gated is None else 64, shape.rows)
    assert tuning.parts == 1 or tuning.rows <= 64
    assert tuning.depth == 2
    assert tuning.stages >= 3
