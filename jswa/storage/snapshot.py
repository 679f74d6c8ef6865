"""The cached text of one salt as plain arrays, captured from one tree to be restored in another (restore.py).

A snapshot lists pages, not their contents: `capture` returns the arena slots to read, `restore` the slots to write. No
two edges of a snapshot share a page: edges begin at page boundaries, so two edges that diverge inside a page both
begin with the tokens before it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.layout import KVLayout
from jswa.cache.moves import slots_of
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.edges import Node
from jswa.cache.prefix.radix import NONE, RadixTree

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class CacheSnapshot:
    """Text and pages of one salt's tree.

    An edge of n tokens has ⌈n / p⌉ entries, one per page, numbered over all edges. With full layers entry i has full
    page i; local pages are numbered in the order of the entries that have one. Ages count the rows that started from a
    match since the last use. Tokens are int32, all other numbers int64.

    Attributes:
        parent: edge above, always an earlier one; -1 for an edge that begins at position 0.
        length: tokens of each edge; whole pages except for the last edge of a text.
        age, hits: of each edge, as in `radix.Node`.
        tokens: of all edges, one edge after the other.
        local: whether an entry has a local page.
        window_edge: the edge that has the last page of a window.
        window_end, window_branch, window_age, window_hits: as in `radix.Window`.
    """

    parent: Int[np.ndarray, " edges"]
    length: Int[np.ndarray, " edges"]
    age: Int[np.ndarray, " edges"]
    hits: Int[np.ndarray, " edges"]
    tokens: Int[np.ndarray, " tokens"]
    local: Bool[np.ndarray, " entries"]
    window_edge: Int[np.ndarray, " windows"]
    window_end: Int[np.ndarray, " windows"]
    window_branch: Bool[np.ndarray, " windows"]
    window_age: Int[np.ndarray, " windows"]
    window_hits: Int[np.ndarray, " windows"]

    def filled(self, page_size: int) -> Int[np.ndarray, " entries"]:
        """Return the number of tokens in the page of each entry."""
        out = np.full(len(self.local), page_size, np.int64)
        counts = -(-self.length.astype(np.int64) // page_size)
        out[np.cumsum(counts) - 1] = self.length - (counts - 1) * page_size
        return out


class Captured(NamedTuple):
    """A snapshot, the arena slots of its pages (all full pages, then all local pages), and its number of tokens."""

    snapshot: CacheSnapshot
    slots: Int[np.ndarray, " slots"]
    tokens: int


def capture(prefix: PrefixCache, salt: str) -> Captured:
    """Capture the tree of a salt. Changes nothing. Text without any page is left out."""
    tree, p, clock = prefix.tree, prefix.layout.page_size, prefix.tree.clock
    root, total = tree.roots.get(salt), 0
    edges: list[tuple[int, int, int, int]] = []  # parent, length, age, hits
    texts, full, local = [_NO_TOKENS], [_NO_TOKENS], [_NO_TOKENS]
    ends: dict[Node, tuple[int, int]] = {}  # number and end of the edge of a node
    nodes: list[Node] = []
    stack = [(child, -1, _NO_TOKENS) for child in root.children.values()] if root is not None else []
    while stack:
        node, parent, carried = stack.pop()
        nodes.append(node)
        start, text = node.start - len(carried), np.concatenate([carried, node.tokens])
        length = max(0, _held_until(tree, node) - start)
        if length:
            ends[node] = len(edges), start + length
            edges.append((parent, length, clock - node.last, node.hits))
            count = -(-length // p)
            texts.append(text[:length])
            full.append(node.full[:count])
            local.append(node.local[:count])
            parent = ends[node][0]
        total += len(node.tokens) if node.children else max(0, length - len(carried))
        stack.extend((child, parent, text[length:]) for child in node.children.values())
    windows = []
    for window in (window for node in nodes for window in node.windows.values()):
        node_of = tree.candidates.edge_at(tree.local_slot.item(window.slabs.item(-1)))
        edge, end = (-1, 0) if node_of is None else ends.get(node_of, (-1, 0))
        if window.end <= end:
            windows.append((edge, window.end, window.branch, clock - window.last, window.hits))
    table, marks = np.array(edges, np.int64).reshape(-1, 4), np.array(windows, np.int64).reshape(-1, 5)
    slabs, ids = np.concatenate(local), np.concatenate(full)
    snapshot = CacheSnapshot(
        parent=table[:, 0],
        length=table[:, 1],
        age=table[:, 2],
        hits=table[:, 3],
        tokens=np.concatenate(texts),
        local=slabs != NONE,
        window_edge=marks[:, 0],
        window_end=marks[:, 1],
        window_branch=marks[:, 2].astype(bool),
        window_age=marks[:, 3],
        window_hits=marks[:, 4],
    )
    return Captured(snapshot, slots_of(ids[ids != NONE], slabs[slabs != NONE], prefix.pool.pages_per_slab), total)


def check(snapshot: CacheSnapshot, layout: KVLayout, vocab: int) -> None:
    """Raise ValueError, with the reason, for a snapshot that `capture` cannot have made."""
    p, edges, windows = layout.page_size, len(snapshot.parent), len(snapshot.window_edge)
    _require(
        all(len(column) == edges for column in (snapshot.length, snapshot.age, snapshot.hits))
        and all(len(getattr(snapshot, f"window_{c}")) == windows for c in ("end", "branch", "age", "hits")),
        "columns of different lengths",
    )
    length, parent = snapshot.length, snapshot.parent
    _require(np.all((length > 0) & (length <= len(snapshot.tokens))), "the length of an edge")
    _require(length.sum() == len(snapshot.tokens), "edges and tokens disagree")
    _require((-(-length // p)).sum() == len(snapshot.local), "edges and pages disagree")
    _require(layout.local is not None or not snapshot.local.any(), "local pages for a model without local layers")
    _require(np.all((parent >= -1) & (parent < np.arange(edges))), "an edge before the one above it")
    _require(np.all(length[parent[parent >= 0]] % p == 0), "an edge that begins inside a page")
    _require(np.all((snapshot.tokens >= 0) & (snapshot.tokens < vocab)), "a token that is not in the vocabulary")
    ages = (snapshot.age, snapshot.hits, snapshot.window_age, snapshot.window_hits)
    _require(all(np.all((column >= 0) & (column < 2**62)) for column in ages), "an age or a count out of range")
    _require(np.all((snapshot.window_edge >= 0) & (snapshot.window_edge < edges)), "a window of an edge that is not")
    ends = Edges.of(snapshot, p).end[snapshot.window_edge]
    _require(np.all((snapshot.window_end > 0) & (snapshot.window_end <= ends)), "a window beyond its edge")


class Edges(NamedTuple):
    """Columns by edge: positions [start, end), tokens from `text` on, `pages` entries from `first` on."""

    start: Int[np.ndarray, " edges"]
    end: Int[np.ndarray, " edges"]
    text: Int[np.ndarray, " edges"]
    first: Int[np.ndarray, " edges"]
    pages: Int[np.ndarray, " edges"]

    @staticmethod
    def of(snapshot: CacheSnapshot, page_size: int) -> "Edges":
        """Derive the columns; parents come before their children."""
        length = snapshot.length
        end, count = length.copy(), -(-length // page_size)
        for edge, parent in enumerate(snapshot.parent.tolist()):
            end[edge] += end[parent] if parent >= 0 else 0
        return Edges(end - length, end, np.cumsum(length) - length, np.cumsum(count) - count, count)

    def tokens(self, snapshot: CacheSnapshot, edge: int) -> Int[np.ndarray, " n"]:
        """Return the tokens of an edge."""
        return snapshot.tokens[self.text[edge] :][: snapshot.length[edge]]

    def entries(self, edge: int) -> slice:
        """Return the entries of an edge."""
        return slice(int(self.first[edge]), int(self.first[edge] + self.pages[edge]))

    def text_to(self, snapshot: CacheSnapshot, edge: int) -> Int[np.ndarray, " n"]:
        """Return the text from position 0 to the end of an edge."""
        parts = []
        while edge >= 0:
            parts.append(self.tokens(snapshot, edge))
            edge = int(snapshot.parent[edge])
        return np.concatenate(parts[::-1])


def _held_until(tree: RadixTree, node: Node) -> int:
    """Return the end of the text on a node's own pages: a shared last page belongs to lower edges."""
    p = tree.page_size
    first, whole = node.start // p, node.end // p * p
    if node.children:
        return whole
    if tree.layout.full is not None:
        return node.end if node.full[-1] != NONE else whole
    held = np.flatnonzero(node.local)
    return min(node.end, (first + int(held[-1]) + 1) * p) if len(held) else node.start


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
