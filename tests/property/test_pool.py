"""Laws of PagePool under random sequences of calls (jswa/cache/pool.py)."""

import random

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jswa.cache.pool import MAX_HOLES, PagePool
from tests.support.builders import share

PAGES_PER_SLAB = [1, 3, 6, 10, 20]


class PoolMachine(RuleBasedStateMachine):
    """Records for itself which full pages are held, with a name for the contents of each, and which local pages."""

    m: int  # pages per slab, set by a subclass

    @initialize(slabs=st.integers(1, 20))
    def start(self, slabs: int) -> None:
        self.pool = PagePool(1 + slabs, self.m)
        self.full: dict[int, int] = {}
        self.local: set[int] = set()
        self.names = 0

    @rule(data=st.data())
    def alloc_full(self, data: st.DataObject) -> None:
        """Allocate up to three slabs' worth of pages at once, as a prefill chunk does."""
        self._take_full(data.draw(st.integers(0, min(3 * self.m, self.pool.free_slots))))

    @precondition(lambda self: self.pool.free_slots)
    @rule()
    def alloc_full_page(self) -> None:
        """Allocate one page, as a decode row does at a page boundary."""
        self._take_full(1)

    @rule()
    def fill(self) -> None:
        """Allocate until no slab is free, so that the next local page needs compaction."""
        self._take_full(self.pool.free_slots)

    @rule(data=st.data())
    def alloc_local(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(4, self.pool.free_slots // self.m)))
        before = len(self.pool.moves)
        slabs = self.pool.alloc_local(count).tolist()
        assert len(self.pool.moves) - before <= count * (self.m - 1)
        self._take_local(slabs)

    @precondition(lambda self: self.pool.free_slots >= self.m)
    @rule()
    def alloc_local_page(self) -> None:
        """Check the law of compaction: moving at most m - 1 pages frees a slab."""
        before = len(self.pool.moves)
        slabs = self.pool.alloc_local(1).tolist()
        assert len(self.pool.moves) - before <= self.m - 1
        self._take_local(slabs)

    @precondition(lambda self: self.full)
    @rule(data=st.data())
    def free_full(self, data: st.DataObject) -> None:
        self.drain_moves()
        pages = data.draw(st.lists(st.sampled_from(sorted(self.full)), unique=True))
        self._give_full(pages)

    @precondition(lambda self: self.full)
    @rule(offset=st.integers(0, 19))
    def free_all_but_one_offset(self, offset: int) -> None:
        """Make the worst case for holes: one page stays in every slab."""
        self.drain_moves()
        self._give_full([page for page in self.full if page % self.m != offset % self.m])

    @precondition(lambda self: self.local)
    @rule(data=st.data())
    def free_local(self, data: st.DataObject) -> None:
        slabs = data.draw(st.lists(st.sampled_from(sorted(self.local)), unique=True))
        self.pool.free_local(np.array(slabs, np.int32))
        self.local -= set(slabs)

    @rule()
    def settle(self) -> None:
        """Check that few holes are left, and that every slab that was emptied cost at most m - 1 moves."""
        before, free = len(self.pool.moves), self.pool.free_slots
        self.pool.compact()
        assert self.pool.free_slots == free
        assert len(self.pool.moves) - before <= len(self.full)
        assert self.pool.holes <= MAX_HOLES * self.pool.total_slots or self.pool.holes < self.m

    @rule()
    def drain_moves(self) -> None:
        """Apply the moves to the recorded ids; a second drain must be empty."""
        self._follow(self.full, self.pool.drain_moves())
        assert self.pool.drain_moves() == []

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        full = dict(self.full)
        self._follow(full, self.pool.moves)
        assert sorted(full) == np.flatnonzero(self.pool.full_owners).tolist()
        assert len(full) == self.pool.num_full
        assert len(self.local) == self.pool.num_local
        assert not {page // self.m for page in full} & (self.local | {0})

    def _take_full(self, count: int) -> None:
        self.drain_moves()
        pages = self.pool.alloc_full(count).tolist()
        assert len(set(pages)) == count
        assert not set(pages) & set(self.full)
        assert not {page // self.m for page in pages} & (self.local | {0})
        assert self.pool.moves == []
        self.full.update((page, self.names + i) for i, page in enumerate(pages))
        self.names += count

    def _take_local(self, slabs: list[int]) -> None:
        assert not set(slabs) & (self.local | {0})
        self.local.update(slabs)

    def _give_full(self, pages: list[int]) -> None:
        self.pool.free_full(np.array(pages, np.int32))
        for page in pages:
            del self.full[page]

    def _follow(self, full: dict[int, int], moves: list[tuple[int, int]]) -> None:
        """Rename pages by the moves; each must go from a held page into a hole of another slab in use."""
        for source, target in moves:
            assert target not in full
            assert target // self.m != source // self.m
            assert any(page in full for page in range(target // self.m * self.m, (target // self.m + 1) * self.m))
            full[target] = full.pop(source)


@pytest.mark.parametrize("m", PAGES_PER_SLAB)
def test_pool_keeps_its_laws_under_any_calls(m: int) -> None:
    """Conservation, compaction and bounded holes, for pages allocated and freed in any order."""
    run_state_machine_as_test(type(f"PoolMachine{m}", (PoolMachine,), {"m": m}), settings=share(8))


@pytest.mark.parametrize("m", PAGES_PER_SLAB)
def test_holes_stay_below_two_percent_of_a_busy_pool(m: int) -> None:
    """Rows grow by a page or a chunk, slide and finish: holes are at most 2 % after compaction, and no page leaks."""
    churn = Churn(m, seed=m)
    for step in range(300):
        churn.step()
        if step % 100 == 0:
            churn.pool.check()
    assert churn.fullest > 0.95
    assert churn.worst_before > 2 * MAX_HOLES or m == 1, "too few holes appeared to test anything"
    assert churn.worst_after <= max(MAX_HOLES, (m - 1) / churn.pool.total_slots)
    churn.finish_all()
    churn.pool.check()
    assert churn.pool.free_slots == churn.pool.total_slots
    assert churn.pool.holes == 0


class Churn:
    """Hundreds of rows in a nearly full pool of 2,000 slabs."""

    def __init__(self, m: int, seed: int) -> None:
        self.pool = PagePool(2_001, m)
        self.random = random.Random(seed)
        self.rows: dict[int, tuple[list[int], list[int]]] = {}
        self.owner: dict[int, list[int]] = {}  # full page -> the list of full pages of its row
        self.steps = 0
        self.worst_before = self.worst_after = self.fullest = 0.0

    def step(self) -> None:
        self.steps += 1
        if self.random.random() < 0.5:
            self.rows[self.steps] = ([], [])
            self._grow(self.steps, self.random.randint(1, 4 * self.pool.pages_per_slab), local=3)
        for name in self.random.sample(list(self.rows), len(self.rows) // 4):
            self._grow(name, self.random.randint(1, 1 + self.pool.pages_per_slab // 2), local=1)
        if self.pool.free_slots < 0.01 * self.pool.total_slots:
            for name in self.random.sample(list(self.rows), len(self.rows) // 2):
                self._finish(name)
        self._settle()

    def finish_all(self) -> None:
        for name in list(self.rows):
            self._finish(name)

    def _grow(self, name: int, count: int, *, local: int) -> None:
        full, window = self.rows[name]
        if count + local * self.pool.pages_per_slab > self.pool.free_slots:
            return
        window.extend(self.pool.alloc_local(local).tolist())
        self._follow()
        pages = self.pool.alloc_full(count).tolist()
        full.extend(pages)
        self.owner.update((page, full) for page in pages)
        if len(window) > 3:
            self.pool.free_local(np.array(window[:-3], np.int32))
            del window[:-3]

    def _finish(self, name: int) -> None:
        full, window = self.rows.pop(name)
        self.pool.free_full(np.array(full, np.int32))
        self.pool.free_local(np.array(window, np.int32))
        for page in full:
            del self.owner[page]

    def _settle(self) -> None:
        total = self.pool.total_slots
        self.fullest = max(self.fullest, 1 - self.pool.free_slots / total)
        self.worst_before = max(self.worst_before, self.pool.holes / total)
        self.pool.compact()
        self._follow()
        self.worst_after = max(self.worst_after, self.pool.holes / total)

    def _follow(self) -> None:
        for source, target in self.pool.drain_moves():
            full = self.owner.pop(source)
            full[full.index(source)] = target
            self.owner[target] = full
