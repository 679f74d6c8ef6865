"""How many drafts per row the next decode step runs: the number that gives most tokens per second, 0 if none pays.

A row has one average: how often its drafts are right. A step has one time, by its rows and drafts. Both are measured,
and both are exponential averages. While no drafts run, drafts that are looked up are compared with the tokens that come
back (`watch`). Drafts of a model cannot be compared: there the averages rise slowly, until a step tries some.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.speculation import PROGRAMS

_WEIGHT = 0.125  # of a draft that was looked up in the average of its row: texts begin to copy within a few tokens
_WEIGHT_MODEL = 0.05  # of a draft of a model
_RISE = 0.01  # of the way to 1 by which an average rises with each choice of no drafts, if nothing is compared
_FIRST = 0.5  # what the first row begins with if nothing is compared; 0 otherwise
_WEIGHT_NEW = 0.02  # of a step in what later rows begin with
_LEAST, _MOST = 0.05, 0.999  # averages below the least count as 0, and none as more than the most
_HOLDS = 4, 16  # steps for which a choice holds at least and at most
_LOOK = 0.02  # seconds for which that of no drafts holds: looking at the tokens takes a hundredth of that or two
_WEIGHT_TIME = 0.1  # of a step in the time of its size
_MEASURED = 3  # times of which the least counts, and before which nothing is known: the first ones are often slow
_FORGOTTEN = 1_024  # measured steps of a size after which a time is unknown again: the machine may have been busy
_UNKNOWN = 1.2  # what an unknown number of drafts is taken to cost, times the next smaller one


class _Time(NamedTuple):
    """What a step takes, how often that was measured, and the step of its size at which it was measured last."""

    seconds: float
    measured: int
    step: int


class DraftChoice:
    """Chooses the number of drafts of each decode step. Rows are named by row id.

    Args:
        watched: whether `watched` tells how often drafts are right while none run.
        most: drafts of a row at most, if the device shares those of a step among the rows for which it finds any; 0 if
            all rows have as many.

    Attributes:
        average: how often the drafts of each row are right.
        last: the last choice.
    """

    def __init__(self, max_rows: int, *, watched: bool = False, most: int = 0) -> None:
        self._watched, self._most, self._weight = watched, most, _WEIGHT if watched else _WEIGHT_MODEL
        self._new = 0.0 if watched else _FIRST
        self.average: Float[np.ndarray, " max_rows"] = np.full(max_rows, self._new)
        self._times: dict[tuple[int, int], _Time] = {}  # by size and drafts
        self._steps: dict[int, int] = {}  # by size
        self.last = self._size = self._left = 0

    def begin(self, row_id: int) -> None:
        """Forget the sequence that had a row: another begins with the average of all."""
        self.average[row_id] = self._new
        self._left = min(self._left, _HOLDS[0])

    def kept(self, rows: int) -> int | None:
        """Return the last choice if it still holds, for a step of about so many rows; None: `choose` anew."""
        if self._left <= 0 or _size(rows) != self._size:
            return None
        self._left -= 1
        return self.last

    @property
    def is_due(self) -> bool:
        """Whether the last choice holds no longer."""
        return self._left <= 0

    @property
    def unmeasured(self) -> bool:
        """Whether the time of a step need not be noted: of a choice of no drafts the last steps suffice."""
        return not self.last and self._left >= _HOLDS[0]

    def choose(self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: Callable[[], tuple[int, ...]]) -> int:
        """Return the number of drafts per row, 0 or one of `lengths`.

        Args:
            row_ids: the rows that may run drafts, of the `rows` of the step.
            lengths: returns the numbers of drafts that can be had now, ascending; called only if some may pay.
        """
        if not self._watched and not self.last:
            self.average[row_ids] += _RISE * (1 - self.average[row_ids])
        best = self.best(row_ids, rows, PROGRAMS)
        if best:
            best = self.best(row_ids, rows, lengths())
        without = self._known(_size(rows), 0)
        holds = _HOLDS[0] if best else _HOLDS[1]
        if self._watched and not best and without is not None:
            holds = max(_HOLDS[0], min(holds, int(_LOOK / without)))
        self.last, self._size, self._left = best, _size(rows), holds - 1
        return best

    def best(
        self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: tuple[int, ...], *, beside_prompts: bool = False
    ) -> int:
        """Return the one of `lengths` that gives most tokens a second, by what is known; 0 if none gives more.

        `beside_prompts`: the device shares no drafts, and numbers whose time is not known do not count.
        """
        size, seconds = _size(rows), self._known(_size(rows), 0)
        averages = [min(a, _MOST) for a in self.average.take(row_ids).tolist() if a >= _LEAST]
        if seconds is None or not averages:
            return 0
        best, speed = 0, rows / seconds
        for drafts in lengths:
            known = self._known(size, drafts)
            if known is None and beside_prompts:
                continue
            seconds = _UNKNOWN * seconds if known is None else known
            each = min(self._most, drafts * rows / len(averages)) if self._most and not beside_prompts else drafts
            # The first draft is right with chance a, the second with a², …
            tokens = rows + sum(a * (1 - a**each) / (1 - a) for a in averages)
            if tokens / seconds > speed:
                best, speed = drafts, tokens / seconds
        return best

    def watched(self, hits: Mapping[int, Sequence[bool]]) -> None:
        """Count which tokens of rows that run no drafts would have been drafted, the last of a row last."""
        for row_id, right in hits.items():
            average = self.average.item(row_id)
            for hit in right:
                average += self._weight * (hit - average)
            self.average[row_id] = average
            self._count(average, len(hits))

    def note(
        self, row_ids: Int[np.ndarray, " R"], drafted: Int[np.ndarray, " R"], right: Int[np.ndarray, " R"]
    ) -> None:
        """Count how many drafts the device had of rows that ran some, and how many were right.

        A row for which it had none counts like one whose first draft was wrong; drafts after a wrong one do not count.
        """
        if not len(row_ids):
            return
        average = 1 - (1 - self.average.take(row_ids)) * (1 - self._weight) ** right
        average = np.where((right < drafted) | (drafted == 0), (1 - self._weight) * average, average)
        self.average[row_ids] = average
        self._count(float(average.mean()))

    def _count(self, average: float, rows: int = 1) -> None:
        """Count an average, of one of so many rows, in what a new row begins with."""
        self._new += _WEIGHT_NEW / rows * (average - self._new)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """Note what a decode step of so many rows, with so many drafts each, has taken."""
        size = _size(rows)
        step = self._steps[size] = self._steps.get(size, 0) + 1
        before = self._times.get((size, drafts))
        if before is None or step - before.step > _FORGOTTEN:
            before = _Time(seconds, 0, step)
        if before.measured < _MEASURED:
            mean = min(seconds, before.seconds)
        else:  # a longer time than twice the mean is other work of the machine
            mean = before.seconds + _WEIGHT_TIME * (min(seconds, 2 * before.seconds) - before.seconds)
        self._times[size, drafts] = _Time(mean, before.measured + 1, step)

    def _known(self, size: int, drafts: int) -> float | None:
        """Return what a step of a size takes; None: it was measured too seldom, or too long ago."""
        time = self._times.get((size, drafts))
        if time is None or time.measured < _MEASURED or self._steps[size] - time.step > _FORGOTTEN:
            return None
        return time.seconds


def _size(rows: int) -> int:
    return (rows - 1).bit_length()
