"""Moves of pages, in batches, and rows of page tables against NumPy (jswa/exec/programs/pages.py)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.programs.pages import ROWS, UNKNOWN, WIDTH, copy_pages, move_batches, rename_pages, row_batches, set_rows
from jswa.exec.programs.state import DeviceState, init_state
from jswa.plan import TableRow
from tests.support.builders import share
from tests.support.oracles import small_model

NUM_SLABS = 20
FEW_PAGES = 40
PAGES = st.integers(0, FEW_PAGES - 1)
PATTERNS = ["LLFLLF", "F", "LLLLLF"]  # two full pages a slab in two lanes; one; five
_programs: dict[str, tuple[KVLayout, Any]] = {}


def program(pattern: str) -> tuple[KVLayout, Any]:
    """Return the layout and its compiled program."""
    if pattern not in _programs:
        layout = KVLayout.of(small_model(pattern), 2)
        pages = NUM_SLABS * layout.pages_per_slab

        def run(state: DeviceState, moves: Any) -> DeviceState:
            lanes = copy_pages(state["lanes"], moves, layout=layout)
            return {**state, "lanes": lanes, "full_table": rename_pages(state["full_table"], moves, num_pages=pages)}

        _programs[pattern] = layout, jax.jit(run)
    return _programs[pattern]


def make_state(layout: KVLayout, rng: np.random.Generator) -> DeviceState:
    """Return a state in which all elements differ."""
    limits = Limits(24, 4, 8, page_size=2, num_slabs=NUM_SLABS)
    state = init_state(layout, limits, 61, jnp.dtype("float32"))
    pages = NUM_SLABS * layout.pages_per_slab
    shape = state["full_table"].shape
    return DeviceState(
        lanes=[jnp.asarray(rng.standard_normal(lane.shape), jnp.float32) for lane in state["lanes"]],
        full_table=jnp.asarray(rng.integers(0, pages, shape), jnp.int32),
        local_table=jnp.asarray(rng.integers(0, NUM_SLABS, shape), jnp.int32),
        length=jnp.asarray(rng.integers(0, 9, 4), jnp.int32),
        last_token=jnp.asarray(rng.integers(0, 9, 4), jnp.int32),
        for_logits=state["for_logits"],
        texts=None,
        carry=None,
        draft_lanes=[],
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@share(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_batch_of_moves_copies_pages_and_renames_them(pattern: str, seed: int) -> None:
    """In every lane sources are copied to targets, and the full table names the targets; nothing else changes."""
    layout, run = program(pattern)
    rng = np.random.default_rng(seed)
    state = make_state(layout, rng)
    pages = NUM_SLABS * layout.pages_per_slab
    count = int(rng.integers(0, min(WIDTH, (pages - 1) // 2) + 1))
    chosen = rng.permutation(np.arange(1, pages))[: 2 * count].reshape(2, count)
    moves = np.tile(pages + np.arange(WIDTH, dtype=np.int32), (3, 1))
    renames = rng.integers(0, 2, count)
    moves[:2, :count], moves[2, :count] = chosen, np.where(renames, chosen[1], chosen[0])
    after = run(state, moves)
    for lane, copied in zip(state["lanes"], after["lanes"], strict=True):
        expected = np.array(lane).reshape(pages, -1)
        expected[chosen[1]] = expected[chosen[0]]
        np.testing.assert_array_equal(np.asarray(copied), expected.reshape(lane.shape))
    renamed = dict(chosen.T[renames == 1].tolist())
    table = [[renamed.get(page, page) for page in row] for row in np.asarray(state["full_table"]).tolist()]
    np.testing.assert_array_equal(after["full_table"], table)
    np.testing.assert_array_equal(after["local_table"], state["local_table"])
    np.testing.assert_array_equal(after["last_token"], state["last_token"])


@share(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_number_of_moves_gives_the_result_of_single_moves(seed: int) -> None:
    """Chains of moves keep their order in batches: a page that moves twice, a hole that is filled again."""
    layout, run = program("LLFLLF")
    rng = np.random.default_rng(seed)
    state = make_state(layout, rng)
    pages = NUM_SLABS * layout.pages_per_slab
    pairs = [rng.choice(np.arange(1, pages), 2, replace=False) for _ in range(int(rng.integers(1, 50)))]
    moves = np.concatenate([np.array(pairs, np.int32), rng.integers(0, 2, (len(pairs), 1), np.int32)], axis=1)
    expected = [np.array(lane).reshape(pages, -1) for lane in state["lanes"]]
    table = np.array(state["full_table"])
    for source, target, renames in moves.tolist():
        for lane in expected:
            lane[target] = lane[source]
        if renames:
            table[table == source] = target
    for batch in move_batches(moves, pages):
        state = run(state, batch)
    for moved, wanted in zip(state["lanes"], expected, strict=True):
        np.testing.assert_array_equal(np.asarray(moved).reshape(pages, -1), wanted)
    np.testing.assert_array_equal(state["full_table"], table)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 20, ROWS, ROWS + 5])
def test_rows_are_set_in_batches(count: int) -> None:
    """Each batch has a power of two of lines; the row ids of its padding do not exist, so nothing is written there."""
    max_rows, width, rng = ROWS + 8, 6, np.random.default_rng(count)
    rows = [
        TableRow(int(row_id), rng.integers(1, 99, n).astype(np.int32), n - k, rng.integers(1, 99, k).astype(np.int32))
        for row_id, n, k in zip(
            rng.permutation(max_rows)[:count], rng.integers(1, 7, count), [0, 1] * ROWS, strict=False
        )
    ]
    before = rng.integers(0, 99, (2, max_rows, width)).astype(np.int32)
    tables = jnp.asarray(before[0]), jnp.asarray(before[1]), jnp.arange(max_rows, dtype=jnp.int32)
    batches = list(row_batches(rows, width, max_rows))
    for batch in batches:
        tables = set_rows(tables, jnp.asarray(batch))
    expected = before.copy()
    for row in rows:
        expected[:, row.row_id] = 0
        expected[0, row.row_id, : len(row.full)] = row.full
        expected[1, row.row_id, row.first_local : row.first_local + len(row.local)] = row.local
    np.testing.assert_array_equal(np.stack(tables[:2]), expected)
    lengths = np.arange(max_rows)
    lengths[[row.row_id for row in rows]] = UNKNOWN
    np.testing.assert_array_equal(tables[2], lengths)
    sizes = [len(batch) for batch in batches]
    assert sizes == {0: [], 1: [1], 2: [2], 3: [4], 20: [32], ROWS: [32], ROWS + 5: [32, 8]}[count]


@given(st.lists(st.tuples(PAGES, PAGES, st.integers(0, 1)), max_size=150))
def test_batches_give_the_pages_of_moves_made_one_by_one(moves: list[tuple[int, int, int]]) -> None:
    """Although a batch reads all its pages before it writes any; also for chains of moves."""
    want, want_names = np.arange(FEW_PAGES), np.arange(FEW_PAGES)
    for source, target, renames in moves:
        want[target] = want[source]
        want_names[want_names == source] = target if renames else source
    got, got_names = np.arange(FEW_PAGES), np.arange(FEW_PAGES)
    for sources, targets, names in move_batches(np.array(moves, np.int32).reshape(-1, 3), FEW_PAGES):
        real = targets < FEW_PAGES
        assert len(set(targets.tolist())) == len(targets) == WIDTH, "destinations, with padding, must be distinct"
        assert np.all(sources[~real] >= FEW_PAGES)
        got[targets[real]] = got[sources[real]]
        renamed = np.arange(FEW_PAGES)
        renamed[sources[real]] = names[real]
        got_names = renamed[got_names]
    np.testing.assert_array_equal(got_names, want_names)
    np.testing.assert_array_equal(got, want)


@given(st.integers(0, 4 * WIDTH))
def test_moves_without_chains_fill_their_batches(count: int) -> None:
    """n independent moves, or copies of one page, take ⌈n / width⌉ launches."""
    moves = np.stack([np.arange(count), count + np.arange(count), np.ones(count)], axis=1).astype(np.int32)
    copies = moves * np.array([0, 1, 0], np.int32) + np.array([7, 8, 0], np.int32)
    batches = list(move_batches(moves, 2 * count))
    assert len(batches) == len(list(move_batches(copies, 2 * count + 8))) == -(-count // WIDTH)
    assert all(batch.shape == (3, WIDTH) and batch.dtype == np.int32 for batch in batches)
