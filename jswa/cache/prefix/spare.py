"""A queue of page ids, oldest first, from which any page can be taken; in arrays."""

import numpy as np
from jaxtyping import Int

_AT_ONCE = 64


class SpareQueue:
    """Ids below `num_ids`, each at most once, in the order in which they were put.

    An entry of the log is valid if the id's ticket is its position; taking an id voids its ticket only.
    """

    def __init__(self, num_ids: int) -> None:
        self._tickets = np.full(num_ids, -1, np.int64)  # position in the log; -1: not in the queue
        self._log = np.empty(2 * num_ids + _AT_ONCE, np.intp)
        self._places = np.arange(len(self._log))
        self._start = self._end = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, ids: Int[np.ndarray, " n"]) -> None:
        """Put different ids at the end, those that are in the queue already excepted."""
        ids = ids.astype(np.intp, copy=False)
        ids = ids[self._tickets[ids] < 0]
        count = len(ids)
        if not count:
            return
        if self._end + count > len(self._log):
            self._rewrite()
        self._log[self._end : self._end + count] = ids
        self._tickets[ids] = self._places[self._end : self._end + count]
        self._end += count
        self._count += count

    def take(self, ids: Int[np.ndarray, " n"]) -> None:
        """Take out those of the ids, which differ, that are in the queue."""
        if not self._count:
            return
        ids = ids.astype(np.intp, copy=False)
        present = np.count_nonzero(self._tickets[ids] >= 0)
        if present:
            self._tickets[ids] = -1
            self._count -= int(present)

    def pop(self, count: int) -> Int[np.ndarray, " n"]:
        """Take out the oldest ids, `count` (at least one) or fewer, but one if there are any."""
        while self._count:
            ids, valid = self._valid(self._start + max(_AT_ONCE, 2 * count))
            taken: Int[np.ndarray, " n"] = ids[valid[:count]]
            self._start += int(valid[len(taken) - 1]) + 1 if len(taken) else len(ids)
            if len(taken):
                self._tickets[taken] = -1
                self._count -= len(taken)
                return taken
        return self._log[:0]

    def ids(self) -> Int[np.ndarray, " n"]:
        """Return all ids, oldest first."""
        entries, valid = self._valid(self._end)
        ids: Int[np.ndarray, " n"] = entries[valid]
        return ids

    def _valid(self, end: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
        """Return the entries of the log up to `end`, and which of them are valid."""
        entries = slice(self._start, min(end, self._end))
        ids = self._log[entries]
        return ids, (self._tickets[ids] == self._places[entries]).nonzero()[0]

    def _rewrite(self) -> None:
        """Move the valid entries, at most half of the log, to its start."""
        ids = self.ids()
        self._log[: len(ids)] = ids
        self._tickets[ids] = self._places[: len(ids)]
        self._start, self._end = 0, len(ids)
