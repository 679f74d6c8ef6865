"""Leases pages to sequences: the only module that changes leases, prefix cache and pool together.

Only `slide` and `slide_all` move windows (`windows.py`). The code is the same with and without the prefix cache.

A page that leaves a lease may be reused at once, although the step that last used it may still run: the next step
consumes the arrays that this step produces, so a data dependence orders them and no guard is needed. A row that ended
at step k still writes one position at k + 1: into its own tail page, past every position that is read, and before the
first step of the page's next owner. For the same reason one plan may copy a page and free its source: moves run in
order, before anything is written.
"""

from collections.abc import Collection, Iterable, KeysView, Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from jswa.cache.demand import Demand
from jswa.cache.host.recall import HostCache, HostMatch, NewPages
from jswa.cache.keys import tree_key
from jswa.cache.laws import check_cursors, check_leases, check_owners, check_table
from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease, LeaseTable, held, owners_without
from jswa.cache.moves import Move, destinations
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import NO_MATCH, PrefixCache, PrefixMatch, window_ends
from jswa.cache.prefix.policies import POLICIES, MakePolicy
from jswa.cache.prefix.stats import CacheStats, HitCounter
from jswa.cache.windows import Windows
from jswa.config import HostMemory
from jswa.errors import EngineError

_NO_TOKENS = np.zeros(0, np.int32)
_DISABLED = NO_MATCH._replace(reason="disabled")


class CacheManager:
    """Owns the pool, all leases and the prefix cache.

    Args:
        width: pages of a page table.
        rows: the most leases that are open at a time.
        sharing: whether there is a prefix cache.
        interval: also keep the windows at multiples of this many prompt tokens.
        memory: that of `host`, a second prefix cache; None: there is none.
        policy: makes the policy that chooses what the prefix cache evicts.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slabs: int,
        width: int,
        rows: int,
        *,
        sharing: bool = True,
        interval: int | None = None,
        memory: HostMemory | None = None,
        policy: MakePolicy = POLICIES["learned"],
    ) -> None:
        self.layout = layout
        self.pool = PagePool(num_slabs, layout.pages_per_slab)
        self.prefix = PrefixCache(layout, self.pool, policy)
        self.hits = HitCounter()
        self.moves: list[Move] = []
        self.epoch = 0  # counts `withdraw` and `flush`: what was matched before may have left the cache since
        self.version = 0  # of the weights
        self._sharing = sharing
        self._interval = interval
        self.table = LeaseTable(layout, rows, width)
        self._leases: dict[Lease, None] = {}  # serves as an ordered set
        self._reserved: tuple[list[int], list[int]] = [], []  # places of full and of local pages (`LeaseTable`)
        self._windows = Windows(self.table, self.pool, self.prefix.retention)
        self._demand = Demand()
        self.host = HostCache(self.prefix, memory, lambda: self.moves) if sharing and memory is not None else None

    @property
    def leases(self) -> KeysView[Lease]:
        """All open leases; read-only."""
        return self._leases.keys()

    @property
    def available_slots(self) -> int:
        """Slots that are free, or can be freed without preempting a row."""
        return self._windows.available_slots()

    def tree_key(self, root: str) -> str:
        """Return the key of a request's tree (`root_key`) for the weights that run now: others have other trees."""
        return tree_key(root, self.version)

    def match(self, salt: str, tokens: Int[np.ndarray, " T"], limit: int) -> PrefixMatch:
        """Return the cached part of the first `limit` tokens of a text. Changes nothing."""
        return self.prefix.match(self.tree_key(salt), tokens, limit) if self._sharing else _DISABLED

    def available_without(self, closed: Collection[Lease]) -> int:
        """Return `available_slots` as they would be if leases were closed."""
        pool, slots = self.pool, self.available_slots - self.pool.pages_per_slab * self._windows.idle_pages()
        for kind, size in (("full", 1), ("local", pool.pages_per_slab)):
            cached = getattr(pool, f"{kind}_cached")
            freed = (getattr(pool, f"{kind}_owners") > cached) & (owners_without(pool, kind, closed) == cached)
            slots += size * int(np.count_nonzero(freed))
        return slots + pool.pages_per_slab * self._windows.idle_pages(closed)

    def leased_slots(self, match: PrefixMatch, closed: Collection[Lease] = ()) -> int:
        """Return the slots of a match that other rows, but for closed ones, hold too: sharing them takes none."""
        if not match.path:
            return 0
        whole = match.resume.full_to // self.layout.page_size
        full = np.count_nonzero(owners_without(self.pool, "full", closed)[match.full[:whole]] > 1)
        own = self._copied_local(match)
        local = np.count_nonzero(owners_without(self.pool, "local", closed)[match.local[: len(match.local) - own]] > 1)
        return int(full) + self.pool.pages_per_slab * int(local)

    def open(self) -> Lease:
        """Return a lease without pages. The caller must `close` it."""
        lease = self.open_at(NO_MATCH)
        assert lease is not None
        return lease

    def open_at(self, match: PrefixMatch, salt: str = "", length: int = 0) -> Lease | None:
        """Return a lease on the pages of a match, for a row with `length` known tokens. The caller must `close` it.

        None, and no change, if there is no room to copy a partly filled page. Raises EngineError if no row is free.
        """
        if not self.table.free:
            raise EngineError(f"open_at: all {len(self.table.owners)} rows have leases")
        row = self.table.free.pop()
        lease = self.table.owners[row] = Lease(self.table, row, salt=self.tree_key(salt))
        self._leases[lease] = None
        if match.path and not self._share(lease, match):
            self._release(lease)
            return None
        self._windows.follow(lease)
        if self._sharing:
            self.prefix.start(lease, match)
            lease.window_ends = window_ends(match, length, self.layout.page_size, self._interval)
            lease.branch_at = match.resume.full_to if match.branch else 0
        return lease

    def grow(self, lease: Lease, length: int, *, later: bool = False) -> bool:
        """Extend the lease to `length`, or leave it if it is longer; False, and no change, if memory is short.

        `later`: its pages are reserved, and `allocate` gives them to it together with those of other leases.
        """
        layout, table, pool, row, page = self.layout, self.table, self.pool, lease.row, self.layout.page_size
        before, pages = table.covered.item(row) // page, -(-length // page)
        if pages <= before:
            return True
        first = row * table.full.shape[1]
        full = range(first + max(before, table.shared.item(row)), first + pages) if layout.full else range(0)
        local = range(first + before, first + pages) if layout.local else range(0)
        slots = len(full) + len(local) * pool.pages_per_slab
        if slots > pool.free_slots and not self.make_room(slots):
            return False
        table.covered[row] = pages * page
        self._reserved[0].extend(full)
        self._reserved[1].extend(local)
        pool.reserved += slots
        if not later:
            self.allocate()
        return True

    def allocate(self) -> None:
        """Allocate the pages that are reserved."""
        (full, local), table = self._reserved, self.table
        self._reserved, self.pool.reserved = ([], []), 0
        if local:
            # Local pages first: compaction may need the holes that full pages would fill.
            table.local.put(local, self.pool.alloc_local(len(local)))
            table.new_local += local
            self._follow_moves()
        if full:
            table.full.put(full, self.pool.alloc_full(len(full)))
            table.new_full += full

    def evict_ahead(self) -> None:
        """Evict until the next plan probably finds enough free slots; to be called while the device works.

        It expects a plan to take as many slots as the largest recent plan. At most 1/128 of the memory is kept free:
        with 1/32, a pool that just holds all texts had 0.6 % fewer hits.
        """
        pool = self.pool
        wanted = min(self._demand.after(pool.allocated), pool.total_slots // 128)
        if wanted > pool.free_slots:
            self._windows.free_waiting(needed=False)
            self.prefix.retention.make_room(min(wanted, pool.free_slots + pool.evictable_slots))

    def grow_by_page(self, rows: Int[np.ndarray, " n"]) -> bool:
        """Extend the leases of different rows by one page of each kind; False, and no change, if memory is short.

        For decode rows at the end of a page: each lease is covered to the end of its last page.
        """
        layout, table, count = self.layout, self.table, len(rows)
        if not self.make_room(count * layout.page_slots):
            return False
        covered = table.covered.take(rows)
        places = rows * table.full.shape[1] + covered // layout.page_size
        if layout.local:
            table.local.put(places, self.pool.alloc_local(count))
            table.new_local += places.tolist()
            self._follow_moves()
        if layout.full:
            table.full.put(places, self.pool.alloc_full(count, scattered=True))
            table.new_full += places.tolist()
        table.covered[rows] = covered + layout.page_size
        return True

    def take_ahead(self, rows: Int[np.ndarray, " n"]) -> None:
        """Give these rows their next page ahead of need, while the device works: the next plan allocates less."""
        self.grow_by_page(rows)
        self._demand.leave_out(self.pool.allocated)

    def slide(self, lease: Lease, launched: int) -> None:
        """Free local pages that no later query of the row can see, once `launched` tokens are on the device."""
        self._windows.slide_all(np.array([lease.row]), np.array([launched]))

    def slide_all(self, rows: Int[np.ndarray, " n"], launched: Int[np.ndarray, " n"]) -> None:
        """Do what `slide` does for the leases of different rows."""
        self._windows.slide_all(rows, launched)

    def publish(self, lease: Lease, tokens: Int[np.ndarray, " T"], computed: int) -> None:
        """Publish whole pages of the first `computed` tokens, at the prompt end also the last. No-op during decode."""
        if not lease.window_ends:
            return
        end = lease.window_ends[-1]
        upto = end if computed >= end else computed // self.layout.page_size * self.layout.page_size
        if not lease.cursor.detached:
            self.prefix.publish(lease, tokens, upto)
            self.prefix.keep_windows(lease)
        if computed >= end or lease.cursor.detached:
            lease.window_ends.clear()
        first = int(self.table.first_local[lease.row])
        self._windows.free_slid(lease, min(first, upto // self.layout.page_size) if lease.window_ends else first)

    def close(self, lease: Lease, tokens: Int[np.ndarray, " T"] = _NO_TOKENS, *, prompt: int = 0) -> None:
        """End a lease and publish its computed tokens, the first `prompt` as a prompt; without tokens, nothing."""
        self.allocate()
        if self._sharing and len(tokens):
            self.prefix.publish(lease, tokens, len(tokens), final=True)
            lease.window_ends = [b for b in lease.window_ends if b < len(tokens)] + [len(tokens)]
            self.prefix.keep_windows(lease)
            self.prefix.end_turn(lease, prompt, len(tokens))
            if self.host is not None:
                self.host.tier.end_turn(lease.salt, tokens, prompt)
        self._release(lease)

    def withdraw(self, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        """Remove a text from the cache, with everything that continues it or a part of it."""
        self.epoch += 1
        self.prefix.withdraw(salt, tokens)
        if self.host is not None:
            self.host.withdraw(salt, tokens)

    def flush(self) -> None:
        """Empty the cache and reset its counters. Rows keep their pages, and the disk its files."""
        self.epoch += 1
        self.prefix.flush()
        self.hits = HitCounter()
        if self.host is not None:
            self.host.flush()

    def next_version(self, version: int) -> None:
        """Start new trees for new weights, and drop those of the old; rows keep their pages, and publish to the old."""
        self.version = version
        self.epoch += 1
        self.prefix.flush()
        if self.host is not None:
            self.host.retire()

    def stats(self) -> CacheStats:
        """Return counters and contents of the cache."""
        found = self.prefix.stats(self.hits, self._windows.slid_pages)
        return found if self.host is None else self.host.counted(found)

    def compact(self) -> None:
        """Bound the holes of the pool; called once per plan."""
        self.pool.compact()
        self._follow_moves()

    def recall(self, found: HostMatch) -> bool:
        """Begin to take a text back from host memory; False, and no change, if there is no room on the device."""

        def allocate(full: int, local: int) -> NewPages | None:
            if not self._windows.make_room(full + local * self.pool.pages_per_slab):
                return None
            slabs = self.pool.alloc_local(local)
            self._follow_moves()
            return NewPages(self.pool.alloc_full(full), slabs)

        return self.host is not None and self.host.begin(found, self.epoch, allocate)

    def drain_moves(self) -> list[Move]:
        """Return the copies that the device must make, in order, before the next step."""
        moves, self.moves = self.moves, []
        return moves

    def check(
        self, launched: Iterable[tuple[Lease, int]], ahead: Mapping[Lease, tuple[int, int]] = MappingProxyType({})
    ) -> None:
        """Assert the laws of pool, cache and leases, given each open lease and its launched length.

        `ahead`: of leases whose rows may have run further, the end of that, and of what the pages may cover at most.
        """
        assert not self.pool.reserved, "pages are reserved between two plans"
        self.pool.check()
        self.prefix.check()
        check_table(self.table, self._leases)
        check_leases(self.layout, self._leases, self._windows.waiting, dict(launched), ahead)
        check_owners(self.pool, self._leases, () if self.host is None else self.host.held)
        if self.host is not None:
            self.host.check()
        if self._sharing:
            check_cursors(self.layout, self.prefix, self._leases)

    def _copied_local(self, match: PrefixMatch) -> int:
        """Return 1 if the row will write to the last local page of the match and needs a copy of it, else 0."""
        return int(len(match.local) > 0 and match.resume.boundary % self.layout.page_size > 0)

    def _share(self, lease: Lease, match: PrefixMatch) -> bool:
        """Give a lease the pages of a match, or copies of those that it will write to; False if there is no room."""
        at, table, row, page = match.resume, self.table, lease.row, self.layout.page_size
        lease.full_write_from, lease.local_visible_from = at.full_to, at.local_visible_from
        lease.exact_from = at.exact_from
        table.full[row, : len(match.full)], table.shared[row] = match.full, len(match.full)
        if self.layout.reach is not None:
            first = at.local_visible_from // page
            end = first + len(match.local)
            table.local[row, first:end] = match.local
            table.unpublished[row] = table.first_local[row] = first
            table.covered[row] = end * page
        # The last pages are copied if the row will write to them.
        full = int(len(match.full) > 0 and at.full_to % self.layout.page_size > 0)
        local = self._copied_local(match)
        shared_full, shared_local = len(match.full) - full, len(match.local) - local
        self.pool.retain_full(match.full[:shared_full])
        self.pool.retain_local(match.local[:shared_local])
        self.prefix.retention.pin(match.local[:shared_local])
        if not self._room_for_copies(match.full[shared_full:], match.local[shared_local:]):
            table.shared[row] -= full
            table.covered[row] -= local * page
            return False
        if local:
            self._copy_local(lease)
        if full:
            # After the local page was allocated: compaction may have moved the full page.
            source = int(table.full[row, shared_full])
            table.full[row, shared_full] = target = int(self.pool.alloc_full(1)[0])
            self.moves.append(Move(source, target, rename=False))
        return True

    def _room_for_copies(self, full: Int[np.ndarray, " n"], local: Int[np.ndarray, " m"]) -> bool:
        """Make room for copies of pages of the cache, which are not evicted for it; False if that is impossible."""
        slots = len(full) + len(local) * self.pool.pages_per_slab
        if slots <= self.pool.free_slots:
            return True
        self.pool.retain_full(full)
        self.pool.retain_local(local)
        self.prefix.retention.pin(local)
        fits = self.make_room(slots)
        self.pool.free_full(full)
        self._windows.free(local)
        return fits

    def _copy_local(self, lease: Lease) -> None:
        """Replace the last local page of a lease by a copy."""
        m, pages = self.pool.pages_per_slab, lease.local.held
        source, target = int(pages[-1]), int(self.pool.alloc_local(1)[0])
        pages[-1] = target
        self._follow_moves()
        self.moves += [Move(source * m + i, target * m + i, rename=False) for i in range(m)]

    def make_room(self, slots: int) -> bool:
        """Free memory until `slots` slots are free, cheapest first; False, and no change, if that is impossible.

        A text that comes back from host memory is given up for it.
        """
        if self.host is not None and self.host.active is not None and slots > self.available_slots:
            self.host.cancel()
        return self._windows.make_room(slots)

    def _release(self, lease: Lease) -> None:
        self.pool.free_full(held(lease, "full"))
        self._windows.free(held(lease, "local"))
        self._windows.waiting.pop(lease, None)
        self._leases.pop(lease)
        self.table.reset(lease.row)
        self.prefix.detach(lease.cursor)

    def _follow_moves(self) -> None:
        """Rewrite the ids of pages that compaction moved, in every lease and in the tree. Rare."""
        if not self.pool.moves:
            return
        moves = self.pool.drain_moves()
        for source, target in moves:
            self.prefix.tree.rename(source, target)
        renamed = destinations(moves, self.pool.num_slabs * self.pool.pages_per_slab)
        self.table.rename(renamed)
        if self.host is not None:
            self.host.rename(renamed)
        self.moves.extend(Move(source, target, rename=True) for source, target in moves)
