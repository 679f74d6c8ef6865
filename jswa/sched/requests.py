"""All unfinished requests, waiting and running: how a request begins to run, is preempted, fails and ends."""

import bisect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from jswa.cache.lease import Lease
from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixMatch
from jswa.config import Limits
from jswa.errors import EngineError, GenerationError
from jswa.plan import NOT_FINITE, NOTHING_ALLOWED, LogitsEntry, Request, StepEvents, StepPlan, StepResults, TokenEvent
from jswa.sched.admission.checks import Writers, match_of, note_admission
from jswa.sched.batch import Batch, lease_of
from jswa.sched.constraint import Masks, forced_tokens, form_error, nothing_allowed
from jswa.sched.fair_queue import FairQueue, Use
from jswa.sched.outputs import confirm, count_hit, landed_of, with_results, with_timing
from jswa.sched.rows import Claims, Rows, Slots
from jswa.sched.sequence import Sequence, Status
from jswa.types import FinishReason


class Requests:
    """Owns the sequences, their queue, and the rows with their leases. Iteration yields the running ones by rank.

    Attributes:
        queue: the waiting sequences.
        rows: the counters of the running ones, as arrays.
        by_row: the running ones by row id.
        masks, writers: masks that change, and rows whose prompts are being published.
        changes: counts what may let a request begin that found no room: rows that begin or end, and published prompts.
        preemptions: the number of preemptions so far.
        grown: called with a row each time that it has got `RECENT` tokens.
    """

    def __init__(self, cache: CacheManager, limits: Limits, speculative: int = 0) -> None:
        self.queue = FairQueue(limits.max_tokens, limits.max_rows, limits.long_prompt)
        self.rows = Rows(limits.max_rows, speculative)
        self.by_row: list[Sequence | None] = [None] * limits.max_rows
        self.masks = Masks(self.rows)
        self.writers = Writers(limits.page_size)
        self.changes = self.preemptions = 0
        self.grown: Callable[[Sequence], None] = lambda sequence: None
        self._cache = cache
        self._limits = limits
        self._arrivals = 0
        self._unfinished: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank
        # Preempted sequences with a token in flight, by the row id that they have left and its generation.
        self._returning: dict[tuple[int, int], Sequence] = {}

    @property
    def unfinished(self) -> Mapping[str, Sequence]:
        """All sequences by request id; read-only."""
        return MappingProxyType(self._unfinished)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._running)

    def sequences_at(self, row_ids: Int[np.ndarray, " n"]) -> list[Sequence]:
        """Return the sequences that have these row ids."""
        return [sequence for row_id in row_ids.tolist() if (sequence := self.by_row[row_id]) is not None]

    def owner(self, row_id: int, generation: int) -> Sequence | None:
        """Return the sequence to which a step has brought a token for a row id; None if the sequence has ended.

        A sequence that was preempted meanwhile has one step less in flight from now on.
        """
        if self.rows.generation[row_id] == generation:
            return self.by_row[row_id]
        sequence = self._returning.get((row_id, generation))
        if sequence is None:
            return None
        sequence.returning -= 1
        if not sequence.returning:
            del self._returning[row_id, generation]
        return None if sequence.status is Status.FINISHED else sequence

    def add(self, request: Request, limit: int) -> None:
        """Let a request wait. Raises EngineError if its id is in use.

        `limit`: prompt and generated tokens at most.
        """
        if request.request_id in self._unfinished:
            raise EngineError(f"request id {request.request_id!r} is already running")
        sequence = Sequence(request, (request.options.priority, self._arrivals), limit)
        self.slots_of(sequence)
        self._arrivals += 1
        self._unfinished[request.request_id] = sequence
        self.queue.register(sequence)

    def begin(self, sequence: Sequence, lease: Lease, match: PrefixMatch) -> LogitsEntry | None:
        """Make a waiting sequence, whose lease is open at a match, a row; return its logits state, if it needs any."""
        self.queue.admit(sequence)
        tokens, start, row_id = sequence.tokens, match.resume.start, lease.row
        self.rows.admit(sequence.request, sequence.record, lease, launched=start, tokens=tokens, needs=sequence.needs)
        sequence.rows, sequence.row_id, sequence.lease, sequence.status = self.rows, row_id, lease, Status.RUNNING
        sequence.run_to = len(tokens)
        if sequence.reads_cache:
            sequence.cached_to, sequence.cache_epoch = match.resume.full_to, self._cache.epoch
        note_admission(sequence, match, prefix_cache=self._limits.prefix_cache)
        if self._cache.host is not None:
            sequence.recalled_from, sequence.disk_until, sequence.disk_gain = None, None, (0, 0)
            if sequence.reads_cache:
                self._cache.host.tier.visit(lease.salt, tokens[:-1], match.text)
        self.by_row[row_id] = sequence
        if self._running and sequence.rank < self._running[-1].rank:
            bisect.insort(self._running, sequence, key=lambda s: s.rank)
        else:
            self._running.append(sequence)
        self.writers.add(sequence, tokens)
        self.changes += 1
        return None if sequence.request.constraint is None else self.masks.admit(sequence)

    def accept(self, sequence: Sequence, token: int) -> TokenEvent:
        """Return the event of a token that was appended, and end the sequence if it is the last of its text."""
        if token in sequence.request.stop_ids:
            asked = token in sequence.request.params.stop_token_ids
            return self.finish(sequence, token, "stop", token if asked else None)
        if sequence.num_known == sequence.limit:
            return self.finish(sequence, token, "length")
        return TokenEvent(sequence.request.request_id, token)

    def extend(self, sequence: Sequence, tokens: list[int]) -> list[TokenEvent]:
        """Append tokens to a sequence, up to the last of its text; return their events."""
        events: list[TokenEvent] = []
        for token in tokens:
            if not events or events[-1].finish_reason is None:
                sequence.append(token)
                events.append(self.accept(sequence, token))
        return events

    def follow_grammars(self, row_ids: Int[np.ndarray, " n"]) -> list[TokenEvent]:
        """Let the matchers of rows accept the known tokens; end the texts that are complete."""
        if not len(row_ids):
            return []
        events = []
        last, known = self.rows.last_tokens(row_ids).tolist(), self.rows.known[row_ids].tolist()
        for row_id, token, length in zip(row_ids.tolist(), last, known, strict=True):
            sequence = self.by_row[row_id]
            if sequence is None or sequence.matcher is None:
                continue
            matcher, begin = sequence.matcher, len(sequence.request.prompt)
            news = length - begin - matcher.accepted
            if not matcher.accept([token] if news == 1 else sequence.tokens[length - news :].tolist()):
                why = form_error(sequence) or GenerationError("structured_outputs: forbids a token of the text")
                events.append(self.finish(sequence, None, "error", error=why))
            elif matcher.finished:
                events.append(self.finish(sequence, None, "stop"))
        return events

    def foretell(self, sequence: Sequence) -> list[TokenEvent]:
        """Append the tokens that a row's grammar forces, and return their events; no step need sample them.

        The step in flight samples the first of them, and more if its drafts are right; a later step runs those that
        are left. A single token is left to the step.
        """
        tokens = forced_tokens(sequence)
        if len(tokens) < 2:
            return []
        sequence.foretold_from = sequence.num_known
        self.rows.plain[sequence.row_id] = False
        sequence.extend(np.array(tokens, np.int32))
        sequence.run_to = sequence.num_known
        *events, last = [TokenEvent(sequence.request.request_id, token) for token in tokens]
        if sequence.num_known == sequence.limit:
            return [*events, self.accept(sequence, tokens[-1])]
        return [*events, last, *self.follow_grammars(np.array([sequence.row_id]))]

    def finish(
        self,
        sequence: Sequence,
        token: int | None,
        reason: FinishReason,
        stop_reason: int | None = None,
        *,
        error: GenerationError | None = None,
    ) -> TokenEvent:
        """End a sequence, and free what it holds."""
        if sequence.status is Status.WAITING:
            self.queue.remove(sequence)
        self._leave(sequence)
        sequence.status = Status.FINISHED
        del self._unfinished[sequence.request.request_id]
        self.queue.unregister(sequence)
        drafts = sequence.drafts if self.rows.speculates else None
        return TokenEvent(sequence.request.request_id, token, reason, stop_reason, error=error, drafts=drafts)

    def preempt(self, sequence: Sequence) -> None:
        """Free a row's pages; the cache may keep them. A token in flight still counts when it comes back."""
        self._leave(sequence)
        self.preemptions += 1
        sequence.preemptions += 1
        self._wait_again(sequence)

    def fail(self, sequence: Sequence, end: int) -> TokenEvent | None:
        """End a row whose step up to `end` is not finite, unless cached KV may be at fault: then run it without.

        A finite step vouches for all KV that it read: only a row that has not yet read all of its cached KV in finite
        steps runs again, once. That run shows whether the cache is at fault. Until then nothing is withdrawn: a prompt
        of which every run fails must not cost others what they share with it.
        """
        if sequence.failed_to or sequence.finite_to >= sequence.cached_to:
            count_hit(self._cache, sequence)
            why = GenerationError("no next token: the logits are not finite")
            return self.finish(sequence, None, "error", error=why)
        sequence.failed_to, sequence.discard, sequence.foretold_from = end, sequence.in_flight, 0
        if sequence.num_known == len(sequence.request.prompt):
            sequence.prefix = None
        self._leave(sequence)
        self._wait_again(sequence)
        return None

    def requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait again."""
        sequence.status = Status.WAITING
        self.queue.push(sequence)

    def apply_row(
        self, sequence: Sequence, plan: StepPlan, row: int, tokens: list[int], results: StepResults | None, at: int
    ) -> list[TokenEvent]:
        """Apply a row that is not plain: it begins, publishes its prompt, has failed, or was preempted meanwhile.

        `at`: index of its first token among the draws of the step.
        """
        events: list[TokenEvent | None] = []
        sampled = bool(plan.samples[row])
        # What a row samples follows the tokens that are known, but for those that its grammar has foretold.
        known = sequence.foretold_from or sequence.num_known
        end = known - 1 + len(tokens) if sampled else int(plan.starts[row] + plan.counts[row])
        if sequence.discard:
            sequence.discard -= 1
        elif tokens[:1] == [NOT_FINITE]:
            events.append(self.fail(sequence, end))
        else:
            if sequence.rows is not None:
                self.confirm(sequence, end)
            if sampled and tokens[:1] == [NOTHING_ALLOWED]:
                events.append(self.finish(sequence, None, "error", error=nothing_allowed(sequence)))
            elif sampled:
                events += self.extend(sequence, sequence.untold(tokens))
        if sequence.status is Status.PREEMPTED and not sequence.returning:
            self.requeue(sequence)
        given = [event for event in events if event is not None]
        if sequence.rows is not None and self.rows.counts_drafts[sequence.row_id]:
            given = [event._replace(drafts=sequence.drafts) for event in given]
        given = [with_timing(event, sequence) for event in given]
        if sequence.rows is not None:
            self.rows.plain[sequence.row_id] = sequence.is_plain
        if not sequence.needs.watched:
            return given
        return with_results(given, self.rows.ribs, landed_of(sequence, plan, row, at), results)

    def apply_plain(
        self, row_ids: Int[np.ndarray, " R"], tokens: Int[np.ndarray, " R"], others: list[TokenEvent]
    ) -> StepEvents:
        """Append a token to each of these plain rows, by array operations only; add the events of rows that end."""
        rows = self.rows
        marked, names = rows.append(row_ids, tokens), rows.names.take(row_ids)
        ended = marked | rows.stops.among(tokens)
        if np.count_nonzero(ended):
            for i in ended.nonzero()[0].tolist():
                (sequence,) = self.sequences_at(row_ids[i : i + 1])
                sequence.copy_recent()
                event = self.accept(sequence, int(tokens[i]))
                ended[i] = event.finish_reason is not None
                others += [event] if ended[i] else []
                if marked[i] and not ended[i]:
                    self.grown(sequence)
            names, tokens = names[~ended], tokens[~ended]
        return StepEvents(names, tokens, tuple(others))

    def slide(self) -> None:
        """Slide the windows of all rows to their launched lengths."""
        if not self.rows.moved:
            return
        self.rows.moved = False
        row_ids = (self.rows.launched >= self._cache.table.next_slide).nonzero()[0]
        if len(row_ids):
            self._cache.slide_all(row_ids, self.rows.launched[row_ids])

    def confirm(self, sequence: Sequence, end: int) -> None:
        """Publish what a row has computed up to `end`: the step that ran it was finite."""
        self.rows.finite_to[sequence.row_id], self.rows.plain[sequence.row_id] = end, False
        lease = lease_of(sequence)
        if not sequence.hit_counted or sequence.failed_to or lease.window_ends:
            confirm(self._cache, sequence, end)
            self.changes += 1
            if not lease.window_ends:
                self.writers.discard(sequence)

    def use(self) -> Use:
        """Return what the rows hold."""
        slots = self._cache.table.held_slots().tolist()
        held = {row: slots[row.row_id] for row in self}
        return Use(held, self._limits.max_rows, self._cache.pool.total_slots, self._cache.layout)

    def state(self) -> tuple[int, ...]:
        """Return counts of all that may let a request begin which found no room."""
        host = self._cache.host
        return self.changes, self._cache.epoch, self.rows.prefill_rows(), 0 if host is None else host.changes

    def admissible(
        self, batch: Batch, sequence: Sequence, match: PrefixMatch, spare: int = 0, victims: Items[Sequence] = ()
    ) -> bool:
        """Return whether resident(prompt + 1) + the step's reserve fits unclaimed memory (docs/design/kv-memory.md).

        Args:
            spare: slots that must be left besides.
            victims: rows that would be preempted first.
        """
        cache, claims = self._cache, batch.claims
        if claims is None:
            claims = batch.claims = Claims(self.rows, cache)
        if victims:
            gone, closed = [row.row_id for row in victims], [lease_of(row) for row in victims]
            need = claims.own(self._limits, self.slots_of(sequence), gone) - cache.leased_slots(match, closed)
            return need + claims.claimed(gone) <= cache.available_without(closed) - spare
        need = claims.own(self._limits, self.slots_of(sequence)) + spare - cache.available_slots
        if match.path:
            need -= cache.leased_slots(match)
        return (claims.most is not None and need + claims.most <= 0) or need + claims.claimed() <= 0

    def slots_of(self, sequence: Sequence) -> Slots:
        """Return the slots of a waiting sequence, computed when it is added: its length seldom changes since."""
        found = sequence.slots
        if found is None or found.length != sequence.num_known:
            found = sequence.slots = Slots.of(self._cache.layout, self._limits, sequence.num_known)
        return found

    def check(self) -> None:
        """Assert the laws of sequences, arrays, leases and the queue; for tests."""
        running = list(self)
        self._cache.check(((lease_of(s), s.launched) for s in running), self._ahead())
        assert running == sorted((s for s in self.by_row if s is not None), key=lambda s: s.rank)
        self.rows.check(np.array([s.row_id for s in running], np.int64))
        for sequence in running:
            lease, row_id = lease_of(sequence), sequence.row_id
            assert self.by_row[row_id] is sequence
            assert lease.row == row_id
            assert not self.rows.plain[row_id] or sequence.is_plain, "a row that must publish is plain"
        claims = Claims(self.rows, self._cache)
        assert claims.most is None or claims.claimed() <= claims.most, "rows claim more than their bound"
        self.masks.check(running)
        self.writers.check(running)
        self.queue.check(self._unfinished.values())
        for sequence in self._unfinished.values():
            sequence.check(len(self.rows.flights))
            if sequence.blocked == self.state() and not self.queue.several:
                match = match_of(self._cache, sequence)
                assert not self.admissible(Batch(0), sequence, match), "a request has room, and is not looked at"

    def _ahead(self) -> dict[Lease, tuple[int, int]]:
        """Return, of each row, the end of what it may have run, and of what its pages may cover: at most a page more.

        Two steps in flight may have run drafts when pages were taken, and a row has gone on since then.
        """
        found, rows = {}, self.rows
        for sequence in self:
            launched, drafts = sequence.launched, int(rows.speculative[sequence.row_id])
            most = launched + self._cache.layout.page_size + (2 * (1 + drafts) if drafts else 0)
            furthest = min(most, max(launched, sequence.limit - 1))
            found[lease_of(sequence)] = launched + sequence.ahead, furthest
        return found

    def _wait_again(self, sequence: Sequence) -> None:
        if sequence.returning:
            sequence.status = Status.PREEMPTED
            self.queue.expect(sequence)
        else:
            self.requeue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Free the pages and the row id of a running sequence, and publish the KV that is known to be finite."""
        if sequence.lease is None:
            return
        row_id, generation = sequence.row_id, int(self.rows.generation[sequence.row_id])
        finite = sequence.tokens[: sequence.finite_to]
        self._cache.close(sequence.lease, finite, prompt=len(sequence.request.prompt))
        self.writers.discard(sequence)
        self.masks.release(sequence)
        self._running.remove(sequence)
        self.by_row[row_id] = None
        sequence.leave()
        if sequence.returning:
            self._returning[row_id, generation] = sequence
        self.changes += 1
