"""The pages that one sequence holds. Page ids and the lengths that every step reads are in arrays by row.

page      0           exact_from      unpublished         first_local        covered
full      [ every page from 0, at first those of the prefix cache ………… full.end )
local                                 [ slid …………………… )[ the window ……………… local.end )
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from jaxtyping import Int

from jswa.cache.capacity import ResidentSlots
from jswa.cache.layout import KVLayout
from jswa.cache.pool import PagePool
from jswa.cache.prefix.edges import Cursor

NEVER = 2**62
_NO_ENTRIES = np.zeros((0, 3), np.int32)
_resident_slots = lru_cache(8)(ResidentSlots)  # one table per text that is published, and one of all rows


class LeaseTable:
    """Leases as arrays by row. Only the cache manager changes them. The entries of a row without a lease are 0.

    Attributes:
        full, local: page ids by row and page position; entries where the lease has no page are stale.
        owners: the lease of each row, or None.
        free: rows without a lease.
        covered: the lease has pages for every position below this one.
        new_full, new_local: places (row · width + page position) of page ids that the device does not have.
        next_slide: launched length at which the next local page leaves the window; NEVER without a lease.
        shared: full pages at the start that come from the prefix cache.
        first_local: page position of the first local page in the window.
        resident_slots: gives the slots that rows hold between two steps.
        unpublished: local pages in [unpublished, first_local) have left the window and wait to be published. The
            manager takes them back when memory is short.
    """

    def __init__(self, layout: KVLayout, rows: int, width: int) -> None:
        self.layout = layout
        self.resident_slots = _resident_slots(layout)
        self.full, self.local = np.zeros((2, rows, width), np.int32)
        self.new_full: list[int] = []
        self.new_local: list[int] = []
        self.owners: list[Lease | None] = [None] * rows
        self.free = list(range(rows - 1, -1, -1))
        self.covered, self.shared, self.first_local, self.unpublished = np.zeros((4, rows), np.int64)
        self.next_slide = np.full(rows, NEVER)

    def reset(self, row: int) -> None:
        """Clear the entries of a row, whose lease is closed."""
        self.owners[row] = None
        self.free.append(row)
        self.covered[row] = self.shared[row] = self.first_local[row] = self.unpublished[row] = 0
        self.next_slide[row] = NEVER
        if self.new_full or self.new_local:
            self._drop_new({row})

    def held_slots(self) -> Int[np.ndarray, " rows"]:
        """Return the slots of the pages that the lease of each row needs."""
        layout, pages = self.layout, self.covered // self.layout.page_size
        if layout.local is None:
            return np.maximum(pages, self.shared)
        slots: Int[np.ndarray, " rows"] = layout.pages_per_slab * (pages - self.first_local)
        return slots if layout.full is None else slots + np.maximum(pages, self.shared)

    def full_pages(self) -> Int[np.ndarray, " rows"]:
        """Return how many full pages the lease of each row has."""
        pages = self.covered // self.layout.page_size
        return np.maximum(pages, self.shared) if self.layout.full is not None else np.zeros_like(pages)

    def rename(self, renamed: Int[np.ndarray, " pages"]) -> None:
        """Follow full pages that the pool has moved, given the new id of each."""
        counts = self.full_pages()
        rows = counts.nonzero()[0]
        places = _spans(rows, np.zeros_like(rows), counts[rows]) if len(rows) else (rows, rows)
        self.full[places] = renamed[self.full[places]]

    def take_new(
        self, but: Collection[int] = (), only: Collection[int] | None = None
    ) -> tuple[Int[np.ndarray, "F 3"], Int[np.ndarray, "L 3"]]:
        """Return the entries of full and of local pages that the device does not have; it has them from now on.

        An entry is of a page table: row, page position, page id.

        Args:
            but: rows whose whole page tables are sent.
            only: rows whose entries are wanted; those of others are left for later. None: all.
        """
        if but:
            self._drop_new(but)
        full, local = self.new_full, self.new_local
        if not full and not local:
            return _NO_ENTRIES, _NO_ENTRIES
        self.new_full, self.new_local = [], []
        if only is not None:
            width = self.full.shape[1]
            self.new_full = [place for place in full if place // width not in only]
            self.new_local = [place for place in local if place // width not in only]
            full = [place for place in full if place // width in only]
            local = [place for place in local if place // width in only]
        entries = _entries(self.full, full)
        if full != local:
            return entries, _entries(self.local, local)
        same = entries.copy()
        same[:, 2] = self.local.take(full)
        return entries, same

    def _drop_new(self, rows: Collection[int]) -> None:
        width = self.full.shape[1]
        self.new_full = [place for place in self.new_full if place // width not in rows]
        self.new_local = [place for place in self.new_local if place // width not in rows]

    def local_pages(
        self, rows: Int[np.ndarray, " n"], first: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]
    ) -> Int[np.ndarray, " pages"]:
        """Return the ids of so many local pages of each row, from page position `first` on."""
        ids: Int[np.ndarray, " pages"] = self.local[_spans(rows, first, counts)]
        return ids


def _entries(table: Int[np.ndarray, "rows width"], places: list[int]) -> Int[np.ndarray, "n 3"]:
    """Return row, page position and page id of each place."""
    if not places:
        return _NO_ENTRIES
    at, entries = np.array(places), np.empty((len(places), 3), np.int32)
    entries[:, 0], entries[:, 1] = np.divmod(at, table.shape[1])
    entries[:, 2] = table.take(at)
    return entries


def _spans(
    rows: Int[np.ndarray, " n"], first: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Return each row once for each of `counts` positions from `first` on, and these positions."""
    if np.count_nonzero(counts == 1) == len(rows):
        return rows, first
    ends = counts.cumsum()
    return rows.repeat(counts), np.arange(ends[-1]) + (first + counts - ends).repeat(counts)


@dataclass(eq=False, slots=True)
class PageRun:
    """Pages of one kind of a lease: those at page positions [start, end). Entries of `ids` outside are stale."""

    ids: Int[np.ndarray, " width"]
    start: int
    end: int

    @property
    def held(self) -> Int[np.ndarray, " n"]:
        """Ids of the pages held, in order of position."""
        return self.ids[self.start : self.end]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lease:
    """Pages of one sequence. Only the cache manager changes it.

    Attributes:
        table, row: where its pages and lengths are.
        full_write_from: first position whose full KV the row writes. The KV of earlier positions is shared with the
            prefix cache.
        local_visible_from: first position whose local KV the row may read.
        exact_from: first position whose local KV equals that of a cold run. Earlier local pages are never shared.
        salt: key of the request's tree (`root_key`); prefixes are shared within one tree only.
        cursor: how far the row's text is in the prefix tree.
        window_ends: ascending positions whose windows the cache keeps once the row has published them. The last one is
            the end of the tokens that were known when the row started; an empty list means that it has been reached.
        branch_at: the window end at which the row's text diverges from cached text; 0 if it does not.
    """

    table: LeaseTable
    row: int
    full_write_from: int = 0
    local_visible_from: int = 0
    exact_from: int = 0
    salt: str = ""
    cursor: Cursor = field(default_factory=Cursor)
    window_ends: list[int] = field(default_factory=list)
    branch_at: int = 0

    @property
    def covered(self) -> int:
        """The lease has pages for every position below this one."""
        return int(self.table.covered[self.row])

    @property
    def next_slide(self) -> int:
        """Launched length at which the next local page leaves the window; NEVER if none does."""
        return int(self.table.next_slide[self.row])

    @next_slide.setter
    def next_slide(self, launched: int) -> None:
        self.table.next_slide[self.row] = launched

    @property
    def full(self) -> PageRun:
        """Its full pages as they are now."""
        layout, table, row = self.table.layout, self.table, self.row
        pages = max(int(table.covered[row]) // layout.page_size, int(table.shared[row])) if layout.full else 0
        return PageRun(table.full[row], 0, pages)

    @property
    def local(self) -> PageRun:
        """Its local pages as they are now, those in the window."""
        layout, table, row = self.table.layout, self.table, self.row
        pages = int(table.covered[row]) // layout.page_size if layout.local else 0
        return PageRun(table.local[row], int(table.first_local[row]), pages)

    @property
    def held_slots(self) -> int:
        """Slots of the pages that it needs."""
        layout, table, row = self.table.layout, self.table, self.row
        pages = table.covered.item(row) // layout.page_size
        slots = max(pages, table.shared.item(row)) if layout.full else 0
        return slots + layout.pages_per_slab * (pages - table.first_local.item(row)) if layout.local else slots

    @property
    def unpublished(self) -> int:
        """Page position of the first local page that it owns: in the window, or waiting to be published."""
        return int(self.table.unpublished[self.row])

    @property
    def slid(self) -> Int[np.ndarray, " n"]:
        """Ids of the local pages that have left the window and wait to be published."""
        return self.table.local[self.row, self.unpublished : int(self.table.first_local[self.row])]


def held(lease: Lease, kind: str) -> Int[np.ndarray, " n"]:
    """Return the pages of a kind that a lease owns, with local ones that wait to be published."""
    run: PageRun = getattr(lease, kind)
    return run.ids[lease.unpublished : run.end] if kind == "local" else run.held


def owners_without(pool: PagePool, kind: str, closed: Collection[Lease]) -> Int[np.ndarray, " pages"]:
    """Return the owners of each page of a kind, if leases were closed."""
    owners: Int[np.ndarray, " pages"] = getattr(pool, f"{kind}_owners")
    if closed:
        owners = owners.copy()
        for lease in closed:
            owners[held(lease, kind)] -= 1
    return owners
