"""A text of a prefix tree with its pages, to be carried to another tree and published there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.lease import Lease, LeaseTable
from jswa.cache.moves import slots_of
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.edges import Cursor, Node
from jswa.cache.prefix.radix import NONE, RadixTree
from jswa.cache.prefix.retention import Retention


@dataclass(eq=False)
class Pages:
    """Pages of one pool by page position, full and local ones; 0: none. Pools that move pages rename them here."""

    full: Int[np.ndarray, " n"]
    local: Int[np.ndarray, " n"]

    @property
    def held(self) -> tuple[Int[np.ndarray, " F"], Int[np.ndarray, " L"]]:
        """The ids."""
        return self.full[self.full != NONE], self.local[self.local != NONE]

    def rename(self, source: int, target: int) -> None:
        """Follow a full page that the pool has moved."""
        self.full[self.full == source] = target

    def hold(self, pool: PagePool, retention: Retention) -> None:
        """Become an owner of the pages, so that they are not evicted."""
        full, local = self.held
        pool.retain_full(full)
        pool.retain_local(local)
        retention.pin(local)

    def release(self, pool: PagePool, retention: Retention) -> None:
        """Be an owner no longer."""
        full, local = self.held
        pool.free_full(full)
        pool.free_local(local)
        retention.unpin(local)


def path_to(node: Node) -> list[Node]:
    """Return the edges from the root to an edge."""
    path, above = [node], node.parent
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    return path[::-1]


def text_of(path: list[Node], end: int, page_size: int) -> Int[np.ndarray, " T"]:
    """Return the tokens of a path up to `end`, and from there to the end of the page if its last edge has them."""
    end = min(-(-end // page_size) * page_size, path[-1].end)
    return np.concatenate([node.tokens for node in path])[:end]


def pages_of(tree: RadixTree, path: list[Node], agreed: int, length: int) -> Pages:
    """Return the pages that a tree has of a text of `length` tokens, of which the tree has the first `agreed`.

    The last page counts only if the tree has all of the text in it.
    """
    count, whole = -(-length // tree.page_size), -(-agreed // tree.page_size)
    found = Pages(np.zeros(count, np.int32), np.zeros(count, np.int32))
    if path:
        full, local = tree.pages(path, agreed)
        whole = whole if agreed == length else agreed // tree.page_size
        found.full[:whole], found.local[:whole] = full[:whole], local[:whole]
    return found


def places_of(path: list[Node], end: int) -> dict[int, int]:
    """Return the places of a path up to `end`, with their kinds."""
    return {at: kind for node in path for at, kind in node.places.items() if at <= end}


def add_places(tail: Node, places: dict[int, int]) -> None:
    """Enter places on the path to the end of an edge. Kinds that are known there already are overwritten."""
    for node in path_to(tail):
        node.places |= {at: kind for at, kind in places.items() if node.start < at <= node.end}


class Taken(NamedTuple):
    """A text that a tree has taken.

    Attributes:
        node: the edge that has its end.
        cursor: there; the caller detaches it.
        slots: of the pages that the tree has gained.
        sources: the numbers elsewhere of their contents.
    """

    node: Node
    cursor: Cursor
    slots: Int[np.ndarray, " slots"]
    sources: Int[np.ndarray, " slots"]


def take(
    prefix: PrefixCache,
    salt: str,
    tokens: Int[np.ndarray, " T"],
    source: Pages,
    wanted: Bool[np.ndarray, " n"],
    follow: Callable[[], None],
    *,
    evict: bool,
) -> Taken | None:
    """Publish what a tree lacks of a text that is elsewhere, in new pages; None, and no change, if there is no room.

    Args:
        source: by page position the number of a page's first slot elsewhere, where those of a page follow each other;
            0: none.
        wanted: whether to take the local page; it may be changed: what takes the place of a partly filled page is taken
            too, because windows of the tree need it.
        follow: renames the full pages that the pool has moved.
        evict: whether other texts may be evicted.
    """
    layout, pool, m = prefix.layout, prefix.pool, prefix.pool.pages_per_slab
    path, agreed = prefix.tree.walk(salt, tokens)
    there = pages_of(prefix.tree, path, agreed, len(tokens))
    lacks_full = np.zeros(len(wanted), bool)
    if agreed < len(tokens):
        lacks_full[agreed // layout.page_size :] = layout.full is not None
        wanted[agreed // layout.page_size] |= agreed % layout.page_size > 0
    lacks_local = wanted & (source.local != NONE) & (there.local == NONE)
    if np.any(lacks_full & (source.full == NONE)):  # they were here before, and have been evicted
        return None
    slots = int(lacks_full.sum()) + m * int(lacks_local.sum())
    if slots > pool.free_slots:
        there.hold(pool, prefix.retention)
        fits = evict and slots <= pool.free_slots + pool.evictable_slots
        if fits:
            prefix.retention.make_room(slots)
        there.release(pool, prefix.retention)
        if not fits:
            return None
    new = Pages(np.zeros_like(source.full), np.zeros_like(source.local))
    new.local[lacks_local] = pool.alloc_local(int(lacks_local.sum()))
    follow()
    new.full[lacks_full] = pool.alloc_full(int(lacks_full.sum()))
    cursor = publish(prefix, salt, tokens, new)
    assert cursor.node is not None
    full, local = pool.full_cached[new.full], pool.local_cached[new.local]
    sources = np.concatenate([source.full[full], (source.local[local][:, None] + np.arange(m)).reshape(-1)])
    new.release(pool, prefix.retention)
    return Taken(cursor.node, cursor, slots_of(new.full[full], new.local[local], m), sources)


def publish(
    prefix: PrefixCache,
    salt: str,
    tokens: Int[np.ndarray, " T"],
    pages: Pages,
    above: Node | None = None,
    start: int = 0,
) -> Cursor:
    """Publish a text in a tree; return the cursor at its end, which the caller detaches.

    The tree becomes an owner of the pages that it lacks, beside the caller.

    Args:
        pages: the pages that the tree lacks, and perhaps pages that it has got meanwhile.
        above: an edge that has the first `start` tokens; None: the root.
    """
    page, count = prefix.layout.page_size, len(pages.full)
    table = LeaseTable(prefix.layout, 1, count)
    table.full[0], table.local[0], table.covered[0] = pages.full, pages.local, count * page
    lease = Lease(table, 0, salt=salt)
    prefix.attach(lease.cursor, above or prefix.tree.root(salt), start)
    prefix.publish(lease, tokens, len(tokens), final=True)
    node, last = lease.cursor.node, int(pages.local[-1])
    assert node is not None
    whole = not node.children and node.end == len(tokens)
    if whole and len(tokens) % page and NONE == node.local[-1] != last and not prefix.pool.local_cached[last]:
        # Rows never give the tree a partly filled page of a text that it has.
        prefix.tree.adopt_local(node, np.array([len(node.local) - 1]), pages.local[-1:])
    return lease.cursor
