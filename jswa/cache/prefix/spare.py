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
        self._tickets[ids] = np.arange(self._end, self._end + count)
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

    def oldest(self, count: int) -> Int[np.ndarray, " n"]:
        """Return the oldest `count` ids, or all if there are fewer; they stay in the queue."""
        parts: list[Int[np.ndarray, " n"]] = []
        left, at = min(count, self._count), self._start
        while left:
            ids, positions = self._valid(at, min(self._end, at + max(_AT_ONCE, 2 * left)))
            at = min(self._end, at + max(_AT_ONCE, 2 * left))
            if not parts:
                self._start = int(positions[0]) if len(positions) else at
            if len(ids):
                parts.append(ids[:left])
                left -= len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, self._log[:0]])

    def ids(self) -> Int[np.ndarray, " n"]:
        """Return all ids, oldest first."""
        return self._valid(self._start, self._end)[0]

    def _valid(self, start: int, end: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return the ids of the valid entries of a part of the log, and their positions."""
        ids = self._log[start:end]
        valid = (self._tickets[ids] == np.arange(start, end)).nonzero()[0]
        return ids[valid], valid + start

    def _rewrite(self) -> None:
        """Move the valid entries, at most half of the log, to its start."""
        ids = self.ids()
        self._log[: len(ids)] = ids
        self._tickets[ids] = np.arange(len(ids))
        self._start, self._end = 0, len(ids)
