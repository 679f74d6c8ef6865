"""Gives pages to sequences and takes them back: the one place where leases and the pool change together.

Local pages slide in one place (`slide`), by one frontier on *launched* tokens (steps handed to the device, never
planned ones): whole pages older than max(0, launched - (W - 1)) leave the lease, and with chunked layers all pages of
earlier chunks.

A page that leaves a lease may be handed out at once although the step that last used it may still run: the next step
consumes the arrays which that step produces, so the order is a data dependence and needs no guard. A row that ended at
step k still writes one position at k + 1: into its own tail page, past every position that anyone reads, and before
the first step of the page's next owner.
"""

from collections.abc import Iterable

import numpy as np

from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER, Lease
from jswa.cache.pool import PagePool


class CacheManager:
    """Owns the pool and all leases. `width` is the width of a page table, in pages."""

    def __init__(self, layout: KVLayout, num_blocks: int, width: int) -> None:
        self.layout = layout
        self.pool = PagePool(num_blocks, layout.pages_per_block)
        self.moves: list[tuple[int, int]] = []
        self._width = width
        self._leases: set[Lease] = set()

    def open(self) -> Lease:
        """A lease without pages. The caller must `close` it."""
        lease = Lease(self._width, slides_at=self._slides_at(0))
        self._leases.add(lease)
        return lease

    def grow(self, lease: Lease, length: int) -> bool:
        """Hold pages for every position below `length`; False, and no change, where the pool has too few."""
        layout = self.layout
        pages = -(-length // layout.page_size)
        more_full = max(0, pages - lease.full.end) if layout.full else 0
        more_local = max(0, pages - lease.local.end) if layout.local else 0
        if more_full + more_local * layout.pages_per_block > self.pool.free_slots:
            return False
        if more_local:
            # Local first: compaction may need holes that full pages would fill.
            lease.local.extend(self.pool.alloc_local(more_local))
            self._follow_moves()
        if more_full:
            lease.full.extend(self.pool.alloc_full(more_full))
        lease.covered = pages * layout.page_size
        return True

    def slide(self, lease: Lease, launched: int) -> None:
        """Let go of local pages that no later query of the row can see, once `launched` tokens are on their way."""
        if self.layout.reach is None:
            return
        frontier = self.layout.reach.first_visible(launched) // self.layout.page_size
        local = lease.local
        if frontier > local.start:
            self.pool.free_local(local.ids[local.start : frontier])
            local.start = frontier
            lease.slides_at = self._slides_at(frontier)

    def close(self, lease: Lease) -> None:
        """Give every page of the lease back."""
        self.pool.free_full(lease.full.held)
        self.pool.free_local(lease.local.held)
        self._leases.remove(lease)

    def held_slots(self, lease: Lease) -> int:
        """Arena slots of everything the lease holds."""
        return len(lease.full.held) + self.layout.pages_per_block * len(lease.local.held)

    def settle(self) -> None:
        """Bound the pool's holes; called once per plan."""
        self.pool.settle()
        self._follow_moves()

    def drain_moves(self) -> list[tuple[int, int]]:
        """Full-page moves (source, destination) for the device to carry out, in order, before the next step."""
        moves, self.moves = self.moves, []
        return moves

    def check(self, launched: Iterable[tuple[Lease, int]]) -> None:
        """Assert the laws of pool and leases, given each open lease and its launched length."""
        self.pool.check()
        layout, seen = self.layout, dict(launched)
        assert set(seen) == self._leases, "leases are open that no sequence holds, or the reverse"
        full = [lease.full.held for lease in seen]
        local = [lease.local.held for lease in seen]
        for ids, held in ((full, self.pool.num_full), (local, self.pool.num_local)):
            flat = np.concatenate(ids) if ids else np.zeros(0, np.int32)
            assert len(flat) == len(np.unique(flat)) == held, "a page has two owners or none"
        for lease, length in seen.items():
            pages = -(-length // layout.page_size)
            assert lease.covered == pages * layout.page_size, "pages end before or after the launched length"
            assert lease.full.end == (pages if layout.full else 0), "full pages differ from the launched length"
            if layout.reach is not None:
                first = layout.reach.first_visible(length) // layout.page_size
                assert (lease.local.start, lease.local.end) == (first, pages), "local pages are not exactly the window"
                assert lease.slides_at > length, "a page has left the window and is still held"
                assert len(lease.local.held) <= layout.window_pages(length) + 1

    def _slides_at(self, local_start: int) -> int:
        """Launched length at which page `local_start` has left every later query's window."""
        if self.layout.reach is None:
            return NEVER
        return self.layout.reach.leaves_at((local_start + 1) * self.layout.page_size - 1)

    def _follow_moves(self) -> None:
        """Rewrite the ids of pages that compaction moved. Rare, so it may look at every lease."""
        moves = self.pool.drain_moves()
        if not moves:
            return
        renamed = np.arange(self.pool.num_blocks * self.pool.pages_per_block, dtype=np.int32)
        came_from: dict[int, int] = {}
        for source, target in moves:
            origin = came_from.pop(source, source)
            came_from[target] = origin
            renamed[origin] = target
        for lease in self._leases:
            lease.full.held[:] = renamed[lease.full.held]
        self.moves.extend(moves)
