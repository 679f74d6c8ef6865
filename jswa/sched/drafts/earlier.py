"""Texts of earlier weights: their KV is of no use any more, but their tokens may be right again as drafts.

A trainer asks the same prompts epoch after epoch, and each change of the weights empties the prefix cache. The texts
that it held are kept here as token ids, in a tree for each salt and LoRA adapter.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import Node
from jswa.cache.prefix.radix import common_prefix

MOST = 1 << 23  # tokens, 4 bytes each
_EDGE = 128  # tokens that an edge counts as beside its own: so much memory do its objects take


class EarlierEdge:
    """An edge of a tree, or the root of one (no tokens): as `Node`, without pages."""

    __slots__ = ("children", "last", "parent", "salt", "start", "tokens")

    def __init__(
        self, start: int, tokens: Int[np.ndarray, " T"], parent: "EarlierEdge | None", last: int, salt: str = ""
    ) -> None:
        self.start, self.tokens, self.parent, self.last, self.salt = start, tokens, parent, last, salt
        self.children: dict[int, EarlierEdge] = {}

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)


class EarlierTexts:
    """Trees of token ids, of at most `most` tokens in all: the text that was used longest ago goes first, from its end.

    Laws (`check`): a text that is found under a salt was added under it; siblings begin with different tokens; the
    leaves are the edges without children, and only leaves are dropped; no empty tree stays.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.tokens = 0  # and `_EDGE` for each edge
        self._roots: dict[str, EarlierEdge] = {}
        self._leaves: OrderedDict[EarlierEdge, None] = OrderedDict()  # the one used longest ago first

    def add(self, salt: str, nodes: Iterator[Node]) -> None:
        """Add the texts of a tree of the prefix cache, given its root and edges, parents first."""
        places: dict[Node, tuple[EarlierEdge, int]] = {}
        ends: list[tuple[int, EarlierEdge]] = []
        for node in nodes:
            if node.parent is None:
                root = self._roots.setdefault(salt, EarlierEdge(0, node.tokens, None, node.last, salt))
                places[node] = root, 0
                continue
            edge, at = places[node] = self._insert(*places[node.parent], node.tokens, node.last)
            if not node.children and at == edge.end and not edge.children:
                ends.append((node.last, edge))
        for _, edge in sorted(ends, key=lambda end: end[0]):
            if edge in self._leaves:  # otherwise a text that came later has split it, or goes on behind it
                self._leaves.move_to_end(edge)
        while self.tokens > self.most and self._leaves:
            self._evict()
        self._drop_empty(salt)

    def walk(self, salt: str, tokens: Int[np.ndarray, " T"]) -> tuple[list[EarlierEdge], int]:
        """Return the edges that agree with a text from its start, and the number of tokens that agree."""
        edge, at, path = self._roots.get(salt), 0, list[EarlierEdge]()
        while edge is not None and at < len(tokens):
            edge = edge.children.get(int(tokens[at]))
            if edge is None:
                break
            agree = common_prefix(edge.tokens, tokens[at:])
            at += agree
            path.append(edge)
            if agree < len(edge.tokens):
                break
        return path, at

    def clear(self) -> None:
        """Forget all texts."""
        self._roots.clear()
        self._leaves.clear()
        self.tokens = 0

    def check(self) -> None:
        """Assert the laws above."""
        tokens, leaves = 0, set[EarlierEdge]()
        for salt, root in self._roots.items():
            assert (root.salt, len(root.tokens), root.parent) == (salt, 0, None)
            assert root.children, "an empty tree"
            edges = [root]
            for edge in edges:
                edges.extend(edge.children.values())
                for token, child in edge.children.items():
                    assert (child.parent, child.start) == (edge, edge.end)
                    assert len(child.tokens), "an edge without tokens"
                    assert token == int(child.tokens[0])
            tokens += sum(len(edge.tokens) + _EDGE for edge in edges[1:])
            leaves |= {edge for edge in edges if not edge.children}
        assert leaves == set(self._leaves), "the leaves are miscounted"
        assert self.tokens == tokens <= self.most, "the tokens are miscounted, or too many"

    def _insert(self, edge: EarlierEdge, at: int, tokens: Int[np.ndarray, " n"], last: int) -> tuple[EarlierEdge, int]:
        """Add text behind position `at` of an edge; return the edge and position of its end.

        The edge may have been split since: the position then lies above it.
        """
        while edge.parent is not None and at <= edge.start:
            edge = edge.parent
        while len(tokens):
            edge.last = max(edge.last, last)
            if at < edge.end:
                agree = common_prefix(edge.tokens[at - edge.start :], tokens)
                if agree:
                    at, tokens = at + agree, tokens[agree:]
                    continue
                edge = self._split(edge, at)
            if int(tokens[0]) not in edge.children:
                edge = self._append(edge, tokens, last)
                return edge, edge.end
            edge = edge.children[int(tokens[0])]
        edge.last = max(edge.last, last)
        return edge, at

    def _append(self, edge: EarlierEdge, tokens: Int[np.ndarray, " n"], last: int) -> EarlierEdge:
        """Append text to an edge: a leaf grows, any other edge gets a child. Return the edge that has the text."""
        self.tokens += len(tokens)
        if edge.parent is not None and not edge.children:
            edge.tokens = np.concatenate([edge.tokens, tokens])
            self._leaves.move_to_end(edge)
            return edge
        child = edge.children[int(tokens[0])] = EarlierEdge(edge.end, tokens.copy(), edge, last)
        self.tokens += _EDGE
        self._leaves[child] = None
        return child

    def _split(self, edge: EarlierEdge, at: int) -> EarlierEdge:
        """Split an edge at a position inside it; return the upper half, a new edge. `edge` becomes the lower half."""
        cut, above = at - edge.start, edge.parent
        assert above is not None
        upper = EarlierEdge(edge.start, edge.tokens[:cut].copy(), above, edge.last)
        above.children[int(upper.tokens[0])] = upper
        upper.children[int(edge.tokens[cut])] = edge
        edge.start, edge.tokens, edge.parent = at, edge.tokens[cut:].copy(), upper
        self.tokens += _EDGE
        return upper

    def _evict(self) -> None:
        """Drop the leaf that was used longest ago; the edge above it goes next if it has no other children."""
        leaf, _ = self._leaves.popitem(last=False)
        above = leaf.parent
        assert above is not None
        del above.children[int(leaf.tokens[0])]
        self.tokens -= len(leaf.tokens) + _EDGE
        if above.parent is None:
            self._drop_empty(above.salt)
        elif not above.children:
            self._leaves[above] = None
            self._leaves.move_to_end(above, last=False)

    def _drop_empty(self, salt: str) -> None:
        root = self._roots.get(salt)
        if root is not None and not root.children:
            del self._roots[salt]
