"""The batch of a step: the rows that it runs, while they are chosen, and how they become a `StepPlan`."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.errors import EngineError
from jswa.plan import COLUMNS, FROM_DEVICE, PLAIN, LogitsEntry, RowText, StepPlan, TableRow
from jswa.ribs.rib import NO_SECTION, Known
from jswa.ribs.table import VARIANTS, section_of
from jswa.sched.constraint import Masks
from jswa.sched.rows import Claims, Rows
from jswa.sched.sequence import Sequence

_START, _COUNT, _SAMPLES = map(COLUMNS.index, ("start", "count", "samples"))
_NO_ROWS = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)
_NO_ENTRIES = np.zeros((0, 3), np.int32)


@dataclass
class Batch:
    """The rows of a step that is being planned, and the tokens that it may still take.

    Attributes:
        budget: tokens that the step may still take.
        reserved: tokens of the budget for running rows that decode, until they get theirs.
        for_others: tokens of the budget that a flood leaves unused (`FairQueue.room`): at most three quarters of it.
        behind: rows that ran before the step and have one known token to run.
        decode: row ids of the rows that run one token.
        speculative: the number of drafts that each of these runs besides; None if no row has any or may be ahead.
        program: drafts per row in the step program (`StepPlan.drafts`).
        prompts: running rows that have a prompt to prefill, and the tokens that the step runs of each so far.
        left: those of them that the step does not end, and the tokens that each still has to prefill after it.
        resumed: rows that start on cached pages, or behind the beginning of their text.
        logits_state: rows of the logits state to set.
        claims: what running rows may still claim; None: to be computed.
    """

    budget: int
    reserved: int = 0
    for_others: int = 0
    behind: int = 0
    speculative: Int[np.ndarray, " n"] | None = None
    program: int = 0
    decode: Int[np.ndarray, " n"] = field(default_factory=lambda: _NO_ROWS)
    prompts: dict[Sequence, int] = field(default_factory=dict)
    left: dict[Sequence, int] = field(default_factory=dict)
    resumed: list[Sequence] = field(default_factory=list)
    logits_state: list[LogitsEntry] = field(default_factory=list)
    claims: Claims | None = None

    def begin(self, sequence: Sequence) -> int:
        """Enter a running row that has a prompt to prefill, so far without tokens in the step; return its length."""
        self.prompts[sequence], self.left[sequence] = 0, sequence.num_known - sequence.launched
        return self.left[sequence]

    def add(self, sequence: Sequence, count: int) -> None:
        """Add tokens of a prompt."""
        self.budget -= count
        self.prompts[sequence] += count
        self.left[sequence] -= count
        if not self.left[sequence]:
            del self.left[sequence]

    def drop(self, sequence: Sequence) -> None:
        """Leave out a prompt that gets nothing in this step."""
        del self.prompts[sequence], self.left[sequence]


def lease_of(sequence: Sequence) -> Lease:
    """Return the lease of a running row. Raises EngineError for any other row."""
    if sequence.lease is None:
        raise EngineError(f"request {sequence.request.request_id!r} runs without pages")
    return sequence.lease


def make_plan(
    batch: Batch,
    rows: Rows,
    sequences: Items[Sequence | None],
    masks: Masks,
    cache: CacheManager,
    texts: tuple[RowText, ...] = (),
) -> tuple[StepPlan, Int[np.ndarray, " R"]]:
    """Return the plan of a batch and its row ids; moves and new page ids count as sent to the device.

    Args:
        sequences: the running ones by row id.
        texts: to send with the plan.
    """
    prompts = [(sequence, count) for sequence, count in batch.prompts.items() if count]
    ids = batch.decode
    if prompts:
        prompt_ids, counts = [sequence.row_id for sequence, _ in prompts], [count for _, count in prompts]
        ids = np.concatenate([ids, prompt_ids])
    records = rows.records(ids)
    if batch.speculative is not None:
        decode = records[: len(batch.decode)]
        decode[:, [_COUNT, _SAMPLES]] += batch.speculative[:, None]
        decode[rows.ahead[batch.decode] > 0, _START] = FROM_DEVICE
    if prompts:
        chunks = records[len(batch.decode) :]
        chunks[:, _COUNT] = counts
        chunks[:, _SAMPLES] = [sequence not in batch.left for sequence, _ in prompts]
    variant, tokens = rows.variant(ids), _tokens(batch, rows, prompts)
    section = section_of(rows.ribs, len(tokens), _known(prompts)) if VARIANTS[variant].forward != PLAIN else NO_SECTION
    moves = cache.drain_moves()
    table_rows = tuple(_table_row(lease_of(sequence)) for sequence in batch.resumed)
    # A bucket has room for the new pages of its rows alone; a row that has got pages ahead may not run in this step.
    only = set(ids.tolist()) if len(ids) < len(cache.leases) else None
    full_pages, local_pages = cache.table.take_new(but={row.row_id for row in table_rows}, only=only)
    changed, late = masks.changes(sequences, ids, rows.launched[ids] + records[:, _COUNT]) if len(masks) else ((), ())
    plan = StepPlan(
        rows=records,
        tokens=tokens,
        full_pages=full_pages,
        local_pages=local_pages,
        moves=np.array(moves, np.int32).reshape(-1, 3) if moves else _NO_ENTRIES,
        table_rows=table_rows,
        logits_state=tuple(batch.logits_state),
        masks=changed,
        late=late,
        variant=variant,
        section=section.numbers,
        embedded=section.embedded,
        adapters=rows.adapters.take(ids),
        drafts=batch.program,
        texts=texts,
        transfers=None if cache.host is None else cache.host.drain(),
    )
    return plan, ids


def plan_copies(cache: CacheManager) -> StepPlan | None:
    """Return a plan without rows that copies pages between device and host memory; None: there is nothing to copy."""
    transfers = None if cache.host is None else cache.host.drain()
    if transfers is None:
        return None
    moves = np.array(cache.drain_moves(), np.int32).reshape(-1, 3)
    rows = np.zeros((0, len(COLUMNS)), np.int32)
    return StepPlan(rows, _NO_TOKENS, _NO_ENTRIES, _NO_ENTRIES, moves, transfers=transfers)


def _tokens(batch: Batch, rows: Rows, prompts: list[tuple[Sequence, int]]) -> Int[np.ndarray, " T"]:
    """Return the tokens that the step runs, FROM_DEVICE where the host does not know them."""
    drafts = batch.speculative
    parts = [_unknown(len(batch.decode) if drafts is None else len(drafts) + int(drafts.sum()))]
    if batch.behind:
        parts[0] = parts[0].copy()
        on_host = np.flatnonzero(rows.launched[batch.decode] < rows.known[batch.decode])
        at = on_host if drafts is None else on_host + (drafts.cumsum() - drafts)[on_host]
        parts[0][at] = rows.last_tokens(batch.decode[on_host])
    parts += [sequence.tokens[sequence.launched :][:count] for sequence, count in prompts]
    return np.concatenate(parts) if prompts else parts[0]


@cache
def _unknown(count: int) -> Int[np.ndarray, " count"]:
    """Return tokens that the host does not know, read-only."""
    tokens = np.full(count, FROM_DEVICE, np.int32)
    tokens.flags.writeable = False
    return tokens


def _known(prompts: list[tuple[Sequence, int]]) -> list[Known]:
    """Return the rows that run known tokens, which are the last of a step."""
    return [Known(sequence.request, sequence.tokens, sequence.launched, count) for sequence, count in prompts]


def _table_row(lease: Lease) -> TableRow:
    """Return all pages of a row that starts on cached pages."""
    full, local = lease.full, lease.local
    return TableRow(lease.row, full.held.copy(), local.start, local.held.copy())
