"""Tests of the grouped product on Triton: its interpreted source against the oracle, its launches, its errors.

Tests marked `triton` interpret it: `make test-triton` runs them in .venv-gpu, because Triton takes 1 GB.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts.api import grouped_matmul, tiling_of, variant
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import Groups, group_rows, list_tiles
from pallas_kernels.experts.mxfp4 import Mxfp4
from pallas_kernels.experts.triton import call as triton_grouped
from pallas_kernels.experts.triton.tuning import Shape, Tuning, default_tuning
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Quantized
from tests.support.kernels.grouped_calls import check, make_call, run
from tools.cases.kernels.experts import CASES, LAYERS, SILU, Case
from tools.cases.kernels.experts_shapes import arguments

SERVED = {case.name: case for case in CASES if case.served_by("triton")}
RAGGED = SERVED["edges, biases"]
GATED = SERVED["16 bits, edges, biases, gpt-oss"]
TUNINGS = [
    (RAGGED, Tuning(16, 16, 16, 4, 2, 1)),
    (RAGGED, Tuning(128, 64, 64, 4, 2, 1)),
    (GATED, Tuning(64, 16, 32, 4, 2, 5)),
    (GATED, Tuning(16, 128, 16, 4, 2, 2)),
]


@pytest.mark.triton
@pytest.mark.parametrize("name", SERVED)
def test_a_row_is_multiplied_by_its_experts_matrix(interpreter: Any, name: str) -> None:
    """As by XLA, to its tolerance. Rows and weights that nobody needs hold NaN; a second run gives equal bits."""
    case = SERVED[name]
    call = make_call(case)
    out = run(call, case, "triton")
    check(out, call, case)
    for count in interpreter.WRITES.values():
        assert count.max() <= 1, "a cell was written twice"
    np.testing.assert_array_equal(run(call, case, "triton")[call.owned], out[call.owned])


@pytest.mark.triton
@pytest.mark.parametrize(("case", "tuning"), TUNINGS, ids=str)
def test_a_tuning_changes_no_result(interpreter: Any, case: Case, tuning: Tuning) -> None:
    """But for rounding: tiles of more rows than a group, pieces beyond the matrix, bands that are not full."""
    call = make_call(case)
    out = triton_grouped.grouped_matmul(call.x, call.weights, call.groups, call.bias, case.gated, tuning=tuning)  # type: ignore[arg-type]
    check(np.asarray(out.astype(jnp.float32)), call, case)


@pytest.mark.triton
def test_only_experts_with_rows_are_read(interpreter: Any) -> None:
    """Once for each tile of their rows."""
    case = Case("", (3, 0, 17, 0), dtype="bfloat16")
    run(make_call(case), case, "triton")
    rows = tiling_of(*(make_call(case).x, make_call(case).weights), None, None, "triton").rows  # type: ignore[union-attr]
    tiles = sum(-(-size // rows) for size in case.sizes)
    assert interpreter.READS["weights"] == tiles * case.inputs * case.outputs


@pytest.mark.triton
def test_a_list_that_is_made_already_is_read(interpreter: Any) -> None:
    """It is that of the groups."""
    call, empty = make_call(GATED), Groups(jnp.zeros(10, jnp.int32), jnp.zeros(10, jnp.int32))
    tiling = tiling_of(call.x, call.weights, call.bias, GATED.gated, "triton")
    assert tiling is not None
    tiles = list_tiles(call.groups, tiling, len(call.x))
    found, right = (
        grouped_matmul(
            call.x, call.weights, groups, bias=call.bias, gated=GATED.gated, implementation="triton", tiles=given
        )
        for groups, given in ((empty, tiles), (call.groups, None))
    )
    np.testing.assert_array_equal(found[call.owned], right[call.owned])


@pytest.mark.triton
def test_nan_in_one_row_stays_there(interpreter: Any) -> None:
    """It reaches no row of the same tile or of the next, and no activation or clamp hides it."""
    case = Case("", (3, 9), 64, 64, Glu("silu", clamp=7.0, alpha=1.702), dtype="bfloat16")
    call = make_call(case)
    clean = run(call, case, "triton")
    object.__setattr__(call, "x", call.x.at[jnp.array([1, 16])].set(jnp.nan))
    dirty = run(call, case, "triton")
    rows = call.owned & ~np.isin(np.arange(len(clean)), [1, 16])
    np.testing.assert_array_equal(dirty[rows], clean[rows])
    assert np.isnan(dirty[[1, 16]]).all()


@pytest.mark.parametrize("tokens", [1, 7, 64, 2048])
def test_a_list_of_tiles_has_room_for_all(tokens: int) -> None:
    """Whether all tokens choose the same experts or each its own."""
    for chosen in (np.zeros((tokens, 2), np.int32), np.arange(tokens * 2, dtype=np.int32).reshape(-1, 2) % 32):
        groups, _, pair = group_rows(jnp.asarray(chosen), 32)
        x, weights = jnp.zeros((len(pair), 64), jnp.bfloat16), jnp.zeros((32, 64, 64), jnp.bfloat16)
        tiling = tiling_of(x, weights, None, None, "triton")
        assert tiling is not None
        assert sum(-(-int(size) // tiling.rows) for size in groups.sizes) <= tiling.most


def test_the_default_tuning_follows_the_rows() -> None:
    """Small tiles for few rows, large ones for many. Calls of one tuning run one kernel, but for their rows."""
    layer = next(layer for layer in LAYERS if layer.name == "MiMo-V2-Flash")
    found: dict[int, tuple[Tuning, Hashable]] = {}

    def note(tokens: int, x: jax.Array, weights: jax.Array) -> None:
        found[tokens] = default_tuning(Shape.of(x, weights, None, SILU)), variant(x, weights, None, SILU, "triton")

    for tokens in (1, 8, 2048):
        given = arguments(layer, "up", tokens)
        jax.eval_shape(partial(note, tokens), given.x, given.weights)
    assert found[1] == found[8] != found[2048]
    assert (found[1][0].rows, found[2048][0].rows) == (16, 128)


def test_what_the_kernel_cannot_serve_is_refused() -> None:
    """By its type; no other kernel takes over."""
    x, groups = jnp.zeros((8, 32), jnp.bfloat16), Groups(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    codes, scales = jnp.zeros((1, 32, 16), jnp.uint8), jnp.zeros((1, 32, 1), jnp.uint8)
    eight = Quantized(jnp.zeros((1, 32, 32), jnp.int8), jnp.ones((1, 32), jnp.float32))
    four = Int4(jnp.zeros((1, 16, 32), jnp.uint8), jnp.ones((1, 1, 32)), jnp.ones((1, 1, 32)), None)
    for weights, named in (
        (Mxfp4(codes, scales), "in MXFP4"),
        (eight, "of 8 bits"),
        (four, "in integers of 4 bits"),
        (jnp.zeros((1, 32, 32)), "rows are bfloat16 and weights float32"),
    ):
        with pytest.raises(NoExpertKernel, match=named):
            grouped_matmul(x, weights, groups, implementation="triton")
    with pytest.raises(NoExpertKernel, match="not float8"):
        grouped_matmul(x.astype(jnp.float8_e4m3fn), jnp.zeros((1, 32, 32)), groups, implementation="triton")
    with pytest.raises(ValueError, match="powers of two"):
        triton_grouped.grouped_matmul(
            x, jnp.zeros((1, 32, 32), x.dtype), groups, None, None, tuning=Tuning(8, 64, 64, 4, 2, 1)
        )
