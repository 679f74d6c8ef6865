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
from jswa.cache.prefix.cache import Match
from jswa.config import Limits
from jswa.errors import EngineError, PromptTooLong
from jswa.plan import PAST_LIMIT, Request, RowMask, StepEvents, StepLogprobs, StepPlan, TokenEvent
from jswa.sched.admission import Recalling, fewest, is_passed, match_of, open_lease
from jswa.sched.draft import Draft, lease_of, make_plan, plan_copies
from jswa.sched.drafts.drafting import Drafting
from jswa.sched.drafts.several import append_several
from jswa.sched.outputs import SchedulerStats, store_prompt_logprobs
from jswa.sched.requests import Requests, needs_one
from jswa.sched.rows import Rows
from jswa.sched.sequence import Sequence, Status

_NO_ROWS = np.zeros(0, np.intp)


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
            limits.num_blocks,
            limits.pages_per_row,
            limits.max_rows,
            sharing=limits.prefix_cache,
            interval=limits.prefix_cache_interval,
            memory=limits.host,
        )
        self.capacity = row_capacity(layout, limits, self.cache.pool.total_slots)
        self._requests = Requests(self.cache, limits, speculative)
        self.drafting = Drafting(self._requests.rows, self.cache, speculative, limits)
        self._requests.grown = self.drafting.look_again
        self._turns = self._requests.turns
        self._recalling = Recalling(self.cache, self._requests.admissible)
        self._in_flight: deque[StepPlan] = deque()

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
        self._recalling.drop(sequence)
        return self._requests.finish(sequence, None, "abort")

    def has_work(self) -> bool:
        """Return whether any request is unfinished or any step is in flight."""
        return bool(self.sequences or self._in_flight)

    def plan(self) -> StepPlan | None:
        """Choose the next step by turns (`Turns`); None if nothing can run now. Its lengths count as launched."""
        self._requests.slide()  # if nobody has called `tidy`
        self.cache.compact()
        self._recalling.settle()
        draft = Draft(self.limits.max_tokens)
        if self._turns.several:
            self._take_rows(draft)
        self._plan_running(draft)
        passed = self._admit(draft)
        self._prefill(draft)
        if passed and draft.budget > 0:
            self._admit(draft)
        if not len(draft.decode) and not any(draft.prompts.values()):
            return None
        requests = self._requests
        if self.rows.speculates:
            self.drafting.give(draft, requests.sequences_at, split=bool(len(requests.masks)))
        texts = self.drafting.texts(requests.by_row)
        plan, row_ids = make_plan(draft, self.rows, requests.by_row, requests.masks, self.cache, texts)
        self.rows.launch(row_ids, plan.counts, draft.speculative)
        # A prompt that ends needs less memory, and so does one whose window slides, or a row with pages for drafts.
        requests.changes += bool(draft.prompts) or draft.speculative is not None
        self._in_flight.append(plan)
        return plan

    def plan_copies(self) -> StepPlan | None:
        """Return a plan without rows that copies pages between device and host memory, after `plan` has returned None.

        None: there is nothing to copy.
        """
        return plan_copies(self.cache)

    def late_masks(self, plan: StepPlan) -> tuple[tuple[RowMask, ...], tuple[TokenEvent, ...]]:
        """Return the masks that change in a step in flight, whose plan left them out. All its tokens are known by now.

        Rows that have ended meanwhile need none: their tokens are ignored. The second result has the ends of the texts
        that their grammars complete, and the tokens that grammars force, which are known without a step: the first of
        a row is the one that this step will sample.
        """
        requests, row_ids = self._requests, np.array(plan.late, np.int64)
        events = requests.follow_grammars(requests.masks.of_grammars(row_ids))
        masks, forced = requests.masks.late(requests.by_row, row_ids)
        return masks, (*events, *(event for sequence in forced for event in requests.foretell(sequence)))

    def apply(
        self,
        plan: StepPlan,
        tokens: Int[np.ndarray, " R"] | Int[np.ndarray, "R n"],
        logprobs: StepLogprobs | None = None,
        counts: Int[np.ndarray, " R"] | None = None,
        drafted: Int[np.ndarray, " R"] | None = None,
    ) -> StepEvents:
        """Apply the tokens of the oldest step in flight; return what each request got, and which ended.

        Args:
            tokens: a token for each row, or several.
            counts: the number of tokens of each row, if there are several; 0 of a row that had reached its limit.
            drafted: how many drafts there were of each row.
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
            if logprobs is not None and logprobs.prompt is not None:
                store_prompt_logprobs(plan, rest, owners, logprobs.prompt)
            for row, sequence in zip(rest.tolist(), owners, strict=True):
                if sequence is not None:
                    own = (tokens[row, : counts[row]] if counts is not None else tokens[row : row + 1]).tolist()
                    own = [] if own == [PAST_LIMIT] else own
                    others += self._requests.apply_row(sequence, plan, row, own, logprobs, row * width)
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

        Windows slide after all rows of a step have their pages: a page must not serve two rows in one step. Then the
        prefix cache evicts what the next plan would otherwise have to evict.
        """
        self._requests.slide()
        self.cache.evict_ahead()

    def preempt(self, request_id: str) -> None:
        """Preempt a running request between two steps, as `plan` does when memory is short. Raises EngineError."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.status is not Status.RUNNING:
            raise EngineError(f"request {request_id!r} does not run: it cannot be preempted")
        self._requests.preempt(sequence)

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        return SchedulerStats.of(self.cache.pool, len(self._requests), len(self._turns), self.preemptions)

    def check(self) -> None:
        """Assert every law of scheduler, leases and pool; for tests."""
        assert len(self._in_flight) == len(self.rows.flights)
        self._requests.check()
        if self.drafting.earlier is not None:
            self.drafting.earlier.check()

    def _take_rows(self, draft: Draft) -> None:
        """Preempt rows of tenants that hold more than their share, for sequences of others that find no room."""
        rows, passed = self.rows, set[str]()
        draft.reserved = int(np.count_nonzero((rows.known - rows.launched <= 1) & (rows.launched < rows.limit - 1)))
        free = draft.budget - draft.reserved
        draft.for_others = max(0, min(self.limits.max_tokens * 3 // 4, free - max(1, free // 8)))
        while (sequence := self._turns.first(passed)) is not None:
            waits = self._recalling.waits(draft, sequence, match_of(self.cache, sequence))
            victims = [] if waits else self._victims(draft, sequence)
            for victim in victims:
                draft.reserved -= needs_one(victim)
                self._requests.preempt(victim)
                draft.claims = None
            if not victims or not self._begin(draft, sequence, match_of(self.cache, sequence)):
                passed.add(sequence.request.tenant)

    def _victims(self, draft: Draft, sequence: Sequence) -> list[Sequence]:
        """Return the rows to preempt so that a waiting sequence begins; none if it needs none, or if no rows do."""
        match = match_of(self.cache, sequence)
        if self._requests.writers.find(sequence, match) is not None:
            return []
        if self.cache.table.free and self._requests.admissible(draft, sequence, match):
            return []
        use = self._requests.use()
        spare = self._turns.spare(sequence, use)
        rows = list(self._turns.victims(sequence, use, [r for r in self._requests if r not in draft.prompts]))

        def begins(count: int) -> bool:
            budget = draft.budget - draft.reserved + sum(map(needs_one, rows[:count]))
            room = self._turns.room(sequence, budget, draft.for_others)
            return room > 0 and self._requests.admissible(draft, sequence, match, spare, rows[:count])

        return rows[: fewest(len(rows), begins)]

    def _plan_running(self, draft: Draft) -> None:
        """Add the running rows that need one token, and a share of the first prompt, by turns.

        The budget has a token for each of these rows.
        """
        rows, draft.reserved = self.rows, 0
        ready = rows.ready()
        for sequence in draft.prompts:  # which this step has admitted
            ready[sequence.row_id] = False
        draft.behind = rows.prefill_rows()
        decode = ready & (rows.known - rows.launched <= 1) if draft.behind else ready
        taken = int(np.count_nonzero(decode))
        draft.budget -= taken
        ends = (decode & (rows.next_positions() >= self.cache.table.covered)).nonzero()[0]  # of their pages
        rest = (ready ^ decode).nonzero()[0] if draft.behind else _NO_ROWS
        if len(ends) and not self.cache.grow_by_page(ends):
            rest = np.concatenate([rest, ends])
        if len(rest):
            self._plan_in_turns(draft, self._requests.sequences_at(rest), decode)
        draft.decode = decode.nonzero()[0]
        draft.budget += taken - len(draft.decode)
        if self._turns.several:
            known = rows.known[draft.decode] > rows.launched[draft.decode]
            self._turns.charge_rows(rows.tenants[draft.decode].tolist(), known.tolist())

    def _plan_in_turns(self, draft: Draft, rows: list[Sequence], decode: Bool[np.ndarray, " max_rows"]) -> None:
        """Get pages for decode rows, and a share of the step for the first prompt; clear rows without in `decode`."""
        share, admitted, positions = self.limits.long_prompt, set(draft.prompts), self.rows.next_positions()
        order = self._turns.order([row for row in self._requests if row not in admitted])
        for sequence in self._turns.order(sorted(rows, key=lambda row: row.rank)):
            if sequence.lease is None:
                continue  # preempted for a row before it
            row_id, count = sequence.row_id, 1
            is_prompt = not decode[row_id]
            if is_prompt:
                draft.begin(sequence)
                left = sequence.num_known - sequence.launched
                count = min(left, share, self._turns.room(sequence, draft.budget, draft.for_others))
                share = 0
            end = int(positions[row_id]) + count
            if count > 0 and end > lease_of(sequence).covered and not self._grow(sequence, end, order, decode):
                decode[row_id] = False
                if is_prompt:
                    draft.drop(sequence)
            elif is_prompt and count > 0:
                self._add(draft, sequence, count)

    def _add(self, draft: Draft, sequence: Sequence, count: int) -> None:
        """Add tokens of a prompt, for which its tenant is charged."""
        if self._turns.several:
            self._turns.charge(sequence, count)
        draft.add(sequence, count)

    def _grow(
        self, sequence: Sequence, length: int, order: list[Sequence], decode: Bool[np.ndarray, " max_rows"]
    ) -> bool:
        """Get pages up to `length`, preempting the rows whose turn is last; False: the row skips this step.

        Args:
            order: the running rows that may be preempted, by turns.
            decode: the rows that run one token; preempted ones are cleared.
        """
        while not self.cache.grow(lease_of(sequence), length):
            if sequence.in_flight:
                return False  # the row, or another, may have ended in the step in flight: try again next step
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

    def _prefill(self, draft: Draft, *, before: Sequence | None = None, long: int = 0) -> None:
        """Give running prompts what is left of the budget, in the order of `Turns.prompts`. Preempts no row."""
        for sequence in self._turns.prompts(draft.left, before, long) if draft.left else ():
            count = min(draft.left[sequence], self._turns.room(sequence, draft.budget, draft.for_others))
            length = sequence.launched + draft.prompts[sequence] + count
            if count and self.cache.grow(lease_of(sequence), length):
                if draft.claims is not None:
                    draft.claims.changed()
                self._add(draft, sequence, count)

    def _admit(self, draft: Draft) -> bool:
        """Admit waiting requests by turns; return whether long prompts were passed by others."""
        if not self.cache.table.free or not len(self._turns):
            return False
        # If there is enough for all that run, none of them is held back.
        enough = sum(draft.left.values()) <= draft.budget
        long = draft.budget if enough else self.limits.long_prompt
        draft.claims = None
        passed: set[str] = set()  # tenants whose next sequence waits for a prefix, or for memory
        short: set[str] = set()  # tenants whose long prompts are passed by their others
        first: Sequence | None = None  # that waits for memory
        began_long = False
        while draft.budget > 0 and self.cache.table.free:
            head = self._turns.first(passed, short)
            if head is None or self._turns.overtakes(head):
                break
            self._prefill(draft, before=head, long=long)
            tenant = head.request.tenant
            no_room = self._turns.room(head, draft.budget, draft.for_others) <= 0
            if no_room or (first is not None and not self._turns.passes(head, first, self._requests.use())):
                passed.add(tenant)
                continue
            if head.blocked is not None and head.blocked == self._requests.state():
                passed.add(tenant)
                first = first or head
                continue
            match = match_of(self.cache, head)
            writer = self._requests.writers.find(head, match)
            behind = began_long and self._turns.first(passed, {*short, tenant}) is not None
            if tenant not in short and is_passed(draft, head, match, writer, self.limits.long_prompt, behind=behind):
                short.add(tenant)
            elif writer is not None or self._recalling.waits(draft, head, match):
                passed.add(tenant)
            elif not self._begin(draft, head, match):
                first = first or head
                passed.add(tenant)
            else:
                began_long |= draft.left.get(head, 0) > self.limits.long_prompt
                if first is not None:
                    first.passed_by += head.num_known
        return bool(short)

    def _begin(self, draft: Draft, sequence: Sequence, match: Match) -> bool:
        """Admit a waiting request if there is room; a prompt that the step cannot end gets a share of the budget."""
        room = self._turns.room(sequence, draft.budget - draft.reserved, draft.for_others)
        if room <= 0 or not self.cache.table.free:
            return False
        spare = self._turns.spare(sequence, self._requests.use()) if self._turns.several else 0
        if not self._requests.admissible(draft, sequence, match, spare):
            sequence.blocked = None if self._turns.several else self._requests.state()
            return False
        opened = open_lease(self.cache, sequence, match)
        if opened is None:
            return False
        (lease, match), start = opened, opened[1].resume.start
        need = sequence.num_known - start
        count = need if need <= room else min(self.limits.long_prompt, room)
        if not self.cache.grow(lease, start + count):
            self.cache.close(lease)
            return False
        entry = self._requests.begin(sequence, lease, match)
        self.drafting.begin(sequence)
        draft.begin(sequence)
        draft.resumed += [sequence] if len(match.full) or len(match.local) else []
        draft.extras += [] if entry is None else [entry]
        if draft.claims is not None:
            draft.claims.admit(lease, sequence.num_known)
        self._add(draft, sequence, count)
        return True
