"""Continuous batching with chunked prefill: `plan` chooses a step and advances lengths, `apply` fills in its tokens.

The overlap protocol: plan(k + 1) runs after apply(k - 1), while step k is on the device. Lengths are known before
tokens are: `plan` decides length stops; `apply` sees end tokens, one step late, at the price of one discarded token.
`apply` ignores rows whose sequence has ended or lost its pages since.
"""

import bisect
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from jswa.cache.capacity import row_capacity
from jswa.cache.layout import KVLayout
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import Match
from jswa.config import Limits
from jswa.errors import EngineError, GenerationError, PromptTooLong
from jswa.plan import NOT_FINITE, NOTHING_ALLOWED, Request, StepEvents, StepLogprobs, StepPlan, TokenEvent
from jswa.sched.admission import admissible, fewest, is_passed, match_of, note_admission, open_lease, prefix_writer
from jswa.sched.constraint import nothing_allowed
from jswa.sched.draft import Draft, lease_of, make_plan, needs_one
from jswa.sched.outputs import SchedulerStats, confirm, count_hit, store_prompt_logprobs, with_results
from jswa.sched.rows import RowTable
from jswa.sched.sequence import Sequence, Status
from jswa.sched.turns import Turns, Use
from jswa.types import FinishReason


class Scheduler:
    """Owns the sequences, the cache manager and the row ids. Not thread-safe: one thread drives it."""

    def __init__(self, layout: KVLayout, limits: Limits) -> None:
        self.layout = layout
        self.limits = limits
        sharing, interval = limits.prefix_cache, limits.prefix_cache_interval
        self.cache = CacheManager(layout, limits.num_blocks, limits.pages_per_row, sharing=sharing, interval=interval)
        self.capacity = row_capacity(layout, limits, self.cache.pool.total_slots)
        self.preemptions = 0
        self._arrivals = 0
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank
        self._admissible = partial(admissible, self.cache, limits, self._running)
        self._turns = Turns(limits.max_tokens, limits.max_rows, limits.long_prompt)
        self._free_row_ids = list(range(limits.max_rows - 1, -1, -1))
        self._logprob_requests = 0
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._rows = RowTable(limits.max_rows)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold pages, by rank."""
        return tuple(self._running)

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All unfinished sequences by request id; read-only."""
        return MappingProxyType(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLong if prompt + 1 token do not fit an otherwise empty arena."""
        length = len(request.prompt)
        if length + 1 > self.capacity:
            raise PromptTooLong(
                "prompt", f"{length} tokens", f"at most {self.capacity - 1} tokens fit with one generated token"
            )
        if request.request_id in self._sequences:
            raise EngineError(f"request id {request.request_id!r} is already running")
        sequence = Sequence(request, (request.priority, self._arrivals), limit=min(request.max_length, self.capacity))
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._logprob_requests += request.params.wants_logprobs
        self._turns.register(sequence)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request at once and free its pages; return None if it has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.status is Status.WAITING:
            self._turns.remove(sequence)
        return self._finish(sequence, None, "abort")

    def has_work(self) -> bool:
        """Return whether any request is unfinished or any step is in flight."""
        return bool(self._sequences or self._in_flight)

    def plan(self) -> StepPlan | None:
        """Choose the next step by turns (`Turns`); None if nothing can run now. Its lengths count as launched."""
        self.cache.compact()
        draft = Draft(self.limits.max_tokens)
        draft.reserved = sum(map(needs_one, self._running))
        free = draft.budget - draft.reserved
        draft.for_others = max(0, min(self.limits.max_tokens * 3 // 4, free - max(1, free // 8)))
        self._take_rows(draft)
        self._plan_running(draft)
        passed = self._admit(draft)
        self._prefill(draft)
        if passed and draft.budget > 0:
            self._admit(draft)
        if not draft.sequences:
            return None
        plan = make_plan(draft, self._rows, self.cache.drain_moves(), logprobs=self._logprob_requests > 0)
        for sequence, count in zip(draft.sequences, draft.counts, strict=True):
            sequence.launched += count
            sequence.in_flight += 1
            # After all rows have their pages: a page must not serve two rows in one step.
            lease = lease_of(sequence)
            if sequence.launched >= lease.next_slide:
                self.cache.slide(lease, sequence.launched)
        self._in_flight.append((plan, draft.sequences))
        return plan

    def apply(self, plan: StepPlan, tokens: Int[np.ndarray, " R"], logprobs: StepLogprobs | None = None) -> StepEvents:
        """Apply the tokens of the oldest step in flight; return what each request got, and which ended."""
        launched_plan, sequences = self._in_flight.popleft()
        if launched_plan is not plan:
            raise EngineError("steps must be applied in the order in which they were planned")
        if logprobs is not None and logprobs.prompt is not None:
            store_prompt_logprobs(plan, sequences, logprobs.prompt)
        events = []
        rows = zip(sequences, plan.samples.tolist(), tokens.tolist(), (plan.starts + plan.counts).tolist(), strict=True)
        for row, (sequence, sampled, token, end) in enumerate(rows):
            sequence.in_flight -= 1
            if sequence.status is Status.FINISHED:
                continue
            event = None
            if sequence.discard:
                sequence.discard -= 1
            elif token == NOT_FINITE:
                event = self._fail(sequence, end)
            else:
                sequence.finite_to = end
                if not sequence.hit_counted or sequence.failed_to or (sequence.lease and sequence.lease.window_ends):
                    confirm(self.cache, sequence, end)
                event = self._apply_token(sequence, token) if sampled else None
            if event is not None:
                events.append(with_results(event, sequence, row, logprobs))
            if sequence.status is Status.PREEMPTED and not sequence.in_flight:
                self._requeue(sequence)
        return StepEvents(others=tuple(events))

    def preempt(self, request_id: str) -> None:
        """Preempt a running request between two steps, as `plan` does when memory is short. Raises EngineError."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is not Status.RUNNING:
            raise EngineError(f"request {request_id!r} does not run: it cannot be preempted")
        self._preempt(sequence)

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        return SchedulerStats.of(self.cache.pool, len(self._running), len(self._turns), self.preemptions)

    def check(self) -> None:
        """Assert every law of scheduler, leases and pool; for tests."""
        self.cache.check((lease_of(s), s.launched) for s in self._running)
        assert [s.rank for s in self._running] == sorted(s.rank for s in self._running)
        row_ids = [s.row_id for s in self._running]
        assert sorted(row_ids + self._free_row_ids) == list(range(self.limits.max_rows)), "a row id leaked"
        self._rows.check(self._running)
        self._turns.check(self._sequences.values())
        for sequence in self._sequences.values():
            sequence.check(len(self._in_flight))

    def _take_rows(self, draft: Draft) -> None:
        """Preempt rows of tenants that hold more than their share, for sequences of others that find no room."""
        passed: set[str] = set()
        while self._turns.several and (sequence := self._turns.first(passed)) is not None:
            victims = self._victims(draft, sequence)
            for victim in victims:
                draft.reserved -= needs_one(victim)
                self._preempt(victim)
            if not victims or not self._begin(draft, sequence, match_of(self.cache, sequence)):
                passed.add(sequence.request.tenant)

    def _victims(self, draft: Draft, sequence: Sequence) -> list[Sequence]:
        """Return the rows to preempt so that a waiting sequence begins; none if it needs none, or if no rows do."""
        match = match_of(self.cache, sequence)
        writer = prefix_writer(self._running, sequence, match, self.layout.page_size)
        if writer is not None or (self._free_row_ids and self._admissible(sequence, match)):
            return []
        use = self._use()
        spare = self._turns.spare(sequence, use)
        rows = list(self._turns.victims(sequence, use, [r for r in self._running if r not in draft.prompts]))

        def begins(count: int) -> bool:
            budget = draft.budget - draft.reserved + sum(map(needs_one, rows[:count]))
            room = self._turns.room(sequence, budget, draft.for_others)
            return room > 0 and self._admissible(sequence, match, spare, rows[:count])

        return rows[: fewest(len(rows), begins)]

    def _use(self) -> Use:
        """Return what the running rows hold."""
        held = {row: self.cache.held_slots(lease_of(row)) for row in self._running}
        return Use(held, self.limits.max_rows, self.cache.pool.total_slots, self.layout)

    def _plan_running(self, draft: Draft) -> None:
        """Add the running rows that need one token, and a share of the first prompt, by turns.

        The budget has a token for each of these rows.
        """
        share, free = self.limits.long_prompt, draft.budget - draft.reserved
        draft.reserved = 0  # all of them get it here
        left = deque(self._turns.order(self._running))
        for sequence in draft.prompts:  # which this step has admitted
            left.remove(sequence)
        while left:
            sequence = left.popleft()
            launched, count = sequence.launched, 1
            if launched >= sequence.limit - 1 or (sequence.waits_for_tokens and sequence.in_flight):
                continue
            if sequence.num_known > launched + 1:
                draft.prompts[sequence] = None
                count = min(sequence.num_known - launched, share, self._turns.room(sequence, free, draft.for_others))
                share = 0
                if count <= 0:
                    continue
            if launched + count > lease_of(sequence).covered:
                if not self._grow(sequence, launched + count, left):
                    draft.prompts.pop(sequence, None)
                    continue
                draft.extended.append(sequence)
            self._add(draft, sequence, count)

    def _add(self, draft: Draft, sequence: Sequence, count: int) -> None:
        """Add tokens of a row, for which its tenant is charged."""
        if self._turns.several:
            self._turns.charge(sequence, count)
        draft.add(sequence, count)

    def _grow(self, sequence: Sequence, length: int, left: deque[Sequence]) -> bool:
        """Get pages up to `length`, preempting the rows whose turn is last; False: the row skips this step."""
        while not self.cache.grow(lease_of(sequence), length):
            if sequence.in_flight:
                return False  # the row, or another, may have ended in the step in flight: try again next step
            if left:
                self._preempt(left.pop())
            elif len(self._running) > 1:
                self._preempt(sequence)
                return False
            else:
                raise EngineError(f"a row of {length} tokens alone does not fit the arena")
        return True

    def _prefill(self, draft: Draft, *, before: Sequence | None = None, long: int = 0) -> None:
        """Give running prompts what is left of the budget, in the order of `Turns.prompts`. Preempts no row."""
        left = {sequence: draft.left(sequence) for sequence in draft.prompts}
        for sequence in self._turns.prompts(left, before, long):
            count = min(left[sequence], self._turns.room(sequence, draft.budget, draft.for_others))
            length = sequence.launched + draft.given(sequence) + count
            if count and self.cache.grow(lease_of(sequence), length):
                draft.extended.append(sequence)
                self._add(draft, sequence, count)

    def _admit(self, draft: Draft) -> bool:
        """Admit waiting requests by turns; return whether long prompts were passed by others."""
        if not self._free_row_ids or not len(self._turns):
            return False
        # If there is enough for all that run, none of them is held back.
        enough = sum(map(draft.left, draft.prompts)) <= draft.budget
        long = draft.budget if enough else self.limits.long_prompt
        passed: set[str] = set()  # tenants whose next sequence waits for a prefix, or for memory
        short: set[str] = set()  # tenants whose long prompts are passed by their others
        first: Sequence | None = None  # that waits for memory
        began_long = False
        while draft.budget > 0 and self._free_row_ids:
            head = self._turns.first(passed, short)
            if head is None or self._turns.overtakes(head):
                break
            self._prefill(draft, before=head, long=long)
            tenant = head.request.tenant
            no_room = self._turns.room(head, draft.budget, draft.for_others) <= 0
            if no_room or (first is not None and not self._turns.passes(head, first, self._use())):
                passed.add(tenant)
                continue
            match = match_of(self.cache, head)
            writer = prefix_writer(self._running, head, match, self.layout.page_size)
            behind = began_long and self._turns.first(passed, {*short, tenant}) is not None
            if tenant not in short and is_passed(draft, head, match, writer, self.limits.long_prompt, behind=behind):
                short.add(tenant)
            elif writer is not None:
                passed.add(tenant)
            elif not self._begin(draft, head, match):
                first = first or head
                passed.add(tenant)
            else:
                began_long |= draft.left(head) > self.limits.long_prompt
                if first is not None:
                    first.passed_by += head.num_known
        return bool(short)

    def _begin(self, draft: Draft, sequence: Sequence, match: Match) -> bool:
        """Admit a waiting request if there is room; a prompt that the step cannot end gets a share of the budget."""
        room = self._turns.room(sequence, draft.budget - draft.reserved, draft.for_others)
        spare = self._turns.spare(sequence, self._use()) if self._turns.several else 0
        fits = room > 0 and self._free_row_ids and self._admissible(sequence, match, spare)
        opened = open_lease(self.cache, sequence, match) if fits else None
        if opened is None:
            return False
        (lease, match), start = opened, opened[1].resume.start
        need = sequence.num_known - start
        count = need if need <= room else min(self.limits.long_prompt, room)
        if not self.cache.grow(lease, start + count):
            self.cache.close(lease)
            return False
        self._turns.admit(sequence)
        sequence.lease, sequence.row_id, sequence.status = lease, self._free_row_ids.pop(), Status.RUNNING
        sequence.launched, sequence.finite_to = start, 0
        if sequence.reads_cache:
            sequence.cached_to, sequence.cache_epoch = match.resume.full_to, self.cache.epoch
        note_admission(sequence, match, prefix_cache=self.limits.prefix_cache)
        draft.resumed += [sequence] if len(match.full) or len(match.local) else []
        entry = self._rows.admit(sequence)
        draft.extras += [] if entry is None else [entry]
        bisect.insort(self._running, sequence, key=lambda s: s.rank)
        draft.extended.append(sequence)
        draft.prompts[sequence] = None
        self._add(draft, sequence, count)
        return True

    def _apply_token(self, sequence: Sequence, token: int) -> TokenEvent:
        if token == NOTHING_ALLOWED:
            return self._finish(sequence, None, "error", error=nothing_allowed(sequence.request, sequence.num_known))
        sequence.append(token)
        if token in sequence.request.stop_ids:
            asked = token in sequence.request.params.stop_token_ids
            return self._finish(sequence, token, "stop", token if asked else None)
        if sequence.num_known == sequence.limit:
            return self._finish(sequence, token, "length")
        return TokenEvent(sequence.request.request_id, token)

    def _finish(
        self,
        sequence: Sequence,
        token: int | None,
        reason: FinishReason,
        stop_reason: int | None = None,
        *,
        error: GenerationError | None = None,
    ) -> TokenEvent:
        self._release(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.request.request_id]
        self._turns.unregister(sequence)
        self._logprob_requests -= sequence.request.params.wants_logprobs
        return TokenEvent(sequence.request.request_id, token, reason, stop_reason, error=error)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a row's pages; the cache may keep them. A token in flight still counts when it comes back."""
        self._release(sequence)
        self.preemptions += 1
        sequence.preemptions += 1
        self._wait_again(sequence)

    def _fail(self, sequence: Sequence, end: int) -> TokenEvent | None:
        """End a row whose step up to `end` is not finite, unless cached KV may be at fault: then run it without.

        A finite step vouches for all KV that it read: only a row that has not yet read all of its cached KV in finite
        steps runs again, once. That run shows whether the cache is at fault. Until then nothing is withdrawn: a prompt
        of which every run fails must not cost others what they share with it.
        """
        if sequence.failed_to or sequence.finite_to >= sequence.cached_to:
            count_hit(self.cache, sequence)
            why = GenerationError("no next token: the logits are not finite")
            return self._finish(sequence, None, "error", error=why)
        sequence.failed_to, sequence.discard = end, sequence.in_flight
        if sequence.num_known == len(sequence.request.prompt):
            sequence.prefix = None
        self._release(sequence)
        self._wait_again(sequence)
        return None

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.launched = 0
        if sequence.in_flight:
            sequence.status = Status.PREEMPTED
            self._turns.expect(sequence)
        else:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._turns.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free a row's pages and row id, and publish the KV that is known to be finite."""
        if sequence.lease is not None:
            finite = sequence.tokens[: sequence.finite_to]
            self.cache.close(sequence.lease, finite, turn=(len(sequence.request.prompt),))
            self._rows.release(sequence)
            self._free_row_ids.append(sequence.row_id)
            self._running.remove(sequence)
            sequence.lease, sequence.row_id = None, -1
