"""A policy without any sense: what it evicts may cost hits, and must break no law (jswa/cache/prefix/policy.py)."""

import random
from collections.abc import Sequence

from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.policy import pages_freed
from jswa.cache.prefix.radix import RadixTree


class AnyVictim:
    """Evicts any candidate, used just now or long ago, and marks no use."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._choose = random.Random(0)

    def beside(self, tree: RadixTree) -> "AnyVictim":
        return AnyVictim(tree)

    def started(self, path: Sequence[Node], text: int, found: int) -> None:
        """Nothing."""

    def appended(self, above: Node) -> None:
        """Nothing."""

    def ended(self, node: Node, published: int, prompt: int, end: int) -> None:
        """Nothing."""

    def outcome(self, age: int, kind: int, *, used: bool) -> None:
        """Nothing."""

    def victim(self) -> tuple[Node | Window, int]:
        items = self._tree.candidates.items
        return self._choose.choice([(item, pages) for item in items if (pages := pages_freed(self._tree, item))])

    def evicted(self, item: Node | Window) -> None:
        """Nothing."""
