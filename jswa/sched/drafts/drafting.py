"""Gives decode rows drafts, counts which were right, and says in which texts the device looks drafts up."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jswa.cache.keys import root_of
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from jswa.plan import RowText, StepPlan
from jswa.ribs.table import VARIANTS
from jswa.sched.batch import Batch, lease_of
from jswa.sched.drafts.choice import DraftChoice
from jswa.sched.drafts.continuations import BETWEEN, continuations
from jswa.sched.drafts.earlier import EarlierTexts
from jswa.sched.drafts.watch import Watch
from jswa.sched.rows import Flight, Rows
from jswa.sched.sequence import Sequence
from jswa.speculation import PROGRAMS

_BEHIND = 512  # positions
_NOTED = 64  # steps whose drafts are counted together: numpy calls cost as much for one
_WATCHED = 16  # rows for each choice, by turns


@runtime_checkable
class Lengths(Protocol):
    """Says how many drafts per row the device can run now."""

    def __call__(self, rows: int, *, tokens: int, split: bool, variant: str) -> tuple[int, ...]:
        """Return the numbers of drafts per row, ascending, with which a step of so many rows may run.

        Args:
            tokens: of a step that runs prompts, without drafts, of which rows may have fewer; 0: a decode step.
            split: whether the step may run in two halves.
            variant: the widest in which it may run.
        """
        ...


@dataclass(frozen=True)
class DraftStats:
    """Sums since the engine's start.

    Attributes:
        steps: steps with drafts.
        rows: rows of these steps that had drafts: without drafts each would have got one token.
        drafts: tokens that were drafted.
        accepted: drafts that were right, by their place among those of a row and step.
    """

    steps: int = 0
    rows: int = 0
    drafts: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def sums(self) -> tuple[int, int]:
        """The tokens that were drafted, and those of them that were right."""
        return self.drafts, sum(self.accepted)


@dataclass
class _Counts:
    """The figures of `DraftStats`; `noted`: drafted and right, of the last steps, which are not counted yet."""

    steps: int = 0
    rows: int = 0
    drafts: int = 0
    accepted: Int[np.ndarray, " K"] = field(default_factory=lambda: np.zeros(PROGRAMS[-1], np.int64))
    noted: list[tuple[Int[np.ndarray, " R"], Int[np.ndarray, " R"]]] = field(default_factory=list)

    def count_noted(self) -> None:
        if not self.noted:
            return
        self.steps += len(self.noted)
        drafted, right = map(np.concatenate, zip(*self.noted, strict=True))
        self.noted = []
        self.rows += len(right)
        self.drafts += int(drafted.sum())
        self.accepted += (right[:, None] > np.arange(PROGRAMS[-1])[None]).sum(axis=0)


class Drafting:
    """The drafts of the running rows.

    Args:
        most: drafts per row and step.

    Attributes:
        lengths: what the device can run; None: `most` drafts per row, in every step.
        earlier: texts of earlier weights; None: drafts are not looked up in other texts.
    """

    def __init__(self, rows: Rows, cache: CacheManager, most: int, limits: Limits) -> None:
        self._rows, self._cache = rows, cache
        self._most, self._speculation, self._one_bucket = most, limits.speculation, limits.one_bucket
        self.lengths: Lengths | None = None
        looks_up = limits.speculation is not None and limits.speculation.looks_up
        self._shares = looks_up and not limits.one_bucket  # whether the device shares the drafts of a decode step
        self.choice = DraftChoice(rows.max_rows, watched=looks_up, most=most if self._shares else 0)
        self._watch = Watch(rows.max_rows) if looks_up else None
        refers = limits.speculation is not None and limits.speculation.reference > 0
        self.earlier = EarlierTexts() if refers else None
        self._counts = _Counts()
        self._landed, self._queued = 0.0, False  # of the step before, and whether this one was on the device then
        self._texts: list[RowText] = []
        self._watched = 0  # rows, by turns
        self._single: dict[int, list[bool]] = {}  # of the step in flight: see `foretold`

    def begin(self, sequence: Sequence) -> None:
        """Note a row that begins: its rows of the device's tables are another's."""
        row_id, speculation = sequence.row_id, self._speculation
        if not self._rows.speculates:
            return
        self.choice.begin(row_id)
        if speculation is None or not speculation.looks_up or not self._rows.speculative[row_id]:
            return
        start, (reference, offset) = sequence.launched, self._reference(sequence)
        if self._watch is not None:
            self._watch.begin(row_id, sequence.tokens, reference)
        if start or reference is not None:
            self._texts.append(RowText(row_id, sequence.tokens[:start].copy(), reference, offset))

    def look_again(self, sequence: Sequence) -> None:
        """Look for other texts in which the drafts of a row are looked up: it has gone on for a while."""
        reference, offset = self._reference(sequence)
        if reference is not None and self._rows.speculative[sequence.row_id]:
            self._texts.append(RowText(sequence.row_id, None, reference, offset))

    def _reference(self, sequence: Sequence) -> tuple[Int[np.ndarray, " n"] | None, int]:
        """Return texts to look drafts up in, those of the weights that run first, and the offset of the first one."""
        speculation = self._speculation
        if speculation is None or self.earlier is None:
            return None, 0
        tokens, salt, before = sequence.tokens, sequence.request.cache_salt, speculation.longest
        most = speculation.reference
        found = self._cache.prefix.tree.walk(self._cache.tree_key(salt), tokens)
        texts, first = continuations(found, tokens, most, before=before, behind=_BEHIND)
        left = most - len(texts) - 1
        if left > before:
            old = self.earlier.walk(salt, tokens)
            more, begin = continuations(old, tokens, left, before=before, behind=_BEHIND)
            if len(more):
                first = first if len(texts) else begin
                texts = np.concatenate([texts, np.full(min(len(texts), 1), BETWEEN, np.int32), more])
        return texts, -first

    def keep_texts(self) -> None:
        """Go on looking drafts up in the texts of the prefix cache, which is about to be emptied."""
        tree = self._cache.prefix.tree
        if self.earlier is not None:
            for key in tree.roots:
                self.earlier.add(root_of(key), tree.nodes(key))

    def forget_texts(self) -> None:
        """Look no drafts up in texts that the prefix cache had once."""
        if self.earlier is not None:
            self.earlier.clear()

    def texts(self, by_row: Iterable[Sequence | None]) -> tuple[RowText, ...]:
        """Return the texts to send with a plan, once: those of rows that still run."""
        if not self._texts:
            return ()
        running = {sequence.row_id for sequence in by_row if sequence is not None}
        texts = tuple(text for text in self._texts if text.row_id in running)
        self._texts = []
        return texts

    def _length(self, batch: Batch, *, split: bool) -> int:
        """Return the number of drafts per row of the program in which the planned step runs."""
        lengths, rows, row_ids = self.lengths, self._rows, batch.decode
        if lengths is None or self._speculation is None:
            return self._most
        if not len(row_ids):
            return 0
        if _runs_prompts(batch) and not self._one_bucket:
            return self._length_beside_prompts(batch, lengths, split=split)
        variant = VARIANTS[rows.variant()].finish
        self.choice.kind = split, variant
        kept = self.choice.kept(len(row_ids))
        if kept is not None:
            return kept
        drafting = row_ids[rows.speculative[row_ids] > 0]
        return self.choice.choose(
            drafting, len(row_ids), lambda: lengths(len(row_ids), tokens=0, split=split, variant=variant)
        )

    def watch(self) -> None:
        """Compare the tokens of rows without drafts with what a lookup would have drafted, if the next step chooses.

        Called while the device works, since it takes as long as the rest of a plan.
        """
        if self._watch is None or self.choice.last or not self.choice.is_due:
            return
        row_ids = self._rows.speculative.nonzero()[0].tolist()
        if len(row_ids) > _WATCHED:
            self._watched = (self._watched + _WATCHED) % len(row_ids)
            row_ids = (row_ids + row_ids)[self._watched :][:_WATCHED]
        self.choice.watched(self._watch.hits(self._rows, row_ids))

    def _length_beside_prompts(self, batch: Batch, lengths: Lengths, *, split: bool) -> int:
        """Return the number of drafts per row of a step that runs prompts too: the one that pays most without these.

        The prompts make each draft cheaper: more of the step's tokens share its weights.
        """
        rows, row_ids = self._rows, batch.decode
        variant = rows.variant()
        if VARIANTS[variant].every:
            return 0  # such programs have no drafts
        best = self.choice.best(row_ids[rows.speculative[row_ids] > 0], len(row_ids), PROGRAMS, beside_prompts=True)
        if not best:
            return 0
        prompts = [count for count in batch.prompts.values() if count]
        tokens = len(row_ids) + sum(prompts)
        there = lengths(len(row_ids) + len(prompts), tokens=tokens, split=split, variant=variant)
        return best if there and best <= there[-1] else 0

    def give(
        self, batch: Batch, sequences_at: Callable[[Int[np.ndarray, " n"]], list[Sequence]], *, split: bool
    ) -> None:
        """Give decode rows drafts of what is left of the step: all rows as many, but for the ends of their texts.

        Where the device shares the drafts of a step, each row may get all that it finds, and has pages for them. Drafts
        preempt no row: a row that finds no page for them runs fewer. `split`: the step may run in two halves.
        """
        rows, row_ids, covered = self._rows, batch.decode, self._cache.table.covered
        if not (rows.unsettled or self.choice.last) and self.choice.kept(len(row_ids)) is not None:
            return
        length = self._length(batch, split=split)
        if not length and not rows.unsettled:
            return
        shares = length > 0 and self._shares and self.lengths is not None and not _runs_prompts(batch)
        drafts = np.minimum(rows.speculative[row_ids], self._most if shares else length)
        ends = rows.next_positions()[row_ids] + 1
        if not shares:
            drafts = np.minimum(drafts, batch.budget // max(1, int(np.count_nonzero(drafts))))
        drafts = np.maximum(np.minimum(drafts, rows.limit[row_ids] - 1 - ends), 0)
        for i in (ends + drafts > covered[row_ids]).nonzero()[0].tolist():
            (sequence,) = sequences_at(row_ids[i : i + 1])
            if not self._cache.grow(lease_of(sequence), int(ends[i] + drafts[i])):
                drafts[i] = covered[row_ids[i]] - ends[i]
        batch.budget -= int(drafts.sum())
        batch.speculative = drafts
        if self.lengths is not None and drafts.any():
            batch.program = length

    def foretold(self, sequences: Iterable[Sequence], single: dict[int, list[bool]]) -> None:
        """Note the texts that grammars force in the step in flight.

        Args:
            sequences: the rows whose text may have been foretold.
            single: by row id, whether a grammar allows a single token at the row's next place, and behind each draft.
        """
        self._single, watch = single, self._watch
        if watch is None:
            return
        for sequence in sequences:
            if sequence.foretold_from and sequence.rows is not None:
                watch.foretold(sequence.row_id, sequence.foretold_from, sequence.num_known)

    def apply(
        self, plan: StepPlan, flight: Flight, counts: Int[np.ndarray, " R"], drafted: Int[np.ndarray, " R"]
    ) -> None:
        """Count which drafts of a step were right."""
        single, self._single = self._single, {}
        if not plan.drafts and not self._one_bucket and self.lengths is not None:
            return
        rows, row_ids = self._rows, flight.row_ids
        ran = (plan.samples > 1) & (counts > 0)
        if np.count_nonzero(ran) < len(ran):
            row_ids, counts, drafted = (array[ran] for array in (row_ids, counts, drafted))
        right = counts - 1
        self._counts.noted.append((drafted, right))
        if len(self._counts.noted) >= _NOTED:
            self._counts.count_noted()
        if flight.departures != rows.departures:
            here = rows.generation.take(row_ids) == flight.generations[ran]
            row_ids, right, drafted = (array[here] for array in (row_ids, right, drafted))
        rows.accepted[row_ids] += right
        rows.rejected[row_ids] += drafted - right
        if single:
            pairs = zip(row_ids.tolist(), right.tolist(), strict=True)
            right = np.array([_saved(single[row], count) if row in single else count for row, count in pairs], int)
        self.choice.note(row_ids, drafted, right)

    def landed(self, plan: StepPlan, now: float) -> None:
        """Note the time at which the tokens of a step are there: what lies between it and the one before is its time.

        Only if it ran no prompts, the device had it before the one before had ended, and its rows still
        run: the tokens of a step that nobody needs any more are looked at when the next request comes. While the choice
        is to draft nothing, a part of the steps without drafts is measured.
        """
        before, queued = self._landed, self._queued
        self._landed, self._queued = now, len(self._rows.flights) > 1
        if self.choice.unmeasured and not plan.drafts:
            return
        whole = self._rows.flights[0].departures == self._rows.departures
        if self.lengths is not None and whole and queued and not plan.runs_prompts:
            self.choice.took(plan.num_rows, plan.drafts, now - before)

    def stats(self) -> DraftStats:
        """Return the sums."""
        counts = self._counts
        counts.count_noted()
        return DraftStats(counts.steps, counts.rows, counts.drafts, tuple(counts.accepted.tolist()[: self._most]))


def _saved(single: list[bool], right: int) -> int:
    """Return how many steps so many right drafts have saved.

    Each saves one, except in a text that a grammar forces: without drafts the whole text takes one step. Drafts save
    that step only if they are right to its end. Where a step ends inside such a text, the rest is foretold in the next.
    """
    ends = sum(not (single[place] and (place == right or single[place + 1])) for place in range(right + 1))
    return max(ends - 1, 0)


def _runs_prompts(batch: Batch) -> bool:
    """Return whether the step runs several known tokens of a row: then the host counts the tokens of each row."""
    return any(count > 1 for count in batch.prompts.values())
