"""Which window or leaf of the tree is evicted next: the one with the least expected loss per slot.

The loss of a window is the number of tokens by which a matching row would start earlier without it, times the share of
requests that go on from there (`Places`); the loss of a leaf is that of a row that matches the whole leaf. Both count
times the chance of another use at the age of the text (`Ageing`). A page that several windows need is shared among
them: one that is worth much does not protect one that is worth little. A few items are taken from each sample, at
least 64 times as large. A leaf whose window is too costly to replay is worth nothing without it, and goes next.
"""

import math

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import UNKNOWN, Node, Window
from jswa.cache.prefix.learned.ageing import Ageing
from jswa.cache.prefix.learned.places import Places
from jswa.cache.prefix.policy import pages_freed
from jswa.cache.prefix.radix import NONE, RadixTree
from jswa.cache.prefix.resume import replay_start
from jswa.errors import EngineError

_SAMPLE = 64  # items drawn for each that is chosen
_CHOSEN = 8  # items chosen from one sample


class Victims:
    """Chooses among the candidates of a tree."""

    def __init__(self, tree: RadixTree, places: Places, ageing: Ageing) -> None:
        self._tree = tree
        self._pool = tree.pool
        self._places = places
        self._ageing = ageing
        self._reach = tree.layout.reach
        self._has_full = tree.layout.full is not None
        self._random = np.random.default_rng(0)
        self._chosen: list[tuple[Node | Window, int]] = []  # with `last`, the best at the end
        self._leaf: tuple[Node, int] | None = None  # chosen last, with `last`

    def next(self) -> tuple[Node | Window, int]:
        """Return the next item to evict, and its `pages_freed`. Raises EngineError if there is none.

        A leaf is evicted further, unless it has been used since.
        """
        if self._leaf is not None and self._leaf[0].index >= 0 and self._leaf[0].last == self._leaf[1]:
            leaf = self._leaf[0]
            if pages := pages_freed(self._tree, leaf):
                return leaf, pages
        item, pages = self._choose()
        self._leaf = (item, item.last) if isinstance(item, Node) else None
        return item, pages

    def _choose(self) -> tuple[Node | Window, int]:
        values = self._tree.candidates.values
        while True:
            while self._chosen:
                item, last = self._chosen.pop()
                # Chosen before, perhaps: it may have been used, changed or evicted since, or rows may hold it.
                if item.index >= 0 and item.last == last and values[item.index] != UNKNOWN:
                    if pages := pages_freed(self._tree, item):
                        return item, pages
                    values[item.index] = math.inf
            self._chosen = self._draw()

    def prefer(self, item: Node) -> None:
        """Evict an edge next if it is worth nothing: without its windows, nobody could start at its end."""
        if item.index >= 0 and not item.cursors:
            value = self._tree.candidates.values[item.index] = self.value(item)
            if value <= 0:
                self._chosen.append((item, item.last))

    def _draw(self) -> list[tuple[Node | Window, int]]:
        """Return the best items of a sample, the best at the end."""
        items = self._tree.candidates.items
        if len(items) > _CHOSEN * _SAMPLE:
            found = self._best(self._random.integers(len(items), size=_CHOSEN * _SAMPLE), _CHOSEN)
        else:
            found = self._best(np.arange(len(items)), max(1, len(items) // _SAMPLE))
        # Edges under a cursor seldom have free pages: they are considered only if no other item is left.
        found = found or self._best(np.arange(len(items)), 1) or self._best(np.arange(len(items)), 1, True)
        if not found:
            raise EngineError("the prefix cache has nothing to evict, although its pages are counted as evictable")
        return found

    def _best(
        self, sample: Int[np.ndarray, " n"], count: int, under_cursors: bool = False
    ) -> list[tuple[Node | Window, int]]:
        """Return at most `count` items of a sample whose loss is least, and finite, the best at the end."""
        candidates, items = self._tree.candidates, self._tree.candidates.items
        values = candidates.values[sample]
        # Unknown, or held by rows when it was last computed.
        stale = (values < 0) | (values == math.inf)
        if stale.any():
            for index in sample[stale].tolist():
                candidates.values[index] = self.value(items[index])
            values = candidates.values[sample]
        slots = candidates.slots[sample]
        values *= self._ageing.worth(self._tree.clock - candidates.last[slots], candidates.kinds[slots])
        found: list[tuple[Node | Window, int]] = []
        while len(found) < count and values.item(place := int(values.argmin())) < math.inf:
            item, values[place] = items[sample.item(place)], math.inf
            if under_cursors or isinstance(item, Window) or not item.cursors:
                found.append((item, item.last))
        return found[::-1]

    def value(self, item: Node | Window) -> float:
        """Return the loss per slot; infinite if evicting the item frees nothing."""
        if isinstance(item, Window):
            free = item.slabs[self._pool.local_owners[item.slabs] == 1]
            if not len(free):
                return math.inf
            loss = item.end - self._resumes_at(item.node, item.end - 1, item.end)
            return loss * self._serves(item) / (self._pool.pages_per_slab * float((1.0 / self._tree.uses[free]).sum()))
        last = item.full.item(-1) if self._has_full else NONE
        if last == NONE or self._pool.full_owners.item(last) > 1:
            return math.inf
        loss = self._resumes_at(item, item.end, item.end) - self._resumes_at(item, item.start, item.start)
        local = self._pool.pages_per_slab * int(np.count_nonzero(item.local)) if loss else 0
        return loss / (len(item.full) + local)

    def _serves(self, window: Window) -> float:
        """Return the share of requests that would resume at this window."""
        node, share = window.node, self._places.share
        above = min((end for end in node.windows if end > window.end), default=node.end + 1)
        return min(1.0, sum(share[kind] for at, kind in node.places.items() if window.end <= at < above))

    def _resumes_at(self, node: Node, last: int, length: int) -> int:
        """Return where a row that matches `length` tokens would start, by the windows that end at `last` or before."""
        if self._reach is None:
            return length
        least = replay_start(self._tree.layout, length)
        above: Node | None = node
        found = least
        while above is not None and found == least and above.start + len(above.tokens) > least:
            for end in above.windows:
                if found < end <= last:
                    found = end
            above = above.parent
        return found
