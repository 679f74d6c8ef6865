"""Continuous batching with chunked prefill: `plan` chooses a step and advances lengths, `apply` fills in its tokens.

The overlap protocol: plan(k + 1) runs after apply(k - 1), while step k is on the device. Lengths are known before
tokens are: `plan` decides length stops; `apply` sees end tokens, one step late, at the price of one discarded token.
`apply` ignores rows whose sequence has ended or lost its pages since.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from jswa.cache.capacity import row_capacity
from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.policies import POLICIES
from jswa.config import Limits
from jswa.errors import EngineError, PromptTooLong
from jswa.plan import PAST_LIMIT, Request, RowMask, RowText, StepEvents, StepPlan, StepResults, TokenEvent
from jswa.sched.admission.prompts import Prompts
from jswa.sched.batch import Batch, lease_of, make_plan, plan_copies
from jswa.sched.drafts.drafting import Drafting
from jswa.sched.drafts.several import append_several
from jswa.sched.outputs import SchedulerStats
from jswa.sched.requests import Requests
from jswa.sched.rows import Rows
from jswa.sched.sequence import Sequence, Status

_NO_ROWS = np.zeros(0, np.intp)
_AHEAD = 8  # steps


class Scheduler:
    """Owns the sequences, the cache manager and the row ids. Not thread-safe: one thread drives it.

    `speculative`: draft tokens that a step may run of a row; the device has them, and tells how many were right.
    `limits.speculation` says it of a real device.
    """

    def __init__(self, layout: KVLayout, limits: Limits, speculative: int = 0) -> None:
        speculation = limits.speculation
        speculative = speculative if speculation is None else speculation.tokens
        self.layout = layout
        self.limits = limits
        self.cache = CacheManager(
            layout,
            limits.num_slabs,
            limits.pages_per_row,
            limits.max_rows,
            sharing=limits.prefix_cache,
            interval=limits.prefix_cache_interval,
            memory=limits.host,
            policy=POLICIES[limits.radix_eviction_policy],
        )
        self.capacity = row_capacity(layout, limits, self.cache.pool.total_slots)
        self._requests = Requests(self.cache, limits, speculative)
        self.drafting = Drafting(self._requests.rows, self.cache, speculative, limits)
        self._requests.grown = self.drafting.look_again
        self._queue = self._requests.queue
        self._prompts = Prompts(self._requests, self.cache, limits, self.drafting.begin)
        self._in_flight: deque[StepPlan] = deque()
        self._since_ahead = 0  # steps since rows got pages ahead

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold pages, by rank."""
        return tuple(self._requests)

    @property
    def preemptions(self) -> int:
        """The number of rows that were preempted so far."""
        return self._requests.preemptions

    @property
    def rows(self) -> Rows:
        """The arrays of the running rows; read-only."""
        return self._requests.rows

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All unfinished sequences by request id; read-only."""
        return self._requests.unfinished

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong if prompt + 1 token do not fit an otherwise empty arena."""
        self.require_fit(request)
        self._requests.add(request, limit=min(request.max_length, self.capacity))

    def require_fit(self, request: Request) -> None:
        """Raise PromptTooLong if a request can never run."""
        length = len(request.prompt)
        if length + 1 > self.capacity:
            raise PromptTooLong(
                "prompt", f"{length} tokens", f"at most {self.capacity - 1} tokens fit with one generated token"
            )

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request at once and free its pages; return None if it has ended already."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return None
        self._prompts.recalling.drop(sequence)
        return self._requests.finish(sequence, None, "abort")

    def has_work(self) -> bool:
        """Return whether any request is unfinished or any step is in flight."""
        return bool(self.sequences or self._in_flight)

    def plan(self) -> StepPlan | None:
        """Choose the next step by turns (`FairQueue`); None if nothing can run now. Its lengths count as launched."""
        self._requests.slide()  # if nobody has called `tidy`
        self.cache.compact()
        if self.cache.host is not None:
            self._prompts.recalling.settle(self.cache.host)
        batch = Batch(self.limits.max_tokens)
        if self._queue.several:
            self._prompts.take_rows(batch)
        self._plan_running(batch)
        if batch.left or len(self._queue):
            self._prompts.fill(batch)
        self.cache.allocate()
        if not len(batch.decode) and not any(batch.prompts.values()):
            return None
        requests, texts = self._requests, tuple[RowText, ...]()
        if self.rows.speculates:
            self.drafting.give(batch, requests.sequences_at, split=bool(len(requests.masks)))
            texts = self.drafting.texts(requests.by_row)
        plan, row_ids = make_plan(batch, self.rows, requests.by_row, requests.masks, self.cache, texts)
        self.rows.launch(row_ids, plan.counts, batch.speculative)
        # A prompt that ends needs less memory, and so does one whose window slides, or a row with pages for drafts.
        requests.changes += bool(batch.prompts) or batch.speculative is not None
        self._in_flight.append(plan)
        return plan

    def plan_copies(self) -> StepPlan | None:
        """Return a plan without rows that copies pages between device and host memory, after `plan` has returned None.

        None: there is nothing to copy.
        """
        return plan_copies(self.cache)

    def late_masks(
        self, plan: StepPlan, drafts: Int[np.ndarray, "R K"] | None = None
    ) -> tuple[tuple[RowMask, ...], tuple[TokenEvent, ...]]:
        """Return the masks that change in a step in flight, whose plan left them out. All its tokens are known by now.

        Rows that have ended meanwhile need none: their tokens are ignored. The second result has the ends of the texts
        that their grammars complete, and the tokens that grammars force, which are known without a step: the first of
        a row is the one that this step will sample.

        `drafts`: of the step's rows, negative behind the last; None: no row has any.
        """
        requests, row_ids = self._requests, np.array(plan.late, np.int64)
        events = requests.follow_grammars(requests.masks.of_grammars(row_ids))
        proposed: dict[int, list[int]] = {row_id: [] for row_id in plan.late}
        if drafts is not None:
            own = zip(plan.row_ids.tolist(), drafts.tolist(), strict=True)
            proposed |= {row: [token for token in tokens if token >= 0] for row, tokens in own if row in proposed}
        masks, forced, single = requests.masks.late(requests.by_row, proposed)
        told = [event for sequence in forced for event in requests.foretell(sequence)]
        if self.rows.speculates:
            self.drafting.foretold(forced, single)
        return masks, (*events, *told)

    def apply(
        self,
        plan: StepPlan,
        tokens: Int[np.ndarray, " R"] | Int[np.ndarray, "R n"],
        results: StepResults | None = None,
        counts: Int[np.ndarray, " R"] | None = None,
        drafted: Int[np.ndarray, " R"] | None = None,
    ) -> StepEvents:
        """Apply the tokens of the oldest step in flight; return what each request got, and which ended.

        Args:
            tokens: a token for each row, or several.
            results: what it gives besides; None of a plain step.
            counts: the number of tokens of each row, if there are several; 0 of a row that had reached its limit.
            drafted: how many drafts there were of each row.

        Raises EngineError if `plan` is not that of the oldest step.
        """
        if self._in_flight.popleft() is not plan:
            raise EngineError("steps must be applied in the order in which they were planned")
        flight, plain = self.rows.land()
        width = 1 if counts is None else tokens.shape[1]
        if counts is not None and drafted is not None:
            self.drafting.apply(plan, flight, counts, drafted)
            plain &= ~self.rows.counts_drafts.take(flight.row_ids)
        plain &= (tokens if counts is None else tokens[:, 0]) >= 0
        row_ids, others = flight.row_ids, []
        if np.count_nonzero(plain) < len(plain):
            rest = np.flatnonzero(~plain)
            owners = list(map(self._requests.owner, row_ids[rest].tolist(), flight.generations[rest].tolist()))
            for row, sequence in zip(rest.tolist(), owners, strict=True):
                if sequence is not None:
                    own = (tokens[row, : counts[row]] if counts is not None else tokens[row : row + 1]).tolist()
                    own = [] if own == [PAST_LIMIT] else own
                    others += self._requests.apply_row(sequence, plan, row, own, results, row * width)
            row_ids, tokens = row_ids[plain], tokens[plain]
            counts = None if counts is None else counts[plain]
        if counts is None:
            events = self._requests.apply_plain(row_ids, tokens, others)
        else:
            events = append_several(self._requests, row_ids, tokens, counts, others)
        if self.rows.unsettled:
            self.rows.settle(flight.row_ids)
            self._requests.slide()
        return events

    def tidy(self) -> None:
        """Free pages for the next plan; called after the launch, while the device works.

        Windows slide after all rows of a step have their pages: a page must not serve two rows in one step. Then rows
        get pages ahead, and the prefix cache evicts what the next plan would otherwise have to evict. Last, the tokens
        of rows without drafts are compared with what a lookup would have drafted.
        """
        self._requests.slide()
        self.cache.evict_ahead()
        self._take_ahead()
        if self.rows.speculates:
            self.drafting.watch()

    def preempt(self, request_id: str) -> None:
        """Preempt a running request between two steps, as `plan` does when memory is short. Raises EngineError."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.status is not Status.RUNNING:
            raise EngineError(f"request {request_id!r} does not run: it cannot be preempted")
        self._requests.preempt(sequence)

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        return SchedulerStats.of(self.cache.pool, len(self._requests), len(self._queue), self.preemptions)

    def check(self) -> None:
        """Assert every law of scheduler, leases and pool; for tests."""
        assert len(self._in_flight) == len(self.rows.flights)
        self._requests.check()
        if self.drafting.earlier is not None:
            self.drafting.earlier.check()

    def _take_ahead(self) -> None:
        """Once in a few steps, give the rows that reach the end of their pages until the next time their next page.

        Giving pages to fifty rows costs about as much as giving one to a single row. No row is preempted for pages
        ahead, nor earlier than without them: no other row that decodes needs a page within these steps. While a waiting
        request might begin with these pages, none are taken.
        """
        steps = min(_AHEAD, self.layout.page_size)
        self._since_ahead += 1
        if self._since_ahead < steps or self._queue.several:
            return
        self._since_ahead = 0
        head = self._queue.first() if self.cache.table.free else None
        if head is not None and head.blocked != self._requests.state():
            return
        rows, covered = self.rows, self.cache.table.covered
        ends = rows.plain & (covered < rows.limit - 1) & (rows.next_positions() + steps > covered)
        row_ids = ends.nonzero()[0]
        if len(row_ids) and len(row_ids) * self.layout.page_slots <= self.cache.available_slots:
            self.cache.take_ahead(row_ids)

    def _plan_running(self, batch: Batch) -> None:
        """Add the running rows that need one token, and a share of the first prompt, by turns.

        The budget has a token for each of these rows.
        """
        rows, batch.reserved = self.rows, 0
        ready = rows.ready()
        for sequence in batch.prompts:  # which this step has admitted
            ready[sequence.row_id] = False
        batch.behind = rows.prefill_rows()
        decode = ready & (rows.known - rows.launched <= 1) if batch.behind else ready
        taken = int(np.count_nonzero(decode))
        batch.budget -= taken
        ends = (decode & (rows.next_positions() >= self.cache.table.covered)).nonzero()[0]  # of their pages
        rest = (ready ^ decode).nonzero()[0] if batch.behind else _NO_ROWS
        batch.behind -= len(rest)
        if len(ends) and not self.cache.grow_by_page(ends):
            rest = np.concatenate([rest, ends])
        if len(rest):
            self._plan_in_turns(batch, self._requests.sequences_at(rest), decode)
        batch.decode = decode.nonzero()[0]
        batch.budget += taken - len(batch.decode)
        if self._queue.several:
            known = rows.known[batch.decode] > rows.launched[batch.decode]
            self._queue.charge_rows(rows.tenants[batch.decode].tolist(), known.tolist())

    def _plan_in_turns(self, batch: Batch, rows: list[Sequence], decode: Bool[np.ndarray, " max_rows"]) -> None:
        """Get pages for decode rows, and a share of the step for the first prompt; clear rows without in `decode`."""
        share, positions, order = self.limits.long_prompt, self.rows.next_positions(), None
        if self._queue.several:  # charges of this step do not change it
            order = self._queue.order([row for row in self._requests if row not in batch.prompts])
        for sequence in self._queue.order(sorted(rows, key=lambda row: row.rank)):
            if sequence.lease is None:
                continue  # preempted for a row before it
            row_id, count = sequence.row_id, 1
            is_prompt = not decode[row_id]
            if is_prompt:
                left = batch.begin(sequence)
                count = min(left, share, self._queue.room(sequence, batch.budget, batch.for_others))
                share = 0
            end = int(positions[row_id]) + count
            if count > 0 and end > lease_of(sequence).covered and not self._grow(sequence, end, order, decode):
                decode[row_id] = False
                if is_prompt:
                    batch.drop(sequence)
            elif is_prompt and count > 0:
                self._prompts.add(batch, sequence, count)

    def _grow(
        self, sequence: Sequence, length: int, order: list[Sequence] | None, decode: Bool[np.ndarray, " max_rows"]
    ) -> bool:
        """Get pages up to `length`, preempting the rows whose turn is last; False: the row skips this step.

        Args:
            order: the running rows that may be preempted, by turns; None: all, by rank.
            decode: the rows that run one token; preempted ones are cleared.
        """
        while not self.cache.grow(lease_of(sequence), length, later=True):
            if sequence.in_flight:
                return False  # the row, or another, may have ended in the step in flight: try again next step
            order = list(self._requests) if order is None else order
            while order[-1].lease is None:
                order.pop()
            if order[-1] is not sequence or len(self._requests) > 1:
                decode[order[-1].row_id] = False
                self._requests.preempt(order[-1])
                if sequence.lease is None:
                    return False
            else:
                raise EngineError(f"a row of {length} tokens alone does not fit the arena")
        return True
