"""The seam between the prefix cache and the policy that chooses what it evicts. `lru.py` is the simplest policy.

The cache keeps the tree and its pages, finds texts and carries evictions out. It tells its policy what requests do with
the tree, and asks it for victims. A policy knows no model and no request, only the marks of edges and windows.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.radix import NONE, RadixTree


@runtime_checkable
class Policy(Protocol):
    """Chooses what a tree evicts. It is made with the tree, which outlives it.

    Law: a method changes nothing but marks (`last` and `kind` of edges, kinds of places, values of candidates), and
    `victim` returns a candidate that frees pages. So a bad policy costs hits, and never a wrong page or a leak.
    """

    def beside(self, tree: RadixTree) -> "Policy":
        """Return the policy of another tree, which keeps what is evicted from this one and sees the same requests."""
        ...

    def started(self, path: Sequence[Node], text: int, found: int) -> None:
        """See a row start whose text agrees with a path up to `text`; the path is empty if no edge agrees.

        `found`: how much of it another tree has, on whose pages the row starts; 0: it starts on those of this tree.
        """
        ...

    def appended(self, above: Node) -> None:
        """See a row that will append text to an edge: a leaf will grow, any other edge will get a child."""
        ...

    def ended(self, node: Node, published: int, prompt: int, end: int) -> None:
        """See the end of a row whose text is in the tree up to `published`, in this edge.

        `prompt`, `end`: where its prompt and its text ended. The text may go on where this tree lacks it.
        """
        ...

    def outcome(self, age: int, kind: int, *, used: bool) -> None:
        """Learn of an evicted text that it was asked for again, or was forgotten, so many rows after its last use.

        `kind`: of its edge when it was evicted.
        """
        ...

    def victim(self) -> tuple[Node | Window, int]:
        """Return the item to evict next, with its `pages_freed`, at least one.

        A leaf may be evicted in part, from its end: it may be returned again. Raises EngineError if no candidate frees
        any page.
        """
        ...

    def evicted(self, item: Node | Window) -> None:
        """See that the victim has been evicted, or a part of it."""
        ...


def pages_freed(tree: RadixTree, item: Node | Window) -> int:
    """Count the pages that only the tree owns: local pages of a window, or full pages at the end of a leaf."""
    if isinstance(item, Window):
        return int(np.count_nonzero(tree.pool.local_owners[item.slabs] == 1))
    if tree.layout.full is None or item.full.item(-1) == NONE:
        return 0
    shared = (tree.pool.full_owners[item.full] > 1).nonzero()[0]
    return len(item.full) - (shared.item(-1) + 1 if len(shared) else 0)
