"""Laws of leases under random sequences of calls (jswa/cache/manager.py)."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease, PageRun
from jswa.cache.manager import CacheManager
from jswa.errors import UnsupportedModel
from tests.support.builders import LAYOUTS, make_layout, share
from tests.support.text.model import first_seen

PAGE_SIZES = [1, 4, 16]
SHAPES = {  # page sizes, and reaches of local layers
    "sliding": [(page, Reach(window)) for page in PAGE_SIZES for window in (1, 2, 3, 5, 16, 33)],
    "chunked": [(page, Reach(page * pages, chunked=True)) for page in PAGE_SIZES for pages in (1, 2, 5)],
    "looking back": [
        (page, Reach(page * pages, True, chunks)) for page in PAGE_SIZES for pages, chunks in ((1, 1), (3, 2))
    ],
}
WIDTH = 200


class Row:
    """A lease and the launched length of its row."""

    def __init__(self, name: int, lease: Lease) -> None:
        self.name = name
        self.lease = lease
        self.launched = 0


class LeaseMachine(RuleBasedStateMachine):
    """Tags every page with (row, page position) when it is allocated; tags follow the pool's moves, never the lease.

    So a lease that misses a move, or has a page twice, disagrees with the tags.
    """

    layers: tuple[int, int]  # numbers of full and local layers; set by a subclass
    shapes: list[tuple[int, Reach]]  # set by a subclass

    @initialize(data=st.data(), slabs=st.integers(1, 24))
    def start(self, data: st.DataObject, slabs: int) -> None:
        page_size, reach = data.draw(st.sampled_from(self.shapes))
        self.layout: KVLayout = make_layout(page_size, reach, num_full=self.layers[0], num_local=self.layers[1])
        self.manager = CacheManager(self.layout, 1 + slabs, WIDTH, 12)
        self.rows: list[Row] = []
        self.names = 0
        self.full_tags: dict[int, tuple[int, int]] = {}
        self.local_tags: dict[int, tuple[int, int]] = {}

    @precondition(lambda self: len(self.rows) < 8)
    @rule(rows=st.integers(1, 4), tokens=st.integers(0, 2))
    def open(self, rows: int, tokens: int) -> None:
        for _ in range(rows):
            self.rows.append(Row(self.names, self.manager.open()))
            self.names += 1
            if tokens and self._grow(self.rows[-1], tokens):
                self._slide(self.rows[-1])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        """Launch a step of several rows: all rows grow, then all slide at their new lengths."""
        rows = data.draw(st.lists(st.sampled_from(self.rows), unique=True, min_size=1, max_size=4))
        grown = [row for row in rows if self._grow(row, data.draw(self._chunks()))]
        for row in grown:
            self._slide(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def launch_at_page_ends(self, data: st.DataObject) -> None:
        """Launch a step of several rows that all begin a page, with the calls for many rows: as the calls for one."""
        rows = data.draw(st.lists(st.sampled_from(self.rows), unique=True, min_size=1, max_size=8))
        rows = [row for row in rows if row.lease.covered < WIDTH * self.layout.page_size]
        self.manager.table.take_new()
        other, twins = deepcopy((self.manager, [row.lease for row in rows]))
        before, free = self._everything(), self.manager.pool.free_slots
        fits = self.manager.grow_by_page(np.array([row.lease.row for row in rows], np.intp))
        page_slots = bool(self.layout.full) + bool(self.layout.local) * self.layout.pages_per_slab
        assert fits == (len(rows) * page_slots <= free)
        if not fits:
            assert self._everything() == before
            return
        self._follow()
        for row, twin in zip(rows, twins, strict=True):
            assert other.grow(twin, twin.covered + 1)
            row.launched = row.lease.covered - self.layout.page_size + 1
        names = {row.lease.row: row.name for row in rows}
        full, local = self.manager.table.take_new()
        for tags, entries, kind in ((self.full_tags, full, "full"), (self.local_tags, local, "local")):
            tags |= {page: (names[row], at) for row, at, page in entries.tolist()}
            runs: list[PageRun] = [getattr(row.lease, kind) for row in rows]
            assert sorted(entries[:, 1].tolist()) == sorted(run.end - 1 for run in runs if run.end)
        self._slide_all(rows)
        for row, twin in zip(rows, twins, strict=True):
            other.slide(twin, row.launched)
            assert _lengths(row.lease) == _lengths(twin)
        pools = self.manager.pool, other.pool
        assert len({(pool.free_slots, pool.num_full, pool.num_local) for pool in pools}) == 1
        assert self.manager.stats().slid_pages == other.stats().slid_pages

    @precondition(lambda self: self.rows)
    @rule()
    def fill(self) -> None:
        """Grow rows by one page in turn until none fits: rows then share slabs, so that closing one makes holes."""
        growing = self.rows
        while growing:
            growing = [row for row in growing if self._grow(row, self.layout.page_size)]
            for row in growing:
                self._slide(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        for row in data.draw(st.lists(st.sampled_from(self.rows), unique=True, min_size=1, max_size=3)):
            self.rows.remove(row)
            self.manager.close(row.lease)
            for tags in (self.full_tags, self.local_tags):
                for page in [page for page, (name, _) in tags.items() if name == row.name]:
                    del tags[page]

    @rule()
    def settle(self) -> None:
        self.manager.compact()
        self._follow()

    @invariant()
    def leases_hold_what_they_were_given(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check((row.lease, row.launched) for row in self.rows)
        assert self._held("full") == self.full_tags
        assert self._held("local") == self.local_tags
        p, reach = self.layout.page_size, self.layout.reach
        for row in self.rows:
            full, local = row.lease.full, row.lease.local
            assert (full.start, full.end) == (0, math.ceil(row.launched / p) if self.layout.full else 0)
            if reach is not None:
                first = first_seen(reach, row.launched)
                assert (local.start, local.end) == (first // p, math.ceil(row.launched / p))
                assert len(local.held) <= self.layout.window_pages(row.launched)
                if reach.chunked:
                    seen = reach.lookback * reach.size + row.launched % reach.size
                    assert len(local.held) == math.ceil(min(seen, row.launched) / p), "pages of an earlier chunk"
                else:
                    assert len(local.held) <= self.layout.touch(min(row.launched, reach.size))
            slots = len(full.held) + self.layout.pages_per_slab * len(local.held)
            assert row.lease.held_slots == slots

    def teardown(self) -> None:
        """Close every lease: the pool must then be empty."""
        if hasattr(self, "manager"):
            for row in self.rows:
                self.manager.close(row.lease)
            self.manager.check([])
            assert self.manager.pool.free_slots == self.manager.pool.total_slots

    def _chunks(self) -> st.SearchStrategy[int]:
        p = self.layout.page_size
        return st.integers(1, 3) | st.sampled_from([p - 1 or 1, p, p + 1, 3 * p, 3 * p + 1])

    def _grow(self, row: Row, chunk: int) -> bool:
        """Grow by a chunk: the lease gets exactly the missing pages or, if they do not fit, nothing changes."""
        layout, lease, pool = self.layout, row.lease, self.manager.pool
        length = row.launched + chunk
        if length > WIDTH * layout.page_size:
            return False
        more = math.ceil(length / layout.page_size) - math.ceil(row.launched / layout.page_size)
        need = (more if layout.full else 0) + (more * layout.pages_per_slab if layout.local else 0)
        before, fits = self._everything(), need <= pool.free_slots
        assert self.manager.grow(lease, length) == fits
        if not fits:
            assert self._everything() == before
            return False
        assert pool.free_slots == before[0] - need
        self._follow()
        for tags, run in ((self.full_tags, lease.full), (self.local_tags, lease.local)):
            old = sum(name == row.name for name, _ in tags.values())
            for position in range(run.start + old, run.end):
                assert int(run.ids[position]) not in tags
                tags[int(run.ids[position])] = (row.name, position)
        row.launched = length
        return True

    def _follow(self) -> None:
        for source, target, _ in self.manager.drain_moves():
            assert target not in self.full_tags
            self.full_tags[target] = self.full_tags.pop(source)

    def _slide(self, row: Row) -> None:
        self.manager.slide(row.lease, row.launched)
        start = row.lease.local.start
        for page in [page for page, (name, n) in self.local_tags.items() if name == row.name and n < start]:
            del self.local_tags[page]

    def _slide_all(self, rows: list[Row]) -> None:
        at = np.array([(row.lease.row, row.launched) for row in rows], np.intp).reshape(-1, 2)
        self.manager.slide_all(at[:, 0], at[:, 1])
        starts = {row.name: row.lease.local.start for row in rows}
        for page in [page for page, (name, n) in self.local_tags.items() if n < starts.get(name, 0)]:
            del self.local_tags[page]

    def _held(self, kind: str) -> dict[int, tuple[int, int]]:
        runs: list[tuple[int, PageRun]] = [(row.name, getattr(row.lease, kind)) for row in self.rows]
        return {page: (name, run.start + i) for name, run in runs for i, page in enumerate(run.held.tolist())}

    def _everything(self) -> tuple[Any, ...]:
        """Return all state that a refused `grow` must not change."""
        pool = self.manager.pool
        runs = [run for row in self.rows for run in (row.lease.full, row.lease.local)]
        leases = [(run.start, run.end, run.held.tobytes()) for run in runs]
        moves = [*self.manager.moves, *pool.moves]
        owners = pool.full_owners.tobytes(), pool.local_owners.tobytes()
        return pool.free_slots, pool.holes, pool.num_full, pool.num_local, moves, leases, owners


def _lengths(lease: Lease) -> tuple[int, ...]:
    """Return all of a lease but the ids of its pages."""
    return lease.covered, lease.next_slide, lease.unpublished, lease.full.end, lease.local.start, lease.local.end


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(k, "sliding") for k in LAYOUTS]
    + [(k, chunks) for chunks in ("chunked", "looking back") for k in LAYOUTS if k != "full only"],
)
def test_leases_hold_exactly_the_window_under_any_calls(kind: str, shapes: str) -> None:
    """Full pages from 0, local pages of exactly the window, ids that follow compaction; growth is all or nothing."""
    machine = type("Machine", (LeaseMachine,), {"layers": LAYOUTS[kind], "shapes": SHAPES[shapes]})
    run_state_machine_as_test(machine, settings=share(8))


@given(
    prompts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=6),
    ahead=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    published=st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(settings(), max_examples=share(4).max_examples)
def test_rows_that_share_pages_slide_together_as_one_by_one(
    prompts: list[tuple[int, int]], ahead: list[int], published: list[bool]
) -> None:
    """Pages of one cached text that several rows slide past in a step are freed once per row."""
    text = np.arange(64, dtype=np.int32) % 7
    manager = CacheManager(make_layout(4, Reach(12), num_full=1, num_local=2), 400, WIDTH, 8)
    first = manager.open_at(manager.match("", text, 63), length=64)
    assert first is not None
    assert manager.grow(first, 64)
    manager.slide(first, 64)
    manager.publish(first, text, 64)
    manager.close(first, text)
    rows: list[tuple[Lease, int]] = []
    for (shared, own), more, publish in zip(prompts, ahead, published, strict=False):
        tokens = np.concatenate([text[:shared], np.full(own, 9 + len(rows), np.int32)])
        lease = manager.open_at(manager.match("", tokens, len(tokens) - 1), length=len(tokens))
        assert lease is not None
        assert manager.grow(lease, len(tokens) + more)
        if publish:
            manager.publish(lease, tokens, len(tokens))
        rows.append((lease, len(tokens) + more))
    other, twins = deepcopy((manager, rows))
    manager.slide_all(np.array([lease.row for lease, _ in rows]), np.array([launched for _, launched in rows]))
    for lease, launched in twins:
        other.slide(lease, launched)
    for one in (manager, other):
        one.check(rows if one is manager else twins)
    assert [_lengths(lease) for lease, _ in rows] == [_lengths(lease) for lease, _ in twins]
    np.testing.assert_array_equal(manager.pool.local_owners, other.pool.local_owners)
    assert manager.available_slots == other.available_slots


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 1), (1, 3), (4, 4), (4, 12), (16, 32)])
def test_a_row_at_a_chunk_boundary_holds_no_local_page(page_size: int, chunk: int) -> None:
    """Local pages are [⌊launched / C⌋ · C / p, ⌈launched / p⌉), whatever the sizes of the steps before."""
    for stride in (1, page_size, page_size + 1, chunk, 2 * chunk + 1):
        manager = CacheManager(
            make_layout(page_size, Reach(chunk, chunked=True), num_full=1, num_local=2), 200, WIDTH, 1
        )
        lease = manager.open()
        for launched in range(stride, 5 * chunk + 1, stride):
            assert manager.grow(lease, launched)
            manager.slide(lease, launched)
            pages = range(launched // chunk * chunk // page_size, -(-launched // page_size))
            assert (lease.local.start, lease.local.end) == (pages.start, pages.stop)
            assert len(pages) > 0 or launched % chunk == 0
            manager.check([(lease, launched)])


@pytest.mark.parametrize(("page_size", "chunk"), [(16, 8), (4, 6), (64, 8192 + 32)])
def test_a_page_size_that_does_not_divide_the_chunk_is_refused(page_size: int, chunk: int) -> None:
    """A page with tokens of two chunks could not be freed with the first chunk."""
    with pytest.raises(UnsupportedModel, match=f"block_size = {page_size} must divide .* chunk of {chunk}"):
        make_layout(page_size, Reach(chunk, chunked=True), num_full=1, num_local=3)
