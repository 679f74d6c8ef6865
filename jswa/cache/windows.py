"""Local pages that leave a row's window.

One frontier on *launched* tokens (of steps handed to the device, never of planned steps): whole pages older than
max(0, launched - (W - 1)) leave the window, and with chunked layers all pages of earlier chunks. Pages of a prompt wait
(`Lease.unpublished_from`) until their tokens have come back and the cache has published them; if memory is short, they
are freed first.
"""

from collections.abc import Collection, Iterable

import numpy as np
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER, Lease, owners_without
from jswa.cache.pool import PagePool
from jswa.cache.prefix.retention import Retention


class Windows:
    """Owns the list of leases with pages that wait to be published. `slid_pages` counts pages that left a window."""

    def __init__(self, layout: KVLayout, pool: PagePool, retention: Retention) -> None:
        self.slid_pages = 0
        self.waiting: dict[Lease, None] = {}  # serves as an ordered set
        self._page = layout.page_size
        self._reach = layout.reach
        self._pool = pool
        self._retention = retention

    def slide(self, lease: Lease, launched: int) -> None:
        """Free local pages that no later query of the row can see, once `launched` tokens are on the device."""
        if self._advance(lease, launched) and not lease.window_ends:
            self.free_slid(lease, lease.local.start)

    def slide_all(self, rows: Iterable[tuple[Lease, int]]) -> None:
        """Do what `slide` does for each lease and its launched length, and free the pages of all at once."""
        parts = []
        for lease, launched in rows:
            if self._advance(lease, launched) and not lease.window_ends:
                parts.append(lease.slid)
                lease.unpublished_from = lease.local.start
                if self.waiting:
                    self.waiting.pop(lease, None)
        if not parts:
            return
        ids = np.concatenate(parts)
        # Rows that share pages of the cache may slide past them in one step: those pages are freed once per row.
        several = self._pool.local_owners[ids] - self._pool.local_cached[ids] > 1
        if several.any():
            for i in several.nonzero()[0].tolist():
                self.free(ids[i : i + 1])
            ids = ids[~several]
        self.free(ids)

    def free_slid(self, lease: Lease, upto: int) -> None:
        """Free the pages below `upto` that have left the window."""
        if upto > lease.unpublished_from:
            self.free(lease.local.ids[lease.unpublished_from : upto])
            lease.unpublished_from = upto
        if self.waiting and lease.unpublished_from >= lease.local.start:
            self.waiting.pop(lease, None)

    def free(self, ids: Int[np.ndarray, " n"]) -> None:
        """Remove an owner of local pages."""
        self._pool.free_local(ids)
        self._retention.unpin(ids)

    def free_waiting(self, *, needed: bool) -> None:
        """Free pages that wait to be published; with `needed` also those of windows that the cache is to keep."""
        for lease in list(self.waiting):
            first = lease.local.start
            if not needed and self._reach is not None:
                first = min(first, self._reach.first_visible(lease.window_ends[0]) // self._page)
            self.free_slid(lease, first)

    def idle_pages(self, closed: Collection[Lease] = ()) -> int:
        """Count the local pages that wait to be published and that no other row holds, if leases were closed."""
        if not self.waiting:
            return 0
        idle, owners = 0, owners_without(self._pool, "local", closed)
        for lease in self.waiting.keys() - closed if closed else self.waiting:
            slid = lease.slid
            idle += int(np.count_nonzero(owners[slid] - self._pool.local_cached[slid] == 1))
        return idle

    def next_slide(self, local_start: int) -> int:
        """Return the launched length at which page `local_start` is outside of every later query's window."""
        return NEVER if self._reach is None else self._reach.hidden_from((local_start + 1) * self._page - 1)

    def _advance(self, lease: Lease, launched: int) -> bool:
        """Move the start of a lease's window; return whether pages have left it."""
        if self._reach is None:
            return False
        frontier = self._reach.first_visible(launched) // self._page
        if frontier <= lease.local.start:
            return False
        self.slid_pages += frontier - lease.local.start
        lease.local.start = frontier
        lease.next_slide = self.next_slide(frontier)
        if lease.window_ends:
            self.waiting[lease] = None
        return True
