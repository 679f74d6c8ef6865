"""Evicts what was used least recently: the policy to read first.

Of a row's text every edge is used when the row ends, and a window when a row starts there. A text loses its window
before its end: a row that finds the text may rebuild the window (`resume.py`).
"""

from collections.abc import Sequence
from heapq import nsmallest

from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.policy import pages_freed
from jswa.cache.prefix.radix import RadixTree
from jswa.errors import EngineError

_AT_ONCE = 64  # items that are looked up together, since that passes all candidates


class LRU:
    """The least recently used item of a tree is its next victim (`policy.Policy`)."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._oldest: list[tuple[Node | Window, int]] = []  # with `last` as it was; the oldest at the end

    def beside(self, tree: RadixTree) -> "LRU":
        return LRU(tree)

    def started(self, path: Sequence[Node], text: int, found: int) -> None:
        """Nothing that the row starts on can be evicted before it ends."""

    def appended(self, above: Node) -> None:
        """New text is as old as the row that appends it: nothing else changes."""

    def ended(self, node: Node, published: int, prompt: int, end: int) -> None:
        above: Node | None = node
        while above is not None:
            self._tree.use(above)
            above = above.parent

    def outcome(self, age: int, kind: int, *, used: bool) -> None:
        """What an eviction cost changes nothing."""

    def victim(self) -> tuple[Node | Window, int]:
        """Return the candidate whose last use is longest ago. Raises EngineError if none frees any page."""
        items = self._tree.candidates.items
        for count in (0, _AT_ONCE, len(items)):
            if count:
                oldest = nsmallest(count, items, key=lambda item: (item.last, isinstance(item, Node)))
                self._oldest = [(item, item.last) for item in reversed(oldest)]
            while self._oldest:
                item, last = self._oldest[-1]
                # It may have been used or evicted since, or rows may hold it.
                if item.index >= 0 and item.last == last and (pages := pages_freed(self._tree, item)):
                    return item, pages
                self._oldest.pop()
        raise EngineError("the prefix cache has nothing to evict, although its pages are counted as evictable")

    def evicted(self, item: Node | Window) -> None:
        """A victim that is gone is no candidate any more."""
