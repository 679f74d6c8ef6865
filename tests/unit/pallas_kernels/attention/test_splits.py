"""Tests of "mosaic_splits" only: the list of splits, what a row's splits depend on, and who runs them."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Int

from pallas_kernels.attention.hopper.heuristics import default_tuning, list_tuning
from pallas_kernels.attention.hopper.launch import Launch, Tuning, launch
from pallas_kernels.attention.hopper.splits import plan_of
from pallas_kernels.attention.hopper.worklist import combine_entries, work_list
from tests.support.kernels.calls import Call, check, lower, make_call, run, shape_of
from tests.support.nights import sample
from tests.support.oracles import Row
from tools.cases.kernels.attention import CASES, RAGGED_DECODE, RAGGED_PROMPT, RAGGED_STEP, Case
from tools.cases.kernels.attention_fp8 import FP8_CASES
from tools.cases.kernels.attention_layers import LAYERS, SPLIT_LAYERS
from tools.cases.kernels.attention_lookback import LOOKBACK_CASES
from tools.cases.kernels.attention_shapes import arguments

CASE = {case.name: case for case in (*CASES, *FP8_CASES, *LOOKBACK_CASES)}
LAYER = {layer.name: layer for layer in LAYERS}
SPLIT = {layer.name: layer for layer in SPLIT_LAYERS}
DECODE, STEP, PROMPT = CASE[RAGGED_DECODE], CASE[RAGGED_STEP], CASE[RAGGED_PROMPT]
FULL = CASE["16 bits, 128/128 p64, full, softcap, splits"]
OVERLAP = CASE["16 bits, 512/512 of 640 p64, full"]
EIGHT_BITS = replace(CASE["fp8 pages, 64/64 p16, window 64, sinks, scales"], kv_scales=None)
EIGHT_BITS_PREFILL = replace(CASE["fp8 pages, prefill, 128/128 p64, full, scales"], kv_scales=None)
EIGHT_BITS_WIDE = replace(CASE["fp8 pages, prefill, 512/512 of 640 p32, chunk 128, scales"], kv_scales=None)
EXTEND = CASE["16 bits, prefill, 64/64 p16, window 70, sinks, cut"]
PREFILL = replace(CASE["16 bits, prefill, 128/128 p64, full, no groups"], tile=128)
WIDE_PREFILL = CASE["16 bits, prefill, 512/512 of 640 p64, full"]
_LIST = Tuning(64, 2, 1, producer=True, split_keys=64, most_splits=16)
TUNINGS = [
    (DECODE, _LIST._replace(producer=False, workers=3, split_keys=128)),
    (FULL, _LIST._replace(workers=2)),
    (OVERLAP, _LIST._replace(stages=1)),
    (replace(EXTEND, tile=8), Tuning(32, 3, 1, producer=False, split_keys=32, most_splits=16, workers=5)),
    (EIGHT_BITS, _LIST._replace(workers=2)),
    (FULL, Tuning(32, 1, 1, producer=False, split_keys=32, most_splits=3, workers=50)),
    (PREFILL, _LIST._replace(stages=3, row_parts=2, ahead=True, most_splits=4)),
    (EXTEND, _LIST._replace(row_parts=2, most_splits=4, workers=3)),
    (WIDE_PREFILL, _LIST._replace(most_splits=2)),
    (EIGHT_BITS_WIDE, _LIST._replace(stages=1, most_splits=2)),
    (EIGHT_BITS_PREFILL, _LIST._replace(row_parts=2, most_splits=4)),
]


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        pytest.param(case, tuning, id=f"{case.name}, {tuning}", marks=pytest.mark.nightly if number % 3 else ())
        for number, (case, tuning) in enumerate(TUNINGS)
    ],
)
def test_all_tunings_give_the_same_result(case: Case, tuning: Tuning) -> None:
    """With one consumer and two, with and without a producer, and with thread blocks that have nothing to do."""
    for rows in case.rows:
        call = make_call(case, rows)
        check(run(call, case, "mosaic", tuning), call, case)


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


@pytest.mark.nightly
def test_a_prompts_bits_are_its_own() -> None:
    """Alone in a smaller step, a prompt that is split has equal bits."""
    call = make_call(PROMPT, PROMPT.rows[0])
    step = run(call, PROMPT, "mosaic_splits")
    check(step, call, PROMPT)
    rows = [Row(0, 0), Row(0, 0), call.rows[2]]
    out = run(Call(call.q[10:], call.kv, call.page_rows, rows), replace(PROMPT, tokens=10), "mosaic_splits")
    np.testing.assert_array_equal(out[:9], step[10:19])


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
            assert len(own) <= 16
            assert len(set(own[:-1, 8])) <= 1
            assert blocks == 0 or own[0, 8] <= max(16, 2 * blocks // 16 + 1)
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


def test_a_short_prompt_of_a_long_row_costs_its_share() -> None:
    """64 tokens of a prompt of 128k, beside 31 prompts of 60: the busiest multiprocessor has twice the mean of keys.

    The GPU gives a thread block's place to the next entry. Each tile has one entry in a step that is not split.
    """
    layer = replace(LAYER["prefill, gemma-3-27b full"], batch=32, count=64)
    plan = plan_of(shape_of(arguments(layer)))
    assert plan.items >= 32
    work = listed(plan, [131_072] + [60] * 31 + [0] * (plan.items - 32))
    blocks = work["entries"][: int(work["used"][0]), 8]
    assert (blocks.max(), len(blocks)) == (256, 4 + 31)
    assert busiest(np.repeat(blocks, plan.kv_heads), 132) == 256
    assert busiest(np.repeat([1_024] + [1] * 31, plan.kv_heads), 132) == 1_024
    assert 127 < blocks.sum() * plan.kv_heads / 132 < 128


def busiest(sizes: Int[np.ndarray, " E"], places: int) -> int:
    """Return the greatest load of a place if each entry begins where one ends first."""
    loads = np.zeros(places, np.int64)
    for size in sizes:
        loads[loads.argmin()] += size
    return int(loads.max())


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
    """Tiles of more than 64 rows make up for more keys. Two consumers have no loop over the list."""
    tunings = {layer.name: list_tuning(shape_of(arguments(layer))) for layer in LAYERS}
    names = (
        *("gpt-oss-20b full", "gemma-3-27b full, one row", "Llama-4-Scout local", "Mistral-7B"),
        "fp8, gemma-3-27b full",
    )
    for name in names:
        tuning = tunings[name]
        assert tuning is not None
        assert (tuning.workers, tuning.split_keys, tuning.most_splits) == (264, 1_024, 16)
    for name in ("gpt-oss-20b local", "gemma-3-27b local", "prefill, Llama-4-Scout local", "prefill, Mistral-7B"):
        assert tunings[name] is None
    assert plan_of(shape_of(arguments(LAYER["gemma-3-27b local, one row"]))).tuning.splits == 1
    alone = list_tuning(shape_of(arguments(replace(LAYER["gemma-4-31B local"], window=None))))
    assert alone is not None
    assert alone.workers == 132
    for name, most, ahead in (("gemma-3-27b", 4, True), ("MiMo-V2-Flash", 4, False), ("gemma-4-31B", 2, False)):
        tuning = tunings[f"prefill, {name} full"]
        assert tuning is not None
        assert (tuning.workers, tuning.split_keys, tuning.most_splits, tuning.ahead) == (0, 4_096, most, ahead)
    for name in ("gemma-4-31B full", "fp8, gemma-4-31B full"):
        tuning = tunings[name]
        assert tuning is not None
        assert (tuning.workers, tuning.most_splits) == (0, 16)
    assert not any(default_tuning(shape_of(arguments(layer))).split_keys for layer in LAYERS)


@pytest.mark.parametrize("name", ["gemma-3-27b full", "gpt-oss-20b full", "MiMo-V2-Flash full", "gemma-4-31B full"])
def test_parts_of_a_prompt_take_bounded_memory(name: str) -> None:
    """8,192 tokens, and a tile of a second row: 128 KB a token, where float32 outputs have 16 to 64."""
    plan = plan_of(shape_of(arguments(LAYER[f"prefill, {name}"])))
    size = plan.entries * plan.kv_heads * plan.stored_rows * plan.v_width * 4
    assert size <= 131_072 * (8_192 + plan.queries)


@pytest.mark.parametrize("name", sample([*SPLIT], 4))
def test_layers_lower_for_hopper(name: str) -> None:
    """Lowering needs no GPU packages; `make gpu-compile` runs the rest of the compilation."""
    lower(SPLIT[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": 2}, "a work list needs splits = 1 and most_splits > 0"),
        ({"most_splits": 0}, "a work list needs splits = 1 and most_splits > 0"),
        ({"split_keys": 0}, "workers need split_keys > 0"),
        ({"split_keys": 96}, "split_keys = 96 must be a multiple of block = 64"),
    ],
)
def test_a_tuning_that_does_not_fit_is_an_error(change: dict[str, int], message: str) -> None:
    """Tuning tables are data, so they may be wrong."""
    tuning = Tuning(64, 2, 1, producer=False, split_keys=1_024, most_splits=16, workers=264)
    with pytest.raises(ValueError, match=message):
        launch(shape_of(arguments(LAYER["Mistral-7B"])), tuning._replace(**change))  # type: ignore[arg-type]
