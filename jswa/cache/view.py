"""What the arena, its rows and the prefix tree hold at one moment: ids and counts for who watches, never text."""

import time
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8

from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.pool import PagePool
from jswa.cache.prefix.edges import Node

# Codes of slots. A local page takes all slots of its slab, each of which has its code.
FREE, FULL, SHARED, CACHED, LOCAL, LOCAL_SHARED, KEPT = range(7)
_MOST_CHILDREN = 40  # of a node, the newest


class ArenaGeometry(NamedTuple):
    """Sizes that never change.

    window: size of a local layer's window or chunk, 0 without such layers.
    lookback: chunks that a query sees before its own.
    """

    page_size: int
    pages_per_slab: int
    num_slabs: int
    max_rows: int
    window: int
    chunked: bool
    has_full: bool
    lookback: int = 0


class CacheView(NamedTuple):
    """One moment.

    Attributes:
        slots: a code for each slot of the arena, those of the slab of zeros first.
        host: likewise for the slots of host memory, which only the cache holds; empty if there is none.
        rows: for each row with pages: row id, tokens launched, full pages at its start that it shares with the cache,
            page position of its window, page position behind its pages.
        tree: for each edge: index of the edge above (-1: none), first position, tokens, full pages, local pages, rows
            that started there, children that are left out. An edge comes behind the edge above it.
        windows: an edge of `tree` and the position of a window that it keeps.
        seconds: how long it took to look.
    """

    geometry: ArenaGeometry
    slots: UInt8[np.ndarray, " slots"]
    host: UInt8[np.ndarray, " host_slots"]
    rows: Int[np.ndarray, "R 5"]
    tree: Int[np.ndarray, "N 7"]
    windows: Int[np.ndarray, "W 2"]
    seconds: float


def geometry_of(layout: KVLayout, num_slabs: int, max_rows: int) -> ArenaGeometry:
    """Return the sizes of an arena."""
    reach, has_full = layout.reach, layout.full is not None
    window, chunked, lookback = (0, False, 0) if reach is None else (reach.size, reach.chunked, reach.lookback)
    return ArenaGeometry(
        layout.page_size, layout.pages_per_slab, num_slabs, max_rows, window, chunked, has_full, lookback
    )


def view(cache: CacheManager, launched: Int[np.ndarray, " rows"], edges: int) -> CacheView:
    """Return what a cache and its rows hold, with so many edges of the tree at most. Changes nothing.

    Args:
        launched: tokens launched, by row id.
    """
    begin = time.perf_counter()
    layout, table = cache.layout, cache.table
    geometry = geometry_of(layout, cache.pool.num_slabs, len(launched))
    slots = _slots(cache.pool)
    host = np.zeros(0, np.uint8) if cache.host is None else _slots(cache.host.tier.pool)
    held = table.covered.nonzero()[0]
    columns = (held, launched[held], table.shared[held], table.first_local[held], table.covered[held])
    rows = np.stack(columns, axis=1).astype(np.int32)
    rows[:, 4] //= layout.page_size
    tree, windows = _edges(cache, edges)
    return CacheView(geometry, slots, host, rows, tree, windows, time.perf_counter() - begin)


def _slots(pool: PagePool) -> UInt8[np.ndarray, " slots"]:
    slots = _codes(pool.full_owners, pool.full_cached)
    local = _codes(pool.local_owners, pool.local_cached)
    slots.reshape(-1, pool.pages_per_slab)[:] += (local + CACHED * (local > 0).view(np.uint8))[:, None]
    return slots


def _codes(owners: Int[np.ndarray, " n"], cached: Bool[np.ndarray, " n"]) -> UInt8[np.ndarray, " n"]:
    """Return 0 for a page without an owner, 1 if only rows own it, 2 if rows and the cache do, 3 if only the cache."""
    shared = cached.view(np.uint8)
    codes: UInt8[np.ndarray, " n"] = (owners > 0).view(np.uint8) + shared + (shared & (owners == 1).view(np.uint8))
    return codes


def _edges(cache: CacheManager, most: int) -> tuple[Int[np.ndarray, "N 7"], Int[np.ndarray, "W 2"]]:
    found: list[tuple[int, ...]] = []
    windows: list[tuple[int, int]] = []
    waiting: list[tuple[int, Node]] = [(-1, root) for root in islice(cache.prefix.tree.roots.values(), most)]
    for above, node in waiting:  # which grows meanwhile: the edges nearest to the roots come first
        if len(found) >= most:
            break
        index = above
        children = list(islice(reversed(node.children.values()), _MOST_CHILDREN))
        if node.parent is not None:
            index = len(found)
            pages = (int(np.count_nonzero(node.full)), int(np.count_nonzero(node.local)))
            left_out = len(node.children) - len(children)
            found.append((above, node.start, len(node.tokens), *pages, node.hits, left_out))
            windows += [(index, end) for end in node.windows]
        waiting += [(index, child) for child in children]
    return np.array(found, np.int64).reshape(-1, 7), np.array(windows, np.int64).reshape(-1, 2)
