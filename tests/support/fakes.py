"""A device without jax."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from jaxtyping import Int, Shaped

from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.moves import origins
from jswa.config import Limits
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.pack import PackSpec, pack, unpack
from jswa.plan import FROM_DEVICE, NOT_FINITE, RowMask, StepPlan, TableRow
from jswa.sched.sequence import Sequence as Row
from tests.support.text.model import Run, TextModel, first_seen

POISON = -1  # a mark of KV memory that no row may read
WRONG = -2  # the mark of a draft that was wrong


@dataclass(eq=False)
class FakePending:
    """A launched step of `FakeRunner`. `counts`: see `Scheduler.apply`."""

    plan: StepPlan
    _tokens: Int[np.ndarray, " R"] | Int[np.ndarray, "R n"]
    counts: Int[np.ndarray, " R"] | None = None
    finished: bool = False

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Note that the second half was launched."""
        assert self.plan.late, "a step without late masks is launched as a whole"
        assert not self.finished, "a second half was launched twice"
        assert {mask.row_id for mask in masks} <= set(self.plan.late)
        self.finished = True

    def tokens(self) -> Int[np.ndarray, " R"] | Int[np.ndarray, "R n"]:
        """Return the tokens of the plan's rows; those of rows that sample none are arbitrary."""
        assert self.finished or not self.plan.late, "only half of the step was launched"
        return self._tokens


class FakeRunner:
    """`StepRunner` in NumPy: has the state of a device, and asserts that every row reads KV of its own text.

    KV memory holds a mark for each position: a hash of the text up to it, so that requests with the same text may share
    pages. The full and the local view lie over the same slots of 1/m slab: a write through one view poisons the other.
    A launch has the device's order: moves, table entries, all writes, all reads. So a page that is reused too early, a
    window that is too short, or a move that is not followed shows as a wrong mark.

    Local KV also has a level: how many of its local layers equal those of a cold run. A token's level is one more than
    the lowest that it sees; positions of its window below the row's `local_visible_from` count as level 0. Full KV and
    samples must come from tokens that see exact KV only: the law of revival, for any start that a scheduler chooses.

    KV that is not finite spreads: a token that sees such KV writes such KV, and its row's step is NOT_FINITE.

    The device chooses how many tokens of a row that runs drafts are right (`advance`, at least one of so many). Behind
    them it writes KV of no text, which is not finite either: nobody may read it.
    """

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        model: TextModel,
        row_of: Callable[[int], Row],
        advance: Callable[[int], int] | None = None,
    ) -> None:
        self.speculates, self.advance = advance is not None, advance or (lambda most: most)
        self.wrong = 0  # drafts that were wrong so far
        self.layout = layout
        self.limits = limits
        self.model = model
        self.launches = self.moves = self.copies = 0
        self._row_of = row_of  # by slot
        self._rows: list[Row | None] = [None] * limits.max_rows
        self._buckets = bucket_table(limits, on_gpu=False)
        page, rows, width = limits.page_size, limits.max_rows, limits.pages_per_row
        slots = limits.num_slabs * layout.pages_per_slab
        self._full = np.full((slots, page), POISON, np.int64)
        self._local = np.full((slots, page), POISON, np.int64)
        self._level = np.zeros((slots, page), np.int32)
        self._full_nan = np.zeros((slots, page), bool)
        self._local_nan = np.zeros((slots, page), bool)
        self._any_nan = False
        self._full_table = np.zeros((rows, width), np.int32)
        self._local_table = np.zeros((rows, width), np.int32)
        self._last_token = np.full(rows, POISON, np.int64)
        # A device has no such thing: the marks that each row must find, and the state of its text.
        self._marks = np.full((rows, width * page), POISON, np.int64)
        self._length = [0] * rows
        self._text = [0] * rows

    @property
    def memory(self) -> list[Shaped[np.ndarray, "slots p"]]:
        """All KV memory by slot: full marks, local marks and levels, and whether full and local KV is not finite."""
        return [self._full, self._local, self._level, self._full_nan, self._local_nan]

    def launch(self, plan: StepPlan) -> FakePending:
        """Pack, unpack and run a step as the real runner does, and return its tokens."""
        bucket = pick_bucket(self._buckets, plan)
        spec = PackSpec.of(bucket, page_size=self.limits.page_size, max_rows=self.limits.max_rows)
        inputs = unpack(pack(plan, spec), spec)
        self.move(plan.moves)
        first_steps = {int(row[0]): row for row in inputs.rows}
        for row in plan.table_rows:
            start, _, full_write_from, local_visible_from = first_steps[row.row_id][1:5].tolist()
            self._set_row(row, start, full_write_from, local_visible_from)
        self._enter(self._full_table, inputs.full_pages, full=True)
        self._enter(self._local_table, inputs.local_pages, full=False)
        rows = inputs.rows[inputs.column("row_id") < self.limits.max_rows]
        ends = np.cumsum(rows[:, 2])
        assert ends[-1] == plan.num_tokens, "rows and tokens disagree"
        runs, finite = [], []
        for record, end in zip(rows.tolist(), ends.tolist(), strict=True):
            slot, start, count, full_write_from, local_visible_from, _, limit, *_ = record
            run = self._resolve(slot, start, limit, inputs.tokens[end - count : end])
            own = self._write(slot, run.start, full_write_from, local_visible_from, run.tokens)
            finite.append(not self._spread(slot, run.start, own, full_write_from, local_visible_from))
            self._write_wrong(slot, range(run.end, run.end + run.wrong), full_write_from)
            of = self._row_of(slot)
            assert 0 <= self._length[slot] - of.launched <= of.ahead, "the length is not where it may be"
            runs.append(run)
        said = [self._say(*row) for row in zip(rows.tolist(), runs, finite, strict=True)]
        self.launches += 1
        tokens = np.array(list(zip_longest(*(new or [0] for new in said), fillvalue=0)), np.int32).T
        counts = np.array([len(new) for new in said])
        return FakePending(plan, tokens, counts) if self.speculates else FakePending(plan, tokens[:, 0])

    def _say(self, record: list[int], run: Run, finite: bool) -> list[int]:
        """Return the tokens of a row, of which the last is sampled; of a row that samples none it is arbitrary."""
        slot, _, _, _, local_visible_from, samples, *_ = record
        if not run.tokens:
            return []  # the row has reached its limit
        self._read(slot, run.start, run.end, local_visible_from)
        exact = self._inexact_from(slot, run.end - 1, run.end, local_visible_from) is None
        assert exact or not samples, "a token is sampled from local KV that is not exact"
        new = [*run.drafts, self.model.next_token(self._text[slot]) if samples else 0] if finite else [NOT_FINITE]
        if samples:
            self._last_token[slot] = max(new[-1], 0)
        return new

    def move(self, moves: Int[np.ndarray, "M 3"]) -> None:
        """Carry out moves of slots, in order."""
        for source, target, renames in moves.tolist():
            assert min(source, target) >= self.layout.pages_per_slab, "a plan moves the slab of zeros"
            for array in self.memory:
                array[target] = array[source]
            if renames:
                self._full_table[self._full_table == source] = target
                self.moves += 1
            else:
                self.copies += 1

    @property
    def slots_per_copy(self) -> int:
        """Slots that `read_slots` or `write_slots` takes at most: few, so that copies take many batches."""
        return 3

    def prepare_copies(self) -> None:
        """Compile nothing."""

    def read_slots(self, ids: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, "n p"]]:
        """Return the contents of slots."""
        assert 0 < len(ids) <= self.slots_per_copy
        return [array[ids].copy() for array in self.memory]

    def write_slots(
        self, ids: Int[np.ndarray, " n"], contents: list[Int[np.ndarray, "m p"]], rows: Int[np.ndarray, " n"]
    ) -> None:
        """Overwrite slots."""
        assert len(ids) <= self.slots_per_copy
        for array, whole in zip(self.memory, contents, strict=True):
            array[ids] = whole[rows]
        self._any_nan = self._any_nan or bool(self._full_nan[ids].any() or self._local_nan[ids].any())

    def _set_row(self, row: TableRow, start: int, full_write_from: int, local_visible_from: int) -> None:
        """Write the table entries of a row that starts on cached pages; the pages after them are new."""
        page = self.limits.page_size
        self._full_table[row.row_id, : len(row.full)] = row.full
        self._local_table[row.row_id, row.first_local : row.first_local + len(row.local)] = row.local
        cached_local = 0 if local_visible_from == start else -(-start // page) - row.first_local
        for page_id in row.full[-(-full_write_from // page) :].tolist():
            self._poison(page_id, full=True)
        for page_id in row.local[cached_local:].tolist():
            self._poison(page_id, full=False)

    def _enter(self, table: Int[np.ndarray, "R N"], entries: Int[np.ndarray, "U 3"], *, full: bool) -> None:
        """Write table entries of new pages. Their memory holds the KV of an earlier owner: poison it."""
        for slot, position, page in entries[entries[:, 0] < self.limits.max_rows].tolist():
            table[slot, position] = page
            self._poison(page, full=full)

    def _poison(self, page: int, *, full: bool) -> None:
        m = self.layout.pages_per_slab
        assert page >= (m if full else 1), "the slab of zeros was handed out"
        slots = slice(page, page + 1) if full else slice(page * m, page * m + m)
        self._full[slots] = self._local[slots] = POISON

    def _begin(self, slot: int, start: int, row: Row) -> None:
        """Begin a row: compute the marks of the known text that it skips."""
        text, self._length[slot], self._rows[slot] = 0, start, row
        known = row.tokens[: min(start, row.num_known)].tolist()
        assert len(known) == start, "a row starts after the end of its text"
        for position, token in enumerate(known):
            text = self.model.fold(text, [token])
            self._marks[slot, position] = text >> 1
        self._text[slot] = text

    def _resolve(self, slot: int, start: int, limit: int, tokens: Int[np.ndarray, " n"]) -> Run:
        """Return what a row runs: from where the device is if the host does not know, and with drafts of its own."""
        row = self._row_of(slot)
        if start == FROM_DEVICE:
            assert row is self._rows[slot], "a row begins at a length that the device does not have"
            start = self._length[slot]
            tokens = tokens[: max(0, limit - 1 - start)]
        elif start == 0 or start != self._length[slot] or row is not self._rows[slot]:
            self._begin(slot, start, row)
        run = tokens.tolist()
        if run[:1] == [FROM_DEVICE]:
            run[0] = int(self._last_token[slot])
        found = self.model.run(self._text[slot], start, run, self.advance)
        self.wrong += found.wrong
        return found

    def _write_wrong(self, slot: int, positions: range, full_write_from: int) -> None:
        """Write the KV of drafts that were wrong."""
        m, page = self.layout.pages_per_slab, self.limits.page_size
        for position in positions:
            assert position >= full_write_from, "a row runs drafts before it has run its prompt"
            at, offset = divmod(position, page)
            self._any_nan = True
            if self.layout.local is not None:
                slots = self._local_table[slot, at] * m + np.arange(m)
                self._local[slots, offset], self._local_nan[slots, offset], self._full[slots] = WRONG, True, POISON
            if self.layout.full is not None:
                own = self._full_table[slot, at]
                self._full[own, offset], self._full_nan[own, offset], self._local[own] = WRONG, True, POISON

    def _write(
        self, slot: int, start: int, full_write_from: int, local_visible_from: int, tokens: Sequence[int]
    ) -> list[bool]:
        """Write the KV of a row's tokens; return of each whether its own history gives KV that is not finite."""
        run = np.array(tokens, np.int64)
        assert np.all(run >= 0), "a token is not known"
        failed = []
        for position, token in enumerate(run.tolist(), start=start):
            self._text[slot] = self.model.fold(self._text[slot], [token])
            self._marks[slot, position] = self._text[slot] >> 1
            failed.append(self.model.next_token(self._text[slot]) == NOT_FINITE)
        self._length[slot] += len(run)
        m, end = self.layout.pages_per_slab, start + len(run)
        if self.layout.local is not None:
            pages, offsets = np.divmod(np.arange(start, end), self.limits.page_size)
            slots = self._local_table[slot, pages][:, None] * m + np.arange(m)
            self._local[slots, offsets[:, None]] = self._marks[slot, start:end, None]
            self._full[slots] = POISON
            self._set_levels(slot, start, end, local_visible_from)
        if self.layout.full is not None and end > max(start, full_write_from):
            first = max(start, full_write_from)
            pages, offsets = np.divmod(np.arange(first, end), self.limits.page_size)
            slots = self._full_table[slot, pages]
            self._full[slots, offsets] = self._marks[slot, first:end]
            self._local[slots] = POISON
            bad = self._inexact_from(slot, first, end, local_visible_from)
            assert bad is None, f"slot {slot} writes full KV at {bad} from local KV that is not exact"
        return failed

    def _spread(self, slot: int, start: int, own: list[bool], full_write_from: int, local_visible_from: int) -> bool:
        """Let KV that is not finite spread to the tokens that see it; return whether any token has such KV."""
        m, page, reach = self.layout.pages_per_slab, self.limits.page_size, self.layout.reach
        self._any_nan |= any(own)
        if not self._any_nan:
            return False
        spoiled = False
        for position, fails in enumerate(own, start=start):
            offset, full, local = position % page, self._full_table[slot], self._local_table[slot] * m
            if self.layout.full is not None:
                fails |= bool(self._full_nan[full].reshape(-1)[:position].any())
            if reach is not None:
                first = max(first_seen(reach, position), local_visible_from)
                fails |= bool(self._local_nan[local].reshape(-1)[first:position].any())
                self._local_nan[local[position // page] : local[position // page] + m, offset] = fails
            if self.layout.full is not None and position >= full_write_from:
                self._full_nan[full[position // page], offset] = fails
            spoiled |= fails
        return spoiled

    def spoil(self, page: int, *, full: bool) -> None:
        """Make the KV of a page NaN, as faulty memory does."""
        m, self._any_nan = self.layout.pages_per_slab, True
        (self._full_nan if full else self._local_nan)[page if full else slice(page * m, page * m + m)] = True

    def check_cached(self, cache: CacheManager) -> None:
        """Assert that all KV in the prefix tree is finite, with the moves that wait for the next plan undone."""
        m, p = self.layout.pages_per_slab, self.limits.page_size
        alone = self.layout.reach is not None and self.layout.reach.size == 1  # no query sees local KV but its own
        for node in cache.prefix.tree.nodes():
            pages = zip(origins(cache.moves, node.full).tolist(), node.local.tolist(), strict=True)
            for index, (full, local) in enumerate(pages):
                filled = min(p, node.end - (node.start // p + index) * p)
                assert not (full and self._full_nan[full, :filled].any()), "full KV in the cache is not finite"
                if local and not alone:
                    assert not self._local_nan[local * m, :filled].any(), "local KV in the cache is not finite"

    def _levels(self, slot: int, first: int, end: int) -> Int[np.ndarray, " n"]:
        pages, offsets = np.divmod(np.arange(first, end), self.limits.page_size)
        levels: Int[np.ndarray, " n"] = self._level[
            self._local_table[slot, pages] * self.layout.pages_per_slab, offsets
        ]
        return levels

    def _set_levels(self, slot: int, start: int, end: int, local_visible_from: int) -> None:
        reach, local, m, page = self.layout.reach, self.layout.local, self.layout.pages_per_slab, self.limits.page_size
        assert reach is not None
        assert local is not None
        for position in range(start, end):
            first = first_seen(reach, position)
            seen = self._levels(slot, max(first, local_visible_from), position)
            least = 0 if local_visible_from > first else int(seen.min(initial=local.num_layers))
            slab = self._local_table[slot, position // page]
            self._level[slab * m : slab * m + m, position % page] = min(local.num_layers, least + 1)

    def _inexact_from(self, slot: int, start: int, end: int, local_visible_from: int) -> int | None:
        """Return the first of these positions that sees local KV that is not exact, or None."""
        reach, local = self.layout.reach, self.layout.local
        if reach is None or local is None:
            return None
        for position in range(start, end):
            first = first_seen(reach, position)
            if local_visible_from > first or (self._levels(slot, first, position + 1) < local.num_layers).any():
                return position
        return None

    def _read(self, slot: int, start: int, end: int, local_visible_from: int) -> None:
        """Check all KV that the queries at [start, end) see: the whole text in full layers, windows in local ones."""
        if self.layout.full is not None:
            self._check(self._full[self._full_table[slot]], slot, 0, end)
        if self.layout.reach is not None:
            first = max(first_seen(self.layout.reach, start), local_visible_from)
            for part in range(self.layout.pages_per_slab):
                memory = self._local[self._local_table[slot] * self.layout.pages_per_slab + part]
                self._check(memory, slot, first, end)

    def _check(self, row: Int[np.ndarray, "N p"], slot: int, first: int, end: int) -> None:
        wrong = np.flatnonzero(row.reshape(-1)[first:end] != self._marks[slot, first:end])
        assert not len(wrong), f"slot {slot} reads KV of another text at positions {first + wrong}"
