"""The prompts of a step: running ones get tokens, waiting requests begin, and tenants get rows of others."""

from collections.abc import Callable

import numpy as np

from jswa.cache.manager import CacheManager
from jswa.cache.prefix.cache import PrefixMatch
from jswa.config import Limits
from jswa.sched.admission.checks import fewest, is_passed, match_of, open_lease
from jswa.sched.admission.recalling import Recalling
from jswa.sched.batch import Batch, lease_of
from jswa.sched.requests import Requests
from jswa.sched.sequence import Sequence


class Prompts:
    """Adds prompts to a step.

    Args:
        begun: called with each row that begins.

    Attributes:
        recalling: the waiting request for which text comes back.
    """

    def __init__(
        self, requests: Requests, cache: CacheManager, limits: Limits, begun: Callable[[Sequence], None]
    ) -> None:
        self.recalling = Recalling(cache, requests.admissible)
        self._requests, self._queue = requests, requests.queue
        self._cache, self._limits, self._long, self._begun = cache, limits, limits.long_prompt, begun

    def take_rows(self, batch: Batch) -> None:
        """Preempt rows of tenants that hold more than their share, for sequences of others that find no room."""
        rows, passed = self._requests.rows, set[str]()
        batch.reserved = int(np.count_nonzero((rows.known - rows.launched <= 1) & (rows.launched < rows.limit - 1)))
        free = batch.budget - batch.reserved
        batch.for_others = max(0, min(self._limits.max_tokens * 3 // 4, free - max(1, free // 8)))
        while (sequence := self._queue.first(passed)) is not None:
            waits = self.recalling.waits(batch, sequence, match_of(self._cache, sequence))
            victims = [] if waits else self._victims(batch, sequence)
            for victim in victims:
                batch.reserved -= victim.needs_one
                self._requests.preempt(victim)
                batch.claims = None
            room = self._queue.room(sequence, batch.budget - batch.reserved, batch.for_others)
            if not victims or not self._begin(batch, sequence, match_of(self._cache, sequence), room):
                passed.add(sequence.request.options.tenant)

    def _victims(self, batch: Batch, sequence: Sequence) -> list[Sequence]:
        """Return the rows to preempt so that a waiting sequence begins; none if it needs none, or if no rows do."""
        match = match_of(self._cache, sequence)
        if self._requests.writers.find(sequence, match) is not None:
            return []
        if self._cache.table.free and self._requests.admissible(batch, sequence, match):
            return []
        use = self._requests.use()
        spare = self._queue.spare(sequence, use)
        rows = list(self._queue.victims(sequence, use, [r for r in self._requests if r not in batch.prompts]))

        def begins(count: int) -> bool:
            budget = batch.budget - batch.reserved + sum(row.needs_one for row in rows[:count])
            room = self._queue.room(sequence, budget, batch.for_others)
            return room > 0 and self._requests.admissible(batch, sequence, match, spare, rows[:count])

        return rows[: fewest(len(rows), begins)]

    def add(self, batch: Batch, sequence: Sequence, count: int) -> None:
        """Add tokens of a prompt, for which its tenant is charged."""
        if self._queue.several:
            self._queue.charge(sequence, count)
        batch.add(sequence, count)

    def fill(self, batch: Batch) -> None:
        """Admit waiting requests, and give running prompts what is left; then long prompts that others have passed."""
        passed = self._admit(batch)
        self._prefill(batch)
        if passed and batch.budget > 0:
            self._admit(batch)

    def _prefill(self, batch: Batch, *, before: Sequence | None = None, long: int = 0) -> None:
        """Give running prompts what is left of the budget, in the order of `FairQueue.prompts`. Preempts no row."""
        for sequence in self._queue.prompts(batch.left, before, long) if batch.left else ():
            count = min(batch.left[sequence], self._queue.room(sequence, batch.budget, batch.for_others))
            length = sequence.launched + batch.prompts[sequence] + count
            if count and self._cache.grow(lease_of(sequence), length, later=True):
                if batch.claims is not None:
                    batch.claims.changed()
                self.add(batch, sequence, count)

    def _admit(self, batch: Batch) -> bool:
        """Admit waiting requests by turns; return whether long prompts were passed by others."""
        if not self._cache.table.free or not len(self._queue):
            return False
        # If there is enough for all that run, none of them is held back.
        enough, most, recalls = sum(batch.left.values()) <= batch.budget, self._long, self._cache.host is not None
        long = batch.budget if enough else most
        batch.claims = None
        passed: set[str] = set()  # tenants whose next sequence waits for a prefix, or for memory
        short: set[str] = set()  # tenants whose long prompts are passed by their others
        first: Sequence | None = None  # that waits for memory
        began_long = False
        while batch.budget > 0 and self._cache.table.free:
            head = self._queue.first(passed, short)
            if head is None or self._queue.overtakes(head):
                break
            self._prefill(batch, before=head, long=long)
            tenant = head.request.options.tenant
            room = self._queue.room(head, batch.budget, batch.for_others)
            if room <= 0 or (first is not None and not self._queue.passes(head, first, self._requests.use())):
                passed.add(tenant)
                continue
            if head.blocked is not None and head.blocked == self._requests.state():
                passed.add(tenant)
                first = first or head
                continue
            match = match_of(self._cache, head)
            writer = self._requests.writers.find(head, match)
            is_long = head.num_known - match.resume.start > most
            behind = is_long and began_long and self._queue.first(passed, {*short, tenant}) is not None
            if is_long and tenant not in short and is_passed(batch, head, match, writer, most, behind=behind):
                short.add(tenant)
            elif writer is not None or (recalls and self.recalling.waits(batch, head, match)):
                passed.add(tenant)
            elif not self._begin(batch, head, match, room):
                first = first or head
                passed.add(tenant)
            else:
                began_long = began_long or batch.left.get(head, 0) > most
                if first is not None:
                    first.passed_by += head.num_known
        return bool(short)

    def _begin(self, batch: Batch, sequence: Sequence, match: PrefixMatch, room: int) -> bool:
        """Admit a waiting request if there is room, also for `room` tokens in the step.

        A prompt that the step cannot end gets a share of the budget.
        """
        if room <= 0 or not self._cache.table.free:
            return False
        spare = self._queue.spare(sequence, self._requests.use()) if self._queue.several else 0
        if not self._requests.admissible(batch, sequence, match, spare):
            self._note_blocked(batch, sequence, match)
            return False
        slots = self._requests.slots_of(sequence)
        opened = open_lease(self._cache, sequence, match, slots.length)
        if opened is None:
            return False
        (lease, match), start = opened, opened[1].resume.start
        need = slots.length - start
        count = need if need <= room else min(self._long, room)
        if not self._cache.grow(lease, start + count, later=True):
            self._cache.close(lease)
            return False
        entry = self._requests.begin(sequence, lease, match)
        self._begun(sequence)
        # A row that starts inside a page may take a page more than its tokens have room for in the packed plan.
        if start or len(match.full):
            batch.resumed.append(sequence)
        if entry is not None:
            batch.logits_state.append(entry)
        if batch.claims is not None:
            batch.claims.admit(lease, slots.resident)
        batch.prompts[sequence], batch.left[sequence] = 0, need
        self.add(batch, sequence, count)
        return True

    def _note_blocked(self, batch: Batch, sequence: Sequence, match: PrefixMatch) -> None:
        """Let a sequence without room be looked at again when something has changed.

        If there were room without the pages that rows have ahead, it is looked at in each step.
        """
        requests, excess = self._requests, 0 if batch.claims is None else batch.claims.excess()
        soon = self._queue.several or (excess and requests.admissible(batch, sequence, match, -excess))
        sequence.blocked = None if soon else requests.state()
