"""What followed a text in a tree: the texts of the other requests of its salt that begin like it."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import Node
from jswa.sched.drafts.earlier import EarlierEdge

BETWEEN = -1  # between two texts


def continuations(
    found: tuple[Sequence[Node | EarlierEdge], int],
    tokens: Int[np.ndarray, " T"],
    most: int,
    *,
    before: int,
    behind: int,
) -> tuple[Int[np.ndarray, " n"], int]:
    """Return the texts of the tree that go on where a text and the tree part, and the position of their first token.

    The text that was used last comes first; BETWEEN separates it from the next. Each begins with some tokens that it
    shares with the text, so that the place can be found.

    Args:
        found: the edges that agree with the text, and the number of tokens that do (`walk` of a tree).
        most: tokens in all.
        before: tokens that are shared.
        behind: positions by which the first text may begin before the end of `tokens`: of a text that has gone on
            elsewhere for long, what is far back is no longer wanted.
    """
    path, at = found
    if not path:
        return np.zeros(0, np.int32), 0
    first = max(at, len(tokens) - behind)
    parts: list[Int[np.ndarray, " n"]] = []
    length, waiting = 0, list[Node | EarlierEdge]([path[-1]])
    begins, start = first, 0
    while waiting and length < most:
        node: Node | EarlierEdge | None = waiting.pop(0)
        assert node is not None
        if parts:
            begins = node.start
            parts.append(np.array([BETWEEN], np.int32))
            length += 1
        shared = _last(node, begins, before) if begins <= node.end else np.zeros(0, np.int32)
        if not length:
            start = begins - len(shared)
        parts.append(shared)
        length += len(shared)
        while node is not None and length < most:
            part = node.tokens[max(0, begins - node.start) :]
            parts.append(part)
            length += len(part)
            below: list[Node | EarlierEdge] = sorted(node.children.values(), key=lambda child: -child.last)
            node, others = (below[0], below[1:]) if below else (None, [])
            waiting += others
    return np.concatenate(parts)[:most].astype(np.int32), start


def _last(node: Node | EarlierEdge, end: int, count: int) -> Int[np.ndarray, " n"]:
    """Return the last tokens of the path to `node` before position `end`."""
    parts: list[Int[np.ndarray, " n"]] = []
    above: Node | EarlierEdge | None = node
    low = max(0, end - count)
    while above is not None and above.parent is not None and end > low:
        if above.start < end:
            part = above.tokens[max(0, low - above.start) : end - above.start]
            parts.append(part)
            end = above.start
        above = above.parent
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)
