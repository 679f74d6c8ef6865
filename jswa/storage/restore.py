"""Publishes a saved cache in a prefix tree: the text that the tree lacks, as much of it as free memory holds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.host.texts import pages_of, take
from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER
from jswa.cache.manager import CacheManager
from jswa.cache.moves import rename
from jswa.cache.prefix.edges import Cursor
from jswa.cache.prefix.radix import NONE
from jswa.storage.snapshot import SavedText


class Restored(NamedTuple):
    """Tokens of text that the tree has gained, and the saved row to write to each slot of the arena."""

    tokens: int
    slots: Int[np.ndarray, " n"]
    rows: Int[np.ndarray, " n"]


def restore(cache: CacheManager, salt: str, texts: list[SavedText]) -> Restored:
    """Publish the part of checked texts that the tree of a salt lacks, as much of it as free memory holds.

    Nothing is evicted: if memory is short, the texts used longest ago are left out. Local pages that no window needs
    come last. The pool may have to move pages, so the manager's moves must be carried out on the device before the
    slots are written.
    """
    prefix, before, rows = cache.prefix, cache.prefix.tree.num_tokens(salt), dict[int, int]()
    cursors = dict[int, Cursor]()  # while they stand at the ends of the texts, no text makes another older
    texts = sorted(texts, key=lambda text: text.age)
    most = max((int(max(text.pages.full.max(), text.pages.local.max())) for text in texts), default=0)
    short = most + cache.pool.pages_per_slab > cache.pool.free_slots
    for number, text in enumerate(texts):
        cursor = _enter(cache, salt, text, _needed(text, cache.layout) if short else text.pages.local != NONE, rows)
        if cursor is not None:
            cursors[number] = cursor
    for number in cursors if short else ():
        spare = _spare(cache, salt, texts[number])
        if spare.any() and (other := _enter(cache, salt, texts[number], spare, rows)) is not None:
            prefix.detach(other)
    for cursor in cursors.values():
        prefix.detach(cursor)
    found = np.array(list(rows.items()), np.int64).reshape(-1, 2)
    return Restored(prefix.tree.num_tokens(salt) - before, found[:, 0], found[:, 1] - 1)


def _enter(
    cache: CacheManager, salt: str, text: SavedText, wanted: Bool[np.ndarray, " n"], rows: dict[int, int]
) -> Cursor | None:
    """Publish a text, with its wanted local pages; return a cursor at its end, or None, and no change, without room.

    Args:
        rows: by slot the number of the saved row; those of the new pages are added.
    """
    prefix, moved = cache.prefix, len(cache.moves)
    uses = {node: node.last for node in prefix.tree.walk(salt, text.tokens)[0][-1:]}
    taken = take(prefix, salt, text.tokens, text.pages, wanted, cache.compact, evict=False)
    if taken is None:
        return None
    for move in cache.moves[moved:]:
        rename(rows, move.source, move.target)
    rows.update(zip(taken.slots.tolist(), taken.sources.tolist(), strict=True))
    node, clock = taken.node, prefix.tree.clock
    if len(taken.slots) and node.end == len(text.tokens):
        node.last, node.hits = max(clock - text.age, uses.get(node, -NEVER)), text.hits  # a leaf that grows stays young
        prefix.tree.candidates.refresh(node)
    for end, branch, age, hits in text.windows:
        prefix.retention.add_window(node, end, branch=branch, last_use=clock - age, hits=hits)
    return taken.cursor


def _spare(cache: CacheManager, salt: str, text: SavedText) -> Bool[np.ndarray, " n"]:
    """Return the page positions of the local pages that the tree lacks, as many as there is room for."""
    tree = cache.prefix.tree
    known = pages_of(tree, *tree.walk(salt, text.tokens), len(text.tokens)).local
    lacking: Bool[np.ndarray, " n"] = (text.pages.local != NONE) & (known == NONE)
    at = np.flatnonzero(lacking)
    lacking[at[: max(0, len(at) - cache.pool.free_slots // cache.pool.pages_per_slab)]] = False
    return lacking


def _needed(text: SavedText, layout: KVLayout) -> Bool[np.ndarray, " n"]:
    """Return the page positions of the local pages that whole windows of a text need."""
    needed, reach, page = np.zeros(len(text.pages.local), bool), layout.reach, layout.page_size
    if reach is None:
        return needed
    for end, *_ in text.windows:
        own = slice(reach.first_visible(end) // page, -(-end // page))
        needed[own] |= bool((text.pages.local[own] != NONE).all())
    return needed
