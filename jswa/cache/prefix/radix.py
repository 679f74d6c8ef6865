"""The radix tree of cached text: one tree per salt, whose edges hold tokens and the pages of their KV.

An edge (`Node`) holds the tokens [start, end) and a full and a local page id for each page position from start // p on,
0 for none. Page ids are arrays of indexes: int32 ids would be converted anew by each access. Edges may end inside a
page. A page that two edges share belongs to the lower edge, which has its own copy of the upper edge's part; the upper
edge's last entry is then 0. A leaf may end in a partly filled page: its contents below the leaf's end never change, and
a row that extends it copies the page first.

Laws (`check`): with full layers every entry of an edge has its full page, except a last entry that a lower edge owns;
a page is in the tree once; pages of the tree are those that the pool counts as cached; an edge without pages exists
only while a descendant or a cursor needs it.

Host only; each operation costs O(tokens compared) in numpy and O(edges passed) in Python.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import numpy as np
from jaxtyping import Int

from jswa.cache.layout import KVLayout
from jswa.cache.pool import PagePool
from jswa.cache.prefix.edges import Candidates, Node
from jswa.cache.prefix.ghosts import Ghosts
from jswa.cache.prefix.notes import Notes

NONE = 0  # slab 0 is never handed out
NO_PAGES = np.zeros(0, np.intp)
_SOURCES = 8  # edges searched for a copy of a page that several share


class RadixTree:
    """Owns the edges; the pool knows which pages belong to them.

    Attributes:
        clock: rows that have started.
        uses: by local page, the windows that need it (`Retention`).
        ghosts: what was evicted.
        visits: edges passed, for tests and benchmarks.
        notes: where changes are noted for routers; None: nowhere.
    """

    def __init__(self, layout: KVLayout, pool: PagePool) -> None:
        self.layout = layout
        self.pool = pool
        self.page_size = layout.page_size
        self.roots: dict[str, Node] = {}
        self.candidates = Candidates()
        self.ghosts = Ghosts()
        self.notes: Notes | None = None
        self.uses = np.zeros(pool.num_slabs, np.int32)
        self.clock = self.visits = 0
        # Of each page of the tree: the slot of its edge (`Candidates`), and of local pages the position. Entries of
        # other pages are stale.
        self._full_slot = np.zeros(pool.num_slabs * pool.pages_per_slab, np.intp)
        self.local_slot = np.zeros(pool.num_slabs, np.intp)
        self._local_place = np.zeros(pool.num_slabs, np.intp)

    def root(self, salt: str) -> Node:
        """Return the root of a salt's tree; create it if there is none."""
        if salt not in self.roots:
            self.roots[salt] = Node(0, np.zeros(0, np.int32), NO_PAGES, NO_PAGES, None, salt)
            self.candidates.refresh(self.roots[salt])
        return self.roots[salt]

    def walk(self, salt: str, tokens: Int[np.ndarray, " T"]) -> tuple[list[Node], int]:
        """Return the edges that agree with a text from its start, and the number of tokens that agree."""
        node, at, path = self.roots.get(salt), 0, []
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is None:
                break
            self.visits += 1
            agree = common_prefix(node.tokens, tokens[at:])
            at += agree
            path.append(node)
            if agree < len(node.tokens):
                break
        return path, at

    def pages(self, path: list[Node], length: int) -> tuple[Int[np.ndarray, " pages"], Int[np.ndarray, " pages"]]:
        """Return full and local page ids of the first `length` tokens of a path that covers them."""
        count = -(-length // self.page_size)
        full, local = np.zeros(count, np.intp), np.zeros(count, np.intp)
        for node in path:
            first = node.start // self.page_size
            if first >= count:
                break
            part = node.full[: count - first]
            full[first : first + len(part)] = part
            local[first : first + len(part)] = node.local[: len(part)]
        if path and length > path[-1].end // self.page_size * self.page_size:
            # The last page belongs to the lower edges: each that begins in it and extends beyond it has its own copy.
            last_full, last_local = int(full[-1]), int(local[-1])
            for child in islice(self._below(path[-1]), _SOURCES):
                last_full = last_full or int(child.full[0])
                last_local = last_local or int(child.local[0])
                if last_full and last_local:
                    break
            full[-1], local[-1] = last_full, last_local
        return full, local

    def page_ids(self, node: Node, kind: Literal["full", "local"], first: int, last: int) -> Int[np.ndarray, " pages"]:
        """Return the page ids at page positions [first, last) on the path from the root to the end of `node`.

        They are an array of indexes, 8 bytes each.
        """
        ids = np.zeros(last - first, np.intp)
        above: Node | None = node
        while above is not None and last > first:
            base = above.start // self.page_size
            low = max(first, base)
            if low < last:
                own = above.full if kind == "full" else above.local
                ids[low - first : last - first] = own[low - base : last - base]
                last = low
            above = above.parent
        return ids

    def use(self, node: Node) -> None:
        """Note a use of an edge, now."""
        node.last = self.clock
        self.candidates.refresh(node)

    def split(self, node: Node, at: int) -> Node:
        """Split an edge at a position inside it; return the upper half, a new edge. `node` becomes the lower half."""
        p, first = self.page_size, node.start // self.page_size
        upper = Node(
            node.start,
            node.tokens[: at - node.start],
            node.full[: -(-at // p) - first].copy(),
            node.local[: -(-at // p) - first].copy(),
            node.parent,
            node.salt,
            node.last,
            node.hits,
            node.kind,
            children={int(node.tokens[at - node.start]): node},
        )
        if at % p:
            upper.full[-1] = upper.local[-1] = NONE
        self.candidates.refresh(upper)
        self._full_slot[upper.full] = self.local_slot[upper.local] = upper.slot  # that of NONE is stale anyway
        assert node.parent is not None
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens = node.tokens[at - node.start :]
        node.full, node.local = node.full[at // p - first :], node.local[at // p - first :]
        node.start, node.parent, node.buffers = at, upper, None
        self.candidates.forget(node)
        for end in [end for end in node.windows if end <= at]:
            window = upper.windows[end] = node.windows.pop(end)
            window.node = upper
            self.candidates.forget(window)
        for end in [end for end in node.places if end <= at]:
            upper.places[end] = node.places.pop(end)
        for cursor in [cursor for cursor in node.cursors if cursor.published <= at]:
            node.cursors.remove(cursor)
            upper.cursors.add(cursor)
            cursor.node = upper
        return upper

    def append(
        self,
        node: Node,
        tokens: Int[np.ndarray, " n"],
        full: Int[np.ndarray, " pages"],
        local: Int[np.ndarray, " pages"],
    ) -> Node:
        """Append text to an edge: a leaf grows, any other edge gets a child. Return the edge that has the text.

        The pages begin at page position end // p and become cached. If a leaf grows from inside a page, the caller has
        dropped the leaf's own last page (`drop_local`, `drop_full`), or the new pages begin with that same page.
        """
        first = node.end // self.page_size
        if node.parent is None or node.children:
            child = Node(node.end, tokens, full, local, node, node.salt)
            self.candidates.refresh(child)
            node.children[int(tokens[0])] = child
            self.candidates.discard(node)
        else:
            child, shared = node, first - node.start // self.page_size
            _extend(node, shared, tokens, full, local)
        if self.layout.full is not None:
            cached = self.pool.full_cached[full]
            self._full_slot[full] = child.slot
            self.pool.cache_full(full[~cached] if np.count_nonzero(cached) else full)
        held = local.nonzero()[0]
        if len(held):
            ids = local[held]
            cached = self.pool.local_cached[ids]
            self.local_slot[ids], self._local_place[ids] = child.slot, held + first
            self.pool.cache_local(ids[~cached] if np.count_nonzero(cached) else ids)
        self.candidates.add(child)
        self.candidates.forget(child)
        if self.notes is not None:
            self.notes.stored(child, first, full, local, tokens)
        return child

    def adopt_local(self, node: Node, index: Int[np.ndarray, " n"], ids: Int[np.ndarray, " n"]) -> None:
        """Fill holes of an edge with local pages."""
        node.local[index] = ids
        ids = ids.astype(np.intp)
        self.pool.cache_local(ids)
        self.local_slot[ids], self._local_place[ids] = node.slot, index + node.start // self.page_size
        if self.notes is not None and self.notes.windows:
            adopted = np.zeros(int(index[-1] - index[0]) + 1, np.intp)
            adopted[index - index[0]] = ids
            first = node.start // self.page_size + int(index[0])
            self.notes.stored(node, first, np.zeros_like(adopted), adopted)

    def drop_local(self, node: Node, index: slice) -> None:
        """Drop local pages of an edge."""
        pages = node.local[index]
        if np.count_nonzero(pages):
            ids = pages[pages != NONE]
            pages[:] = NONE
            self.pool.uncache_local(ids)
            if self.notes is not None:
                self.notes.removed("local", ids)

    def free_local(self, node: Node, ids: Int[np.ndarray, " n"], first: int | None = None) -> None:
        """Free local pages of an edge that nobody else owns. `first`: successive ones, from this entry of it on."""
        places = (
            self._local_place[ids] - node.start // self.page_size if first is None else slice(first, first + len(ids))
        )
        node.local[places] = NONE
        self.pool.evict_local(ids)
        if self.notes is not None:
            self.notes.removed("local", ids)

    def drop_full(self, node: Node, index: slice, *, alone: bool = False) -> None:
        """Drop full pages of an edge; the caller truncates it. `alone`: nobody else owns them."""
        ids = node.full[index]
        if np.count_nonzero(ids) < len(ids):
            ids = ids[ids != NONE]
        if len(ids):
            (self.pool.evict_full if alone else self.pool.uncache_full)(ids)
            if self.notes is not None:
                self.notes.removed("full", ids)  # before its view becomes zeros
            node.full[index] = NONE

    def truncate(self, node: Node, end: int) -> None:
        """Shorten a leaf. The caller has dropped the pages behind `end`, and no window or cursor is there."""
        count = max(0, -(-end // self.page_size) - node.start // self.page_size)
        self.candidates.forget(node)
        node.tokens, node.full, node.local = node.tokens[: end - node.start], node.full[:count], node.local[:count]
        node.places = {at: kind for at, kind in node.places.items() if at <= end}
        whole = node.tokens.base
        if whole is not None and 4 * len(node.tokens) < len(whole):  # do not keep the memory of what is gone
            node.tokens, node.full, node.local = node.tokens.copy(), node.full.copy(), node.local.copy()
            node.buffers = None

    def remove(self, node: Node) -> None:
        """Remove a leaf or a root that has no pages left."""
        self.candidates.discard(node)
        if node.parent is None:
            del self.roots[node.salt]
            self.candidates.release(node)
        else:
            self.detach(node)

    def detach(self, node: Node) -> None:
        """Cut off an edge with all edges below it. The caller has dropped their pages."""
        above = node.parent
        assert above is not None
        del above.children[int(node.tokens[0])]
        gone = [node]
        for edge in gone:
            gone.extend(edge.children.values())
            self.candidates.release(edge)
        if not above.children and above.parent is not None:
            self.candidates.add(above)

    def rename(self, source: int, target: int) -> None:
        """Follow a full page that the pool has moved."""
        slot = self._full_slot[target] = self._full_slot.item(source)
        node = self.candidates.edge_at(slot)
        if node is not None:  # if the page is not one of the tree, the entry is stale, and no edge has the page
            node.full[node.full == source] = target
        if self.notes is not None:
            self.notes.moved(source, target)

    def num_tokens(self, salt: str) -> int:
        """Return the tokens of text in the tree of a salt."""
        return sum(len(node.tokens) for node in self.nodes(salt))

    def nodes(self, salt: str | None = None) -> Iterator[Node]:
        """Yield edges and roots, parents first; of one salt's tree if `salt` is given."""
        stack = list(self.roots.values()) if salt is None else [self.roots[salt]] if salt in self.roots else []
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Assert the laws above."""
        nodes, p = list(self.nodes()), self.page_size
        for node in nodes:
            assert len(node.full) == len(node.local) == -(-node.end // p) - node.start // p, "an edge lacks entries"
            for token, child in node.children.items():
                assert (child.parent, child.start, int(child.tokens[0])) == (node, node.end, token)
            for cursor in node.cursors:
                assert cursor.node is node
                assert node.start < cursor.published <= node.end or node.parent is None
            for end, window in node.windows.items():
                assert (window.node, window.end) == (node, end)
                assert node.start < end <= node.end
            assert all(node.start < at <= node.end for at in node.places)
            is_leaf = node.parent is not None and not node.children
            assert (node.index >= 0) == is_leaf, "a leaf is no candidate for eviction, or something else is"
            if node.parent is None:
                assert node.children or node.cursors, "an empty root"
                continue
            assert len(node.tokens), "an edge without tokens"
            if self.layout.full is not None:
                entries = node.full if node.end % p == 0 else node.full[:-1]
                assert np.all(entries != NONE), "an edge has a hole in its full pages"
            if is_leaf and not node.cursors:
                last = node.full[-1] if self.layout.full is not None else node.local[-1]
                assert last != NONE, "a leaf ends in nothing"
        for name, owner, cached in (
            ("full", self._full_slot, self.pool.full_cached),
            ("local", self.local_slot, self.pool.local_cached),
        ):
            ids = [getattr(node, name)[getattr(node, name) != NONE] for node in nodes]
            flat = np.concatenate([np.zeros(0, np.int32), *ids])
            assert len(flat) == len(np.unique(flat)), f"a {name} page is in the tree twice"
            assert np.array_equal(np.sort(flat), np.flatnonzero(cached)), "cached ≠ in the tree"
            assert all(np.all(owner[own] == node.slot) for node, own in zip(nodes, ids, strict=True))
        for node in nodes:
            held = node.local.nonzero()[0]
            assert np.array_equal(self._local_place[node.local[held]], held + node.start // p), "a page is elsewhere"
        self.candidates.check()

    def _below(self, node: Node) -> Iterator[Node]:
        """Yield the edges that begin in the page in which `node` ends."""
        for child in node.children.values():
            yield child
            if child.end // self.page_size == node.end // self.page_size:
                yield from self._below(child)


def _extend(
    node: Node,
    shared: int,
    tokens: Int[np.ndarray, " n"],
    full: Int[np.ndarray, " pages"],
    local: Int[np.ndarray, " pages"],
) -> None:
    """Append to the arrays of a leaf, of whose pages the first `shared` stay.

    Room doubles when it is short: a text that is published chunk by chunk is copied twice in all, not once per chunk.
    """
    parts = [(node.tokens, len(node.tokens), tokens), (node.full, shared, full), (node.local, shared, local)]
    sizes = [kept + len(new) for _, kept, new in parts]
    if node.buffers is None or any(size > len(room) for size, room in zip(sizes, node.buffers, strict=True)):
        node.buffers = [np.empty(2 * size, new.dtype) for size, (_, _, new) in zip(sizes, parts, strict=True)]
        for room, (old, kept, _) in zip(node.buffers, parts, strict=True):
            room[:kept] = old[:kept]
    for room, (_, kept, new) in zip(node.buffers, parts, strict=True):
        room[kept : kept + len(new)] = new
    node.tokens, node.full, node.local = (room[:size] for room, size in zip(node.buffers, sizes, strict=True))


def common_prefix(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " m"]) -> int:
    """Return the number of leading tokens that two texts share."""
    length = min(len(a), len(b))
    at, step = 0, 2048
    while at < length:
        stop = min(length, at + step)
        differ = a[at:stop] != b[at:stop]
        first = int(differ.argmax())
        if differ[first]:
            return at + first
        at, step = stop, 8 * step
    return length
