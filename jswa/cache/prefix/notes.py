"""Notes of whole pages that come into a tree and leave it, for a journal (`jswa.kv_events`).

Law (tests/property/test_prefix.py): a reader that follows the notes knows exactly the whole pages of the tree.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import Node
from jswa.kv_events.journal import Journal, Kind, Medium, Moved, Removed, Stored

_NO_TEXT = np.zeros(0, np.int32)
_NO_PAGES = np.zeros(0, np.intp)


class Notes(NamedTuple):
    """Who reads the notes of a tree.

    Attributes:
        medium: where the tree's pages are.
        page: tokens of a page.
        told_by: kind of the pages that tell the text before a page: full ones, if there are any.
        windows: whether local pages are noted.
    """

    journal: Journal
    medium: Medium
    page: int
    told_by: Kind
    windows: bool

    def stored(
        self,
        node: Node,
        first: int,
        full: Int[np.ndarray, " pages"],
        local: Int[np.ndarray, " pages"],
        tokens: Int[np.ndarray, " n"] = _NO_TEXT,
    ) -> None:
        """Note the pages of an edge from page position `first` on, as far as they are whole; 0 where there is none.

        `tokens`: the last ones of the edge, which nobody changes; they are not copied if they begin with a page.
        """
        page, end = self.page, node.end
        count = min(len(full), end // page - first)
        if count <= 0:
            return
        begin = first * page
        whole = begin + len(tokens) == end
        before = page_at(node, self.told_by, first - 1, page) if begin else 0
        self.journal.put(
            Stored(
                self.medium,
                node.salt,
                (self.told_by, before) if before else None,
                _NO_TEXT if before or not begin else text_between(node, 0, begin),
                tokens[: count * page] if whole else text_between(node, begin, begin + count * page),
                full[:count].copy(),
                local[:count].copy() if self.windows else _NO_PAGES,
            )
        )

    def removed(self, kind: Kind, ids: Int[np.ndarray, " pages"]) -> None:
        """Note pages that left the tree; they may be partly filled ones."""
        if kind == "full" or self.windows:
            self.journal.put(Removed(self.medium, kind, ids.copy()))

    def moved(self, source: int, target: int) -> None:
        """Note that a full page has another id."""
        self.journal.put(Moved(self.medium, source, target))


def page_at(node: Node, kind: Kind, position: int, page: int) -> int:
    """Return the id of the page at a page position of the path to an edge; 0 if there is none."""
    above: Node | None = node
    while above is not None:
        base = above.start // page
        if position >= base:
            ids = above.full if kind == "full" else above.local
            return int(ids[position - base]) if position - base < len(ids) else 0
        above = above.parent
    return 0


def text_between(node: Node, begin: int, end: int) -> Int[np.ndarray, " n"]:
    """Return a copy of the tokens [begin, end) of the path to an edge."""
    if node.start <= begin:
        return node.tokens[begin - node.start : end - node.start].copy()
    parts: list[Int[np.ndarray, " m"]] = [_NO_TEXT]
    above: Node | None = node
    while above is not None and end > begin:
        if above.start < end:
            low = max(begin, above.start)
            parts.append(above.tokens[low - above.start : end - above.start])
            end = low
        above = above.parent
    return np.concatenate(parts[::-1])
