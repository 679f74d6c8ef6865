"""Writes texts of host memory to the disk, and reads texts for requests that wait.

A text is written once its pages have arrived in host memory, ahead of their eviction there, as far as no file has them:
so a process that is killed leaves all that the device has evicted. Pages are found by digests of the whole text before
them, identity and salt included, so a page of another text, tenant or model cannot be found at all.

A text that is read becomes a text of host memory, a part with each step, from where `Recall` takes it to the device.
"""

import time
from collections import deque
from functools import partial

import numpy as np
from jaxtyping import Int

from jswa.cache.disk.find import Wanted, find
from jswa.cache.disk.records import DiskRecord, Key, Lanes, Tail, page_keys, tree_digest
from jswa.cache.disk.store import DiskStore
from jswa.cache.host.texts import Pages, pages_of
from jswa.cache.host.tier import HostTier, Row
from jswa.cache.moves import slots_of
from jswa.cache.prefix.radix import NONE
from jswa.plan import Save

_TEXTS = 256  # that wait to be written
_PATIENCE = 1.0  # seconds that a request waits at least for what it has asked for, and once


class DiskCache:
    """Owns the store, and the text that is being read, if there is one.

    Args:
        slots_per_step: slots that one step writes or takes in at most.
        seconds_per_token: time to compute a token; a text that takes longer to read is not read.

    Attributes:
        wanted: the text that is being read, or taken in.
        torn: whether the last text was given up because one of its files was a miss.
        seconds_per_token: as above; it may be changed between steps.
    """

    def __init__(
        self,
        tier: HostTier,
        store: DiskStore,
        slots_per_step: int,
        seconds_per_token: float,
        patience: float = _PATIENCE,
    ) -> None:
        self.store = store
        self.wanted: Wanted | None = None
        self.torn = False
        self._tier = tier
        self._slots = max(slots_per_step, 1 + tier.pool.pages_per_slab)
        self.seconds_per_token = seconds_per_token
        self._patience = patience
        self._retired = False
        self._late = False  # a request has stopped waiting for the read under way
        self._lanes: dict[DiskRecord, Lanes] = {}  # the rows that were read
        self._asked = 0.0  # when
        self._taken = 0  # pages that have been taken in
        tier.kept = deque(maxlen=_TEXTS)

    def find(self, salt: str, tokens: Int[np.ndarray, " T"], limit: int, start: int) -> Wanted | None:
        """Return the pages that the disk adds to a text; None if reading takes too long, or if they do not fit here.

        Args:
            limit: where a row would start at most.
            start: where a row would start without disk and host memory.
        """
        if self._retired or (self._late and self.store.reading):
            return None
        self._late = False
        wanted = find(self._tier, self.store, salt, tokens, limit, start)
        if wanted is None or self.store.seconds(wanted.records) > wanted.gain * self.seconds_per_token:
            return None
        pool = self._tier.pool
        return wanted if len(wanted.rows) <= pool.free_slots + pool.evictable_slots else None

    def patience(self, wanted: Wanted) -> float:
        """Return how many seconds a request waits at most for these pages."""
        return max(self._patience, wanted.gain * self.seconds_per_token)

    def begin(self, wanted: Wanted) -> None:
        """Begin to read a text."""
        assert self.wanted is None
        self.wanted, self._lanes, self._taken, self._asked = wanted, {}, 0, time.monotonic()
        self.torn = False
        self.store.use(wanted.records)
        for record in wanted.records:
            self.store.fetch(record, partial(self._arrive, wanted, record))

    def settle(self, seconds: float = 0.0) -> None:
        """Take in the pages that were read; wait up to `seconds` for them. Called once per step."""
        self.store.settle(seconds if self.wanted is not None else 0.0)
        wanted = self.wanted
        if wanted is not None and len(self._lanes) == len(wanted.records):
            self._take(wanted)

    def give_up(self) -> None:
        """Note that the request waits no longer for the read under way, because it takes too long."""
        if self.wanted is not None:
            self._late = True
            self.store.slow(max(time.monotonic() - self._asked, 1e-3), self.wanted.size)

    def saves(self) -> tuple[Save, ...]:
        """Return the slots of host memory to write with this step, as the step's moves have left them."""
        kept = self._tier.kept
        while kept and not self._retired:
            salt, tokens, batch = kept[0]
            if not self._tier.landed(batch):
                break
            save, more = self._save(salt, tokens)
            if not more:
                kept.popleft()
            if save is not None:
                return (save,)
        return ()

    def withdraw(self, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        """Delete a text, with all texts of the same first page; of a text without a whole page, all of its salt."""
        page, root = self._tier.prefix.layout.page_size, tree_digest(self.store.geometry.identity, salt)
        first = page_keys(root, tokens[:page], page)[0] if len(tokens) >= page else None
        self._cancel()
        self.store.forget(lambda record: record.tree == root if first is None else record.first == first)

    def clear(self) -> None:
        """Delete all texts of this engine."""
        self._cancel()
        self._tier.kept.clear()
        self.store.forget(lambda _: True)

    def retire(self) -> None:
        """Write and find nothing any more: the weights have changed. The files stay for an engine with the old ones."""
        self._cancel()
        self._retired = True
        self._tier.kept = deque(maxlen=0)

    def _cancel(self) -> None:
        self.wanted, self._lanes = None, {}

    def _arrive(self, wanted: Wanted, record: DiskRecord, lanes: Lanes | None) -> None:
        """Keep the rows of a record; if a record is lost, the text is given up, and may be asked for again."""
        if self.wanted is not wanted:
            return
        if lanes is None:
            self._cancel()
            self.torn = True
        else:
            self._lanes[record] = lanes

    def _take(self, wanted: Wanted) -> None:
        """Publish the next part of the text in host memory, as many pages as a step takes in."""
        page, count = self._tier.prefix.layout.page_size, len(wanted.pages.full)
        slots = (wanted.pages.full != NONE) + self._tier.pool.pages_per_slab * (wanted.pages.local != NONE)
        to = self._taken + int(np.searchsorted(np.cumsum(slots[self._taken :]), self._slots, side="right"))
        end, source = min(to * page, len(wanted.tokens)), Pages(wanted.pages.full[:to], wanted.pages.local[:to])
        rows: list[Row] = [(self._lanes[record], row) for record, row in wanted.rows]
        boundary = wanted.at.boundary if to == count else 0
        if not self._tier.take(wanted.salt, wanted.tokens[:end], source, rows, boundary) or to == count:
            self._cancel()
        self._taken = to

    def _save(self, salt: str, tokens: Int[np.ndarray, " T"]) -> tuple[Save | None, bool]:
        """Return the pages of a text to write now, and whether more are left."""
        tier, geometry = self._tier, self.store.geometry
        page, m = tier.prefix.layout.page_size, tier.pool.pages_per_slab
        path, agreed = tier.prefix.tree.walk(salt, tokens)
        if agreed < len(tokens):
            agreed -= agreed % page  # its end has been evicted
        if agreed < page:
            return None, False
        pages = pages_of(tier.prefix.tree, path, agreed, agreed)
        there = dict(zip(("full", "local"), tier.arrived(pages), strict=True))
        root = tree_digest(geometry.identity, salt)
        keys = page_keys(root, tokens[:agreed], page)
        chosen, known, slots, more = list[tuple[int, Key]](), dict[DiskRecord, None](), 0, False
        for at, digest in enumerate(keys):
            for kind in ("full", "local"):
                key = kind, digest
                if found := self.store.find(key):
                    known[found[0]] = None
                elif there[kind][at] and not self.store.has(key):
                    more = more or slots + geometry.rows(key) > self._slots
                    if not more:
                        slots += geometry.rows(key)
                        chosen.append((at, key))
        self.store.use(known)  # else the beginning of a text that grows would be the oldest
        if not chosen or not self.store.room(slots):
            return None, False
        own = [slots_of(*_ids(pages, at, kind), m) for at, (kind, _) in chosen]
        tail = Tail(keys[-2], agreed % page) if chosen[-1][0] == len(keys) - 1 and agreed % page else None
        record = DiskRecord(geometry.identity, root, keys[0], tuple(key for _, key in chosen), tail)
        return Save(np.concatenate(own), partial(self.store.put, record)), more


def _ids(pages: Pages, at: int, kind: str) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " k"]]:
    """Return a page as full pages and local pages."""
    none, own = np.zeros(0, np.int32), getattr(pages, kind)[at : at + 1]
    return (own, none) if kind == "full" else (none, own)
