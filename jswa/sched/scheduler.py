"""Continuous batching with chunked prefill: `plan` chooses a step and advances lengths, `apply` fills in its tokens.

The overlap protocol: plan(k + 1) runs after apply(k - 1), while step k is on the device. Lengths are known before
tokens are: `plan` decides length stops; `apply` sees end tokens, one step late, at the price of one discarded token.
`apply` ignores rows whose sequence has ended or lost its pages since.
"""

import bisect
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from jswa.cache.capacity import peak_slots, row_capacity
from jswa.cache.layout import KVLayout
from jswa.cache.lease import NEVER
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import Match
from jswa.cache.prefix.radix import common_prefix
from jswa.config import Limits
from jswa.errors import EngineError, PromptTooLong
from jswa.plan import NOT_FINITE, Request, StepLogprobs, StepPlan, TokenEvent
from jswa.sched.draft import Draft, lease_of, make_plan, prefix_is_coming
from jswa.sched.outputs import SchedulerStats, store_prompt_logprobs, with_results
from jswa.sched.rows import RowTable
from jswa.sched.sequence import Sequence, Status
from jswa.sched.turns import Turns
from jswa.types import FinishReason, MissReason, PrefixHit


class Scheduler:
    """Owns the sequences, the cache manager and the row ids. Not thread-safe: one thread drives it."""

    def __init__(self, layout: KVLayout, limits: Limits) -> None:
        self.layout = layout
        self.limits = limits
        self.cache = CacheManager(
            layout,
            limits.num_blocks,
            limits.pages_per_row,
            sharing=limits.prefix_cache,
            interval=limits.prefix_cache_interval,
        )
        self.capacity = row_capacity(layout, limits, self.cache.pool.total_slots)
        self.preemptions = 0
        self._arrivals = 0
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank
        self._turns = Turns(limits.max_tokens, limits.max_rows)
        self._free_row_ids = list(range(limits.max_rows - 1, -1, -1))
        self._logprob_requests = 0
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._rows = RowTable(limits.max_rows, limits.max_extras)

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
        self._turns.enter(sequence)

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
        self._plan_running(draft)
        self._plan_admissions(draft)
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

    def apply(
        self, plan: StepPlan, tokens: Int[np.ndarray, " R"], logprobs: StepLogprobs | None = None
    ) -> list[TokenEvent]:
        """Apply the tokens of the oldest step in flight; return an event for each request that got a token or ended."""
        launched_plan, sequences = self._in_flight.popleft()
        if launched_plan is not plan:
            raise EngineError("steps must be applied in the order in which they were planned")
        if logprobs is not None and logprobs.prompt is not None:
            store_prompt_logprobs(plan, sequences, logprobs.prompt)
        events = []
        rows = zip(sequences, plan.samples.tolist(), tokens.tolist(), strict=True)
        for row, (sequence, sampled, token) in enumerate(rows):
            sequence.in_flight -= 1
            if sequence.discard:
                sequence.discard -= 1
                sampled = 0
            elif sampled and token == NOT_FINITE:
                self._withdraw(sequence)
            if sequence.status is Status.FINISHED:
                continue
            if sequence.lease is not None and sequence.lease.window_ends and token != NOT_FINITE:
                computed = int(plan.starts[row] + plan.counts[row])
                self.cache.publish(sequence.lease, sequence.tokens[: sequence.num_known], computed)
            if sampled:
                event = self._apply_token(sequence, token)
                events.append(with_results(event, sequence, row, logprobs))
            if sequence.status is Status.PREEMPTED and not sequence.in_flight:
                self._requeue(sequence)
        return events

    def preempt(self, request_id: str) -> None:
        """Preempt a running request between two steps, as `plan` does when memory is short. Raises EngineError."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is not Status.RUNNING:
            raise EngineError(f"request {request_id!r} does not run: it cannot be preempted")
        self._preempt(sequence)

    def stats(self) -> SchedulerStats:
        """Return rows and memory at this moment."""
        pool = self.cache.pool
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._turns),
            full_pages=pool.num_full - pool.evictable_full,
            local_pages=pool.num_local - pool.evictable_local,
            cached_slots=pool.evictable_slots,
            free_slots=pool.free_slots,
            total_slots=pool.total_slots,
            preemptions=self.preemptions,
        )

    def check(self) -> None:
        """Assert every law of scheduler, leases and pool; for tests."""
        self.cache.check((lease_of(s), s.launched) for s in self._running)
        assert [s.rank for s in self._running] == sorted(s.rank for s in self._running)
        row_ids = [s.row_id for s in self._running]
        assert sorted(row_ids + self._free_row_ids) == list(range(self.limits.max_rows)), "a row id leaked"
        self._rows.check(self._running)
        self._turns.check(self._sequences.values())
        for sequence in self._sequences.values():
            assert sequence.status is not Status.FINISHED
            assert (sequence.lease is not None) == (sequence.status is Status.RUNNING)
            assert 0 <= sequence.in_flight <= len(self._in_flight)
            assert sequence.num_known <= sequence.limit
            assert sequence.launched <= sequence.limit - 1
            assert sequence.launched <= sequence.num_known + sequence.in_flight

    def _plan_running(self, draft: Draft) -> None:
        """Add running rows by turns. The budget reserves a token for each decode row before any prefill chunk.

        Before the rows of a tenant come the waiting sequences of tenants whose turn is earlier.
        """
        draft.budget -= sum(s.decodes for s in self._running)
        draft.kept = max(0, min(self.limits.max_tokens // 2, draft.budget - max(1, draft.budget // 8)))
        draft.left.extend(self._turns.order(self._running))
        last = None
        while draft.left:
            group = draft.left[0].rank[0], draft.left[0].request.tenant
            if group != last and self._turns.several:
                last = group
                self._plan_admissions(draft, before=draft.left[0])
                continue
            sequence = draft.left.popleft()
            known = sequence.num_known - sequence.launched
            count = min(known, self._turns.room(sequence, draft.budget, draft.kept)) if known > 0 else 1
            if count <= 0 or sequence.launched >= sequence.limit - 1:
                continue
            if sequence.in_flight and sequence.waits_for_tokens:
                continue
            length = sequence.launched + count
            if length > lease_of(sequence).covered:
                if not self._grow(sequence, length, draft.left):
                    continue
                draft.extended.append(sequence)
            self._turns.charge(sequence, count)
            draft.add(sequence, count, spend=known > 0)

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

    def _plan_admissions(self, draft: Draft, before: Sequence | None = None) -> None:
        """Admit waiting sequences by turns, with `before` only those that come before this row."""
        # A row that was preempted with a token in flight is not in the queue yet; no later request may overtake it.
        in_flight = (s for _, sequences in self._in_flight for s in sequences)
        returning = min((self._turns.turn(s) for s in in_flight if s.status is Status.PREEMPTED), default=None)
        passed: set[str] = set()
        while (sequence := self._turns.first(passed)) is not None:
            if before is not None and not self._turns.goes_before(sequence, before):
                return
            if returning is not None and self._turns.turn(sequence) > returning:
                return
            if not self._may_start(sequence, draft):
                if draft.budget <= 0:
                    return
                passed.add(sequence.request.tenant)  # others may have a right to a row, or to more tokens
                continue
            match = self._match(sequence)
            if prefix_is_coming(sequence, match.resume.full_to, self._running, self.layout.page_size):
                passed.add(sequence.request.tenant)
            elif not self._rows.has_room(sequence.request) or not self._start(sequence, match, draft):
                return

    def _may_start(self, sequence: Sequence, draft: Draft) -> bool:
        """Return whether there are tokens and a row for a waiting sequence, or a row that it may take."""
        if self._free_row_ids:
            return self._turns.room(sequence, draft.budget, draft.kept) > 0
        victim = self._victim(sequence, draft.left)
        return victim is not None and self._turns.room(sequence, draft.budget, draft.kept) + victim.decodes > 0

    def _start(self, sequence: Sequence, match: Match, draft: Draft) -> bool:
        """Give a waiting sequence a row and pages, which others may lose; False: it still waits."""
        while not self._free_row_ids or not self._admissible(sequence, match):
            victim = self._victim(sequence, draft.left)
            if victim is None:
                return False
            draft.left.remove(victim)
            draft.budget += victim.decodes
            self._preempt(victim)
            match = self._match(sequence)
        lease = self.cache.open_at(match, sequence.request.cache_salt, sequence.num_known)
        if lease is None:  # a partial page and its copy do not both fit: start at the page before
            whole = match.resume.full_to // self.layout.page_size * self.layout.page_size
            match = self._match(sequence, whole)
            lease = self.cache.open_at(match, sequence.request.cache_salt, sequence.num_known)
        if lease is None:
            return False
        start = match.resume.start
        count = min(sequence.num_known - start, self._turns.room(sequence, draft.budget, draft.kept))
        if not self.cache.grow(lease, start + count):
            self.cache.close(lease)
            return False
        self._turns.admit(sequence)
        sequence.lease, sequence.row_id, sequence.status = lease, self._free_row_ids.pop(), Status.RUNNING
        sequence.launched, sequence.computed_from = start, min(sequence.computed_from, start)
        self._note_admission(sequence, match)
        draft.resumed += [sequence] if len(match.full) or len(match.local) else []
        entry = self._rows.admit(sequence)
        draft.extras += [] if entry is None else [entry]
        bisect.insort(self._running, sequence, key=lambda s: s.rank)
        draft.extended.append(sequence)
        self._turns.charge(sequence, count)
        draft.add(sequence, count, spend=True)
        return True

    def _victim(self, sequence: Sequence, left: deque[Sequence]) -> Sequence | None:
        """Return the row that a waiting sequence may take from a tenant that holds more than its share."""
        if not self._turns.several:
            return None
        need, total = self.layout.resident_slots(sequence.num_known + 1), self.cache.pool.total_slots
        held = {row: self.cache.held_slots(lease_of(row)) for row in self._running}
        return self._turns.victim(sequence, need, held, left, (self.limits.max_rows, total))

    def _match(self, sequence: Sequence, most: int = NEVER) -> Match:
        """Match at most `most` tokens of a waiting row.

        Its last token must run, and so must a prompt whose log probabilities were requested.
        """
        limit = 0 if sequence.request.params.prompt_logprobs is not None else min(most, sequence.num_known - 1)
        return self.cache.match(sequence.request.cache_salt, sequence.tokens[: sequence.num_known], limit)

    def _note_admission(self, sequence: Sequence, match: Match) -> None:
        """Record when the row was first scheduled and its prefix cache hit, for the first token's event."""
        length, at = len(sequence.request.prompt), match.resume
        if sequence.prefix is not None or sequence.num_known > length:
            return
        sequence.first_scheduled_time = time.monotonic()
        skipped = sequence.request.params.prompt_logprobs is not None and self.limits.prefix_cache
        reason: MissReason = "prompt logprobs" if skipped else match.reason
        sequence.prefix = PrefixHit(
            length, at.start, at.full_to, at.full_to - at.start, reason, revived=0 < at.start < at.exact_from
        )
        self.cache.hits.count(sequence.prefix)

    def _admissible(self, sequence: Sequence, match: Match) -> bool:
        """Return whether resident(prompt + 1) + the step's reserve fits unclaimed memory (docs/design.md §3)."""
        layout = self.layout
        claimed = prefill_rows = 0
        for other in self._running:
            held = self.cache.held_slots(lease_of(other))
            claimed += max(0, layout.resident_slots(max(other.launched, other.num_known + 1)) - held)
            prefill_rows += other.launched < other.num_known
        reserve = layout.step_reserve_slots(self.limits.max_tokens, prefill_rows + 1) if prefill_rows else 0
        need = layout.resident_slots(sequence.num_known + 1)
        alone = peak_slots(layout, self.limits.max_tokens, sequence.num_known + 1)
        return max(need + reserve, alone) - self.cache.leased_slots(match) + claimed <= self.cache.available_slots

    def _apply_token(self, sequence: Sequence, token: int) -> TokenEvent:
        if token == NOT_FINITE:
            return self._finish(sequence, None, "error", keep=False)
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
        keep: bool = True,
    ) -> TokenEvent:
        self._release(sequence, keep=keep)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.request.request_id]
        self._turns.leave(sequence)
        self._logprob_requests -= sequence.request.params.wants_logprobs
        return TokenEvent(sequence.request.request_id, token, reason, stop_reason)

    def _preempt(self, sequence: Sequence) -> None:
        """Free a row's pages; the cache may keep them. A token in flight still counts when it comes back."""
        self._release(sequence)
        self.preemptions += 1
        sequence.preemptions += 1
        self._wait_again(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Remove from the cache what a row with non-finite logits computed, and restart rows that matched it."""
        tokens, start = sequence.tokens[: sequence.num_known], sequence.computed_from
        page = start - start % self.layout.page_size
        self.cache.withdraw(sequence.request.cache_salt, tokens, start)
        for other in list(self._running):
            lease = lease_of(other)
            if other is sequence or lease.salt != sequence.request.cache_salt:
                continue
            if common_prefix(tokens, other.tokens[: lease.full_write_from]) > page:
                self._release(other, keep=False)
                other.discard = other.in_flight
                self._wait_again(other)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.launched = 0
        if sequence.in_flight:
            sequence.status = Status.PREEMPTED
        else:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._turns.push(sequence)

    def _release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free a row's pages and row id. `keep`: publish the KV that it has computed."""
        if sequence.lease is not None:
            computed = min(sequence.launched, sequence.num_known) if keep else 0
            self.cache.close(sequence.lease, sequence.tokens[:computed], turn=(len(sequence.request.prompt),))
            self._rows.release(sequence)
            self._free_row_ids.append(sequence.row_id)
            self._running.remove(sequence)
            sequence.lease, sequence.row_id, sequence.extras_id = None, -1, -1
