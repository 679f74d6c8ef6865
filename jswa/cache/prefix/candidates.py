"""The windows and leaves that may be evicted, in arrays, so that a sample of them is scored by a few numpy calls."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

UNKNOWN = -1.0


@runtime_checkable
class Item(Protocol):
    """A window or a leaf, which may be evicted. `index`: its position among the candidates, negative if it is none.

    `last` and `hits`: the cache's clock at its last use, and the number of its uses.
    """

    index: int
    last: int
    hits: int


class Candidates[T: Item]:
    """Items in no order, with their numbers in arrays by index; adding and discarding cost O(1).

    The caller calls `refresh` after it has changed `last` or `hits` of an item. Entries of the arrays past the last
    item are stale.

    Attributes:
        values: loss per slot if the item is evicted: UNKNOWN, or infinite if evicting it would free nothing.
        last, reused: `last` and `hits > 0` of each item.
    """

    def __init__(self) -> None:
        self.items: list[T] = []
        self.values: Float[np.ndarray, " room"] = np.empty(256)
        self.last: Int[np.ndarray, " room"] = np.empty(256, np.int64)
        self.reused: Bool[np.ndarray, " room"] = np.empty(256, bool)

    def add(self, item: T) -> None:
        """Add an item of unknown value if it is absent."""
        if item.index >= 0:
            return
        item.index = len(self.items)
        self.items.append(item)
        if len(self.items) > len(self.values):
            self.values, self.last, self.reused = (
                np.concatenate([array, array]) for array in (self.values, self.last, self.reused)
            )
        self.values[item.index] = UNKNOWN
        self.refresh(item)

    def discard(self, item: T) -> None:
        """Remove an item if it is present."""
        index = item.index
        if index < 0:
            return
        last = self.items.pop()
        if last is not item:
            self.items[index] = last
            for array in (self.values, self.last, self.reused):
                array[index] = array[last.index]
            last.index = index
        item.index = -1

    def refresh(self, item: T) -> None:
        """Follow a change of `last` or `hits` of an item, if it is present."""
        if item.index >= 0:
            self.last[item.index], self.reused[item.index] = item.last, item.hits > 0

    def forget(self, item: T) -> None:
        """Count an item's value as unknown, if it is present."""
        if item.index >= 0:
            self.values[item.index] = UNKNOWN

    def check(self) -> None:
        """Assert that arrays and items agree."""
        for index, item in enumerate(self.items):
            assert item.index == index
            assert (self.last[index], self.reused[index]) == (item.last, item.hits > 0), "a use was not refreshed"
