"""Leases pages to sequences: the only module that changes leases, prefix cache and pool together.

`slide` alone moves windows, by one frontier on *launched* tokens (of steps handed to the device, never of planned
steps): whole pages older than max(0, launched - (W - 1)) leave the window, and with chunked layers all pages of earlier
chunks. The code is the same with and without the prefix cache. Pages of a prompt wait (`Lease.unpublished_from`) until
their tokens have come back and the cache has published them; if memory is short, they are freed first.

A page that leaves a lease may be reused at once, although the step that last used it may still run: the next step
consumes the arrays that this step produces, so a data dependence orders them and no guard is needed. A row that ended
at step k still writes one position at k + 1: into its own tail page, past every position that is read, and before the
first step of the page's next owner. For the same reason one plan may copy a page and free its source: moves run in
order, before anything is written.
"""

from collections.abc import Collection, Iterable, KeysView, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.cache.laws import check_cursors, check_leases, check_owners
from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER, Lease, PageRun, owners_without
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import NO_MATCH, Match, PrefixCache
from jswa.cache.prefix.radix import Window
from jswa.cache.prefix.stats import CacheStats, HitCounter

_NO_TOKENS = np.zeros(0, np.int32)
_DISABLED = NO_MATCH._replace(reason="disabled")


class Move(NamedTuple):
    """A slot to copy. `rename`: page tables that name the source name the target from then on."""

    source: int
    target: int
    rename: bool


class CacheManager:
    """Owns the pool, all leases and the prefix cache.

    Args:
        width: pages of a page table.
        sharing: whether there is a prefix cache.
        interval: also keep the windows at multiples of this many prompt tokens.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, width: int, *, sharing: bool = True, interval: int | None = None
    ) -> None:
        self.layout = layout
        self.pool = PagePool(num_blocks, layout.pages_per_block)
        self.prefix = PrefixCache(layout, self.pool)
        self.hits = HitCounter()
        self.moves: list[Move] = []
        self.slid_pages = 0
        self.epoch = 0  # counts `withdraw` and `flush`: what was matched before may have left the cache since
        self._sharing = sharing
        self._interval = interval
        self._width = width
        self._leases: dict[Lease, None] = {}  # dicts serve as ordered sets
        self._waiting: dict[Lease, None] = {}  # leases with pages that wait to be published

    @property
    def leases(self) -> KeysView[Lease]:
        """All open leases; read-only."""
        return self._leases.keys()

    @property
    def available_slots(self) -> int:
        """Slots that are free, or can be freed without preempting a row."""
        return self.pool.free_slots + self.pool.evictable_slots + self.pool.pages_per_block * self._idle_pages()

    def match(self, salt: str, tokens: Int[np.ndarray, " T"], limit: int) -> Match:
        """Return the cached part of the first `limit` tokens of a text. Changes nothing."""
        return self.prefix.match(salt, tokens, limit) if self._sharing else _DISABLED

    def available_without(self, closed: Collection[Lease]) -> int:
        """Return `available_slots` as they would be if leases were closed."""
        pool, slots = self.pool, self.available_slots - self.pool.pages_per_block * self._idle_pages()
        for kind, size in (("full", 1), ("local", pool.pages_per_block)):
            cached = getattr(pool, f"{kind}_cached")
            freed = (getattr(pool, f"{kind}_owners") > cached) & (owners_without(pool, kind, closed) == cached)
            slots += size * int(np.count_nonzero(freed))
        return slots + pool.pages_per_block * self._idle_pages(closed)

    def leased_slots(self, match: Match, closed: Collection[Lease] = ()) -> int:
        """Return the slots of a match that other rows, but for closed ones, hold too: sharing them takes none."""
        whole = match.resume.full_to // self.layout.page_size
        full = np.count_nonzero(owners_without(self.pool, "full", closed)[match.full[:whole]] > 1)
        own = self._copied_local(match)
        local = np.count_nonzero(owners_without(self.pool, "local", closed)[match.local[: len(match.local) - own]] > 1)
        return int(full) + self.pool.pages_per_block * int(local)

    def open(self) -> Lease:
        """Return a lease without pages. The caller must `close` it."""
        lease = self.open_at(NO_MATCH)
        assert lease is not None
        return lease

    def open_at(self, match: Match, salt: str = "", length: int = 0) -> Lease | None:
        """Return a lease on the pages of a match, for a row with `length` known tokens. The caller must `close` it.

        None, and no change, if there is no room to copy a partly filled page.
        """
        lease = Lease(self._width, salt=salt)
        at, p = match.resume, self.layout.page_size
        lease.full_write_from, lease.local_visible_from, lease.exact_from = (
            at.full_to,
            at.local_visible_from,
            at.exact_from,
        )
        lease.full.extend(match.full)
        if self.layout.reach is not None:
            lease.unpublished_from = lease.local.start = lease.local.end = lease.local.sent = at.local_visible_from // p
            lease.local.extend(match.local)
        self.pool.retain_full(match.full)
        self.pool.retain_local(match.local)
        self.prefix.retention.pin(match.local)
        self._leases[lease] = None
        if not self._copy_last(lease, match):
            self._release(lease)
            return None
        lease.next_slide = self._next_slide(lease.local.start)
        if self._sharing:
            self.prefix.start(lease, match)
            self._set_window_ends(lease, match, length)
        return lease

    def grow(self, lease: Lease, length: int) -> bool:
        """Extend the lease to every position below `length`; False, and no change, if memory is short."""
        layout = self.layout
        pages = -(-length // layout.page_size)
        more_full = max(0, pages - lease.full.end) if layout.full else 0
        more_local = max(0, pages - lease.local.end) if layout.local else 0
        if not self.make_room(more_full + more_local * layout.pages_per_block):
            return False
        if more_local:
            # Local pages first: compaction may need the holes that full pages would fill.
            lease.local.extend(self.pool.alloc_local(more_local))
            self._follow_moves()
        if more_full:
            lease.full.extend(self.pool.alloc_full(more_full))
        lease.covered = pages * layout.page_size
        return True

    def grow_by_page(self, leases: Sequence[Lease]) -> bool:
        """Extend different leases, whose pages are full, by one page of each kind; False, and no change, if short.

        For decode rows at the end of a page: each lease is covered to the end of its last page. `pop_last` then has the
        new entries of the page tables.
        """
        layout, count = self.layout, len(leases)
        local, full = layout.local is not None, layout.full is not None
        if not self.make_room(count * (full + local * layout.pages_per_block)):
            return False
        if local:
            _append([lease.local for lease in leases], self.pool.alloc_local(count))
            self._follow_moves()
        if full:
            _append([lease.full for lease in leases], self.pool.alloc_full(count, scattered=True))
        for lease in leases:
            lease.covered += layout.page_size
        return True

    def slide(self, lease: Lease, launched: int) -> None:
        """Free local pages that no later query of the row can see, once `launched` tokens are on the device."""
        frontier = self._advance(lease, launched)
        if frontier and not lease.window_ends:
            self._free_slid(lease, frontier)

    def slide_all(self, rows: Iterable[tuple[Lease, int]]) -> None:
        """Do what `slide` does for each lease and its launched length, and free the pages of all at once."""
        if self.layout.reach is None:
            return
        parts = []
        for lease, launched in rows:
            first, frontier = lease.unpublished_from, self._advance(lease, launched)
            if frontier and not lease.window_ends:
                parts.append(lease.local.ids[first:frontier])
                lease.unpublished_from = frontier
                self._waiting.pop(lease, None)
        if not parts:
            return
        ids = np.concatenate(parts)
        # Rows that share pages of the cache may slide past them in one step: those pages are freed once per row.
        several = self.pool.local_owners[ids] - self.pool.local_cached[ids] > 1
        if several.any():
            for i in np.flatnonzero(several).tolist():
                self._free_local(ids[i : i + 1])
            ids = ids[~several]
        self._free_local(ids)

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
        waiting_from = upto // self.layout.page_size if lease.window_ends else lease.local.start
        self._free_slid(lease, min(lease.local.start, waiting_from))

    def close(self, lease: Lease, tokens: Int[np.ndarray, " T"] = _NO_TOKENS, *, turn: tuple[int, ...] = ()) -> None:
        """End a lease and publish its computed tokens; without tokens, publish nothing.

        Args:
            turn: positions whose windows stay cached, besides the end. Windows of earlier turns become spare.
        """
        if self._sharing and len(tokens):
            self.prefix.publish(lease, tokens, len(tokens), final=True)
            lease.window_ends = [b for b in lease.window_ends if b < len(tokens)] + [len(tokens)]
            self.prefix.keep_windows(lease)
            # The window at the start of the turn stays too: a request with an edited last message resumes there.
            self.prefix.supersede(lease, (lease.full_write_from, *turn, len(tokens)), self._interval)
        self._release(lease)

    def withdraw(self, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        """Remove a text from the cache, with everything that continues it or a part of it."""
        self.epoch += 1
        self.prefix.withdraw(salt, tokens)

    def flush(self) -> None:
        """Empty the cache and reset its counters. Rows keep their pages."""
        self.epoch += 1
        self.prefix.flush()
        self.hits = HitCounter()

    def stats(self) -> CacheStats:
        """Return counters and contents of the cache."""
        pool = self.pool
        return CacheStats(
            **{**vars(self.hits), "missed": dict(self.hits.missed)},
            full_pages=int(np.count_nonzero(pool.full_cached)),
            local_pages=int(np.count_nonzero(pool.local_cached)),
            evictable_full_pages=pool.evictable_full,
            evictable_local_pages=pool.evictable_local,
            windows=sum(isinstance(item, Window) for item in self.prefix.tree.candidates.items),
            evictions=self.prefix.retention.evictions,
            slid_pages=self.slid_pages,
        )

    def held_slots(self, lease: Lease) -> int:
        """Return the slots of the pages that a lease needs."""
        return len(lease.full.held) + self.layout.pages_per_block * len(lease.local.held)

    def compact(self) -> None:
        """Bound the holes of the pool; called once per plan."""
        self.pool.compact()
        self._follow_moves()

    def drain_moves(self) -> list[Move]:
        """Return the copies that the device must make, in order, before the next step."""
        moves, self.moves = self.moves, []
        return moves

    def check(self, launched: Iterable[tuple[Lease, int]]) -> None:
        """Assert the laws of pool, cache and leases, given each open lease and its launched length."""
        self.pool.check()
        self.prefix.check()
        check_leases(self.layout, self._leases, self._waiting, dict(launched))
        check_owners(self.pool, self._leases)
        if self._sharing:
            check_cursors(self.layout, self.prefix, self._leases)

    def _copied_local(self, match: Match) -> int:
        """Return 1 if the row will write to the last local page of the match and needs a copy of it, else 0."""
        return int(len(match.local) > 0 and match.resume.boundary % self.layout.page_size > 0)

    def _copy_last(self, lease: Lease, match: Match) -> bool:
        """Replace shared pages that the row will write to by copies; False if there is no room."""
        full = int(len(match.full) > 0 and match.resume.full_to % self.layout.page_size > 0)
        local, m = self._copied_local(match), self.pool.pages_per_block
        if not full and not local:
            return True
        if not self.make_room(full + local * m):
            return False
        if local:
            source = lease.local.ids[lease.local.end - 1 : lease.local.end].copy()
            lease.local.ids[lease.local.end - 1] = target = int(self.pool.alloc_local(1)[0])
            self._follow_moves()
            self.moves += [Move(int(source[0]) * m + i, target * m + i, rename=False) for i in range(m)]
            self._free_local(source)
        if full:
            # Read after the local page was allocated: compaction may have moved the full page.
            source = lease.full.ids[lease.full.end - 1 : lease.full.end].copy()
            lease.full.ids[lease.full.end - 1] = target = int(self.pool.alloc_full(1)[0])
            self.moves.append(Move(int(source[0]), target, rename=False))
            self.pool.free_full(source)
        return True

    def _set_window_ends(self, lease: Lease, match: Match, length: int) -> None:
        """Choose the windows to keep: where texts diverge, at intervals, and at the end of the known tokens."""
        found = match.resume.full_to
        if length <= found:
            return
        step = self._interval
        regular = range(found // step * step + step, length, step) if step is not None else ()
        lease.window_ends = [*([found] if match.branch and found else []), *regular, length]
        lease.branch_at = found if match.branch else 0

    def make_room(self, slots: int) -> bool:
        """Free memory until `slots` slots are free, cheapest first; False, and no change, if that is impossible."""
        pool = self.pool
        if slots <= pool.free_slots:
            return True
        if slots > self.available_slots:
            return False
        for held in (False, True):
            for lease in list(self._waiting):
                first = self._first_needed(lease) if not held else lease.local.start
                self._free_slid(lease, min(lease.local.start, first))
            self.prefix.retention.make_room(min(slots, pool.free_slots + pool.evictable_slots))
            if slots <= pool.free_slots:
                break
        return True

    def _first_needed(self, lease: Lease) -> int:
        """Return the first page position of the windows that the cache is to keep."""
        assert self.layout.reach is not None
        return self.layout.reach.first_visible(lease.window_ends[0]) // self.layout.page_size

    def _idle_pages(self, closed: Collection[Lease] = ()) -> int:
        """Count the local pages that wait to be published and that no other row holds, if leases were closed."""
        idle, owners = 0, owners_without(self.pool, "local", closed)
        for lease in self._waiting.keys() - closed if closed else self._waiting:
            slid = lease.slid
            idle += int(np.count_nonzero(owners[slid] - self.pool.local_cached[slid] == 1))
        return idle

    def _advance(self, lease: Lease, launched: int) -> int:
        """Move the start of a lease's window; return its page position, or 0 if it has not moved."""
        if self.layout.reach is None:
            return 0
        frontier = self.layout.reach.first_visible(launched) // self.layout.page_size
        if frontier <= lease.local.start:
            return 0
        self.slid_pages += frontier - lease.local.start
        lease.local.start = frontier
        lease.next_slide = self._next_slide(frontier)
        if lease.window_ends:
            self._waiting[lease] = None
        return frontier

    def _free_slid(self, lease: Lease, upto: int) -> None:
        if upto > lease.unpublished_from:
            self._free_local(lease.local.ids[lease.unpublished_from : upto])
            lease.unpublished_from = upto
        if lease.unpublished_from >= lease.local.start:
            self._waiting.pop(lease, None)

    def _free_local(self, ids: Int[np.ndarray, " n"]) -> None:
        self.pool.free_local(ids)
        self.prefix.retention.unpin(ids)

    def _release(self, lease: Lease) -> None:
        self.pool.free_full(lease.full.held)
        self._free_local(lease.local.ids[lease.unpublished_from : lease.local.end])
        self._waiting.pop(lease, None)
        self._leases.pop(lease)
        self.prefix.detach(lease.cursor)

    def _next_slide(self, local_start: int) -> int:
        """Return the launched length at which page `local_start` is outside of every later query's window."""
        if self.layout.reach is None:
            return NEVER
        return self.layout.reach.hidden_from((local_start + 1) * self.layout.page_size - 1)

    def _follow_moves(self) -> None:
        """Rewrite the ids of pages that compaction moved, in every lease and in the tree. Rare."""
        if not self.pool.moves:
            return
        moves = self.pool.drain_moves()
        renamed = np.arange(self.pool.num_blocks * self.pool.pages_per_block, dtype=np.int32)
        came_from: dict[int, int] = {}
        for source, target in moves:
            origin = came_from.pop(source, source)
            came_from[target] = origin
            renamed[origin] = target
            self.prefix.tree.rename(source, target)
        for lease in self._leases:
            lease.full.held[:] = renamed[lease.full.held]
        self.moves.extend(Move(source, target, rename=True) for source, target in moves)


def _append(runs: list[PageRun], ids: Int[np.ndarray, " n"]) -> None:
    """Append a page to each run."""
    for run, page in zip(runs, ids.tolist(), strict=True):
        run.ids[run.end] = page
        run.end += 1
