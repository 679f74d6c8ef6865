"""The fair queue of waiting sequences, in which tenants take turns: shares in proportion to the tenants' weights.

A tenant is an API key of the server; a program that uses the engine has one tenant, and arrival decides. With several,
each has a counter of the tokens that its rows have run, divided by its weight (start-time fair queueing of Goyal, Vin
and Cheng, 1996, with the virtual token counter of Sheng et al., OSDI 2024). Of two tenants the one with the lower
counter goes first: its waiting sequence is admitted and its prompt gets tokens of the step before the other's. Virtual
time is the lowest counter of the waiting tenants when a sequence is admitted. A tenant that had no waiting sequence
goes on from there, so idleness earns no credit. Tenants that are ahead of virtual time by less than a few steps count
as equal, and the one with fewer unfinished prompt tokens goes first: a tenant may use its share in bursts.

Counters decide between waiting tenants. A tenant's use is its fraction of the rows or of KV memory, whichever is
larger, and its share bounds that (dominant resource fairness, Ghodsi et al., NSDI 2011). A sequence that finds no room
preempts the youngest row of the tenant whose use exceeds its share most, if this use, relative to the share, is also
larger than that of the sequence's own tenant will be with its new row: so no two tenants can preempt each other's rows
in turn. A sequence that waits for more memory than its tenant's share is passed by sequences of tenants that stay
within their shares, but not for ever.
"""

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from jswa.cache.layout import KVLayout
from jswa.sched.sequence import Rank, Sequence, Status

_BURST = 8  # steps
_SPARE = 16  # part of the memory that a tenant beyond its share leaves free
_PASSED = 64  # steps of prompts that may pass a sequence which waits for memory

_LAST: Rank = (2**63, 0)  # no rank is later

Turn = tuple[int, float, int, int]


class Use(NamedTuple):
    """The rows and the KV memory in use, and how much the engine has.

    Attributes:
        held: slots of KV memory that each running row holds.
        rows, slots: numbers of rows and of slots of the engine.
        layout: gives the slots that a new row would hold.
    """

    held: Mapping[Sequence, int]
    rows: int
    slots: int
    layout: KVLayout


class TenantQueue:
    """Waiting sequences by rank; those of more than `threshold` tokens have their own heap, so that others overtake."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._short: list[tuple[Rank, Sequence]] = []
        self._long: list[tuple[Rank, Sequence]] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        heapq.heappush(self._heap_of(sequence), (sequence.rank, sequence))

    def head(self, *, longs: bool = True) -> Sequence | None:
        """Return the first sequence by rank, with or without long prompts."""
        short, long = self._short, self._long if longs else ()
        if not short or not long:
            return short[0][1] if short else long[0][1] if long else None
        return min(short[0], long[0])[1]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        heap = self._heap_of(sequence)
        if heap[0][1] is sequence:
            heapq.heappop(heap)
            return
        heap[:] = [entry for entry in heap if entry[1] is not sequence]
        heapq.heapify(heap)

    def _heap_of(self, sequence: Sequence) -> list[tuple[Rank, Sequence]]:
        return self._long if sequence.num_known > self._threshold else self._short


class FairQueue:
    """Owns the waiting sequences, a queue for each tenant, and the tenants' counters.

    Args:
        max_tokens, max_rows: tokens and rows of a step.
        long_prompt: prompts with more tokens than this are long, for `TenantQueue`.
    """

    def __init__(self, max_tokens: int, max_rows: int, long_prompt: int) -> None:
        self._long_prompt = long_prompt
        self._decode_cost = max_tokens / max_rows  # of a generated token, in tokens of prompts
        self._burst = _BURST * max_tokens  # by which a tenant of weight 1 may be ahead without going behind
        self._passed = _PASSED * max_tokens
        self._now = 0.0
        self._waiting: dict[str, TenantQueue] = {}
        self._returning: set[Sequence] = set()
        self._unfinished: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()  # prompt tokens of the unfinished sequences
        self._weights: dict[str, float] = {}
        self._spent: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return sum(map(len, self._waiting.values()))

    @property
    def several(self) -> bool:
        """Whether more than one tenant has unfinished sequences."""
        return len(self._unfinished) > 1

    def register(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        tenant = sequence.request.options.tenant
        if tenant not in self._waiting:
            self._spent[tenant] = max(self._spent.get(tenant, 0.0), self._now)
        self._unfinished[tenant] += 1
        self._asked[tenant] += len(sequence.request.prompt)
        self._weights[tenant] = sequence.request.options.weight
        self.push(sequence)

    def unregister(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished."""
        tenant = sequence.request.options.tenant
        self._unfinished[tenant] -= 1
        self._asked[tenant] -= len(sequence.request.prompt)
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        self._returning.discard(sequence)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Charge one tenant of several for tokens that a step runs, before they count as launched."""
        tenant = sequence.request.options.tenant
        cost = tokens if sequence.launched < sequence.num_known else self._decode_cost
        self._spent[tenant] += cost / self._weights[tenant]

    def charge_rows(self, tenants: list[str], prefill: list[bool]) -> None:
        """Charge the tenants of rows that run one token, of a known text (`prefill`) or a generated one."""
        for (tenant, known), count in Counter(zip(tenants, prefill, strict=True)).items():
            self._spent[tenant] += count * (1 if known else self._decode_cost) / self._weights[tenant]

    def turn(self, sequence: Sequence) -> Turn:
        """Return a sequence's sort key: priority, the tenant's counter and unfinished prompt tokens, and arrival."""
        (priority, arrival), tenant = sequence.rank, sequence.request.options.tenant
        return priority, max(self._spent[tenant] - self._burst, self._now), self._asked[tenant], arrival

    def room(self, sequence: Sequence, budget: int, for_others: int) -> int:
        """Return the prompt tokens of a step that a row may take, of the `budget` that is left.

        While another tenant's prompts are short, a tenant whose prompts need more than a few steps leaves `for_others`
        of these tokens unused: steps stay short for requests that arrive, at about the same throughput.
        """
        if self.several and self._asked[sequence.request.options.tenant] > self._burst:
            flooded = min(self._asked[tenant] for tenant in self._unfinished) > self._burst
            budget -= 0 if flooded else for_others
        return max(0, budget)

    def group(self, sequence: Sequence) -> tuple[int, float, int]:
        """Return a sort key that sequences of one tenant and priority share: the turn without the arrival."""
        return self.turn(sequence)[:3]

    def prompts(self, left: Mapping[Sequence, int], before: Sequence | None, long: int) -> list[Sequence]:
        """Return the running prompts that get tokens next: by tenant, then those with least left.

        Args:
            left: prompts, and the tokens that each has left.
            before: a sequence that waits. Then only prompts of tenants whose turn is earlier are returned, and those of
                its own that have at most `long` left.
        """
        limit = None if before is None else self.group(before)
        found = []
        for sequence, count in left.items():
            own = self.group(sequence)
            if count and (limit is None or own < limit or (own == limit and count <= long)):
                found.append((own, count, sequence.rank, sequence))
        return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:3])]

    def order(self, sequences: Items[Sequence]) -> list[Sequence]:
        """Return sequences, which are sorted by rank, in the order of their turns."""
        return sorted(sequences, key=self.turn) if self.several else list(sequences)

    def expect(self, sequence: Sequence) -> None:
        """Note a preempted sequence with a token in flight, which waits again once that has come."""
        self._returning.add(sequence)

    def overtakes(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence would begin before one that is expected and whose turn is earlier."""
        return bool(self._returning) and any(self.turn(other) < self.turn(sequence) for other in self._returning)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._returning.discard(sequence)
        tenant = sequence.request.options.tenant
        if tenant not in self._waiting:
            self._waiting[tenant] = TenantQueue(self._long_prompt)
        self._waiting[tenant].push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        tenant = sequence.request.options.tenant
        queue = self._waiting[tenant]
        queue.remove(sequence)
        if not len(queue):
            del self._waiting[tenant]

    def first(self, passed: Container[str] = (), short: Container[str] = ()) -> Sequence | None:
        """Return the waiting sequence whose turn it is, but for tenants in `passed` and long prompts of `short`.

        A tenant of which an earlier sequence is expected has none.
        """
        if len(self._waiting) == 1 and not self._returning:
            ((tenant, queue),) = self._waiting.items()
            return None if tenant in passed else queue.head(longs=tenant not in short)
        earliest: dict[str, Rank] = {}
        for other in self._returning:
            tenant = other.request.options.tenant
            earliest[tenant] = min(other.rank, earliest.get(tenant, other.rank))
        heads = (queue.head(longs=name not in short) for name, queue in self._waiting.items() if name not in passed)
        ready = [h for h in heads if h is not None and h.rank < earliest.get(h.request.options.tenant, _LAST)]
        return min(ready, key=self.turn, default=None) if len(ready) > 1 else ready[0] if ready else None

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that will run."""
        spent, waiting = self._spent, self._waiting
        least = min(map(spent.__getitem__, waiting)) if len(waiting) > 1 else spent[sequence.request.options.tenant]
        if least > self._now:
            self._now = least
        self.remove(sequence)

    def victims(self, sequence: Sequence, use: Use, left: Items[Sequence]) -> Iterator[Sequence]:
        """Yield the rows among `left`, by rank, that a waiting sequence may preempt, in this order."""
        own = sequence.request.options.tenant
        rows, slots = self._counts(sequence, use)
        if rows[own] > 1 and rows[own] / use.rows > self._share(own):
            return

        def load(tenant: str) -> float:
            return max(rows[tenant] / use.rows, slots[tenant] / use.slots) / self._share(tenant)

        least = max(1.0, load(own))
        takeable: dict[str, list[Sequence]] = {}
        for row in left:
            if row.rank[0] >= sequence.rank[0]:
                takeable.setdefault(row.request.options.tenant, []).append(row)
        while over := [tenant for tenant, found in takeable.items() if found and load(tenant) > least]:
            row = takeable[max(over, key=lambda tenant: (load(tenant), takeable[tenant][-1].rank))].pop()
            rows[row.request.options.tenant] -= 1
            slots[row.request.options.tenant] -= use.held[row]
            yield row

    def spare(self, sequence: Sequence, use: Use) -> int:
        """Return the slots that must stay free if a sequence begins, so that other tenants' next requests find room.

        0 unless the tenant has running rows and would exceed its share. Without free slots each such request preempts a
        row, whose KV is then computed again.
        """
        own = sequence.request.options.tenant
        runs = any(row.request.options.tenant == own for row in use.held)
        return use.slots // _SPARE if runs and self._loads(sequence, use)[own] > 1.0 else 0

    def passes(self, sequence: Sequence, first: Sequence, use: Use) -> bool:
        """Return whether a sequence of another tenant may begin before `first`, which waits for memory.

        So it is if `first` wants more than its tenant's share, the other stays within its own, and not too many have
        passed `first`.
        """
        if sequence.rank[0] != first.rank[0] or first.passed_by >= self._passed:
            return False
        own, other = sequence.request.options.tenant, first.request.options.tenant
        return self._loads(first, use)[other] > 1.0 >= self._loads(sequence, use)[own]

    def check(self, unfinished: Iterable[Sequence]) -> None:
        """Assert that exactly these sequences are counted."""
        unfinished = list(unfinished)
        assert Counter(s.request.options.tenant for s in unfinished) == self._unfinished, "a tenant's count is wrong"
        assert all(self._waiting.values()), "a tenant without waiting sequences has a heap"
        assert self._returning == {s for s in unfinished if s.status is Status.PREEMPTED}, "a sequence does not return"

    def _counts(self, sequence: Sequence, use: Use) -> tuple[Counter[str], Counter[str]]:
        """Return the rows and the slots that each tenant would hold if a sequence began."""
        own = sequence.request.options.tenant
        rows, slots = Counter({own: 1}), Counter({own: use.layout.resident_slots(sequence.num_known + 1)})
        for row, count in use.held.items():
            rows[row.request.options.tenant] += 1
            slots[row.request.options.tenant] += count
        return rows, slots

    def _loads(self, sequence: Sequence, use: Use) -> dict[str, float]:
        """Return the rows or memory that tenants hold, whichever is more, by their shares, if a sequence began."""
        rows, slots = self._counts(sequence, use)
        return {t: max(rows[t] / use.rows, slots[t] / use.slots) / self._share(t) for t in rows}

    def _share(self, tenant: str) -> float:
        return self._weights[tenant] / sum(self._weights[other] for other in self._unfinished)
