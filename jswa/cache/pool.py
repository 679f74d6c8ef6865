"""Which slabs and pages of the arena are free, and how many owners the others have. It holds ids, no memory.

A slab is free, or one local page, or m full pages of which some may be free. Free full pages inside partly used
slabs are *holes*. A slot is 1/m of a slab: free_slots = m · free slabs + holes.

Owners are leases and the prefix cache: `alloc_*` gives a page its first owner, `retain_*` adds one, `free_*` removes
one and frees the page with the last. The cache marks its pages (`cache_*`, `uncache_*`); a page that only the cache
owns is *evictable*.

Laws (`check`):
* conservation: free slots + m · local pages + full pages = slots of all slabs but slab 0;
* evictable pages are those of the cache with one owner;
* compaction: free_slots ≥ m ⇒ at most m - 1 page moves free one slab;
* after `compact`, holes ≤ 2 % of all slots (or fewer than m, too few to free a slab).

Moves are recorded in `moves` and must be carried out on the device, in order, before anything is written to the
new ids; the caller rewrites the ids it holds (`drain_moves`).
"""

from collections import Counter

import numpy as np
from jaxtyping import Int

from jswa.errors import EngineError

MAX_HOLES = 0.02
_ONE = np.int32(1).tobytes()  # comparing bytes costs half of what comparing a few numbers does


def _index(ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return ids as numpy indexes with them: a few int32 ids would be converted anew, slowly, by every access."""
    return ids.astype(np.intp, copy=False)


class PagePool:
    """Free lists of one arena of `num_slabs` slabs with `pages_per_slab` (m) full pages each.

    Read-only for others, by page id: `full_owners`, `local_owners` (number of owners), `full_cached` and `local_cached`
    (whether the prefix cache is an owner). `allocated` counts the slots that were ever allocated. `reserved` counts the
    slots that the cache manager, which sets it, will allocate soon: they are not free for others.
    """

    def __init__(self, num_slabs: int, pages_per_slab: int) -> None:
        self.num_slabs = num_slabs
        self.pages_per_slab = pages_per_slab
        self.holes = 0
        self.num_local = 0
        self.num_full = 0
        self.allocated = 0
        self.reserved = 0
        self.moves: list[tuple[int, int]] = []
        self.evictable_full = 0
        self.evictable_local = 0
        self.full_owners = np.zeros(num_slabs * pages_per_slab, np.int32)
        self.local_owners = np.zeros(num_slabs, np.int32)
        self.full_cached = np.zeros(num_slabs * pages_per_slab, bool)
        self.local_cached = np.zeros(num_slabs, bool)
        # A stack of free slabs, and full pages in use by slab (not if m = 1). Few numbers cost less in lists.
        self._free = list(range(num_slabs - 1, 0, -1))
        self._live = [0] * num_slabs
        self._fullest_first = range(pages_per_slab - 1, 0, -1)
        # The partly used slabs of each level, as keys in the order in which they came to it.
        self._partial: list[dict[int, None]] = [{} for _ in range(pages_per_slab)]
        self._bound = max(pages_per_slab, int(MAX_HOLES * self.total_slots) + 1)

    @property
    def total_slots(self) -> int:
        """Slots of all slabs except the slab of zeros."""
        return (self.num_slabs - 1) * self.pages_per_slab

    @property
    def free_slots(self) -> int:
        """Slots that can still be allocated, holes included, but for those that are reserved."""
        return len(self._free) * self.pages_per_slab + self.holes - self.reserved

    @property
    def evictable_slots(self) -> int:
        """Slots of pages that only the cache owns."""
        return self.evictable_full + self.pages_per_slab * self.evictable_local

    def alloc_local(self, count: int) -> Int[np.ndarray, " count"]:
        """Allocate `count` whole slabs as local pages.

        The caller has checked `free_slots ≥ m · count`. Raises EngineError if fewer slots are free, the reserved ones
        included.
        """
        if count > len(self._free):
            if count * self.pages_per_slab > self.free_slots + self.reserved:
                raise EngineError(f"alloc_local({count}) with {self.free_slots} slots, {self.pages_per_slab} a slab")
            while len(self._free) < count:
                self._empty_one_slab()
        slabs = np.array(self._pop_slabs(count), np.intp)
        self.local_owners[slabs] = 1
        self.num_local += count
        self.allocated += count * self.pages_per_slab
        return slabs

    def alloc_full(self, count: int, *, scattered: bool = False) -> Int[np.ndarray, " count"]:
        """Allocate `count` full pages: whole slabs for the whole-slab part, holes of shared slabs for the rest.

        The caller has seen `free_slots ≥ count`. `scattered`: the pages are for rows that end at different times; they
        fill holes before they take slabs. Raises EngineError if fewer pages are free.
        """
        m, left = self.pages_per_slab, count
        if count > len(self._free) * m + self.holes:
            raise EngineError(f"alloc_full({count}) with {self.free_slots} free slots")
        pages: list[int] = []
        if count >= m and not (scattered and self.holes):
            pages = self._fill_slabs(min(count // m, len(self._free)))
            left -= len(pages)
        while left and self.holes:
            pages += self._fill_holes(left)
            left = count - len(pages)
        if left >= m:
            pages += self._fill_slabs(left // m)  # none were filled before: there were holes
            left %= m
        if left:
            pages += self._begin_slab(left)
        ids = np.array(pages, np.intp)
        self.full_owners[ids] = 1
        self.num_full += count
        self.allocated += count
        return ids

    def retain_local(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Add an owner to local pages that have one."""
        if not len(slabs):
            return
        at = _index(slabs)
        owners = self.local_owners[at]
        self.evictable_local -= int(np.count_nonzero(self.local_cached[at] & (owners == 1)))
        self.local_owners[at] = owners + 1

    def retain_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Add an owner to full pages that have one."""
        if not len(pages):
            return
        at = _index(pages)
        owners = self.full_owners[at]
        self.evictable_full -= int(np.count_nonzero(self.full_cached[at] & (owners == 1)))
        self.full_owners[at] = owners + 1

    def cache_local(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Make the cache an owner of local pages that a lease owns."""
        at = _index(slabs)
        self.local_cached[at] = True
        self.local_owners[at] += 1

    def cache_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Make the cache an owner of full pages that a lease owns."""
        at = _index(pages)
        self.full_cached[at] = True
        self.full_owners[at] += 1

    def uncache_local(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Remove the cache as an owner of local pages."""
        at = _index(slabs)
        self.local_cached[at] = False
        self.evictable_local -= self._release_local(at)[1]

    def uncache_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Remove the cache as an owner of full pages."""
        at = _index(pages)
        self.full_cached[at] = False
        self.evictable_full -= self._release_full(at)[1]

    def evict_local(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Free local pages that the cache alone owns, given as an array of indexes.

        Raises EngineError, and frees none, if rows own any of them.
        """
        if self.local_owners[slabs].tobytes() != _ONE * len(slabs):
            raise EngineError(f"evict_local of local pages that rows own: {slabs}")
        self.local_cached[slabs] = False
        self.local_owners[slabs] = 0
        self.evictable_local -= len(slabs)
        self.num_local -= len(slabs)
        self._free += slabs.tolist()

    def evict_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Free full pages that the cache alone owns, given as an array of indexes.

        Raises EngineError, and frees none, if rows own any of them.
        """
        if self.full_owners[pages].tobytes() != _ONE * len(pages):
            raise EngineError(f"evict_full of full pages that rows own: {pages}")
        self.full_cached[pages] = False
        self.full_owners[pages] = 0
        self.evictable_full -= len(pages)
        self._free_pages(pages)

    def free_local(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Remove an owner of local pages; pages without owners become free."""
        at = _index(slabs)
        owners, gone = self._release_local(at)
        if gone < len(at):
            self.evictable_local += int(np.count_nonzero(self.local_cached[at] & (owners == 1)))

    def free_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Remove an owner of full pages; a slab without pages becomes free."""
        at = _index(pages)
        owners, gone = self._release_full(at)
        if gone < len(at):
            self.evictable_full += int(np.count_nonzero(self.full_cached[at] & (owners == 1)))

    def _release_local(self, slabs: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
        """Remove an owner; return how many each page has left, and how many pages became free."""
        if not len(slabs):
            return slabs, 0
        owners = self.local_owners[slabs] - 1
        least = int(owners.min())
        if least < 0:
            raise EngineError(f"free_local of slabs that are not local pages: {slabs}")
        self.local_owners[slabs] = owners
        if least:
            return owners, 0
        gone = slabs[owners == 0]
        self._free += gone.tolist()
        self.num_local -= len(gone)
        return owners, len(gone)

    def _release_full(self, pages: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
        """Do the same for full pages."""
        if not len(pages):
            return pages, 0
        owners = self.full_owners[pages] - 1
        least = int(owners.min())
        if least < 0:
            raise EngineError(f"free_full of pages that are not held: {pages}")
        self.full_owners[pages] = owners
        if least:
            return owners, 0
        gone = pages[owners == 0]
        self._free_pages(gone)
        return owners, len(gone)

    def _free_pages(self, gone: Int[np.ndarray, " n"]) -> None:
        """Free full pages that have no owner any more."""
        m, free = self.pages_per_slab, self._free
        self.num_full -= len(gone)
        if m == 1:
            free += gone.tolist()
            return
        before, live = len(free), self._live
        for slab, count in Counter((gone // m).tolist()).items():
            self._set_live(slab, live[slab] - count)
            if not live[slab]:
                free.append(slab)
        self.holes += len(gone) - m * (len(free) - before)

    def compact(self) -> None:
        """Compact until holes are at most 2 % of the pool, so that no step has to move many pages at once."""
        while self.holes >= self._bound:
            self._empty_one_slab()

    def drain_moves(self) -> list[tuple[int, int]]:
        """Return the page moves (source, destination) since the last call, in order."""
        moves, self.moves = self.moves, []
        return moves

    def check(self) -> None:
        """Assert the laws that hold between any two calls."""
        m = self.pages_per_slab
        held = self.full_owners > 0
        live = held.reshape(-1, m).sum(axis=1)
        assert m == 1 or self._live == live.tolist()
        assert not live[0], "slab 0 was handed out"
        assert not self.local_owners[0], "slab 0 was handed out"
        free = (live == 0) & (self.local_owners == 0)
        assert np.array_equal(np.sort(self._free), 1 + np.flatnonzero(free[1:])), "a free slab is lost"
        assert not np.any((live > 0) & (self.local_owners > 0)), "a slab is a local page and has full pages"
        assert self.num_local == np.count_nonzero(self.local_owners)
        assert self.num_full == int(live.sum())
        partial = np.flatnonzero((live > 0) & (live < m)).tolist()
        listed = sorted((slab, count) for count, slabs in enumerate(self._partial) for slab in slabs)
        assert m == 1 or listed == [(slab, live[slab]) for slab in partial], "a slab is listed wrongly"
        assert self.holes == int((m - live[partial]).sum())
        assert np.all(self.full_owners >= 0)
        assert np.all(self.local_owners >= 0)
        assert not np.any(self.full_cached & ~held)
        assert not np.any(self.local_cached & (self.local_owners == 0)), "a page is cached that is free"
        assert self.evictable_full == int((self.full_cached & (self.full_owners == 1)).sum())
        assert self.evictable_local == int((self.local_cached & (self.local_owners == 1)).sum())
        assert self.free_slots + m * self.num_local + self.num_full == self.total_slots, "slots are not conserved"

    def _pop_slabs(self, count: int) -> list[int]:
        left = len(self._free) - count
        slabs = self._free[left:]
        del self._free[left:]
        return slabs

    def _fill_slabs(self, count: int) -> list[int]:
        """Take all pages of `count` free slabs. The caller sets their owners."""
        m = self.pages_per_slab
        pages: list[int] = []
        for slab in self._pop_slabs(count):
            self._live[slab] = m
            pages += range(slab * m, slab * m + m)
        return pages

    def _fill_holes(self, most: int) -> list[int]:
        """Take at most `most` holes of the fullest partly used slab, so that emptier slabs drain."""
        m = self.pages_per_slab
        slab = self._partial_slab(self._fullest_first)
        owners = self.full_owners[slab * m : slab * m + m].tolist()
        pages = [page for page, count in enumerate(owners, start=slab * m) if not count]
        self._set_live(slab, m - len(pages) + most if most < len(pages) else m)
        del pages[most:]
        self.holes -= len(pages)
        return pages

    def _begin_slab(self, count: int) -> list[int]:
        """Take the first `count` pages of a free slab."""
        slab = self._free.pop()
        self.holes += self.pages_per_slab - count
        self._set_live(slab, count)
        return list(range(slab * self.pages_per_slab, slab * self.pages_per_slab + count))

    def _partial_slab(self, levels: range) -> int:
        """Return a partly used slab of the first level that has one; a level is a number of pages in use."""
        for live in levels:
            if self._partial[live]:
                return next(reversed(self._partial[live]))
        raise EngineError(f"no slab has one of the {self.holes} holes")

    def _set_live(self, slab: int, live: int) -> None:
        before, self._live[slab] = self._live[slab], live
        if 0 < before < self.pages_per_slab:
            del self._partial[before][slab]
        if 0 < live < self.pages_per_slab:
            self._partial[live][slab] = None

    def _empty_one_slab(self) -> None:
        """Move the pages of the least used partial slab to holes of others: at most m - 1 moves, m fewer holes."""
        m = self.pages_per_slab
        if self.holes < m:
            raise EngineError(f"compaction with {self.holes} holes of {m} a slab: no slab can be emptied")
        slab = self._partial_slab(range(1, m))
        sources = (slab * m + np.flatnonzero(self.full_owners[slab * m : slab * m + m])).tolist()
        # The slab is empty before its pages move, so that they do not move within it.
        self._set_live(slab, 0)
        self.holes -= m - len(sources)
        targets: list[int] = []
        while len(targets) < len(sources):
            targets += self._fill_holes(len(sources) - len(targets))
        self.moves += zip(sources, targets, strict=True)
        for table in (self.full_owners, self.full_cached):
            table[targets] = table[sources]
            table[sources] = 0
        self._free.append(slab)
