"""`step_indices` and the device state: where tokens are written and rows read, against loops over tokens."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.pack import Inputs, PackSpec, pack, unpack
from jswa.exec.programs.indices import StepIndices, by_token, step_indices
from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.state import DeviceState, init_state, state_bytes, state_shapes
from jswa.plan import FROM_DEVICE, StepPlan
from tests.support.builders import changed, make_plan, share
from tests.support.oracles import small_model

MAX_ROWS, MAX_LEN = 6, 96
MIXED, DECODE = Bucket(40, 4, decode=False), Bucket(4, 4, decode=True)
CASES = [("LLF", 9, 4, MIXED), ("LLF", 9, 4, DECODE), ("F", 1, 16, MIXED), ("LL", 1, 1, MIXED), ("LF", 200, 4, MIXED)]


def plan_of(rows: list[tuple[int, int, int, int]]) -> StepPlan:
    """Return a plan of rows (slot, start, count, local_visible_from) with arbitrary tokens."""
    slots, starts, counts, visible = zip(*rows, strict=True)
    return make_plan(slots, starts, counts, local_visible_from=visible)


class Program:
    """`step_indices` of one layout and bucket, compiled once, on page tables in which all entries differ."""

    def __init__(self, pattern: str, window: int, page_size: int, bucket: Bucket) -> None:
        self.layout = KVLayout.of(small_model(pattern, window=window), page_size)
        self.limits = Limits(MAX_LEN, MAX_ROWS, bucket.tokens, page_size, num_slabs=700)
        self.bucket = bucket
        self.spec = PackSpec.of(bucket, page_size=page_size, max_rows=MAX_ROWS)
        width = self.limits.pages_per_row
        ids = np.random.default_rng(0).permutation(np.arange(1, 700))[: MAX_ROWS * width].astype(np.int32)
        self.table = ids.reshape(MAX_ROWS, width)
        self.state = DeviceState(
            lanes=init_state(self.layout, self.limits, 61, jnp.dtype("float32"))["lanes"],
            full_table=jnp.asarray(self.table),
            local_table=jnp.asarray(self.table[::-1].copy()),
            length=jnp.zeros(MAX_ROWS, jnp.int32),
            last_token=jnp.zeros(MAX_ROWS, jnp.int32),
            for_logits=init_logits_state(2, 61),
            texts=None,
            carry=None,
            draft_lanes=[],
        )
        self._compiled = jax.jit(partial(step_indices, layout=self.layout, bucket=bucket))

    def __call__(self, plan: StepPlan, length: np.ndarray | None = None) -> StepIndices:
        """Return the indices as NumPy arrays. `length`: that of the state."""
        inputs: Inputs = unpack(pack(plan, self.spec), self.spec)
        state = self.state if length is None else DeviceState(**{**self.state, "length": jnp.asarray(length)})
        indices: StepIndices = jax.tree.map(np.asarray, self._compiled(inputs, state))
        return indices


_programs: dict[tuple[Any, ...], Program] = {}


def check_kind(program: Program, kind: Any, plan: StepPlan, table: np.ndarray, *, window: int | None) -> None:
    """Check `KindIndices`, as NumPy arrays, for each token and row."""
    page = program.limits.page_size
    num_pages = program.limits.num_slabs * (program.layout.pages_per_slab if window is None else 1)
    token = 0
    for row in range(plan.num_rows):
        slot, start, count = (int(x[row]) for x in (plan.row_ids, plan.starts, plan.counts))
        for position in range(start, start + count):
            assert kind.write_pages[token] == table[slot, position // page]
            assert kind.write_offsets[token] == position % page
            token += 1
        first = int(kind.rows.first_page[row])
        oldest = 0 if window is None else max(0, start - window + 1)
        assert first == oldest // page
        pages = kind.rows.page_rows[row]
        for position in range(oldest, start + count):
            assert pages[position // page - first] == table[slot, position // page]
        assert (kind.rows.starts[row], kind.rows.counts[row]) == (start, count)
        assert kind.rows.visible_from[row] == (0 if window is None else plan.local_visible_from[row])
    assert (kind.write_pages[token:] >= num_pages).all(), "a padding token is written"
    cells = list(zip(kind.write_pages.tolist(), kind.write_offsets.tolist(), strict=True))
    assert len(set(cells)) == len(cells), "the scatter relies on unique indices"
    assert (kind.rows.counts[plan.num_rows :] == 0).all()
    assert (kind.rows.page_rows[plan.num_rows :] == 0).all(), "rows that do not exist read the slab of zeros"


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket(4, 4, decode=True),
        Bucket(8, 4, decode=True, drafts=1),
        Bucket(8, 4, decode=True, drafts=3),
        Bucket(9, 4, decode=False),
    ],
    ids=str,
)
def test_tokens_have_the_values_of_their_rows(bucket: Bucket) -> None:
    """Whether rows have places, share them, or lie one behind the other; places need no gather."""
    values, places = jnp.arange(bucket.rows) * 10, bucket.decode and not bucket.shared
    rows = jnp.arange(bucket.tokens) // bucket.per_row if places else jnp.array([0, 0, 1, 2, 2, 3, 3, 3, 3])
    rows = rows[: bucket.tokens]
    assert by_token(values, rows, bucket).tolist() == values[rows].tolist()
    found = str(jax.make_jaxpr(partial(by_token, bucket=bucket))(values, rows))
    assert ("gather" in found) != places


@pytest.mark.parametrize("case", CASES, ids=str)
@share(4)
@given(data=st.data())
def test_tokens_are_written_to_and_read_from_their_own_pages(case: tuple[Any, ...], data: st.DataObject) -> None:
    """Pages and offsets to write, page rows cut to the window, positions and last tokens, for any rows that fit."""
    program = _programs.setdefault(case, Program(*case))
    bucket = program.bucket
    slots = data.draw(st.permutations(range(MAX_ROWS)))[: data.draw(st.integers(1, bucket.rows))]
    rows, left = [], bucket.tokens
    for index, slot in enumerate(slots):
        others = len(slots) - index - 1
        count = 1 if bucket.decode else data.draw(st.integers(1, left - others))
        start = data.draw(st.integers(0, MAX_LEN - count))
        rows.append((slot, start, count, data.draw(st.integers(0, start))))
        left -= count
    plan = plan_of(rows)
    found = program(plan)

    positions = np.concatenate([np.arange(start, start + count) for _, start, count, _ in rows])
    np.testing.assert_array_equal(found.positions[: plan.num_tokens], positions)
    np.testing.assert_array_equal(found.token_row_ids[: plan.num_tokens], np.repeat(plan.row_ids, plan.counts))
    np.testing.assert_array_equal(found.last_tokens[: plan.num_rows], np.cumsum(plan.counts) - 1)
    assert ((found.positions >= 0) & (found.positions < MAX_LEN)).all()
    window = program.layout.reach.size if program.layout.reach else None
    assert (found.full is not None, found.local is not None) == (program.layout.full is not None, window is not None)
    if found.full is not None:
        check_kind(program, found.full, plan, program.table, window=None)
    if found.local is not None:
        check_kind(program, found.local, plan, program.table[::-1], window=window)
    assert {
        leaf.dtype
        for leaf in jax.tree.leaves((found.positions, found.token_rows, found.tiles, found.full, found.local))
    } == {np.dtype("int32")}
    np.testing.assert_array_equal(found.real, np.arange(len(found.real)) < plan.num_tokens)
    np.testing.assert_array_equal(found.token_rows[: plan.num_tokens], np.repeat(np.arange(plan.num_rows), plan.counts))
    padding = found.token_rows[plan.num_tokens :]
    assert ((padding >= 0) & (padding < bucket.rows)).all(), "a padding token reads a row that is not there"


@pytest.mark.parametrize("case", CASES, ids=str)
@share(4)
@given(data=st.data())
def test_a_row_goes_on_where_the_device_is_and_never_past_its_limit(case: tuple[Any, ...], data: st.DataObject) -> None:
    """The indices are those of a plan with the device's starts; tokens past limit - 1 are padding."""
    program = _programs.setdefault(case, Program(*case))
    bucket = program.bucket
    slots = data.draw(st.permutations(range(MAX_ROWS)))[: bucket.rows]
    length = np.array(data.draw(st.lists(st.integers(0, 60), min_size=MAX_ROWS, max_size=MAX_ROWS)), np.int32)
    counts = [1 if bucket.decode else data.draw(st.integers(1, bucket.tokens // bucket.rows)) for _ in slots]
    limits = [int(length[slot]) + data.draw(st.integers(1, 12)) for slot in slots]
    asked = [data.draw(st.booleans()) for _ in slots]
    plan = plan_of([(slot, int(length[slot]), count, 0) for slot, count in zip(slots, counts, strict=True)])
    starts = np.where(asked, FROM_DEVICE, plan.starts)
    found = program(changed(plan, start=starts, limit=limits), length)

    run = [min(c, n - 1 - length[s]) if a else c for s, c, n, a in zip(slots, counts, limits, asked, strict=True)]
    assert (found.starts.tolist(), found.counts.tolist()) == (length[slots].tolist(), run)
    first = np.cumsum(counts) - counts
    real = np.zeros(bucket.tokens, bool)
    for begin, count in zip(first.tolist(), run, strict=True):
        real[begin : begin + count] = True
    np.testing.assert_array_equal(found.real, real)
    whole = program(plan)
    np.testing.assert_array_equal(found.positions[real], whole.positions[real])
    np.testing.assert_array_equal(found.last_tokens, np.maximum(first + run - 1, 0))
    for kind, same in ((found.full, whole.full), (found.local, whole.local)):
        assert (kind is None) == (same is None)
        if kind is not None and same is not None:
            np.testing.assert_array_equal(kind.write_pages[real], same.write_pages[real])
            np.testing.assert_array_equal(kind.rows.page_rows, same.rows.page_rows)
            assert (kind.write_pages[~real] >= program.limits.num_slabs).all(), "a token past the limit is written"
            assert kind.rows.counts.tolist() == run


@pytest.mark.parametrize(("page_size", "window"), [(4, 9), (16, 64), (1, 3)])
def test_the_width_of_local_page_rows_does_not_depend_on_the_context(page_size: int, window: int) -> None:
    """It is ⌈(W − 1 + chunk) / p⌉ + 1, or that of the whole table if it is smaller."""
    layout = KVLayout.of(small_model("LF", window=window), page_size)
    for bucket in (MIXED, DECODE):
        for max_len in (64, 4_096):
            limits = Limits(max_len, MAX_ROWS, bucket.tokens, page_size, num_slabs=9)
            spec = PackSpec.of(bucket, page_size=page_size, max_rows=MAX_ROWS)
            found = jax.eval_shape(
                lambda packed, state: step_indices(unpack(packed, spec), state, layout=layout, bucket=bucket),  # noqa: B023 - called at once
                jnp.zeros(spec.size, jnp.int32),
                state_shapes(layout, limits, 61, jnp.dtype("float32")),
            )
            wanted = -(-(window - 1 + (1 if bucket.decode else bucket.tokens)) // page_size) + 1
            assert found.local.rows.page_rows.shape == (bucket.rows, min(wanted, limits.pages_per_row))
            assert found.full.rows.page_rows.shape == (bucket.rows, limits.pages_per_row)


def test_a_new_state_is_zero_and_has_the_shapes_of_state_shapes() -> None:
    """`state_shapes` allocates nothing."""
    layout, limits = KVLayout.of(small_model("LLLF"), 4), Limits(30, 5, 16, page_size=4, num_slabs=7)
    state = init_state(layout, limits, 61, jnp.dtype("bfloat16"))
    shapes = state_shapes(layout, limits, 61, jnp.dtype("bfloat16"))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    tables = {name: leaf for name, leaf in state.items() if name != "for_logits"}
    assert not any(np.asarray(leaf).astype(np.float32).any() for leaf in jax.tree.leaves(tables))
    assert (np.asarray(state["for_logits"]["mask"]) == -1).all(), "a new mask forbids tokens"
    assert [lane.shape for lane in state["lanes"]] == [(1, 7, layout.slab_elems)]
    assert state["full_table"].shape == state["local_table"].shape == (5, 8)
    logits_state = 5 * (61 * 2 + 1_024 * 8 + 2 * 4 + (16 * 9 + 16) * 4)
    assert (
        state_bytes(state) == state_bytes(shapes) == 7 * layout.slab_bytes(2) + 4 * (2 * 5 * 8 + 5 + 5) + logits_state
    )
