"""Local pages that leave a row's window.

One frontier on *launched* tokens (of steps handed to the device, never of planned steps): whole pages older than what
the next query sees leave the window (`Reach`). Pages of a prompt wait (`Lease.slid`) until their tokens have come back
and the cache has published them; if memory is short, they are freed first.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import Lease, LeaseTable, owners_without
from jswa.cache.pool import PagePool
from jswa.cache.prefix.retention import Retention


class Windows:
    """Owns the list of leases with pages that wait to be published. `slid_pages` counts pages that left a window."""

    def __init__(self, table: LeaseTable, pool: PagePool, retention: Retention) -> None:
        self.slid_pages = 0
        self.waiting: dict[Lease, None] = {}  # serves as an ordered set
        self._page = table.layout.page_size
        self._reach = table.layout.reach
        self._table = table
        self._pool = pool
        self._retention = retention

    def follow(self, lease: Lease) -> None:
        """Note when a lease, which has been opened, slides first."""
        if self._reach is not None:
            end = (self._table.first_local.item(lease.row) + 1) * self._page
            self._table.next_slide[lease.row] = self._reach.hidden_from(end - 1)

    def slide_all(self, rows: Int[np.ndarray, " n"], launched: Int[np.ndarray, " n"]) -> None:
        """Free local pages that no later query of these rows can see, once so many tokens are on the device."""
        if self._reach is None:
            return
        table = self._table
        # It is negative for a query that sees everything: no page is below that.
        frontier = self._reach.oldest(launched) // self._page
        moved = frontier > table.first_local[rows]
        rows, frontier = rows[moved], frontier[moved]
        self.slid_pages += int((frontier - table.first_local[rows]).sum())
        table.first_local[rows], table.next_slide[rows] = frontier, self._leaves_at(frontier)
        publishing = [(lease := table.owners[row]) is not None and bool(lease.window_ends) for row in rows.tolist()]
        if any(publishing):
            self.waiting |= {lease: None for row in rows[publishing].tolist() if (lease := table.owners[row])}
            rows, frontier = rows[np.invert(publishing)], frontier[np.invert(publishing)]
        if not len(rows):
            return
        first = table.unpublished[rows]
        ids = table.local_pages(rows, first, frontier - first)
        table.unpublished[rows] = frontier
        # Rows that share pages of the cache may slide past them in one step: those pages are freed once per row.
        several = self._pool.local_owners[ids] - self._pool.local_cached[ids] > 1
        if np.count_nonzero(several):
            for i in several.nonzero()[0].tolist():
                self.free(ids[i : i + 1])
            ids = ids[~several]
        self.free(ids)

    def free_slid(self, lease: Lease, upto: int) -> None:
        """Free the pages below `upto` that have left the window."""
        table, row = self._table, lease.row
        if upto > (first := lease.unpublished):
            self.free(table.local[row, first:upto])
            table.unpublished[row] = upto
        if self.waiting and max(first, upto) >= table.first_local[row]:
            self.waiting.pop(lease, None)

    def free(self, ids: Int[np.ndarray, " n"]) -> None:
        """Remove an owner of local pages."""
        self._pool.free_local(ids)
        self._retention.unpin(ids)

    def free_waiting(self, *, needed: bool) -> None:
        """Free pages that wait to be published; with `needed` also those of windows that the cache is to keep."""
        for lease in list(self.waiting):
            first = int(self._table.first_local[lease.row])
            if not needed and self._reach is not None:
                first = min(first, self._reach.first_visible(lease.window_ends[0]) // self._page)
            self.free_slid(lease, first)

    def available_slots(self) -> int:
        """Return the slots that are free, or can be freed without preempting a row."""
        slots = self._pool.free_slots + self._pool.evictable_slots
        return slots + self._pool.pages_per_slab * self.idle_pages() if self.waiting else slots

    def make_room(self, slots: int) -> bool:
        """Free pages that wait, and evict, until `slots` slots are free; False, and no change, if that is impossible.

        What is cheapest goes first.
        """
        pool = self._pool
        if slots <= pool.free_slots:
            return True
        if slots > self.available_slots():
            return False
        for needed in (False, True):
            self.free_waiting(needed=needed)
            self._retention.make_room(min(slots, pool.free_slots + pool.evictable_slots))
            if slots <= pool.free_slots:
                break
        return True

    def idle_pages(self, closed: Collection[Lease] = ()) -> int:
        """Count the local pages that wait to be published and that no other row holds, if leases were closed."""
        if not self.waiting:
            return 0
        idle, owners = 0, owners_without(self._pool, "local", closed)
        for lease in self.waiting.keys() - closed if closed else self.waiting:
            slid = lease.slid
            idle += int(np.count_nonzero(owners[slid] - self._pool.local_cached[slid] == 1))
        return idle

    def _leaves_at(self, page: Any) -> Any:
        """Return the launched length at which a page, or each of an array, is outside of every later query's window."""
        assert self._reach is not None
        return self._reach.hidden_from((page + 1) * self._page - 1)
