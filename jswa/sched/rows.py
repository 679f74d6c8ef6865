"""The state of the running rows as arrays by row id: a step costs a few numpy calls, however many rows it has.

A row id is also the index of the row in the device's tables. The entries of a row id that no sequence has are 0.

    position  0 ………………………………… launched …… + ahead …… limit
    tokens    [ known to the host …………… known )           launched ≤ known + steps in flight

`launched` positions have been handed to the device or found in the cache. The host knows the first `known` token ids:
the prompt, and the tokens that have come back. A row with launched < known runs known tokens (a prompt, or a preempted
text again). Any other row runs the token that the device sampled last, which the host need not know.

A row that speculates also runs drafts of its next tokens, and only the device knows how many of them were right: the
length of the row on the device is in [launched, launched + ahead]. `settle` narrows the interval when tokens come back.
Pages are taken for its end, windows slide at its start. Without drafts ahead is 0.
"""

from collections import deque
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.capacity import peak_slots
from jswa.cache.layout import KVLayout
from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.config import Limits
from jswa.plan import COLUMNS, PLAIN, SAMPLING, SAMPLING_ROW, Request, sampling_of
from jswa.ribs.rib import NO_NEEDS, Needs, RibRows
from jswa.ribs.table import RIBS, joined_name
from jswa.sched.token_counts import TokenCounts

RECENT = 1024  # tokens of a row that wait to be copied to its text; a power of two
_RECORD = np.dtype([("first", "i4", len(COLUMNS) - len(SAMPLING)), ("sampling", SAMPLING_ROW)])
_START, _FULL_WRITE_FROM, _LOCAL_VISIBLE_FROM, _LIMIT, _LOGITS_STATE = map(
    COLUMNS.index, ("start", "full_write_from", "local_visible_from", "limit", "logits_state")
)


class Flight(NamedTuple):
    """The rows of a step on the device.

    Attributes:
        row_ids, generations: the rows, and the sequences in them by `Rows.generation`.
        counts: the number of positions that each runs, with drafts.
        departures: `Rows.departures` when the step was planned.
    """

    row_ids: Int[np.ndarray, " R"]
    generations: Int[np.ndarray, " R"]
    counts: Int[np.ndarray, " R"]
    departures: int


class Slots(NamedTuple):
    """The slots that a row of `length` known tokens may hold between two steps, and at its peak, with the next one."""

    length: int
    resident: int
    peak: int

    @staticmethod
    def of(layout: KVLayout, limits: Limits, length: int) -> "Slots":
        """Return the slots of such a row."""
        return Slots(length, layout.resident_slots(length + 1), peak_slots(layout, limits.max_tokens, length + 1))


def record_of(request: Request, limit: int) -> Int[np.ndarray, " C"]:
    """Return the plan's record of a row that runs one token and samples the next, but for its row id and start."""
    record = np.zeros(1, _RECORD)
    record["first"], record["sampling"] = (0, 0, 1, 0, 0, 1, limit), sampling_of(request)
    return record.view(np.int32)


class Rows:
    """Arrays by row id, [max_rows] each. Only the scheduler changes them.

    Args:
        speculative: draft tokens per row that a step may run.

    Attributes:
        launched, ahead, known: see the module.
        speculative: draft tokens that a step may run of each row.
        speculates: whether any row may have some.
        unsettled: whether any row may be ahead: if not, nothing is computed for drafts.
        accepted, rejected: drafts of each row that were right or not.
        limit: prompt and generated tokens at most. The last token is sampled but never run, so launched < limit.
        mark: the number of known tokens at which the row must be looked at: its text ends, or its recent tokens must be
            copied.
        moved: whether rows have been launched, or settled, since their windows last slid.
        finite_to: end of the positions that the row has run in steps that came back finite, before it was plain.
        generation: counts the sequences that have had this row id. A step in flight remembers the generation of each of
            its rows, so a token for a sequence that has left the row is recognised.
        departures: counts the sequences that have left their rows.
        flights: the steps on the device, oldest first.
        plain: whether a token of the row needs no more than these arrays: its prompt is launched, nothing of it is to
            be published, and its request wants only the token.
        ribs, asking: their states of the rows, in the order of `ribs.table`, and how many rows ask any of them.
        counts_drafts: whether each token of a step with drafts comes with the counts of the row's drafts.
        names, tenants: request id and tenant, as objects.
        stops: the tokens that end rows.
        adapters: index of the LoRA adapter; 0: none.
    """

    def __init__(self, max_rows: int, speculative: int = 0) -> None:
        self.max_rows = max_rows
        self.launched, self.known, self.limit, self.finite_to = np.zeros((4, max_rows), int)
        self.mark, self.moved = np.zeros(max_rows, int), False
        self.ahead, self.speculative, self.accepted, self.rejected = np.zeros((4, max_rows), int)
        self.speculates, self._speculative, self.unsettled = speculative > 0, speculative, False
        self.generation = np.zeros(max_rows, np.int32)
        self.departures = self.asking = 0
        self.ribs = tuple(rib.rows(max_rows) for rib in RIBS)
        self.flights: deque[Flight] = deque()
        self.plain, self.counts_drafts = np.zeros((2, max_rows), bool)
        self.names, self.tenants = np.full((2, max_rows), None, object)
        self.adapters = np.zeros(max_rows, np.int32)
        self.stops = TokenCounts()
        # The records of a plan, for rows that run one token and sample the next.
        self._records = np.zeros((max_rows, len(COLUMNS)), np.int32)
        self._recent = np.zeros((max_rows, RECENT), np.int32)  # the last known tokens, each at its position % RECENT

    def admit(
        self,
        request: Request,
        record: Int[np.ndarray, " C"],
        lease: Lease,
        *,
        launched: int,
        tokens: Int[np.ndarray, " T"],
        needs: Needs = NO_NEEDS,
    ) -> None:
        """Enter a sequence with these known tokens, in the row of its lease. `record`: that of `record_of`."""
        row, known, limit = lease.row, len(tokens), record.item(_LIMIT)
        constraint = request.constraint
        self.launched[row], self.limit[row], self.known[row] = launched, limit, known
        self.mark[row] = min(limit, known + RECENT)
        self._recent[row, (known - 1) & (RECENT - 1)] = tokens[-1]
        if needs.variants:
            self.asking += 1
            for rib in self._asked_by(request):
                rib.begins(row, request)
        self.names[row], self.tenants[row] = request.request_id, request.options.tenant
        if request.adapter:
            self.adapters[row] = request.adapter
        if self.speculates:
            self.counts_drafts[row] = bool(request.params.stop)
            if constraint is None or constraint.fits_device or request.grammar is not None:
                self.speculative[row] = self._speculative
        own = self._records[row]
        own[:] = record
        own[0], own[_LOGITS_STATE] = row, self.max_rows if constraint is None else row
        if lease.full_write_from:  # of a match; without one both are 0
            own[_FULL_WRITE_FROM], own[_LOCAL_VISIBLE_FROM] = lease.full_write_from, lease.local_visible_from
        self.stops.count(request.stop_ids, 1)

    def release(self, row: int, request: Request, needs: Needs = NO_NEEDS) -> None:
        """Clear the entries of a row id that a request leaves; the sequence has copied the tokens (`recent`)."""
        self.launched[row] = self.known[row] = self.limit[row] = self.mark[row] = self.finite_to[row] = 0
        self.ahead[row] = self.speculative[row] = self.accepted[row] = self.rejected[row] = 0
        self.adapters[row] = 0
        self.plain[row] = False
        self.names[row] = self.tenants[row] = None
        self.generation[row] += 1
        self.departures += 1
        if needs.variants:
            self.asking -= 1
            for rib in self._asked_by(request):
                rib.leaves(row)
        self.stops.count(request.stop_ids, -1)

    def _asked_by(self, request: Request) -> list[RibRows]:
        """Return the states of the ribs that a request asks for something."""
        params, images = request.params, bool(request.images)
        return [own for rib, own in zip(RIBS, self.ribs, strict=True) if rib.needs(params, images).variants]

    def variant(self, row_ids: Int[np.ndarray, " R"] | None = None) -> str:
        """Return the variant in which a step of these rows runs; None: the widest that any step may need now."""
        if not self.asking:
            return PLAIN
        return joined_name(*(rib.variant(self.launched, row_ids) for rib in self.ribs))

    def records(self, row_ids: Int[np.ndarray, " R"]) -> Int[np.ndarray, "R C"]:
        """Return the plan's records of rows that run one token and sample the next, columns `COLUMNS`."""
        records = self._records.take(row_ids, axis=0)
        records[:, _START] = self.launched.take(row_ids)
        return records

    def recent(self, row: int, first: int) -> Int[np.ndarray, " n"]:
        """Return the known tokens from position `first` on, at most `RECENT`."""
        found: Int[np.ndarray, " n"] = self._recent[row, np.arange(first, self.known[row]) % RECENT]
        return found

    def last_tokens(self, row_ids: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
        """Return the last known token of each row."""
        found: Int[np.ndarray, " R"] = self._recent[row_ids, (self.known[row_ids] - 1) % RECENT]
        return found

    def set_known(self, row: int, tokens: Int[np.ndarray, " T"]) -> None:
        """Set the known tokens of a row, all of which the caller has."""
        first = max(min(self.known.item(row), len(tokens) - 1), len(tokens) - RECENT)
        self._recent[row, np.arange(first, len(tokens)) % RECENT] = tokens[first:]
        self.known[row] = len(tokens)
        self.copied(row)

    def copied(self, row: int) -> None:
        """Note that the caller has all known tokens of a row."""
        self.mark[row] = min(self.limit[row], self.known[row] + RECENT)

    def append_one(self, row: int, token: int) -> bool:
        """Append a token to the known tokens of one row; return whether the row has reached its mark."""
        known = int(self.known[row])
        self._recent[row, known % RECENT], self.known[row] = token, known + 1
        return bool(known + 1 == self.mark[row])

    def append(self, row_ids: Int[np.ndarray, " R"], tokens: Int[np.ndarray, " R"]) -> Bool[np.ndarray, " R"]:
        """Append a token to each row's known tokens; return which rows have reached their mark."""
        known = self.known.take(row_ids)
        self._recent.put(row_ids * RECENT + (known & (RECENT - 1)), tokens)
        known += 1
        self.known[row_ids] = known
        reached: Bool[np.ndarray, " R"] = known == self.mark.take(row_ids)
        return reached

    def passes_mark(self, row_ids: Int[np.ndarray, " R"], counts: Int[np.ndarray, " R"]) -> bool:
        """Return whether so many tokens more take any of these rows to its mark."""
        return bool((self.known.take(row_ids) + counts >= self.mark.take(row_ids)).any())

    def append_several(
        self,
        row_ids: Int[np.ndarray, " R"],
        given: Bool[np.ndarray, "R n"],
        tokens: Int[np.ndarray, "R n"],
        counts: Int[np.ndarray, " R"],
    ) -> None:
        """Append the `given` tokens to the rows, so many of each: see `append`."""
        places = (self.known.take(row_ids)[:, None] + np.arange(tokens.shape[1])) & (RECENT - 1)
        self._recent.reshape(-1)[(row_ids[:, None] * RECENT + places)[given]] = tokens[given]
        self.known[row_ids] += counts

    def ready(self) -> Bool[np.ndarray, " max_rows"]:
        """Return which rows can run: their last token is not launched.

        A row of which a grammar has foretold tokens while it runs drafts waits: how far these are right is not known.
        """
        ready: Bool[np.ndarray, " max_rows"] = self.launched < self.limit - 1
        if self.unsettled:
            ready &= (self.ahead == 0) | (self.launched >= self.known)
        return ready

    def next_positions(self) -> Int[np.ndarray, " max_rows"]:
        """Return the highest position that the next token of each row may have, if it has one."""
        return np.minimum(self.launched + self.ahead, self.limit - 2) if self.unsettled else self.launched

    def launch(
        self, row_ids: Int[np.ndarray, " R"], counts: Int[np.ndarray, " R"], drafts: Int[np.ndarray, " D"] | None = None
    ) -> None:
        """Note a step that runs so many positions of different rows, of the first D rows so many as drafts."""
        launched = self.launched.take(row_ids) + counts
        if drafts is not None:
            end = np.minimum(launched + self.ahead[row_ids], self.limit[row_ids] - 1)
            launched[: len(drafts)] -= drafts
            self.ahead[row_ids] = end - launched
            self.unsettled = bool(self.ahead.any())
        self.launched[row_ids] = launched
        self.moved = True
        self.flights.append(Flight(row_ids, self.generation.take(row_ids), counts, self.departures))

    def land(self) -> tuple[Flight, Bool[np.ndarray, " R"]]:
        """Remove the oldest step; return it, and which of its rows need no more than these arrays."""
        flight = self.flights.popleft()
        plain: Bool[np.ndarray, " R"] = self.plain.take(flight.row_ids)
        if flight.departures != self.departures:
            plain &= self.generation.take(flight.row_ids) == flight.generations
        return flight, plain

    def settle(self, row_ids: Int[np.ndarray, " R"]) -> None:
        """Narrow the lengths of rows, now that the tokens of a step are known, to what the later steps may add.

        A step runs at least one position of a row, unless that has reached its limit.
        """
        ahead = self.ahead.take(row_ids) > 0
        row_ids = row_ids if ahead.all() else row_ids[ahead]
        launched = self.known.take(row_ids) - 1
        end = launched.copy()
        for flight in self.flights if len(row_ids) else ():
            counts = self._counts_in(flight, row_ids)
            launched += counts > 0
            end += counts
        self.launched[row_ids] = launched
        self.ahead[row_ids] = np.minimum(end, self.limit.take(row_ids) - 1) - launched
        self.unsettled, self.moved = bool(self.ahead.any()), True

    def _counts_in(self, flight: Flight, row_ids: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return how many positions of each row a step runs for its present sequence."""
        if flight.departures == self.departures and np.array_equal(flight.row_ids, row_ids):
            return flight.counts
        counts, own = np.zeros(self.max_rows, int), self.generation[flight.row_ids] == flight.generations
        counts[flight.row_ids[own]] = flight.counts[own]
        return counts.take(row_ids)

    def settle_at(self, row: int, length: int) -> None:
        """Set the length of a row on the device, if it was not known: no step in flight runs the row."""
        if self.ahead[row]:
            self.launched[row], self.ahead[row], self.moved = length, 0, True
            self.unsettled = bool(self.ahead.any())

    def in_flight(self, row: int) -> int:
        """Return the number of steps on the device that run a row for its present sequence."""
        flights = ((f.row_ids == row) & (f.generations == self.generation[row]) for f in self.flights)
        return sum(bool(runs.any()) for runs in flights)

    def prefill_rows(self) -> int:
        """Return the number of rows that run known tokens next."""
        return int(np.count_nonzero(self.launched < self.known))

    def check(self, running: Int[np.ndarray, " n"]) -> None:
        """Assert that the entries of all other row ids are 0."""
        used = np.zeros(self.max_rows, bool)
        used[running] = True
        for array in (self.launched, self.ahead, self.known, self.limit, self.mark, self.plain):
            assert not array[~used].any(), "an unused row id has a value"
        assert np.all(self.known[used] < self.mark[used]), "a row has passed its mark"
        for rib in self.ribs:
            rib.check(running)
        assert len(running) or not len(self.stops), "stop ids of no row"


class Claims:
    """The memory that running rows have not taken yet but may claim, while a step is planned.

    A row claims the slots that it may hold between two steps, less those that it holds. The former depend on its
    lengths, which do not change while a step is planned; the latter are its lease's.

    Attributes:
        most: what all rows claim together at most, which costs little to know: a row that decodes claims two pages of
            each kind at most, one with a prompt what it may hold. None: there is no such bound, as layers are chunked.
    """

    def __init__(self, rows: Rows, cache: CacheManager) -> None:
        self._rows, self._cache = rows, cache
        prompts, reach = (rows.launched < rows.known).nonzero()[0], cache.layout.reach
        self._prefill_rows = len(prompts)
        self.most = None if reach is not None and reach.chunked else 2 * cache.layout.page_slots * len(cache.leases)
        if self.most is not None and len(prompts):
            self.most += int(cache.table.resident_slots(rows.known[prompts] + 1).sum())
        self._resident: Int[np.ndarray, " max_rows"] | None = None  # None: to be computed
        self._claimed: int | None = None  # by all rows; None: to be summed up

    def excess(self) -> int:
        """Return the slots that rows hold beyond that: of pages taken ahead, or for drafts."""
        return int(np.maximum(self._cache.table.held_slots() - self._residents(), 0).sum())

    def admit(self, lease: Lease, resident: int) -> None:
        """Count a row that begins: it has a prompt to prefill, and may hold so many slots."""
        self._prefill_rows += 1
        if self.most is not None:
            self.most += resident
        if self._resident is not None:
            self._resident[lease.row] = resident
            if self._claimed is not None:
                self._claimed += max(0, resident - lease.held_slots)

    def changed(self) -> None:
        """Note that rows have got pages since the claims were summed up."""
        self._claimed = None

    def own(self, limits: Limits, slots: Slots, gone: Items[int] = ()) -> int:
        """Return the free slots that a request needs besides all claims: its own, and the reserve of the step.

        `gone`: rows that would be preempted first.
        """
        prefill_rows = self._prefill_rows
        if gone:
            prefill_rows -= int(np.count_nonzero(self._rows.launched[gone] < self._rows.known[gone]))
        reserve = self._cache.layout.step_reserve_slots(limits.max_tokens, prefill_rows + 1) if prefill_rows else 0
        return max(slots.resident + reserve, slots.peak)

    def claimed(self, gone: Items[int] = ()) -> int:
        """Return the claims of all rows but those that are `gone`."""
        if self._claimed is None:
            self._claimed = int(self._claims().sum())
        return self._claimed - (int(self._claims()[gone].sum()) if gone else 0)

    def _residents(self) -> Int[np.ndarray, " max_rows"]:
        if self._resident is None:
            rows = self._rows
            lengths = np.maximum(rows.launched, rows.known + (rows.limit > 0))
            self._resident = self._cache.table.resident_slots(lengths)
        return self._resident

    def _claims(self) -> Int[np.ndarray, " max_rows"]:
        claims: Int[np.ndarray, " max_rows"] = np.maximum(self._residents() - self._cache.table.held_slots(), 0)
        return claims
