"""The one upload of a launch (jswa/exec/pack.py)."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec, pack, unpack
from jswa.plan import FROM_DEVICE, SAMPLING, StepPlan
from tests.support.builders import make_plan

MAX_ROWS = 7


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Draw any plan of up to MAX_ROWS rows, with extreme integers, floats and keys."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(1, MAX_ROWS))
    counts = rng.integers(1, 9, rows).astype(np.int32)
    entries = [rng.integers(0, 2**31, (rng.integers(0, rows + 1), 3)).astype(np.int32) for _ in range(2)]
    for table in entries:
        table[:, 0] %= MAX_ROWS
    return make_plan(
        rng.permutation(MAX_ROWS)[:rows],
        rng.integers(0, 2**31, rows),
        counts,
        full_write_from=rng.integers(0, 2**31, rows),
        local_visible_from=rng.integers(0, 2**31, rows),
        samples=rng.integers(0, 2, rows),
        sampling=rng.integers(-(2**31), 2**31, (rows, len(SAMPLING))),
        tokens=rng.integers(FROM_DEVICE, 2**31, counts.sum()).astype(np.int32),
        full_pages=entries[0],
        local_pages=entries[1],
        adapters=rng.integers(0, 2**31, rows).astype(np.int32),
    )


@given(plans(), st.integers(0, 5), st.integers(0, 20))
def test_unpacking_gives_the_plan_and_padding(plan: StepPlan, more_rows: int, more_tokens: int) -> None:
    """Every field of the plan, bit for bit; padding rows have a slot that does not exist."""
    bucket = Bucket(plan.num_tokens + more_tokens, plan.num_rows + more_rows, decode=False)
    spec = PackSpec.of(bucket, page_size=4, max_rows=MAX_ROWS)
    packed = pack(plan, spec)
    assert packed.dtype == np.int32
    assert packed.shape == (spec.size,)
    inputs = unpack(packed, spec)
    rows = plan.num_rows
    for name, field in (("row_id", "row_ids"), ("start", "starts"), ("count", "counts")):
        np.testing.assert_array_equal(inputs.column(name)[:rows], getattr(plan, field))
    for name in ("full_write_from", "local_visible_from", "samples"):
        np.testing.assert_array_equal(inputs.column(name)[:rows], getattr(plan, name))
    np.testing.assert_array_equal(inputs.rows[:rows], plan.rows)
    assert np.all(inputs.column("logits_state")[rows:] == MAX_ROWS), "padding rows have logits state"
    np.testing.assert_array_equal(inputs.tokens[: plan.num_tokens], plan.tokens)
    assert np.all(inputs.column("row_id")[rows:] == MAX_ROWS)
    assert np.all(inputs.column("count")[rows:] == 0)
    for section, entries in ((inputs.full_pages, plan.full_pages), (inputs.local_pages, plan.local_pages)):
        np.testing.assert_array_equal(section[: len(entries)], entries)
        assert np.all(section[len(entries) :, 0] == MAX_ROWS)


@given(plans())
def test_sections_cover_the_packed_array_without_overlap(plan: StepPlan) -> None:
    """They are views of the array."""
    spec = PackSpec.of(
        Bucket(plan.num_tokens + 3, plan.num_rows + 2, decode=False),
        page_size=16,
        max_rows=MAX_ROWS,
        section=True,
        adapters=True,
        width=3,
    )
    packed = np.zeros(spec.size, np.int32)
    for section in unpack(packed, spec):
        assert np.shares_memory(section, packed)
        section += 1
    assert np.all(packed == 1)


@given(plans(), st.integers(0, 5))
def test_adapter_ids_are_packed_only_if_the_engine_has_adapters(plan: StepPlan, more_rows: int) -> None:
    """They are at the end: everything before them is bit for bit as without adapters."""
    bucket = Bucket(plan.num_tokens, plan.num_rows + more_rows, decode=False)
    without = PackSpec.of(bucket, page_size=4, max_rows=MAX_ROWS)
    spec = PackSpec.of(bucket, page_size=4, max_rows=MAX_ROWS, adapters=True)
    packed = pack(plan, spec)
    np.testing.assert_array_equal(packed[: without.size], pack(plan, without))
    assert spec.size == without.size + bucket.rows
    assert unpack(packed, without).adapters is None
    inputs = unpack(packed, spec)
    np.testing.assert_array_equal(inputs.adapters[: plan.num_rows], plan.adapters)
    assert not inputs.adapters[plan.num_rows :].any(), "padding rows have an adapter"


@given(plans())
def test_each_launch_packs_into_fresh_memory(plan: StepPlan) -> None:
    """The device may still read the array of the previous launch."""
    spec = PackSpec.of(Bucket(plan.num_tokens, plan.num_rows, decode=False), page_size=16, max_rows=MAX_ROWS)
    first = pack(plan, spec)
    kept = first.copy()
    second = pack(dataclasses.replace(plan, tokens=np.zeros_like(plan.tokens)), spec)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=20),
    st.sampled_from([1, 4, 16, 64]),
)
def test_a_bucket_fits_the_new_pages_of_any_plan(rows: list[tuple[int, int]], page_size: int) -> None:
    """Rows of any start and count never need more table entries of a kind than the bucket has."""
    pages = sum(-(-(start + count) // page_size) - -(-start // page_size) for start, count in rows)
    bucket = Bucket(sum(count for _, count in rows), len(rows), decode=False)
    assert pages <= PackSpec.of(bucket, page_size=page_size, max_rows=64).entries


@given(plans(), st.integers(0, 5), st.integers(1, 4))
def test_rows_in_place_of_embeddings_are_packed_behind_all_else(plan: StepPlan, more: int, width: int) -> None:
    """As bits; tokens of padding, and a step without images, have zeros."""
    bucket = Bucket(plan.num_tokens + more, plan.num_rows, decode=False)
    without = PackSpec.of(bucket, page_size=4, max_rows=MAX_ROWS)
    spec = PackSpec.of(bucket, page_size=4, max_rows=MAX_ROWS, width=width)
    rows = np.random.default_rng(0).normal(size=(plan.num_tokens, width)).astype(np.float32)
    packed = pack(dataclasses.replace(plan, embedded=rows), spec)
    np.testing.assert_array_equal(packed[: without.size], pack(plan, without))
    found = unpack(packed, spec).embedded.view(np.float32)
    np.testing.assert_array_equal(found[: plan.num_tokens], rows)
    assert not found[plan.num_tokens :].any()
    assert not unpack(pack(plan, spec), spec).embedded.any()
    assert unpack(packed, without).embedded is None
