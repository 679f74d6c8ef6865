"""Publishes a snapshot in a prefix tree: the text that the tree lacks, as much of it as free memory holds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.architecture import Reach
from jswa.cache.host.texts import Pages, publish
from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER
from jswa.cache.manager import CacheManager
from jswa.cache.moves import slots_of
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.edges import Cursor
from jswa.cache.prefix.radix import RadixTree
from jswa.storage.snapshot import CacheSnapshot, Edges

_NONE = np.zeros(0, np.int32)


class Restored(NamedTuple):
    """Tokens of text that the tree has gained, and the saved slot (`rows`) to write to each slot of the arena."""

    tokens: int
    slots: Int[np.ndarray, " n"]
    rows: Int[np.ndarray, " n"]


def restore(cache: CacheManager, salt: str, snapshot: CacheSnapshot) -> Restored:
    """Publish the text of a checked snapshot that the tree of a salt lacks, as much of it as free memory holds.

    Nothing is evicted: if memory is short, the branches used longest ago are left out. The pool may have to move
    pages, so the manager's moves must be carried out on the device before the slots are written.
    """
    prefix, pool, m = cache.prefix, cache.pool, cache.pool.pages_per_slab
    has_full, before = cache.layout.full is not None, prefix.tree.num_tokens(salt)
    edges = Edges.of(snapshot, cache.layout.page_size)
    new, last_use = _lacking(prefix.tree, salt, snapshot, edges)
    chosen, local = _choose(snapshot, edges, new, cache.layout, pool.free_slots)
    full = new & np.repeat(chosen, edges.pages) & has_full
    slabs, pages = np.zeros(len(new), np.int32), np.zeros(len(new), np.int32)
    slabs[local] = pool.alloc_local(int(local.sum()))
    cache.compact()  # full pages may have moved to make whole slabs free
    pages[full] = pool.alloc_full(int(full.sum()))
    cursors = _publish(prefix, salt, snapshot, edges, chosen, pages, slabs)
    for edge, cursor in cursors.items():
        if cursor.node is not None and new[edges.entries(edge)].any():
            cursor.node.last = max(cursor.node.last, int(last_use[edge]))
            prefix.tree.candidates.refresh(cursor.node)
    # The tree owns the pages now. Pages of text that two edges of the snapshot share are free again.
    pool.free_full(pages[full])
    pool.free_local(slabs[local])
    prefix.retention.unpin(slabs[local])
    _add_windows(prefix, snapshot, cursors)
    for cursor in cursors.values():
        prefix.detach(cursor)
    saved_full = len(new) if has_full else 0
    numbers = np.cumsum(snapshot.local) - 1
    rows = [np.flatnonzero(full), saved_full + slots_of(_NONE, numbers[local], m)]
    slots = slots_of(pages[full], slabs[local], m)
    return Restored(prefix.tree.num_tokens(salt) - before, slots, np.concatenate(rows))


def _lacking(
    tree: RadixTree, salt: str, snapshot: CacheSnapshot, edges: Edges
) -> tuple[Bool[np.ndarray, " entries"], Int[np.ndarray, " edges"]]:
    """Entries whose text the tree does not have to its end, and by edge the last use of the leaf that it extends."""
    new, last_use = np.ones(len(snapshot.local), bool), np.full(len(snapshot.parent), -NEVER)
    for edge in range(len(snapshot.parent)):
        path, found = tree.walk(salt, edges.text_to(snapshot, edge))
        agreed = found - int(edges.start[edge])
        if agreed > 0:
            whole = agreed == snapshot.length[edge]
            new[edges.entries(edge)][: None if whole else agreed // tree.page_size] = False
        if agreed >= 0 and path and found == path[-1].end and not path[-1].children:
            last_use[edge] = path[-1].last
    return new, last_use


def _publish(
    prefix: PrefixCache,
    salt: str,
    snapshot: CacheSnapshot,
    edges: Edges,
    chosen: Bool[np.ndarray, " edges"],
    pages: Int[np.ndarray, " entries"],
    slabs: Int[np.ndarray, " entries"],
) -> dict[int, Cursor]:
    """Publish the chosen edges as rows do that end with them; returns the cursor at the end of each.

    Each edge begins where its parent ended, and has the new pages; known ones are left at 0.
    """
    p, clock, cursors = prefix.layout.page_size, prefix.tree.clock, dict[int, Cursor]()
    tokens = np.zeros(int(edges.end.max(initial=0)), np.int32)
    for edge in np.flatnonzero(chosen).tolist():
        start, end, own = int(edges.start[edge]), int(edges.end[edge]), edges.entries(edge)
        known, above = np.zeros(start // p, np.int32), cursors.get(int(snapshot.parent[edge]))
        new = Pages(np.concatenate([known, pages[own]]), np.concatenate([known, slabs[own]]))
        tokens[start:end] = edges.tokens(snapshot, edge)
        cursor = cursors[edge] = publish(prefix, salt, tokens[:end], new, None if above is None else above.node, start)
        if cursor.node is not None and (pages[own].any() or slabs[own].any()):
            cursor.node.last, cursor.node.hits = clock - int(snapshot.age[edge]), int(snapshot.hits[edge])
            prefix.tree.candidates.refresh(cursor.node)
    return cursors


def _add_windows(prefix: PrefixCache, snapshot: CacheSnapshot, cursors: dict[int, Cursor]) -> None:
    """Keep the saved windows whose pages are there."""
    clock = prefix.tree.clock
    columns = (snapshot.window_edge, snapshot.window_end, snapshot.window_branch, snapshot.window_age)
    rows = zip(*(column.tolist() for column in (*columns, snapshot.window_hits)), strict=True)
    for edge, end, branch, age, hits in rows:
        if edge in cursors and (tail := cursors[edge].node) is not None:
            prefix.retention.add_window(tail, end, branch=branch, last_use=clock - age, hits=hits)


def _choose(
    snapshot: CacheSnapshot, edges: Edges, new: Bool[np.ndarray, " entries"], layout: KVLayout, room: int
) -> tuple[Bool[np.ndarray, " edges"], Bool[np.ndarray, " entries"]]:
    """Edges, and entries whose local pages, fit `room` slots: last used first, each with all above it and its windows.

    Local pages that no window needs come last.
    """
    m, parent = layout.pages_per_slab, snapshot.parent.tolist()
    slots = np.add.reduceat(new.astype(np.int64), edges.first) if len(parent) else np.zeros(0, np.int64)
    slots *= layout.full is not None
    needs = _needs(snapshot, edges, layout.page_size, layout.reach)
    chosen, local = np.zeros(len(parent), bool), np.zeros(len(new), bool)
    order = np.argsort(snapshot.age, kind="stable").tolist()
    for edge in order:
        chain = []
        while edge >= 0 and not chosen[edge]:
            chain.append(edge)
            edge = parent[edge]
        need = np.unique(np.concatenate([_NONE, *(entries for i in chain for entries in needs[i])]))
        need = need[new[need] & ~local[need]]
        cost = int(slots[chain].sum()) + m * len(need)
        if cost <= room:
            room -= cost
            chosen[chain] = True
            local[need] = True
    for edge in order:
        if chosen[edge]:
            own = slice(edges.first[edge], edges.first[edge] + edges.pages[edge])
            spare = edges.first[edge] + np.flatnonzero(snapshot.local[own] & new[own] & ~local[own])
            spare = spare[max(0, len(spare) - room // m) :]
            room -= m * len(spare)
            local[spare] = True
    return chosen, local


def _needs(
    snapshot: CacheSnapshot, edges: Edges, page_size: int, reach: Reach | None
) -> list[list[Int[np.ndarray, " n"]]]:
    """By edge: the entries of the local pages that each of its windows needs; none where one is missing."""
    needs: list[list[Int[np.ndarray, " n"]]] = [[] for _ in snapshot.parent]
    if reach is None:
        return needs
    for tail, end in zip(snapshot.window_edge.tolist(), snapshot.window_end.tolist(), strict=True):
        first, last, edge = reach.first_visible(end) // page_size, -(-end // page_size), tail
        entries = []
        while edge >= 0 and last > first:
            base = int(edges.start[edge]) // page_size
            low = max(first, base)
            if low < last:
                entries.append(edges.first[edge] + np.arange(low - base, last - base))
                last = low
            edge = int(snapshot.parent[edge])
        if all(snapshot.local[part].all() for part in entries):
            needs[tail] += entries
    return needs
