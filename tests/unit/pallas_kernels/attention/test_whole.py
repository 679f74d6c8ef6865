"""Tests of "mosaic_whole" and "triton_whole": a query's bits depend on itself and on the keys that it sees."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float

from pallas_kernels.attention.api import Implementation
from pallas_kernels.attention.hopper.heuristics import default_tuning
from pallas_kernels.attention.hopper.whole import plan_of
from tests.support.kernels.calls import Call, check, make_call, run, shape_of
from tests.support.nights import sample
from tests.support.oracles import Row
from tools.cases.kernels.attention import Case, RowSpec
from tools.cases.kernels.attention_layers import LAYERS, Layer
from tools.cases.kernels.attention_shapes import arguments

TILE = 8  # tokens: of a group of 16 heads 128 rows, which two warpgroups share
SEEN = RowSpec(758, 24)  # of a text: all queries that are compared. Tiles have six blocks of 128 keys, or seven
CUTS = [3, 4, 5, 14, 23]
_FULL = Case("whole, full", ((SEEN,),), 24, 16, heads=(16, 1, 64, 64), tile=TILE, dtype="bfloat16", sinks=(0.5,) * 16)
CASES = {
    "full": _FULL,
    "window 520": replace(_FULL, window=520, softcap=20.0),
    "chunk 600, 8 bits": replace(_FULL, chunk=600, sinks=None, kv_dtype="float8_e4m3fn"),
}


def pieces(
    call: Call, case: Case, cuts: list[int], implementation: Implementation, *, one_shape: bool = False
) -> Float[np.ndarray, "T H V"]:
    """Return the results of the text's queries, computed in steps that end at the cuts.

    Steps have the tokens that they run, and tiles of one if they run one; or all have the shape of the whole.
    """
    out = []
    for begin, end in zip([0, *cuts], [*cuts, SEEN.count], strict=True):
        size = end - begin
        own = case if one_shape else replace(case, tokens=size, tile=1 if size == 1 else TILE)
        q = np.pad(call.q[begin:end], ((0, own.tokens - size), (0, 0), (0, 0)))
        one = Call(q, call.kv, call.page_rows, [Row(SEEN.start + begin, size)])
        out.append(run(one, own, implementation)[:size])
    return np.concatenate(out)


# The interpreter computes on the CPU, where XLA's products may add up a row's numbers by its place among the rows. That
# changed the last bit of up to 4 of 24,576 numbers; other kernels change 89 or more.
FEW = 12


@pytest.mark.parametrize("name", sample(tuple(CASES), 3))
def test_a_query_has_the_same_bits_in_every_step(name: str) -> None:
    """In one chunk or several that cut tiles elsewhere, and in a decode step; with the numbers of the oracle."""
    case = CASES[name]
    call = make_call(case, case.rows[0])
    whole = pieces(call, case, [], "mosaic_whole")
    check(whole, call, case)
    found = pieces(call, case, CUTS, "mosaic_whole")
    assert np.count_nonzero(found != whole) <= FEW


@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("implementation", sample(("mosaic", "mosaic_splits"), 2))
def test_other_kernels_have_other_bits_in_other_steps(implementation: Implementation, *, one_shape: bool) -> None:
    """In steps of one shape too, if chunks are cut elsewhere. So the test before would see it."""
    call = make_call(_FULL, _FULL.rows[0])
    whole, found = (pieces(call, _FULL, cuts, implementation, one_shape=one_shape) for cuts in ([], CUTS))
    assert np.count_nonzero(found != whole) > FEW


@pytest.mark.triton
@pytest.mark.parametrize("implementation", ["triton", "triton_whole"])
def test_in_steps_of_one_shape_triton_has_the_same_bits_without_splits(
    implementation: Implementation, interpreter: Any
) -> None:
    """And other bits with them; there a decode step has the tiles of a prompt."""
    call = make_call(_FULL, _FULL.rows[0])
    whole, found = (pieces(call, _FULL, cuts, implementation, one_shape=True) for cuts in ([], CUTS))
    assert np.array_equal(found, whole) == (implementation == "triton_whole")


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_blocks_are_those_of_one_query(layer: Layer) -> None:
    """For all released models, and there are no splits; the number of tiles changes nothing."""
    shape = shape_of(arguments(layer))
    plan, one = plan_of(shape), plan_of(replace(shape, queries=1))
    assert (plan.tuning.block, plan.tuning.splits, plan.tuning.workers) == (one.tuning.block, 1, 0)
    assert plan_of(replace(shape, tiles=7 * shape.tiles)).tuning == plan.tuning
    if shape.queries == 1:
        assert plan.tuning == default_tuning(shape, split=1)
