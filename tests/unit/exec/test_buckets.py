"""The table of compiled shapes (jswa/exec/buckets.py)."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.config import Limits, resolve_limits
from jswa.errors import EngineError
from jswa.exec.buckets import Bucket, bucket_table, in_units, pick_bucket
from jswa.plan import StepPlan
from jswa.speculation import Speculation
from jswa.text.inputs import engine_config
from tests.support.builders import make_layer, make_model, make_plan


def plan_of(counts: list[int]) -> StepPlan:
    """Return a plan of rows with these token counts."""
    return make_plan(np.arange(len(counts)), 0, counts)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Limits, StepPlan]:
    """Draw limits, and any plan that they allow."""
    max_rows = draw(st.integers(1, 300))
    max_tokens = draw(st.integers(max_rows, 9000))
    rows = draw(st.integers(1, max_rows))
    extra = draw(st.just(0) | st.integers(0, max_tokens - rows))
    long = draw(st.integers(0, rows - 1))
    return Limits(10_000, max_rows, max_tokens, 16), plan_of([1 + extra * (i == long) for i in range(rows)])


@given(plans(), st.booleans())
def test_every_plan_gets_the_smallest_bucket_that_fits(case: tuple[Limits, StepPlan], on_gpu: bool) -> None:
    """Every plan with at most max_rows rows and max_tokens tokens fits a bucket."""
    limits, plan = case
    table = bucket_table(limits, on_gpu=on_gpu)
    bucket = pick_bucket(table, plan)
    most = in_units(limits.max_rows, 8 if on_gpu else 1)
    assert plan.num_rows <= bucket.rows <= most
    assert plan.num_tokens <= bucket.tokens <= max(limits.max_tokens, most)
    assert not bucket.decode or plan.counts.max() == 1
    assert not any(other.holds(plan.num_rows, plan.num_tokens) for other in table if other.tokens < bucket.tokens)


@given(st.integers(1, 300), st.integers(1, 9000), st.booleans())
def test_a_decode_plan_runs_in_the_decode_bucket_of_its_size(max_rows: int, max_tokens: int, on_gpu: bool) -> None:
    """A step with one token per row runs in a mixed bucket only if that is smaller."""
    limits = Limits(10_000, max_rows, max(max_rows, max_tokens), 16)
    table = bucket_table(limits, on_gpu=on_gpu)
    for rows in {1, max_rows // 2 or 1, max_rows}:
        bucket = pick_bucket(table, plan_of([1] * rows))
        assert bucket.decode or bucket.tokens < min(b.tokens for b in table if b.decode and b.rows >= rows)


@given(st.integers(1, 300), st.integers(1, 9000), st.sampled_from([1, 2]))
def test_the_buckets_of_a_cpu_are_near_every_plan(max_rows: int, max_tokens: int, fewest: int) -> None:
    """No plan pads its rows to twice their number, or its tokens beyond 32 to more than one and a half times theirs."""
    limits = Limits(10_000, max_rows, max(max_rows, max_tokens), 16)
    table = bucket_table(limits, on_gpu=False, fewest_rows=fewest)
    assert len(table) == len(set(table))
    decode, mixed = ([b.tokens for b in table if b.decode is kind] for kind in (True, False))
    assert (decode[0], decode[-1]) == (fewest, max(fewest, max_rows))
    assert (mixed[0], mixed[-1]) == (min(32, limits.max_tokens), limits.max_tokens)
    for sizes, most in ((decode, 2), (mixed, 1.5)):
        assert all(before < after <= most * before for before, after in itertools.pairwise(sizes))


@given(st.integers(1, 300), st.integers(0, 900), st.booleans(), st.booleans())
def test_the_buckets_of_a_gpu_have_eights_of_rows(max_rows: int, more: int, drafting: bool, one: bool) -> None:
    """Even where fewer rows may run. Those with drafts have at least eight places."""
    drafts = Speculation("ngram", 7) if drafting else None
    limits = Limits(10_000, max_rows, max_rows + more, 16, speculation=drafts, one_bucket=one)
    for bucket in bucket_table(limits, on_gpu=True):
        if bucket.decode and bucket.drafts:
            assert bucket.tokens >= 8 or bucket.tokens > limits.max_tokens // 2
        else:
            assert bucket.rows % 8 == 0 or bucket.rows == bucket.tokens


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "programs"), [(256, 2_048, 14), (256, 8_192, 18), (1_024, 8_192, 22)]
)
def test_the_sizes_of_a_gpu(max_rows: int, max_tokens: int, programs: int) -> None:
    """Powers of two, and between them those that save a step 5 % or more."""
    table = bucket_table(Limits(131_072, max_rows, max_tokens, 64), on_gpu=True)
    assert len(table) == len(set(table)) == programs
    decode, mixed = ([b.tokens for b in table if b.decode is kind] for kind in (True, False))
    assert decode == [n for n in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1_024) if n <= max_rows]
    assert mixed == [n for n in (128, 256, 512, 1_024, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192) if n <= max_tokens]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("sizes", "max_tokens", "decode", "mixed"),
    [
        ([2048, 64, 256], 2048, [64, 256], [2048]),
        ([256, 512, 2048, 512], 2048, [256], [512, 2048]),
        ([1, 4, 256], 256, [1, 4, 256], [256]),
    ],
)
def test_only_the_sizes_that_are_asked_for_are_compiled(
    sizes: list[int], max_tokens: int, decode: list[int], mixed: list[int], on_gpu: bool
) -> None:
    """Up to max_num_seqs they are rows of a decode step, beyond it tokens of a mixed one."""
    options = {"max_num_seqs": 256, "max_num_batched_tokens": max_tokens, "cudagraph_capture_sizes": sizes}
    limits = resolve_limits(engine_config(options), make_model(make_layer(8, (1, 2, 2))), on_gpu=on_gpu)
    table = bucket_table(limits, on_gpu=on_gpu)
    unit = 8 if on_gpu else 1
    assert [bucket.rows for bucket in table if bucket.decode] == sorted({in_units(rows, unit) for rows in decode})
    assert [bucket.tokens for bucket in table if not bucket.decode] == mixed
    assert pick_bucket(table, plan_of([1] * 256)).decode
    assert pick_bucket(table, plan_of([max_tokens - 255] + [1] * 255)).tokens == max_tokens


@pytest.mark.parametrize("on_gpu", [True, False])
def test_steps_with_prompts_have_programs_with_drafts(on_gpu: bool) -> None:
    """Of powers of two tokens, with the largest number of drafts; none if layers run for last tokens alone."""
    limits = Limits(10_000, 256, 3_000, 16, speculation=Speculation("suffix", 4).of_length(10_000))
    table = bucket_table(limits, on_gpu=on_gpu)
    mixed = [bucket for bucket in table if bucket.drafts and not bucket.decode]
    assert [bucket.tokens for bucket in mixed] == [
        n for n in (32, 64, 128, 256, 512, 1024, 2048, 3000) if n > 64 * on_gpu
    ]
    assert {bucket.drafts for bucket in mixed} == {7}
    assert not [b for b in bucket_table(limits, on_gpu=on_gpu, tail=True) if b.drafts and not b.decode]
    assert len(table) == len(set(table))
    # A row of drafts and a prompt of as many tokens as a row of this many drafts would have.
    plan = make_plan(np.arange(2), 0, [4, 4], samples=[4, 1], drafts=3)
    assert pick_bucket(table, plan) == mixed[0]
    assert pick_bucket(table, make_plan(np.arange(2), 0, [4, 4], samples=[4, 4], drafts=3)).decode
    # A prompt of which one token is left takes the place of a row without drafts.
    assert pick_bucket(table, make_plan(np.arange(2), 0, [4, 1], samples=[4, 1], drafts=3)).decode


def test_rows_share_the_tokens_of_a_decode_step() -> None:
    """Each may have all drafts that are looked up, also with fewer tokens; drafters with weights draft for all rows."""
    drafts = Speculation("ngram", 7).of_length(10_000)
    table = bucket_table(Limits(10_000, 4, 3_000, 16, speculation=drafts), on_gpu=False)
    shared = {bucket.mean_drafts: bucket for bucket in table if bucket.drafts and bucket.decode and bucket.rows == 4}
    assert {mean: bucket.tokens for mean, bucket in shared.items()} == {1: 8, 3: 16, 7: 32}
    assert [shared[mean].shared for mean in (1, 3, 7)] == [True, True, False]
    plan = make_plan(np.arange(4), 0, [8, 8, 1, 8], samples=[8, 8, 1, 8], drafts=1)
    assert plan.num_places == 4 + 3
    assert pick_bucket(table, plan) == shared[1]
    weights = Speculation("eagle3", 7, "drafter")
    table = bucket_table(Limits(10_000, 4, 3_000, 16, speculation=weights), on_gpu=False)
    assert not any(bucket.shared for bucket in table)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20), st.sampled_from([1, 3]), st.booleans(), st.data())
def test_drafts_fit_into_whatever_is_compiled(
    counts: list[int], drafts: int, on_gpu: bool, data: st.DataObject
) -> None:
    """Rows that share the drafts of a decode step may run more than the program has places for; others may not.

    A program that is not compiled yet is left out: a plan of 8 rows with 3 drafts each, of which some run 7, had its
    tokens packed into a step of 32 tokens, where only the program of 16 rows and the one of 32 tokens were there.
    """
    limits = Limits(10_000, 20, 300, 16, speculation=Speculation("ngram", 7).of_length(10_000))
    table = bucket_table(limits, on_gpu=on_gpu)
    there = [bucket for bucket in table if bucket == table[-1] or data.draw(st.booleans())]
    plan = make_plan(np.arange(len(counts)), 0, counts, samples=counts, drafts=drafts)
    bucket = pick_bucket(tuple(there), plan)
    assert bucket.rows >= plan.num_rows
    assert bucket.tokens >= (plan.num_places if bucket.decode else plan.num_tokens)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_with_more_drafts_than_others_run_in_a_larger_step(on_gpu: bool) -> None:
    """If the decode step of their number is not compiled; the mixed step of as many places has no room for them."""
    limits = Limits(10_000, 64, 1_024, 16, speculation=Speculation("ngram", 7).of_length(10_000))
    table = bucket_table(limits, on_gpu=on_gpu)
    rows = 32 if on_gpu else 8
    counts = [8] * (rows // 2) + [1] * (rows // 2)
    plan = make_plan(np.arange(rows), 0, counts, samples=counts, drafts=3)
    own, later = pick_bucket(table, plan), tuple(b for b in table if b != Bucket.verifying(rows, 3, 7))
    assert own == Bucket.verifying(rows, 3, 7)
    assert pick_bucket(later, plan) == Bucket.verifying(2 * rows, 3, 7)


def test_a_plan_beyond_the_limits_is_an_engine_error() -> None:
    """Only a broken scheduler makes such a plan, so the engine stops."""
    table = (Bucket(4, 4, decode=True), Bucket(8, 4, decode=False))
    assert pick_bucket(table, plan_of([5, 1])) == table[1]
    with pytest.raises(EngineError, match="2 rows and 9 tokens"):
        pick_bucket(table, plan_of([8, 1]))
