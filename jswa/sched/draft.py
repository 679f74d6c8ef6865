"""A step while it is being planned, and how it becomes a `StepPlan`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import Lease, PageRun
from jswa.cache.manager import Move
from jswa.errors import EngineError
from jswa.plan import FROM_DEVICE, ExtrasEntry, Logprobs, StepPlan, TableRow
from jswa.sched.rows import RowTable
from jswa.sched.sequence import Sequence


@dataclass
class Draft:
    """A step that is being planned.

    Attributes:
        budget: tokens that the step may still take.
        reserved: tokens of these for running rows that need one, until they get it.
        for_others: tokens of these that a flood leaves unused (`Turns.room`): at most three quarters of the step.
        sequences, counts: rows so far, and the tokens that each runs.
        prompts: running rows that have a prompt to prefill, with their index among `sequences`, or None.
        extended: rows with new pages.
        resumed: rows that start on cached pages.
        extras: rows of the extras tables to set.
    """

    budget: int
    reserved: int = 0
    for_others: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompts: dict[Sequence, int | None] = field(default_factory=dict)
    extended: list[Sequence] = field(default_factory=list)
    resumed: list[Sequence] = field(default_factory=list)
    extras: list[ExtrasEntry] = field(default_factory=list)

    def add(self, sequence: Sequence, count: int) -> None:
        """Add tokens of a row."""
        self.budget -= count
        if self.prompts and sequence in self.prompts:
            index = self.prompts[sequence]
            if index is not None:
                self.counts[index] += count
                return
            self.prompts[sequence] = len(self.sequences)
        self.sequences.append(sequence)
        self.counts.append(count)

    def given(self, sequence: Sequence) -> int:
        """Return the tokens that the step runs of a prompt so far."""
        index = self.prompts[sequence]
        return 0 if index is None else self.counts[index]

    def left(self, sequence: Sequence) -> int:
        """Return the tokens that a running prompt still has to prefill after the step."""
        return sequence.num_known - sequence.launched - self.given(sequence)


def needs_one(sequence: Sequence) -> bool:
    """Return whether a running row has one token to run: the last one that was sampled, or the last of a known text."""
    return sequence.num_known - 1 <= sequence.launched < sequence.limit - 1


def lease_of(sequence: Sequence) -> Lease:
    """Return the lease of a running row. Raises EngineError for any other row."""
    if sequence.lease is None:
        raise EngineError(f"request {sequence.request.request_id!r} runs without pages")
    return sequence.lease


def make_plan(draft: Draft, rows: RowTable, moves: list[Move], *, logprobs: bool) -> StepPlan:
    """Build the StepPlan from a draft, and mark the new page ids as sent to the device.

    `logprobs`: some request in the engine asked for log probabilities.
    """
    sequences = draft.sequences
    row_ids = np.array([s.row_id for s in sequences], np.int32)
    starts = np.array([s.launched for s in sequences], np.int32)
    known = np.array([s.num_known for s in sequences], np.int32)
    counts = np.array(draft.counts, np.int32)
    ends = np.cumsum(counts)
    kind: Logprobs = _logprobs(sequences) if logprobs else "none"
    table_rows = tuple(_table_row(s.row_id, lease_of(s)) for s in draft.resumed)
    tokens = np.full(ends[-1], FROM_DEVICE, np.int32)
    for row in np.flatnonzero(starts < known).tolist():
        start, count = starts[row], counts[row]
        tokens[ends[row] - count : ends[row]] = sequences[row].tokens[start : start + count]
    return StepPlan(
        row_ids=row_ids,
        starts=starts,
        counts=counts,
        full_write_from=rows.cached[row_ids, 0],
        local_visible_from=rows.cached[row_ids, 1],
        samples=(starts + counts >= known).astype(np.int32),
        tokens=tokens,
        sampling=rows.sampling[row_ids],
        table_rows=table_rows,
        full_pages=_table_entries((s.row_id, lease_of(s).full) for s in draft.extended),
        local_pages=_table_entries((s.row_id, lease_of(s).local) for s in draft.extended),
        moves=np.array(moves, np.int32).reshape(-1, 3),
        extras=tuple(draft.extras),
        masks=rows.masks(sequences, draft.counts),
        logprobs=kind,
        targets=_targets(draft) if kind == "prompt" else np.zeros(0, np.int32),
        adapters=rows.adapters[row_ids],
    )


def _logprobs(sequences: list[Sequence]) -> Logprobs:
    if any(s.request.params.prompt_logprobs is not None and s.launched < len(s.request.prompt) - 1 for s in sequences):
        return "prompt"
    return "sampled" if any(s.request.params.logprobs is not None for s in sequences) else "none"


def _targets(draft: Draft) -> Int[np.ndarray, " T"]:
    """Return the token that follows each token of the step, 0 if the host does not know it."""
    parts = []
    for sequence, count in zip(draft.sequences, draft.counts, strict=True):
        part = np.zeros(count, np.int32)
        known = sequence.tokens[sequence.launched + 1 : min(sequence.launched + 1 + count, sequence.num_known)]
        part[: len(known)] = known
        parts.append(part)
    return np.concatenate(parts)


def _table_row(row_id: int, lease: Lease) -> TableRow:
    """Return all pages of a row that starts on cached pages, and mark them as sent."""
    full, local = lease.full, lease.local
    full.sent, local.sent = full.end, local.end
    return TableRow(row_id, full.held.copy(), local.start, local.held.copy())


def _table_entries(runs: Iterable[tuple[int, PageRun]]) -> Int[np.ndarray, "n 3"]:
    """Return entries (row id, page position, page id) for pages that the device's tables do not have yet."""
    parts = []
    for row_id, run in runs:
        if run.end > run.sent:
            positions, ids = run.pop_unsent()
            part = np.empty((len(ids), 3), np.int32)
            part[:, 0], part[:, 1], part[:, 2] = row_id, positions, ids
            parts.append(part)
    return np.concatenate(parts) if parts else np.zeros((0, 3), np.int32)
