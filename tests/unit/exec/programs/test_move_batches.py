"""Batches of page moves (`move_batches` in jswa/exec/programs/pages.py)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jswa.exec.programs.pages import WIDTH, move_batches

NUM_PAGES = 40
PAGES = st.integers(0, NUM_PAGES - 1)


@given(st.lists(st.tuples(PAGES, PAGES, st.integers(0, 1)), max_size=150))
def test_batches_give_the_pages_of_moves_made_one_by_one(moves: list[tuple[int, int, int]]) -> None:
    """Although a batch reads all its pages before it writes any; also for chains of moves."""
    want, want_names = np.arange(NUM_PAGES), np.arange(NUM_PAGES)
    for source, target, renames in moves:
        want[target] = want[source]
        want_names[want_names == source] = target if renames else source
    got, got_names = np.arange(NUM_PAGES), np.arange(NUM_PAGES)
    for sources, targets, names in move_batches(np.array(moves, np.int32).reshape(-1, 3), NUM_PAGES):
        real = targets < NUM_PAGES
        assert len(set(targets.tolist())) == len(targets) == WIDTH, "destinations, with padding, must be distinct"
        assert np.all(sources[~real] >= NUM_PAGES)
        got[targets[real]] = got[sources[real]]
        renamed = np.arange(NUM_PAGES)
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
