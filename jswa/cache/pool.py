"""Which blocks and pages of the arena are free, and how many owners the others have. It holds int32 ids, no memory.

A block is free, or one local page, or m full pages of which some may be free. Free full pages inside partly used
blocks are *holes*. A slot is 1/m of a block: free_slots = m · free blocks + holes.

Owners are leases and the prefix cache: `alloc_*` gives a page its first owner, `retain_*` adds one, `free_*` removes
one and frees the page with the last. The cache marks its pages (`cache_*`, `uncache_*`); a page that only the cache
owns is *evictable*.

Laws (`check`):
* conservation: free slots + m · local pages + full pages = slots of all blocks but block 0;
* evictable pages are those of the cache with one owner;
* compaction: free_slots ≥ m ⇒ at most m - 1 page moves free one block;
* after `compact`, holes ≤ 2 % of all slots (or fewer than m, too few to free a block).

Moves are recorded in `moves` and must be carried out on the device, in order, before anything is written to the
new ids; the caller rewrites the ids it holds (`drain_moves`).
"""

from collections import Counter

import numpy as np
from jaxtyping import Int

from jswa.errors import EngineError

MAX_HOLES = 0.02
_FREE, _LOCAL, _FULL, _ZERO = range(4)


class PagePool:
    """Free lists of one arena of `num_blocks` blocks with `pages_per_block` (m) full pages each.

    Read-only for others, by page id: `full_owners`, `local_owners` (number of owners), `full_cached` and `local_cached`
    (whether the prefix cache is an owner).
    """

    def __init__(self, num_blocks: int, pages_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.pages_per_block = pages_per_block
        self.holes = 0
        self.num_local = 0
        self.num_full = 0
        self.moves: list[tuple[int, int]] = []
        self._state = np.full(num_blocks, _FREE, np.int8)
        self._state[0] = _ZERO
        self._free = list(range(num_blocks - 1, 0, -1))
        self.evictable_full = 0
        self.evictable_local = 0
        self._held = np.zeros((num_blocks, pages_per_block), bool)
        self.full_owners = np.zeros(num_blocks * pages_per_block, np.int32)
        self.local_owners = np.zeros(num_blocks, np.int32)
        self.full_cached = np.zeros(num_blocks * pages_per_block, bool)
        self.local_cached = np.zeros(num_blocks, bool)
        self._live = [0] * num_blocks
        # Partly used blocks by their number of live pages; dicts serve as ordered sets.
        self._partial: list[dict[int, None]] = [{} for _ in range(pages_per_block + 1)]

    @property
    def total_slots(self) -> int:
        """Slots of all blocks except the block of zeros."""
        return (self.num_blocks - 1) * self.pages_per_block

    @property
    def free_slots(self) -> int:
        """Slots that can still be allocated, holes included."""
        return len(self._free) * self.pages_per_block + self.holes

    @property
    def evictable_slots(self) -> int:
        """Slots of pages that only the cache owns."""
        return self.evictable_full + self.pages_per_block * self.evictable_local

    def alloc_local(self, count: int) -> Int[np.ndarray, " count"]:
        """Allocate `count` whole blocks as local pages. The caller has checked `free_slots ≥ m · count`."""
        if count * self.pages_per_block > self.free_slots:
            raise EngineError(f"alloc_local({count}) with {self.free_slots} slots, {self.pages_per_block} a block")
        while len(self._free) < count:
            self._empty_one_block()
        blocks = np.array([self._free.pop() for _ in range(count)], np.int32)
        self._state[blocks] = _LOCAL
        self.local_owners[blocks] = 1
        self.num_local += count
        return blocks

    def alloc_full(self, count: int) -> Int[np.ndarray, " count"]:
        """Allocate `count` full pages: whole blocks for the whole-block part, holes of shared blocks for the rest.

        The caller has seen `free_slots ≥ count`.
        """
        if count > self.free_slots:
            raise EngineError(f"alloc_full({count}) with {self.free_slots} free slots")
        m = self.pages_per_block
        pages: list[int] = []
        for _ in range(min(count // m, len(self._free))):
            block = self._open_block()
            self._held[block] = True
            self._relist(block, 0, m)
            pages.extend(range(block * m, block * m + m))
        while len(pages) < count:
            pages.append(self._fill_hole())
        self.num_full += count
        ids = np.array(pages, np.int32)
        self.full_owners[ids] = 1
        return ids

    def retain_local(self, blocks: Int[np.ndarray, " n"]) -> None:
        """Add an owner to local pages that have one."""
        owners = self.local_owners[blocks]
        self.evictable_local -= int(np.count_nonzero(self.local_cached[blocks] & (owners == 1)))
        self.local_owners[blocks] = owners + 1

    def retain_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Add an owner to full pages that have one."""
        owners = self.full_owners[pages]
        self.evictable_full -= int(np.count_nonzero(self.full_cached[pages] & (owners == 1)))
        self.full_owners[pages] = owners + 1

    def cache_local(self, blocks: Int[np.ndarray, " n"]) -> None:
        """Make the cache an owner of local pages that a lease owns."""
        self.local_cached[blocks] = True
        self.local_owners[blocks] += 1

    def cache_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Make the cache an owner of full pages that a lease owns."""
        self.full_cached[pages] = True
        self.full_owners[pages] += 1

    def uncache_local(self, blocks: Int[np.ndarray, " n"]) -> None:
        """Remove the cache as an owner of local pages."""
        self.local_cached[blocks] = False
        self.evictable_local -= self._release_local(blocks)[1]

    def uncache_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Remove the cache as an owner of full pages."""
        self.full_cached[pages] = False
        self.evictable_full -= self._release_full(pages)[1]

    def free_local(self, blocks: Int[np.ndarray, " n"]) -> None:
        """Remove an owner of local pages; pages without owners become free."""
        owners, gone = self._release_local(blocks)
        if gone < len(blocks):
            self.evictable_local += int(np.count_nonzero(self.local_cached[blocks] & (owners == 1)))

    def free_full(self, pages: Int[np.ndarray, " n"]) -> None:
        """Remove an owner of full pages; a block without pages becomes free."""
        owners, gone = self._release_full(pages)
        if gone < len(pages):
            self.evictable_full += int(np.count_nonzero(self.full_cached[pages] & (owners == 1)))

    def _release_local(self, blocks: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
        """Remove an owner; return how many each page has left, and how many pages became free."""
        owners = self.local_owners[blocks] - 1
        if len(owners) and owners.min() < 0:
            raise EngineError(f"free_local of blocks that are not local pages: {blocks}")
        self.local_owners[blocks] = owners
        gone = blocks[owners == 0]
        if len(gone):
            self._state[gone] = _FREE
            self._free.extend(gone.tolist())
            self.num_local -= len(gone)
        return owners, len(gone)

    def _release_full(self, pages: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
        """Do the same for full pages."""
        owners = self.full_owners[pages] - 1
        if len(owners) and owners.min() < 0:
            raise EngineError(f"free_full of pages that are not held: {pages}")
        self.full_owners[pages] = owners
        pages = pages[owners == 0]
        if len(pages):
            self._held.reshape(-1)[pages] = False
            for block, gone in Counter((pages // self.pages_per_block).tolist()).items():
                self._relist(block, self._live[block], self._live[block] - gone)
            self.num_full -= len(pages)
        return owners, len(pages)

    def compact(self) -> None:
        """Compact until holes are at most 2 % of the pool, so that no step has to move many pages at once."""
        bound = max(self.pages_per_block, int(MAX_HOLES * self.total_slots) + 1)
        while self.holes >= bound:
            self._empty_one_block()

    def drain_moves(self) -> list[tuple[int, int]]:
        """Return the page moves (source, destination) since the last call, in order."""
        moves, self.moves = self.moves, []
        return moves

    def check(self) -> None:
        """Assert the laws that hold between any two calls."""
        m = self.pages_per_block
        live = self._held.sum(axis=1)
        assert self._state[0] == _ZERO, "block 0 was handed out"
        assert self._live == live.tolist()
        assert sorted(self._free) == np.flatnonzero(self._state == _FREE).tolist(), "free list differs from states"
        assert np.all((live > 0) == (self._state == _FULL)), "a block with full pages is not marked so"
        assert self.num_local == int((self._state == _LOCAL).sum())
        assert self.num_full == int(live.sum())
        partial = np.flatnonzero((live > 0) & (live < m))
        assert sorted(b for s in self._partial for b in s) == partial.tolist(), "partial lists differ from pages"
        assert all(live[b] == n for n, s in enumerate(self._partial) for b in s)
        assert self.holes == int((m - live[partial]).sum())
        held = self._held.reshape(-1)
        assert np.array_equal(self.full_owners > 0, held), "owners of a full page that is free, or the reverse"
        assert np.array_equal(self.local_owners > 0, self._state == _LOCAL), "the same for a local page"
        assert not np.any(self.full_cached & ~held)
        assert not np.any(self.local_cached & (self.local_owners == 0)), "a page is cached that is free"
        assert self.evictable_full == int((self.full_cached & (self.full_owners == 1)).sum())
        assert self.evictable_local == int((self.local_cached & (self.local_owners == 1)).sum())
        assert self.free_slots + m * self.num_local + self.num_full == self.total_slots, "slots are not conserved"

    def _open_block(self) -> int:
        block = self._free.pop()
        self._state[block] = _FULL
        return block

    def _fill_hole(self) -> int:
        """Allocate a page of the fullest partly used block, so that emptier blocks drain; else of a fresh block."""
        listed = next((s for s in reversed(self._partial) if s), None)
        block = next(reversed(listed)) if listed else self._open_block()
        offset = int(self._held[block].argmin())
        self._held[block, offset] = True
        self._relist(block, self._live[block], self._live[block] + 1)
        return block * self.pages_per_block + offset

    def _relist(self, block: int, before: int, after: int) -> None:
        """Move a block between the lists as its number of live pages changes."""
        m = self.pages_per_block
        self._live[block] = after
        if 0 < before < m:
            del self._partial[before][block]
            self.holes -= m - before
        if 0 < after < m:
            self._partial[after][block] = None
            self.holes += m - after
        if after == 0:
            self._state[block] = _FREE
            self._free.append(block)

    def _empty_one_block(self) -> None:
        """Move the pages of the least used partial block to holes of others: at most m - 1 moves, m fewer holes."""
        m = self.pages_per_block
        if self.holes < m:
            raise EngineError(f"compaction with {self.holes} holes of {m} a block: no block can be emptied")
        live, listed = next((n, s) for n, s in enumerate(self._partial) if s)
        block = next(iter(listed))
        self._live[block] = 0
        sources = (block * m + np.flatnonzero(self._held[block])).tolist()
        # The block leaves the lists first, so that its pages do not move within it.
        del listed[block]
        self.holes -= m - live
        targets = [self._fill_hole() for _ in sources]
        self.moves += zip(sources, targets, strict=True)
        for table in (self.full_owners, self.full_cached):
            table[targets] = table[sources]
            table[sources] = 0
        self._held[block] = False
        self._state[block] = _FREE
        self._free.append(block)
