"""How many drafts per row the next decode step runs: the number that gives most tokens per second, 0 if none pays.

The time of a step is measured by its rows and drafts. The share of right drafts is counted by row: for the first draft
of a step, and for each draft behind a right one, since a row that follows an earlier text does so for a while. While no
drafts run, drafts that are looked up are compared with the tokens that come back (`watch`); drafts of a model must be
tried. Trials of unknown times and shares take a small part of the time of all steps.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Real

from jswa.sched.drafts.watch import Hits
from jswa.speculation import PROGRAMS

_SHARE = 0.006  # of the time, for trials
_MOST_SAVED = 8  # steps
_HOLDS = 16  # steps for which a choice holds, as long as the rows are the same
_RESTS = 8, 16  # steps for which the choice of no drafts holds at first and, doubled each time, at most
_RUN = 3  # right drafts in a row, behind which a row's wrong ones before count no more
_TIMED = 4  # the last of these, which are measured
_NEW = 4  # steps for which a choice holds at most once a row has begun: others' texts say little about its own
_CLOSE = 0.8  # of the best tokens a second, which a number of drafts must give for its time to be measured again
_NOTED = 64  # steps that are counted together at most
_GAIN = 1.02  # drafts must give so many times the tokens a second
_KEEP = 0.9  # of a row's counts, each time that it has run drafts
_POOL_KEEP = 0.99  # of those of all rows
_WEIGHT = 1.2  # steps for which the counts of all rows stand for a row that has none of its own
_STALE = 16  # steps of a size after which a time may be measured again
_FORGOTTEN = 1_024  # after which it is unknown again: the machine may have been busy
_FIRST = 3  # measurements of which the least counts, and before which nothing is known
_NEWEST, _NEWEST_STALE = 0.2, 0.5  # weight of the last measurement
_SLOWER = 0.25  # of this weight if it is longer than what was known: other work makes steps slower, nothing faster
_OUTLIER = 2.0  # times what was known: the machine did something else
_NEVER_WRONG = 1 - 1e-9
_CHEAP = 1.1  # what an unknown length is taken to cost, times that of the next shorter one


class Chances(NamedTuple):
    """How often drafts of R rows are right: the first of a step, and one behind a right one.

    Attributes:
        most: drafts of a row at most, if the device shares those of a step among the rows for which it finds any; 0 if
            all rows have as many.
        precise: how often a first draft is right where one is found.
    """

    first: Float[np.ndarray, " R"]
    further: Float[np.ndarray, " R"]
    most: int = 0
    precise: float = 1.0

    def tokens(self, lengths: Iterable[int]) -> dict[int, float]:
        """Return how many tokens a step gives besides one for each row, by number of drafts per row."""
        drafts = tuple(lengths)
        each = np.array(drafts, float)
        if self.most:
            finding = _where_any(float(self.first.sum()) / self.precise, len(self.first))
            each = np.minimum(each * (len(self.first) / finding), self.most)
        further = np.minimum(self.further, _NEVER_WRONG)
        right = (1 - further ** each[:, None]) @ (self.first / (1 - further))
        return dict(zip(drafts, right.tolist(), strict=True))


def best_length(tokens: Mapping[int, float], rows: int, seconds: Mapping[int, float]) -> int:
    """Return the number of drafts that gives most tokens a second, 0 unless it gives clearly more than none does.

    Args:
        tokens: what a step of so many `rows` gives besides one token for each, by number of drafts.
        seconds: what it takes, by number of drafts; 0 is among them.
    """
    speed = {drafts: (rows + tokens[drafts]) / max(time, 1e-9) for drafts, time in seconds.items()}
    best = max(speed, key=lambda drafts: speed[drafts])
    return best if speed[best] > _GAIN * speed[0] else 0


def _where_any(finding: float, rows: int) -> float:
    """Return how many of the rows find drafts where any does, if on average so many do, each by itself."""
    share = min(finding / rows, 1.0)
    return finding / -math.expm1(rows * math.log1p(-share)) if 1e-9 < share < 1 else max(finding, 1.0)


class _Noted(NamedTuple):
    """Steps of rows that are not counted yet: by row their number, and the drafts and the right drafts of each."""

    row_ids: Int[np.ndarray, " R"]
    steps: Int[np.ndarray, " R"]
    drafted: Int[np.ndarray, " R"]
    right: Int[np.ndarray, " R"]


class DraftChoice:
    """Chooses the number of drafts of each decode step. Rows are named by row id.

    Args:
        watched: whether `watched` tells how often drafts are right while none run, so that no step is spent on that.
        most: see `Chances`.
    """

    def __init__(self, max_rows: int, *, watched: bool = False, most: int = 0) -> None:
        self._watched, self._most = watched, most
        # By row: right and tried, of first drafts and of those behind a right one.
        self._counts = np.zeros((max_rows, 2, 2))
        self._pool = np.array([[0.5, 1.0], [0.8, 1.0]])
        self._found = 0.5  # first drafts of all rows that were found, of those tried
        self._noted: list[_Noted] = []  # by `note`, not counted yet
        self._seconds: dict[tuple[int, int], float] = {}
        # By size and drafts: steps of the size until the last measurement, and the number of measurements.
        self._measured: dict[tuple[int, int], tuple[int, int]] = {}
        self._steps: dict[int, int] = {}
        self._saved = 0.0  # seconds for trials
        self._rest = _RESTS[0]
        self._kept = (0, 0, 0)  # the last choice, the rows of its step, and for how many more steps it holds
        self._lengths: tuple[int, ...] = ()  # those that could be had then

    def begin(self, row_id: int) -> None:
        """Forget the sequence that had a row."""
        self._count_noted()
        self._counts[row_id] = 0.0
        last, size, left = self._kept
        self._kept, self._rest = (last, size, min(left, _NEW)), _RESTS[0]

    def kept(self, rows: int) -> int | None:
        """Return the choice for a step of so many rows if the last one still holds; None: `choose` anew.

        It holds for somewhat fewer rows too: what holds more has a program for these.
        """
        last, size, left = self._kept
        if rows > size or 2 * rows <= size or left <= 0:
            return None
        self._kept = last, size, left - 1
        return last

    def rests(self, rows: int) -> bool:
        """Return whether the last choice was to draft nothing, and still holds for a step of so many rows, about."""
        last, size, left = self._kept
        if last or not size < 2 * rows < 4 * size or left <= 0:
            return False
        self._kept = last, size, left - 1
        return True

    @property
    def unmeasured(self) -> bool:
        """Whether the time of a step need not be noted now."""
        last, _, left = self._kept
        return not last and left > _TIMED

    @property
    def is_due(self) -> bool:
        """Whether the last choice holds no longer."""
        return self._kept[2] <= 0

    @property
    def last(self) -> int:
        """The last choice."""
        return self._kept[0]

    def chances(self, row_ids: Int[np.ndarray, " R"]) -> Chances:
        """Return how often drafts of these rows are right."""
        self._count_noted()
        counts, pool = self._counts.take(row_ids, axis=0), self._pool[:, 0] / self._pool[:, 1]
        chance = (counts[:, :, 0] + _WEIGHT * pool) / (counts[:, :, 1] + _WEIGHT)
        return Chances(chance[:, 0], chance[:, 1], self._most, self._precise)

    @property
    def _precise(self) -> float:
        return min(1.0, float(self._pool[0, 0]) / self._found)

    def choose(self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: tuple[int, ...]) -> int:
        """Return the number of drafts per row, 0 or one of `lengths`.

        Args:
            row_ids: the rows that may run drafts, of the `rows` of the step.
            lengths: the numbers of drafts that can be had now, ascending.
        """
        if not len(row_ids) or not lengths:
            return 0
        size, chances = rows.bit_length(), self.chances(row_ids)
        if (size, 0) not in self._seconds:
            return 0
        seconds, tokens = self._times(size, lengths), chances.tokens((0, *lengths))
        best = best_length(tokens, rows, self._known(size, seconds))
        trial = self._trial(tokens, rows, seconds, best)
        # Of rows that have begun just now little is known: the choice holds for about as long as they have run drafts.
        holds = max(_NEW, min(_HOLDS, int(2 * self._counts[row_ids, 0, 1].mean()))) if best else self._rest
        self._kept, self._lengths = (best, rows, holds) if trial is None else (0, 0, 0), lengths
        self._rest = _RESTS[0] if best else min(2 * self._rest, _RESTS[1])
        return best if trial is None else trial

    def fitting(self, rows: int, finding: float) -> int:
        """Return the number of drafts per row that pays most if the device finds some for this share of the rows.

        One of the numbers that could be had for the last choice. Texts find drafts for many steps, or for none, so the
        next step needs about as much room as the last one.
        """
        size = rows.bit_length()
        if (size, 0) not in self._seconds:
            return self.last
        known = self._known(size, self._times(size, self._lengths))
        drafting, further = finding * rows, min(float(self._pool[1, 0] / self._pool[1, 1]), _NEVER_WRONG)

        def speed(drafts: int) -> float:
            each = min(float(self._most), drafts * rows / _where_any(drafting, rows))
            tokens = rows + drafting * self._precise * float(1 - further**each) / (1 - further)
            return tokens / known[drafts]

        return max((drafts for drafts in known if drafts), key=speed, default=self.last)

    def best(self, row_ids: Int[np.ndarray, " E"], rows: int) -> int:
        """Return the number of drafts that pays most in a decode step, by what is known; arguments as in `choose`."""
        size = rows.bit_length()
        if not len(row_ids) or (size, 0) not in self._seconds:
            return 0
        chances = self.chances(row_ids)._replace(most=0)  # the host counts the tokens of steps with prompts
        known = self._known(size, self._times(size, PROGRAMS))
        return best_length(chances.tokens(known), rows, known)

    def _times(self, size: int, lengths: tuple[int, ...]) -> dict[int, float]:
        """Return what a step of a size takes, by number of drafts: as measured, or as guessed from the next shorter."""
        guess = self._seconds[size, 0]
        seconds = {0: guess}
        for drafts in lengths:
            guess *= _CHEAP
            if self._is_known(size, drafts):
                guess = self._seconds[size, drafts]
            seconds[drafts] = guess
        # A step with fewer drafts takes no longer: a time that says so was measured while the machine did other work.
        least = math.inf
        for drafts in sorted(seconds, reverse=True):
            least = seconds[drafts] = min(least, seconds[drafts])
        return seconds

    def _known(self, size: int, seconds: Mapping[int, float]) -> dict[int, float]:
        """Return those of the times that rest on measurements."""
        return {drafts: time for drafts, time in seconds.items() if not drafts or self._is_known(size, drafts)}

    def _trial(self, tokens: Mapping[int, float], rows: int, seconds: Mapping[int, float], best: int) -> int | None:
        """Return a number of drafts to try instead of the best, if one may pay and the time for that has been saved."""
        size, value = rows.bit_length(), (rows + tokens[best]) / seconds[best]
        step = self._steps.get(size, 0)
        unknown = [drafts for drafts in seconds if drafts and not self._is_known(size, drafts)]
        wanted = [drafts for drafts in unknown if best_length(tokens, rows, {0: seconds[0], drafts: seconds[drafts]})]
        stale = [d for d in seconds if d != best and d not in unknown and step - self._measured[size, d][0] >= _STALE]
        if self._watched:
            stale = [d for d in stale if not d or rows + tokens[d] > _CLOSE * value * seconds[d]]
        elif not best and not stale:
            # Numbers of drafts whose times are unknown, and that probably do not pay, are tried too: chances change.
            stale = [d for d in unknown if step - self._measured.get((size, d), (0, 0))[0] >= _STALE]
        # Of several the shortest tells most cheaply whether drafts are right by now.
        for drafts in (*wanted[:1], *sorted(stale)):
            lost = max(0.0, seconds[drafts] - (rows + tokens[drafts]) / value)
            if lost <= self._saved:
                self._saved -= lost
                return drafts
        return None

    def _is_known(self, size: int, drafts: int) -> bool:
        """Return whether enough steps were measured: the first ones are often slow."""
        last, times = self._measured.get((size, drafts), (0, 0))
        return times >= _FIRST and self._steps[size] - last < _FORGOTTEN

    def watched(self, hits: Hits) -> None:
        """Count, of rows that run no drafts, which of their next tokens would have been drafted.

        If none would have been, for some time, the choice of no drafts holds on.
        """
        right, compared = hits.right, hits.compared
        if not len(compared):
            return
        if not right.any():
            none = np.zeros(len(compared), np.int64)
            self._keep(_Noted(hits.row_ids, compared, none, none))
            last, size, _ = self._kept
            if not last and self._rest == _RESTS[-1]:
                self._kept = last, size, self._rest
            return
        good, tried_behind = right.sum(axis=1), right[:, :-1].sum(axis=1)
        behind = (right[:, 1:] & right[:, :-1]).sum(axis=1)
        self._count_noted()
        self._add(hits.row_ids, np.stack([good, compared, behind, tried_behind], axis=1), compared, int(good.sum()))
        # A row that follows an earlier text by now does so for a while, whatever it did before.
        runs = np.where(right.all(axis=1), right.shape[1], right[:, ::-1].argmin(axis=1))
        follows = runs >= _RUN
        self._counts[hits.row_ids[follows]] = runs[follows, None, None]

    def note(
        self, row_ids: Int[np.ndarray, " R"], drafted: Int[np.ndarray, " R"], right: Int[np.ndarray, " R"]
    ) -> None:
        """Note how many drafts the device had of rows that ran some, and how many were right: counted when needed.

        The arrays are kept. A step costs less than the numpy calls of counting, which take as long for many steps.
        """
        if len(row_ids):
            self._keep(_Noted(row_ids, np.ones_like(drafted), drafted, right))

    def _keep(self, noted: _Noted) -> None:
        """Keep what is known of steps until it is needed, or much has been kept."""
        self._noted.append(noted)
        if len(self._noted) >= _NOTED:
            self._count_noted()

    def _count_noted(self) -> None:
        if not self._noted:
            return
        row_ids, steps, drafted, right = map(np.concatenate, zip(*self._noted, strict=True))
        self._noted = []
        # A further draft is tried behind each right one, but for the last of the step.
        behind, tried_behind = np.maximum(right - 1, 0), np.minimum(right, np.maximum(drafted - 1, 0))
        rows, places = np.unique(row_ids, return_inverse=True)
        sums = [np.bincount(places, each, len(rows)) for each in (right > 0, steps, behind, tried_behind)]
        self._add(rows, np.stack(sums, axis=1), sums[1], int(np.count_nonzero(drafted)))

    def _add(
        self,
        row_ids: Int[np.ndarray, " R"],
        counted: Real[np.ndarray, "R 4"],
        times: Real[np.ndarray, " R"],
        found: int,
    ) -> None:
        """Add what different rows have counted in so many steps of each.

        Args:
            counted: first drafts that were right, and were tried; further ones.
            found: first drafts, right or wrong.
        """
        kept = self._counts.take(row_ids, axis=0) * (_KEEP**times)[:, None, None]
        self._counts[row_ids] = kept + counted.reshape(-1, 2, 2)
        weight = _POOL_KEEP ** int(times.sum())
        self._pool = self._pool * weight + counted.sum(axis=0).reshape(2, 2)
        self._pool[:, 1] = np.maximum(self._pool[:, 1], 1e-6)
        self._found = max(self._found * weight + found, 1e-6)

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """Note what a decode step of so many rows, with so many drafts each, has taken."""
        last_choice, rows_then, _ = self._kept
        size, rests = rows.bit_length(), not drafts and not last_choice and rows_then < 2 * rows < 4 * rows_then
        stands_for = self._rest // _TIMED if rests else 1
        key, step = (size, drafts), self._steps.get(size, 0) + stands_for
        last, times = self._measured.get(key, (step, 0))
        if drafts and step - last >= _FORGOTTEN:
            times = 0
            self._seconds.pop(key, None)
        before = self._seconds.get(key, seconds)
        weight = _NEWEST_STALE if step - last >= _STALE else _NEWEST
        weight *= _SLOWER if seconds > before else 1.0
        changed = before + weight * (min(seconds, _OUTLIER * before) - before)
        self._seconds[key] = min(before, seconds) if times < _FIRST else changed
        self._steps[size], self._measured[key] = step, (step, times + 1)
        self._saved = min(self._saved + _SHARE * seconds * stands_for, _MOST_SAVED * seconds)
