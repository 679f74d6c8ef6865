"""Texts that come back from host memory to the device, before the requests that wait for them begin.

One at a time: its pages get memory of the device at once, their contents come a few slots with each step, and when the
last have been sent the text is published on the device, where requests match it as any other. Meanwhile nothing that it
takes from either memory is evicted. A text is not taken back if that costs more time than it saves.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.disk.texts import DiskCache
from jswa.cache.host.texts import Pages, add_places, pages_of, places_of, publish, text_of
from jswa.cache.host.tier import HostTier
from jswa.cache.moves import Move
from jswa.cache.prefix.cache import PrefixCache, PrefixMatch
from jswa.cache.prefix.radix import NONE
from jswa.cache.prefix.resume import resume
from jswa.cache.prefix.stats import CacheStats
from jswa.config import HostMemory
from jswa.plan import Transfers


class HostMatch(NamedTuple):
    """A text of which host memory has more than the device.

    Attributes:
        salt, tokens: key of the tree, and the text to the end of its last page or of the tree's text.
        source: the pages here, all full ones, as only the end of a text can be evicted, and the local ones to copy.
        lacks: of which page positions the full pages are to be copied.
        kept: the pages of the device that a row would use with them.
        boundary: end of the window to keep; 0: none.
        places: of the text, with their kinds.
        branch: of that window.
    """

    salt: str
    tokens: Int[np.ndarray, " T"]
    source: Pages
    lacks: Bool[np.ndarray, " n"]
    kept: Pages
    boundary: int
    places: dict[int, int]
    branch: bool


class NewPages(NamedTuple):
    """New full and local pages of the device, without another owner."""

    full: Int[np.ndarray, " F"]
    local: Int[np.ndarray, " L"]


class Recall:
    """A text on its way. `new`: its pages on the device; `sent`: how many of its pages have been copied."""

    def __init__(self, found: HostMatch, epoch: int) -> None:
        self.found = found
        self.epoch = epoch
        self.new = Pages(np.zeros_like(found.source.full), np.zeros_like(found.source.local))
        self.sent = 0
        self._kinds = [("full", at) for at in np.flatnonzero(found.lacks).tolist()]
        self._kinds += [("local", at) for at in np.flatnonzero(found.source.local).tolist()]

    @property
    def complete(self) -> bool:
        """Whether all pages have been copied."""
        return self.sent == len(self._kinds)

    def uploads(self, slots: int, pages_per_slab: int) -> list[tuple[int, int]]:
        """Return the next pairs (slot here, slot of the device), about so many; they count as copied."""
        pairs: list[tuple[int, int]] = []
        while not self.complete and len(pairs) < slots:
            kind, at = self._kinds[self.sent]
            m = 1 if kind == "full" else pages_per_slab
            source, target = (int(getattr(pages, kind)[at]) * m for pages in (self.found.source, self.new))
            pairs += [(source + i, target + i) for i in range(m)]
            self.sent += 1
        return pairs


class HostCache:
    """Owns host memory (`tier`), and the text that is on its way back, if there is one.

    Args:
        device: the prefix cache on the device.
        moves: returns the moves of the device that wait for the next plan.

    Attributes:
        active: the text on its way.
        disk: the files behind host memory; None: there are none.
        changes: counts texts that began and ended to come back.
        recalled: slots that were copied back so far.
    """

    def __init__(self, device: PrefixCache, memory: HostMemory, moves: Callable[[], list[Move]]) -> None:
        self.tier = tier = HostTier(device, memory)
        self.active: Recall | None = None
        self.disk: DiskCache | None = None
        self.changes = self.recalled = 0
        device.retention.demote = lambda item: tier.keep(item, moves())
        self._device = device
        self._memory = memory

    @property
    def held(self) -> list[Pages]:
        """Pages of the device that the text on its way owns, beside other owners or alone."""
        return [] if self.active is None else [self.active.new, self.active.found.kept]

    def find(self, salt: str, tokens: Int[np.ndarray, " T"], limit: int, match: PrefixMatch) -> HostMatch | None:
        """Return the pages that host memory adds to a match of the first `limit` tokens; None if they do not pay."""
        layout, page = self._device.layout, self._device.layout.page_size
        path, agreed = self.tier.prefix.tree.walk(salt, tokens[:limit])
        if not path or agreed <= match.resume.start:
            return None
        text = text_of(path, agreed, page)
        here = pages_of(self.tier.prefix.tree, path, len(text), len(text))
        full, local = self.tier.arrived(here)
        if layout.full is not None and not full.all():
            return None
        device_path, device_end = self._device.tree.walk(salt, text)
        kept = pages_of(self._device.tree, device_path, device_end, len(text))
        to = max(agreed, match.resume.full_to)
        if to > len(text) and len(text) % page:
            local[-1] = False  # the device has more of that page
        live = np.zeros(-(-to // page), bool)
        live[: len(local)] = local | (kept.local != NONE)
        if match.text > agreed:  # the device knows more of the text, and local pages behind
            ids = self._device.tree.pages(list(match.path), match.text)[1][: len(live)]
            live[: len(ids)] |= ids != NONE
        at = resume(layout, to, live)
        first, last = at.local_visible_from // page, min(-(-at.boundary // page), len(local))
        window = np.zeros(len(local), bool)
        window[first : last if at.boundary > at.local_visible_from else first] = True
        lacks = (here.full != NONE) & (kept.full == NONE)
        here.local[~window | (kept.local != NONE) | ~local] = NONE
        kept.local[~window] = NONE
        gain = at.start - match.resume.start
        cost = int(np.count_nonzero(lacks)) + layout.pages_per_slab * int(np.count_nonzero(here.local))
        if not cost or gain <= max(page, cost * self._memory.tokens_per_slot):
            return None
        places = places_of(path, len(text))
        # A prompt has the last token of a text that it continues, of which there is no KV: its boundary is one behind.
        boundary = max((end for end in places if end <= at.boundary), default=min(at.boundary, len(text)))
        branch = any(node.windows[boundary].branch for node in path if boundary in node.windows)
        return HostMatch(salt, text, here, lacks, kept, boundary, places, branch)

    def begin(self, found: HostMatch, epoch: int, allocate: Callable[[int, int], NewPages | None]) -> bool:
        """Begin to take a text back; False, and no change, if there is no room.

        Args:
            epoch: if the cache's differs at the end, the text has been withdrawn.
            allocate: takes numbers of full and local pages, and returns new ones; pages that are `held` must be renamed
                meanwhile.
        """
        assert self.active is None
        host, device, recall = self.tier, self._device, Recall(found, epoch)
        found.source.hold(host.pool, host.prefix.retention)
        found.kept.hold(device.pool, device.retention)
        host.reading.append(found.source)
        self.active = recall
        local = found.source.local != NONE
        pages = allocate(int(np.count_nonzero(found.lacks)), int(np.count_nonzero(local)))
        if pages is None:
            self._end()
            return False
        recall.new.full[found.lacks], recall.new.local[local] = pages.full, pages.local
        self.changes += 1
        return True

    def drain(self) -> Transfers | None:
        """Return the copies of the next step; None if there are none."""
        pairs: list[tuple[int, int]] = []
        if self.active is not None:
            pairs = self.active.uploads(self._memory.slots_per_step, self._device.pool.pages_per_slab)
            self.recalled += len(pairs)
        moves, downloads, writes = self.tier.drain()
        saves = () if self.disk is None else self.disk.saves()
        found = Transfers(moves, downloads, np.array(pairs, np.int32).reshape(-1, 2), writes, saves)
        return found if any(len(part) for part in found) else None

    def land(self, batches: int, *, lost: bool) -> None:
        """Note that so many more batches of downloads have arrived. `lost`: forget everything, contents were lost."""
        if lost:
            self.flush()
        self.tier.land(batches)

    def counted(self, stats: CacheStats) -> CacheStats:
        """Return the figures of the cache with those of host memory."""
        pool = self.tier.pool
        usage = 1 - pool.free_slots / pool.total_slots
        stats = replace(stats, host_written_slots=self.tier.copied, host_read_slots=self.recalled, host_usage=usage)
        if self.disk is None:
            return stats
        store = self.disk.store
        return replace(
            stats,
            disk_written_bytes=store.written,
            disk_read_bytes=store.read,
            disk_dropped=store.dropped,
            disk_usage=store.used / store.limit,
        )

    def finish(self, epoch: int) -> None:
        """Publish the text on its way, if all its pages have been sent. All drained copies have been launched."""
        recall = self.active
        if recall is None or not recall.complete:
            return
        if recall.epoch == epoch:
            found = recall.found
            cursor = publish(self._device, found.salt, found.tokens, recall.new)
            assert cursor.node is not None
            add_places(cursor.node, found.places)
            if found.boundary:
                self._device.retention.add_window(cursor.node, found.boundary, branch=found.branch)
            self._device.detach(cursor)
        self.cancel()

    def cancel(self) -> None:
        """Give up the text on its way: its pages are free, unless the tree has them."""
        if self.active is not None:
            self._end()
            self.changes += 1

    def withdraw(self, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        """Remove a text, with everything that continues it or a part of it, here and on the disk."""
        self.tier.prefix.withdraw(salt, tokens)
        if self.disk is not None:
            self.disk.withdraw(salt, tokens)

    def retire(self) -> None:
        """Forget everything: the weights have changed. The files stay, and are not used any more."""
        self.flush()
        if self.disk is not None:
            self.disk.retire()

    def flush(self) -> None:
        """Forget everything that is in memory."""
        self.cancel()
        self.tier.flush()

    def check(self) -> None:
        """Assert the laws of host memory and of the files."""
        self.tier.check()
        if self.disk is not None:
            self.disk.store.check()

    def rename(self, renamed: Int[np.ndarray, " pages"]) -> None:
        """Follow the full pages of the device that the pool has moved."""
        for pages in self.held:
            pages.full[:] = renamed[pages.full]

    def _end(self) -> None:
        recall, host = self.active, self.tier
        assert recall is not None
        host.reading.remove(recall.found.source)
        recall.found.source.release(host.pool, host.prefix.retention)
        for pages in self.held:
            pages.release(self._device.pool, self._device.retention)
        self.active = None
