"""Eviction: which windows and pages the prefix cache keeps, and which it evicts first.

A local page of the tree is *needed* by the windows at which a request can resume (at the end of a prompt, at the end of
a text, where texts diverge), or it is *spare*: it slid out of a row's window. Memory is taken from spare pages, oldest
first, which help a text that diverges at a new position; then from windows and leaves, which a policy chooses
(`policy.py`). A window is evicted as a whole, a leaf from its end together with the windows there.

Laws (`check`): a local page is spare exactly if the tree alone owns it and no window needs it; windows are whole.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import BRANCH, TEXT_END, Node, Window
from jswa.cache.prefix.policy import Policy
from jswa.cache.prefix.radix import NONE, RadixTree
from jswa.cache.prefix.spare import SpareQueue

_LEAST_CUT = 32  # pages of a leaf that are evicted at once
_WINDOWS = 64  # and places of an edge, or as many as it has pages: more help nobody, and each use passes all of them


class Retention:
    """Owns windows and spare pages of a tree, and evicts what its policy chooses."""

    def __init__(self, tree: RadixTree, policy: Policy) -> None:
        self.tree = tree
        self.pool = tree.pool
        self.policy = policy
        self.evictions = 0
        self.demote: Callable[[Node | Window], None] | None = None  # called with what is about to be evicted
        self._reach = tree.layout.reach
        self._uses = tree.uses
        self._least_cut = min(_LEAST_CUT, tree.pool.total_slots // 256)
        self._spare = SpareQueue(tree.pool.num_slabs)

    def add_window(
        self,
        tail: Node,
        end: int,
        place: int | None = None,
        *,
        branch: bool = False,
        last_use: int | None = None,
        hits: int = 0,
    ) -> None:
        """Keep the window of a query at `end`, on the path to the end of `tail`, if all its pages are there.

        `place`: the kind of place, if it is none yet; by default a branch, or the end of a text.

        `last_use` and `hits` as `last` and `hits` of `Window`; by default the last use is now, with zero hits.
        """
        last_use = self.tree.clock if last_use is None else last_use
        if self._reach is None:
            return
        p = self.tree.page_size
        first, last = self._reach.first_visible(end) // p, -(-end // p)
        if first >= last:
            return  # a query at a chunk boundary sees no earlier local page
        node = tail
        while node.start >= end:
            assert node.parent is not None
            node = node.parent
        node.places.setdefault(end, place if place is not None else BRANCH if branch else TEXT_END)
        if len(node.places) > max(_WINDOWS, len(node.local)):
            del node.places[min(node.places)]
        window = node.windows.get(end)
        if window is not None:
            window.branch |= branch
            window.last = max(window.last, last_use)
            return
        slabs = self.tree.page_ids(tail, "local", first, last)
        if np.count_nonzero(slabs) < len(slabs):
            return
        self._uses[slabs] += 1
        self._spare.take(slabs)
        window = node.windows[end] = Window(end, node, slabs, branch, last_use, hits)
        self.tree.candidates.add(window)
        if len(node.windows) > max(_WINDOWS, len(node.local)):
            others = (w for w in node.windows.values() if w is not window)
            self.drop_window(min(others, key=lambda w: (w.branch, w.hits > 1, w.last)))
        self._changed(node)

    def drop_window(self, window: Window) -> Int[np.ndarray, " n"]:
        """Drop a window; return its pages that are spare now."""
        idle = self._drop(window)
        self._spare.put(idle)
        return idle

    def _drop(self, window: Window, *, alone: bool = False) -> Int[np.ndarray, " n"]:
        """Drop a window; return its pages that no window needs and no row holds any more. `alone`: no row holds any."""
        del window.node.windows[window.end]
        self.tree.candidates.discard(window)
        self._changed(window.node)
        slabs = window.slabs
        self._uses[slabs] = uses = self._uses[slabs] - 1
        if alone and not np.count_nonzero(uses):
            return slabs
        # The cache is an owner of the pages: none has fewer owners than one.
        idle: Int[np.ndarray, " n"] = slabs[uses + self.pool.local_owners[slabs] == 1]
        return idle

    def drop_windows(self) -> None:
        """Drop every window, and every local page that no lease owns. Texts keep their full KV."""
        for window in [window for node in self.tree.nodes() for window in node.windows.values()]:
            self.drop_window(window)
        self.drop_spare()

    def drop_spare(self) -> None:
        """Free all spare local pages."""
        spare = np.sort(self._spare.ids())
        self._spare.take(spare)
        self._free_slabs(spare)

    def pin(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Local pages of the tree got an owner: they are not spare."""
        self._spare.take(slabs)

    def unpin(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Local pages lost an owner: pages that only the tree owns and no window needs become spare."""
        if not len(slabs):
            return
        slabs = slabs.astype(np.intp, copy=False)
        idle = self.pool.local_cached[slabs] & (self.pool.local_owners[slabs] + self._uses[slabs] == 1)
        if np.count_nonzero(idle):
            self._spare.put(slabs[idle])

    def make_room(self, slots: int) -> None:
        """Evict until the pool has `slots` free slots. The caller has checked that so many are free or evictable."""
        m = self.pool.pages_per_slab
        while (short := slots - self.pool.free_slots) > 0:
            if len(self._spare):
                self._free_slabs(self._spare.pop(-(-short // m)))
            else:
                self._evict(max(short, m))

    def replace_partial(self, node: Node, first: int, slab: int) -> None:
        """Drop the partly filled local page of a leaf that ends inside page position `first` and is about to grow.

        `slab` is the local page that replaces it, or 0: then windows that need the page are dropped.
        """
        index = first - node.start // self.tree.page_size
        old = int(node.local[index])
        if old in (NONE, slab):
            return
        windows = self._windows_past(node, first * self.tree.page_size)
        if slab == NONE:
            for window in windows:
                self.drop_window(window)
        else:
            for window in windows:
                window.slabs[window.slabs == old] = slab
            self._uses[slab], self._uses[old] = self._uses[old], 0
        self._spare.take(node.local[index : index + 1])
        self.tree.drop_local(node, slice(index, index + 1))

    def cut(self, node: Node, count: int) -> None:
        """Evict the last `count` pages of a leaf, with their text and every window that needs them.

        The tree alone owns these full pages. A row may own a local page among them: where several edges begin in a page
        (`RadixTree.pages`), it may share the full page of one edge and the local page of another.
        """
        index = len(node.full) - count
        at = max(node.start, (node.start // self.tree.page_size + index) * self.tree.page_size)
        for last, kind in self.tree.ghosts.cut(node, at):
            self.policy.outcome(self.tree.clock - last, kind, used=False)
        self.clear(node, index, alone=True)
        self.trim(node, held=index)

    def clear(self, node: Node, index: int, *, alone: bool = False) -> None:
        """Drop an edge's pages from entry `index` on, and every window that needs one. The text stays.

        `alone`: nobody else owns these full pages.
        """
        for window in self._windows_past(node, (node.start // self.tree.page_size + index) * self.tree.page_size):
            self.drop_window(window)
        if np.count_nonzero(local := node.local[index:]):
            self._spare.take(local)
            self.tree.drop_local(node, slice(index, None))
        self.tree.drop_full(node, slice(index, None), alone=alone)

    def trim(self, node: Node, held: int | None = None) -> None:
        """Shorten a leaf to its last page or last cursor; remove it if nothing is left, and then trim its parent.

        `held`: entries of the leaf up to its last page; None: to be found out.
        """
        p = self.tree.page_size
        while node.parent is not None and not node.children:
            if held is None:
                there = (node.full if self.tree.layout.full is not None else node.local).nonzero()[0]
                held = int(there[-1]) + 1 if len(there) else 0
            end = min(node.end, (node.start // p + held) * p) if held else node.start
            if node.cursors:
                end = max(end, *(cursor.published for cursor in node.cursors))
            if end > node.start:
                if end < node.end:
                    # Without full layers this cuts holes only; with them, a page shared with removed edges, of which
                    # this edge has no copy.
                    for window in self._windows_past(node, end):
                        self.drop_window(window)
                    self.tree.truncate(node, end)
                return
            for window in list(node.windows.values()):
                self.drop_window(window)
            self.tree.remove(node)
            self.tree.ghosts.inherit(node.parent, node)
            node, held = node.parent, None
        if node.parent is None and not node.children and not node.cursors and node.salt in self.tree.roots:
            self.tree.remove(node)

    def check(self) -> None:
        """Assert the laws above."""
        uses = np.zeros_like(self._uses)
        for node in self.tree.nodes():
            for window in node.windows.values():
                uses[window.slabs] += 1
                assert window.index >= 0
                assert window.slabs.all()
                assert self.pool.local_cached[window.slabs].all(), "a window has a hole"
        assert np.array_equal(uses, self._uses), "windows and what they need differ"
        slabs = np.arange(len(uses), dtype=np.int32)
        spare = self.pool.local_cached[slabs] & (self.pool.local_owners[slabs] == 1) & (uses == 0)
        assert np.array_equal(np.sort(self._spare.ids()), np.flatnonzero(spare)), "spare pages differ"

    def _windows_past(self, node: Node, at: int) -> list[Window]:
        """Return windows of an edge and the edges above it that end behind `at` (page aligned, or an end)."""
        found: list[Window] = []
        above: Node | None = node
        while above is not None and above.end > at:
            found += [window for end, window in above.windows.items() if end > at]
            above = above.parent
        return found

    def _free_slabs(self, slabs: Int[np.ndarray, " n"]) -> None:
        """Free local pages that the tree alone owns and no window needs; they are not among the spare ones any more.

        `slabs`: an array of indexes.
        """
        tree, slots, start = self.tree, self.tree.local_slot[slabs].tolist(), 0
        while start < len(slots):
            slot, stop = slots[start], len(slots)
            if slots.count(slot) < stop:
                stop = next((at for at in range(start, stop) if slots[at] != slot), stop)
            node = tree.candidates.edge_at(slot)
            assert node is not None
            tree.free_local(node, slabs[start:stop] if stop - start < len(slots) else slabs)
            if tree.layout.full is None:
                self.trim(node)
            start = stop

    def _evict(self, slots: int) -> None:
        """Evict one window, or as much of one leaf's end as frees `slots` slots."""
        victim, pages = self.policy.victim()
        self.evictions += 1
        if self.demote is not None:
            self.demote(victim)
        if isinstance(victim, Node):
            self.cut(victim, min(max(slots, self._least_cut), pages))
        else:
            self._evict_window(victim, alone=pages == len(victim.slabs))
        self.policy.evicted(victim)

    def _evict_window(self, window: Window, *, alone: bool) -> None:
        """Evict a window. Its pages are mostly its alone, and successive entries of its edge.

        `alone`: only the tree owns them.
        """
        assert self._reach is not None
        idle, node, p = self._drop(window, alone=alone), window.node, self.tree.page_size
        first = max(0, self._reach.first_visible(window.end) // p - node.start // p)
        own = node.local[first : -(-window.end // p) - node.start // p]
        # Others may be those of an edge above or below, or needed by rows or other windows.
        if self.tree.layout.full is None or own.tobytes() != idle.tobytes():
            self._free_slabs(idle)
        else:
            self.tree.free_local(node, idle, first)

    def _changed(self, node: Node) -> None:
        """Invalidate the values of an edge and its windows."""
        self.tree.candidates.forget(node)
        for window in node.windows.values():
            self.tree.candidates.forget(window)
