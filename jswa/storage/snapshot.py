"""The cached texts of one salt, captured from one tree to be restored in another (restore.py).

Texts list pages, not their contents: `capture` returns the arena slots to read, `restore` the slots to write. Texts
that begin alike share the pages of what they have in common.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jswa.cache.host.texts import Pages, pages_of, path_to
from jswa.cache.layout import KVLayout
from jswa.cache.moves import slots_of
from jswa.cache.pool import PagePool
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.radix import NONE

Mark = tuple[int, bool, int, int]  # of a window: its end, whether texts diverge there, age, hits


class SavedText(NamedTuple):
    """A text from its first token on, with its pages. Ages count the rows that started from a match since the last use.

    Attributes:
        pages: by page position the number of a page's first row among all rows, from 1 on; 0: none.
        age, hits: as `last` and `hits` of `Node`.
        windows: those whose pages the text has.
    """

    tokens: Int[np.ndarray, " T"]
    pages: Pages
    age: int
    hits: int
    windows: list[Mark]


class Captured(NamedTuple):
    """What a tree has.

    Attributes:
        texts: those used last first.
        slots: the arena slot of each row: all full pages, then all local pages.
        filled: by full page, and by local page, the number of its tokens.
        tokens: of all texts, where they are shared counted once.
    """

    texts: list[SavedText]
    slots: Int[np.ndarray, " rows"]
    filled: tuple[Int[np.ndarray, " F"], Int[np.ndarray, " L"]]
    tokens: int


def capture(prefix: PrefixCache, salt: str) -> Captured:
    """Capture the tree of a salt. Changes nothing. Text without any page is left out."""
    tree, clock, texts = prefix.tree, prefix.tree.clock, list[SavedText]()
    ends = dict[Node, int]()  # of the text of each edge that is captured
    leaves = (node for node in tree.nodes(salt) if node.parent is not None and not node.children)
    for leaf in sorted(leaves, key=lambda leaf: -leaf.last):
        path = path_to(leaf)
        pages = pages_of(tree, path, leaf.end, leaf.end)
        held = np.flatnonzero(pages.full if tree.layout.full is not None else pages.local)
        count = int(held[-1]) + 1 if len(held) else 0
        end, pages = min(leaf.end, count * tree.page_size), Pages(pages.full[:count], pages.local[:count])
        ends |= {node: max(ends.get(node, 0), min(node.end, end)) for node in path}
        if count:
            own = [w for node in path for w in node.windows.values() if _has(pages, w, tree.page_size)]
            marks = [(w.end, w.branch, clock - w.last, w.hits) for w in own]
            tokens = np.concatenate([node.tokens for node in path])[:end]
            texts.append(SavedText(tokens, pages, clock - leaf.last, leaf.hits, marks))
    total = sum(max(0, end - node.start) for node, end in ends.items())
    return _numbered(texts, prefix.pool, tree.page_size, total)


def _has(pages: Pages, window: Window, page_size: int) -> bool:
    """Return whether a text has the pages of a window."""
    last = -(-window.end // page_size)
    return np.array_equal(pages.local[last - len(window.slabs) : last], window.slabs)


def _numbered(texts: list[SavedText], pool: PagePool, page_size: int, total: int) -> Captured:
    """Replace the ids of the pages of texts by numbers of rows."""
    m, first, columns, held, filled = pool.pages_per_slab, 1, [], [], []
    for kind, size in (("full", 1), ("local", m)):
        ids = [getattr(text.pages, kind) for text in texts]
        tokens, row_of = np.zeros((2, len(getattr(pool, f"{kind}_owners"))), np.int64)  # by page
        for text, own in zip(texts, ids, strict=True):
            tokens[own] = page_size
            tokens[own[-1]] = len(text.tokens) - page_size * (len(own) - 1)
        tokens[NONE] = 0
        held.append(np.flatnonzero(tokens))
        filled.append(tokens[held[-1]])
        row_of[held[-1]] = first + size * np.arange(len(held[-1]))
        columns.append([row_of[own] for own in ids])
        first += size * len(held[-1])
    out = [text._replace(pages=Pages(*pages)) for text, *pages in zip(texts, *columns, strict=True)]
    return Captured(out, slots_of(held[0], held[1], m), (filled[0], filled[1]), total)


def check(texts: list[SavedText], layout: KVLayout, vocab: int) -> None:
    """Raise ValueError, with the reason, for texts that `capture` cannot have made."""
    for text in texts:
        numbers = [text.age, text.hits, *(n for end, _, *uses in text.windows for n in (end, *uses))]
        _require(all(type(n) is int and 0 <= n < 2**62 for n in numbers), "a number out of range")
        _require(all(type(branch) is bool for _, branch, *_ in text.windows), "a window that is no branch, nor none")
        _require(all(0 < end <= len(text.tokens) for end, *_ in text.windows), "a window beyond its text")
        _require(len(text.tokens), "a text without tokens")
        # Ids below -1 are of images.
        _require(np.all((text.tokens != -1) & (text.tokens < vocab)), "a token that is not in the vocabulary")
        _require(layout.full is None or text.pages.full.all(), "a page is missing")
        _require(layout.local is not None or not text.pages.local.any(), "local pages for a model without local layers")


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
