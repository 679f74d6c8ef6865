"""Finds the pages on the disk that a text lacks in host memory."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.disk.records import DiskRecord, next_key, page_keys, tree_digest
from jswa.cache.disk.store import DiskStore
from jswa.cache.host.texts import Pages, pages_of
from jswa.cache.host.tier import HostTier
from jswa.cache.layout import KVLayout
from jswa.cache.prefix.resume import Resume, resume

_CANDIDATES = 4  # ends of a text that are compared, the last ones

Place = tuple[DiskRecord, int]  # a record, and a row, of a page the first one


class Wanted(NamedTuple):
    """A text to read.

    Attributes:
        salt, tokens: the text, as in `PrefixCache`.
        at: where a row starts with it.
        gain: tokens that need not be computed.
        pages: by page position the number of a page's first row in `rows`, from 1 on; 0: not wanted from the disk.
        rows: where they are.
        records: the files to read.
    """

    salt: str
    tokens: Int[np.ndarray, " T"]
    at: Resume
    gain: int
    pages: Pages
    rows: list[Place]
    records: list[DiskRecord]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(record.size for record in self.records)


class _Part(NamedTuple):
    """The pages of the beginning of a text by page position: in host memory, or on the disk if they are not there."""

    full_here: Bool[np.ndarray, " n"]
    local_here: Bool[np.ndarray, " n"]
    full: list[Place | None]
    local: list[Place | None]

    @property
    def live(self) -> Bool[np.ndarray, " n"]:
        """Whether there is a local page."""
        return _or(self.local_here, self.local)

    @property
    def held(self) -> Bool[np.ndarray, " n"]:
        """Whether there is a full page."""
        return _or(self.full_here, self.full)


class _Text:
    """A text, and where its pages may be."""

    def __init__(self, tier: HostTier, store: DiskStore, salt: str, tokens: Int[np.ndarray, " T"]) -> None:
        self.tier, self.store, self.tokens = tier, store, tokens
        self.page = page = tier.prefix.layout.page_size
        root = tree_digest(store.geometry.identity, salt)
        self.keys = [root, *page_keys(root, tokens[: len(tokens) // page * page], page)]  # by whole pages before it
        self.path, self.agreed = tier.prefix.tree.walk(salt, tokens)

    def part(self, end: int) -> _Part:
        """Return the pages of the first `end` tokens."""
        whole = end // self.page
        keys = self.keys[1 : 1 + whole]
        if end % self.page:
            keys.append(next_key(self.keys[whole], self.tokens[whole * self.page : end].astype(np.int32).tobytes()))
        pages = pages_of(self.tier.prefix.tree, self.path, min(self.agreed, end), end)
        full, local = self.tier.arrived(pages)
        return _Part(
            full,
            local,
            [None if there else self.store.find(("full", key)) for there, key in zip(full, keys, strict=True)],
            [None if there else self.store.find(("local", key)) for there, key in zip(local, keys, strict=True)],
        )

    def ends(self, whole: int) -> list[int]:
        """Return where texts end that may be there, the last ones first, if so many whole pages are."""
        ends = {whole * self.page}
        for i in range(whole + 1):
            ends |= {i * self.page + count for count in self.store.tails(self.keys[i])}
        return sorted((end for end in ends if 0 < end <= len(self.tokens)), reverse=True)[:_CANDIDATES]


def find(
    tier: HostTier, store: DiskStore, salt: str, tokens: Int[np.ndarray, " T"], limit: int, start: int
) -> Wanted | None:
    """Return the most that the disk adds to a text; None if it adds nothing.

    Args:
        limit: where a row would start at most; pages that reach further are of use all the same.
        start: where a row would start without disk and host memory.
    """
    layout = tier.prefix.layout
    if len(tokens) < layout.page_size or not store.used:
        return None
    text = _Text(tier, store, salt, tokens)
    part = text.part(len(tokens) // layout.page_size * layout.page_size)
    if layout.full is not None:
        missing = np.flatnonzero(~part.held)
        whole = int(missing[0]) if len(missing) else len(part.full)
    else:  # a local page tells that the disk knows the text before it
        whole = max([text.agreed // layout.page_size, *(i + 1 for i in np.flatnonzero(part.live).tolist())])
    here = text.part(text.agreed)
    if layout.full is None or here.full_here.all():
        start = max(start, resume(layout, min(text.agreed, limit), here.local_here).start)
    best: Wanted | None = None
    for end in text.ends(whole):
        part = text.part(end)
        if end % layout.page_size and end < text.agreed:
            continue  # a tree takes no part-filled page in the middle of a text
        if layout.full is None or part.held.all():
            at = resume(layout, min(end, limit), part.live)
            found = _wanted(layout, salt, tokens[:end], part, at, start)
            if found.records and found.gain > (layout.page_size if best is None else best.gain):
                best = found
    return best


def _wanted(layout: KVLayout, salt: str, tokens: Int[np.ndarray, " T"], part: _Part, at: Resume, start: int) -> Wanted:
    """Return the pages that a row which begins with a text, and starts there, needs from the disk."""
    first = at.local_visible_from // layout.page_size
    last = -(-at.boundary // layout.page_size) if at.boundary > at.local_visible_from else first
    local = [place if first <= i < last else None for i, place in enumerate(part.local)]
    full: list[Place | None] = part.full if layout.full is not None else [None for _ in local]
    pages, rows = Pages(np.zeros(len(local), np.int32), np.zeros(len(local), np.int32)), list[Place]()
    for i, both in enumerate(zip(full, local, strict=True)):
        for numbers, place, size in zip((pages.full, pages.local), both, (1, layout.pages_per_slab), strict=True):
            if place is not None:
                numbers[i] = 1 + len(rows)
                rows += [(place[0], place[1] + row) for row in range(size)]
    return Wanted(salt, tokens.copy(), at, at.start - start, pages, rows, list(dict.fromkeys(row[0] for row in rows)))


def _or(here: Bool[np.ndarray, " n"], places: list[Place | None]) -> Bool[np.ndarray, " n"]:
    there = here.copy()
    there[[i for i, place in enumerate(places) if place is not None]] = True
    return there
