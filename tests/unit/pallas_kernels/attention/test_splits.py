"""Tests of "mosaic_splits" only: the list of splits, what a row's splits depend on, and who runs them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Int

from pallas_kernels.attention.hopper.heuristics import default_tuning, list_tuning
from pallas_kernels.attention.hopper.plan import MOST_SPLITS, Launch, Tuning, launch
from pallas_kernels.attention.hopper.splits import plan_of
from pallas_kernels.attention.hopper.worklist import combine_entries, work_list
from pallas_kernels.errors import NoKernel
from tests.support.kernels.calls import Call, check, lower, make_call, run, shape_of
from tests.support.oracles import Row
from tests.support.turns import by_turns, in_turn, whose_turn
from tools.cases.kernels.attention import CASES, RAGGED_DECODE, RAGGED_STEP, Case
from tools.cases.kernels.attention_fp8 import FP8_CASES
from tools.cases.kernels.attention_layers import LAYERS, SPLIT_LAYERS, SPLIT_PREFILL
from tools.cases.kernels.attention_shapes import arguments

CASE = {case.name: case for case in (*CASES, *FP8_CASES)}
LAYER = {layer.name: layer for layer in LAYERS}
SPLIT = {layer.name: layer for layer in (*SPLIT_LAYERS, SPLIT_PREFILL)}
DECODE, STEP = CASE[RAGGED_DECODE], CASE[RAGGED_STEP]
FULL = CASE["16 bits, 128/128 p64, full, softcap, splits"]
OVERLAP = CASE["16 bits, 512/512 of 640 p64, full"]
EIGHT_BITS = replace(CASE["fp8 pages, 64/64 p16, window 64, sinks, scales"], kv_scales=None)
EXTEND = CASE["16 bits, prefill, 64/64 p16, window 70, sinks, cut"]
TUNINGS = [
    (DECODE, Tuning(64, 2, 1, producer=False, workers=3, split_keys=128)),
    (FULL, Tuning(64, 2, 1, producer=True, workers=2, split_keys=64)),
    (OVERLAP, Tuning(64, 1, 1, producer=True, workers=2, split_keys=64)),
    (replace(EXTEND, tile=8), Tuning(32, 3, 1, producer=False, workers=5, split_keys=32)),
    (EIGHT_BITS, Tuning(64, 2, 1, producer=True, workers=2, split_keys=64)),
    (FULL, Tuning(32, 1, 1, producer=False, workers=50, split_keys=32)),
]


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        pytest.param(*pair, id=f"{pair[0].name}, {pair[1]}", marks=() if pair in now else pytest.mark.nightly)
        for now in [whose_turn(TUNINGS, 3)]
        for pair in TUNINGS
    ],
)
def test_all_tunings_give_the_same_result(case: Case, tuning: Tuning) -> None:
    """With one consumer and two, with and without a producer, and with thread blocks that have nothing to do."""
    for rows in case.rows:
        call = make_call(case, rows)
        check(run(call, case, "mosaic", tuning), call, case)


@in_turn(0, 6)
def test_a_rows_bits_are_its_own() -> None:
    """Alone, among others, and beside a prompt: a row of one token gives equal bits."""
    call = make_call(STEP, STEP.rows[0])
    step = run(call, STEP, "mosaic_splits")
    check(step, call, STEP)
    long, _, short = call.rows
    decode = replace(STEP, tokens=3, tile=1)
    ones = {"both": [long, Row(0, 0), short], "long": [long, Row(0, 0), Row(0, 0)], "short": [Row(0, 0)] * 2 + [short]}
    tokens = {"both": [0, 18], "long": [0], "short": [18]}
    for name, rows in ones.items():
        q = call.q[[*tokens[name], *range(3 - len(tokens[name]))]]
        out = run(Call(q, call.kv, call.page_rows, rows), decode, "mosaic_splits")
        np.testing.assert_array_equal(out[: len(tokens[name])], step[tokens[name]], name)


def listed(plan: Launch, lengths: list[int], begins: list[int] | None = None) -> dict[str, Int[np.ndarray, "..."]]:
    """Return the work list of rows of those lengths, sorted as `call` does."""
    begin = np.array(begins or [0] * len(lengths))
    fields = np.arange(len(lengths)), np.arange(len(lengths)), begin, np.array(lengths), begin, begin
    items = np.stack(fields, axis=1)
    order = np.argsort(-(items[:, 3] - items[:, 2]), kind="stable")
    return {
        name: np.asarray(value)
        for name, value in work_list(plan, jnp.asarray(items[order], jnp.int32))._asdict().items()
    }


def plan_for(name: str, rows: int) -> Launch:
    """Return the launch of a layer with so many rows."""
    return plan_of(shape_of(arguments(replace(LAYER[name], batch=rows))))


def test_splits_cover_each_row_once_and_depend_on_it_alone() -> None:
    """In order, at most 16, of equal size but for the last; the longest rows come first."""
    rng = np.random.default_rng(0)
    for lengths in (
        [131_072] + [1_000] * 7,
        [0, 1, 63, 64, 65, 1_024, 1_025, 16_385],
        list(rng.integers(0, 99_999, 8)),
    ):
        plan = plan_for("gpt-oss-20b full", 8)
        work = listed(plan, lengths)
        used = work["entries"][: int(work["used"][0])]
        assert len(used) == work["splits"].sum() <= plan.entries
        for row, length in enumerate(lengths):
            own = used[work["first"][row] :][: work["splits"][row]]
            assert (own[:, 0] == row).all()
            np.testing.assert_array_equal(own[:, 6], np.arange(len(own)))
            blocks = -(-length // 64)
            np.testing.assert_array_equal(own[:, 7], np.cumsum([0, *own[:-1, 8]])[: len(own)])
            assert own[:, 8].sum() == blocks
            assert len(own) <= MOST_SPLITS
            assert len(set(own[:-1, 8])) <= 1
            assert blocks == 0 or own[0, 8] <= max(16, 2 * blocks // MOST_SPLITS + 1)
            alone = listed(plan, [0] * row + [length] + [0] * (7 - row))
            np.testing.assert_array_equal(alone["entries"][: len(own)], own)
        assert (np.diff([lengths[entry[0]] for entry in used]) <= 0).all()


def test_a_long_row_costs_its_share() -> None:
    """One of 128k tokens among 63 of 1k: the busiest thread block has little more than the mean of keys."""
    plan = plan_for("gpt-oss-20b full", 64)
    work, workers = listed(plan, [131_072] + [1_024] * 63), plan.tuning.workers
    blocks = np.repeat(work["entries"][: int(work["used"][0]), 8], plan.kv_heads)
    load = np.zeros(workers)
    for number, size in enumerate(blocks):
        turn, place = divmod(number, workers)
        load[place if turn % 2 == 0 else workers - 1 - place] += size
    assert load.max() == 160  # blocks of keys: one thread block for a row and a head would visit 2,048
    assert load.mean() > 92


def test_entries_are_combined_as_one_softmax() -> None:
    """Unused parts and dead items may hold NaN; dead items give zeros."""
    rng = np.random.default_rng(1)
    plan = launch(shape_of(arguments(replace(LAYER["gpt-oss-20b full"], batch=3))), TUNINGS[0][1])
    items = np.array([[1, 1, 0, 400, 399, 0], [0, 0, 0, 100, 99, 0], [2, 2, 0, 0, 0, 0]], np.int32)
    work = work_list(plan, jnp.asarray(items))
    parts = rng.standard_normal((plan.entries, 1, 2, 8)).astype(np.float32)
    lse = rng.standard_normal((plan.entries, 1, 2)).astype(np.float32)
    used = int(work.used[0])
    parts[used:], lse[used:] = np.nan, np.nan
    out = np.asarray(combine_entries(work, plan.most_splits, jnp.asarray(parts), jnp.asarray(lse)))
    for index in range(3):
        own = slice(int(work.first[index]), int(work.first[index]) + int(work.splits[index]))
        weights = np.exp2(lse[own])
        expected = (parts[own] * weights[..., None]).sum(0) / np.maximum(weights.sum(0), 1e-30)[..., None]
        np.testing.assert_allclose(out[index], expected, rtol=1e-5, atol=1e-6)
    assert int(work.splits[2]) == 0


def test_queries_that_see_few_keys_have_no_list() -> None:
    """Nor have tiles of more than 64 rows."""
    wide = [layer for layer in LAYERS if layer.heads[3] > 256]
    tunings = {layer.name: list_tuning(shape_of(arguments(layer))) for layer in LAYERS if layer not in wide}
    names = (
        "gpt-oss-20b full",
        "gemma-3-27b full, one row",
        "Llama-4-Scout local",
        "Mistral-7B",
        "fp8, gemma-3-27b full",
    )
    for name in names:
        tuning = tunings[name]
        assert tuning is not None
        assert tuning.workers == 264
    assert tunings["gpt-oss-20b local"] is tunings["gemma-3-27b local"] is None
    assert plan_of(shape_of(arguments(LAYER["gemma-3-27b local, one row"]))).tuning.splits == 1
    alone = list_tuning(shape_of(arguments(replace(LAYER["gemma-4-31B local"], window=None))))
    assert alone is not None
    assert alone.workers == 132
    assert all(default_tuning(shape_of(arguments(layer))).workers == 0 for layer in LAYERS)
    for layer in wide:
        with pytest.raises(NoKernel, match=r"head sizes 512 and 512 over pages of .* 'mosaic_splits' has no room"):
            list_tuning(shape_of(arguments(layer)))


@pytest.mark.parametrize("name", by_turns([*SPLIT], 4))
def test_layers_lower_for_hopper(name: str) -> None:
    """Lowering needs no GPU packages; `make gpu-compile` runs the rest of the compilation."""
    lower(SPLIT[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": 2}, "workers need splits = 1, row_parts = 1 and no ahead"),
        ({"row_parts": 2, "producer": True}, "workers need splits = 1, row_parts = 1 and no ahead"),
        ({"split_keys": 0}, "split_keys = 0 must be a multiple of block = 64"),
        ({"split_keys": 96}, "split_keys = 96 must be a multiple of block = 64"),
    ],
)
def test_a_tuning_that_does_not_fit_is_an_error(change: dict[str, int], message: str) -> None:
    """Tuning tables are data, so they may be wrong."""
    tuning = Tuning(64, 2, 1, producer=False, workers=264, split_keys=1_024)
    with pytest.raises(ValueError, match=message):
        launch(shape_of(arguments(LAYER["Mistral-7B"])), tuning._replace(**change))  # type: ignore[arg-type]
