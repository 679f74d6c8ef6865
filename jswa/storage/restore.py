"""Enters a snapshot into a prefix tree: what the tree lacks, and as much as free memory holds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.architecture import Reach
from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.radix import Node, RadixTree, common_prefix
from jswa.storage.snapshot import Edges, Snapshot, slots_of

_NONE = np.zeros(0, np.int32)
_Place = tuple[Node, int]  # a position on the way to the end of a node


class Restored(NamedTuple):
    """Tokens of text that were entered, and which slot of the arena must get which of the saved slots (`rows`)."""

    tokens: int
    slots: Int[np.ndarray, " n"]
    rows: Int[np.ndarray, " n"]


def restore(cache: CacheManager, salt: str, snapshot: Snapshot) -> Restored:
    """Enter a checked snapshot into the tree of a salt: what the tree lacks, and as much as free memory holds.

    Nothing is evicted; of what does not fit the branches used longest ago are left out. The pool may have to move
    pages: the manager's moves must be carried out on the device before the slots are written.
    """
    prefix, pool, m = cache.prefix, cache.pool, cache.pool.pages_per_block
    tree, has_full = prefix.tree, cache.layout.full is not None
    before = _text_length(tree, salt)
    edges = Edges.of(snapshot, tree.page_size)
    new = _lacking(prefix, salt, snapshot, edges)
    chosen, local = _choose(snapshot, edges, new, cache.layout, pool.free_slots)
    full = new & np.repeat(chosen, edges.pages) if has_full else np.zeros_like(new)
    blocks, pages = np.zeros(len(new), np.int32), np.zeros(len(new), np.int32)
    blocks[local] = pool.alloc_local(int(local.sum()))
    cache.settle()  # full pages may have moved to make whole blocks free
    pages[full] = pool.alloc_full(int(full.sum()))
    entered = _enter(prefix, salt, snapshot, edges, chosen, pages, blocks)
    # The tree owns them by now; those that it had no place for are free again.
    pool.free_full(pages[full])
    pool.free_local(blocks[local])
    prefix.retention.give(blocks[local])
    _enter_windows(prefix, snapshot, entered)
    for leaf in [node for node in dict.fromkeys(node for node, _ in entered.values()) if not node.children]:
        prefix.retention.trim(leaf)
    prefix.retention.trim(tree.root(salt))
    saved_full = len(new) if has_full else 0
    numbers = np.cumsum(snapshot.local) - 1
    rows = [np.flatnonzero(full), saved_full + slots_of(_NONE, numbers[local], m)]
    slots = slots_of(pages[full], blocks[local], m)
    return Restored(_text_length(tree, salt) - before, slots, np.concatenate(rows))


def _lacking(prefix: PrefixCache, salt: str, snapshot: Snapshot, edges: Edges) -> Bool[np.ndarray, " entries"]:
    """Entries whose text the tree does not have to its end. Changes nothing."""
    new = np.ones(len(snapshot.local), bool)
    root = (prefix.tree.roots[salt], 0) if salt in prefix.tree.roots else None
    places: list[_Place | None] = []  # of the ends of the edges that the tree has
    for edge, parent in enumerate(snapshot.parent.tolist()):
        above = places[parent] if parent >= 0 else root
        place: _Place | None = None
        if above is not None:
            tokens = edges.tokens(snapshot, edge)
            node, agreed = _descend(above[0], above[1], tokens)
            whole = agreed == len(tokens)
            new[edges.first[edge] :][: edges.pages[edge] if whole else agreed // prefix.layout.page_size] = False
            place = (node, int(edges.end[edge])) if whole else None
        places.append(place)
    return new


def _choose(
    snapshot: Snapshot, edges: Edges, new: Bool[np.ndarray, " entries"], layout: KVLayout, room: int
) -> tuple[Bool[np.ndarray, " edges"], Bool[np.ndarray, " entries"]]:
    """Edges, and entries whose local pages, fit `room` slots: last used first, each with all above it and its windows.

    Local pages that no window needs come last.
    """
    m, parent = layout.pages_per_block, snapshot.parent.tolist()
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


def _needs(snapshot: Snapshot, edges: Edges, page_size: int, reach: Reach | None) -> list[list[Int[np.ndarray, " n"]]]:
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


def _enter(
    prefix: PrefixCache,
    salt: str,
    snapshot: Snapshot,
    edges: Edges,
    chosen: Bool[np.ndarray, " edges"],
    pages: Int[np.ndarray, " entries"],
    blocks: Int[np.ndarray, " entries"],
) -> dict[int, _Place]:
    """Enter the chosen edges with their pages, by entry; returns where each ends."""
    tree, p, clock = prefix.tree, prefix.layout.page_size, prefix.retention.clock
    places: dict[int, _Place] = {-1: (tree.root(salt), 0)}
    fresh: set[Node] = set()
    grown: dict[Node, int] = {}  # leaves that were there, and when they were last used
    entered = []
    for edge in np.flatnonzero(chosen).tolist():
        tokens = edges.tokens(snapshot, edge)
        node, agreed = _descend(*_climb(*places[int(snapshot.parent[edge])]), tokens)
        if agreed < len(tokens):
            at, own = int(edges.start[edge]) + agreed, slice(edges.first[edge] + agreed // p, None)
            count = int(edges.pages[edge]) - agreed // p
            if at < node.end:
                node = tree.split(node, at)
            leaf, last = node, node.last
            node = _append(prefix, node, tokens[agreed:], pages[own][:count], blocks[own][:count])
            if node is not leaf:
                fresh.add(node)
                _mark(node, snapshot, edge, clock)  # so that edges cut off it have some mark
            elif node not in fresh:
                grown.setdefault(node, last)
            entered.append(edge)
        places[edge] = node, int(edges.end[edge])
    places = {edge: _climb(*place) for edge, place in places.items()}
    for edge in entered:
        node = places[edge][0]
        _mark(node, snapshot, edge, clock)
        node.last = max(node.last, grown.get(node, node.last))
    del places[-1]
    return places


def _mark(node: Node, snapshot: Snapshot, edge: int, clock: int) -> None:
    node.last, node.hits = clock - int(snapshot.age[edge]), int(snapshot.hits[edge])


def _append(
    prefix: PrefixCache,
    node: Node,
    tokens: Int[np.ndarray, " n"],
    full: Int[np.ndarray, " pages"],
    local: Int[np.ndarray, " pages"],
) -> Node:
    """Add text at the end of an edge, as a row does that has computed it; a leaf that ends inside a page loses that."""
    if node.end % prefix.layout.page_size and node.parent is not None and not node.children:
        prefix.retention.replace_partial(node, node.end // prefix.layout.page_size, int(local[0]))
        if node.full[-1] != full[0]:
            prefix.tree.drop_full(node, slice(len(node.full) - 1, None))
    return prefix.tree.append(node, tokens.copy(), full.copy(), local.copy())


def _enter_windows(prefix: PrefixCache, snapshot: Snapshot, places: dict[int, _Place]) -> None:
    """Keep the windows that are whole, and that the tree does not have."""
    retention = prefix.retention
    for index, (edge, end) in enumerate(zip(snapshot.window_edge.tolist(), snapshot.window_end.tolist(), strict=True)):
        if edge not in places:
            continue
        tail, _ = places[edge]
        holder, _ = _climb(tail, end)
        if end in holder.windows:
            continue
        retention.add_window(tail, end, branch=bool(snapshot.window_branch[index]))
        window = holder.windows.get(end)
        if window is not None:
            window.last = retention.clock - int(snapshot.window_age[index])
            window.hits = int(snapshot.window_hits[index])


def _descend(node: Node, at: int, tokens: Int[np.ndarray, " n"]) -> _Place:
    """The node at which the tree stops going on with a text from position `at`, and how many of its tokens agree."""
    agreed = 0
    while agreed < len(tokens):
        if at == node.end:
            child = node.children.get(int(tokens[agreed]))
            if child is None:
                break
            node = child
        step = common_prefix(node.tokens[at - node.start :], tokens[agreed:])
        if not step:
            break
        at, agreed = at + step, agreed + step
    return node, agreed


def _climb(node: Node, at: int) -> _Place:
    """A position and the node that holds the token before it, given one on the way down from there."""
    while node.parent is not None and at <= node.start:
        node = node.parent
    return node, at


def _text_length(tree: RadixTree, salt: str) -> int:
    total, nodes = 0, [tree.roots[salt]] if salt in tree.roots else []
    while nodes:
        node = nodes.pop()
        total += len(node.tokens)
        nodes.extend(node.children.values())
    return total
