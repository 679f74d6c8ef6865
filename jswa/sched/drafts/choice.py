"""How many drafts per row the next decode step runs: the number that gives most tokens per second, 0 if none pays.

A row has one average: how often its drafts are right, the newest weighing most. A step has one time, by its rows and
drafts: the median of the last ones. While no drafts run, drafts that are looked up are compared with the tokens that
come back (`watch`). Drafts of a model cannot be compared: there the averages rise slowly, until a step tries some.

A time that is not known lies on a line through the known times next to it:

    time of a step │        ╱ 7, expected
                   │     ╳ 3, measured
                   │   ╱ 1, expected
                   │ ╳ 0, measured
                   └────────────────────── drafts
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

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
_LOOK = 0.02  # seconds for which the choice of no drafts holds: looking at the tokens takes one or two percent of it
_TIMES = 15  # of which the median counts: a mean would be misled by one step that waited for other work
_MEASURED = 3  # times below which nothing is known
_FORGOTTEN = 1_024  # measured steps of a size after which a time is unknown again: the machine may have been busy
_STALE = 32  # steps with drafts for each known time without: after so many, steps without drafts are measured again
_EACH = 0.1  # what a draft is expected to cost, of a step without drafts, as long as no step with drafts is known
_EACH_LEAST = 0.02  # and at least


@dataclass
class _Times:
    """What the last steps of a size with some number of drafts took; `step`: number of the last one in its size."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    step: int = 0


class DraftChoice:
    """Chooses the number of drafts of each decode step. Rows are named by row id.

    Args:
        watched: whether `watched` tells how often drafts are right while none run.
        most: drafts of a row at most, if the device shares those of a step among the rows for which it finds any; 0 if
            all rows have as many.

    Attributes:
        average: how often the drafts of each row are right.
        last: the last choice.
        kind: of the steps that run now. Steps of another kind take another time, even with as many rows.
    """

    def __init__(self, max_rows: int, *, watched: bool = False, most: int = 0) -> None:
        self._watched, self._most, self._weight = watched, most, _WEIGHT if watched else _WEIGHT_MODEL
        self._new = 0.0 if watched else _FIRST
        self.average: Float[np.ndarray, " max_rows"] = np.full(max_rows, self._new)
        self.kind: Hashable = None
        self._times: dict[tuple[Hashable, int], _Times] = {}  # by size and drafts
        self._steps: dict[Hashable, int] = {}  # by size
        self._size: Hashable = None  # of the last choice
        self.last = self._left = 0

    def begin(self, row_id: int) -> None:
        """Forget the sequence that had a row: another begins with the average of all."""
        self.average[row_id] = self._new
        self._left = min(self._left, _HOLDS[0])

    def kept(self, rows: int) -> int | None:
        """Return the last choice if it still holds, for a step of about so many rows; None: `choose` anew."""
        if self._left <= 0 or self._size_of(rows) != self._size:
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
        size, holds = self._size_of(rows), _HOLDS[0]
        if best and self._is_stale(size):
            best = 0
        elif not best and (without := self._known(size).get(0)) is not None:
            holds = max(holds, min(_HOLDS[1], int(_LOOK / without))) if self._watched else _HOLDS[1]
        self.last, self._size, self._left = best, size, holds - 1
        return best

    def best(
        self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: tuple[int, ...], *, beside_prompts: bool = False
    ) -> int:
        """Return the one of `lengths` that gives most tokens a second, by what is known; 0 if none gives more.

        `beside_prompts`: the device shares no drafts, and numbers whose time is not known do not count.
        """
        averages = [min(a, _MOST) for a in self.average.take(row_ids).tolist() if a >= _LEAST]
        known = self._known(self._size_of(rows)) if averages else {}
        if 0 not in known:
            return 0
        best, speed = 0, rows / known[0]
        for drafts in lengths:
            if drafts not in known and beside_prompts:
                continue
            each = min(self._most, drafts * rows / len(averages)) if self._most and not beside_prompts else drafts
            # The first draft is right with chance a, the second with a², …
            tokens = rows + sum(a * (1 - a**each) / (1 - a) for a in averages)
            seconds = known[drafts] if drafts in known else _expected(known, drafts)
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
        size = self._size_of(rows)
        step = self._steps[size] = self._steps.get(size, 0) + 1
        times = self._times.setdefault((size, drafts), _Times())
        if step - times.step > _FORGOTTEN:
            times.seconds.clear()
        times.seconds.append(seconds)
        times.step = step

    def _size_of(self, rows: int) -> Hashable:
        return self.kind, (rows - 1).bit_length()

    def _known(self, size: Hashable) -> dict[int, float]:
        """Return what a step of a size takes, by drafts, ascending; without times that are too few or too old."""
        known = {}
        for drafts in (0, *PROGRAMS):
            times = self._times.get((size, drafts))
            if times and len(times.seconds) >= _MEASURED and self._steps[size] - times.step <= _FORGOTTEN:
                known[drafts] = sorted(times.seconds)[(len(times.seconds) - 1) // 2]
        return known

    def _is_stale(self, size: Hashable) -> bool:
        """Return whether steps without drafts are to be measured again: soon after the first ones, then seldom."""
        times = self._times[size, 0]
        return self._steps[size] - times.step > _STALE * len(times.seconds)


def _expected(known: Mapping[int, float], drafts: int) -> float:
    """Return the time of an unknown number of drafts, by the known ones; that of 0 drafts is among these."""
    *_, below = (number for number in known if number < drafts)
    above = next((number for number in known if number > drafts), None)
    other = above if above is not None else max((number for number in known if number < below), default=None)
    if other is None:
        return known[0] * (1 + _EACH * drafts)
    slope = (known[other] - known[below]) / (other - below)
    return known[below] + max(slope, _EACH_LEAST * known[0]) * (drafts - below)
