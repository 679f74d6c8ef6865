"""The queue of waiting sequences, and the tenants' turns in it: shares in proportion to the tenants' weights.

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
in turn.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Items

from jswa.sched.queue import Queue
from jswa.sched.sequence import Sequence

_BURST = 8  # steps

Turn = tuple[int, float, int, int]


class Turns:
    """Owns the waiting sequences, a queue for each tenant, and the tenants' counters.

    Args:
        max_tokens, max_rows: tokens and rows of a step.
        long_prompt: prompts with more tokens than this are long, for `Queue`.
    """

    def __init__(self, max_tokens: int, max_rows: int, long_prompt: int) -> None:
        self._long_prompt = long_prompt
        self._decode_cost = max_tokens / max_rows  # of a generated token, in tokens of prompts
        self._burst = _BURST * max_tokens  # by which a tenant of weight 1 may be ahead without going behind
        self._now = 0.0
        self._waiting: dict[str, Queue] = {}
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

    def enter(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        tenant = sequence.request.tenant
        if tenant not in self._waiting:
            self._spent[tenant] = max(self._spent.get(tenant, 0.0), self._now)
        self._unfinished[tenant] += 1
        self._asked[tenant] += len(sequence.request.prompt)
        self._weights[tenant] = sequence.request.weight
        self.push(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished."""
        tenant = sequence.request.tenant
        self._unfinished[tenant] -= 1
        self._asked[tenant] -= len(sequence.request.prompt)
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Charge one tenant of several for tokens that a step runs, before they count as launched."""
        tenant = sequence.request.tenant
        cost = tokens if sequence.launched < sequence.num_known else self._decode_cost
        self._spent[tenant] += cost / self._weights[tenant]

    def turn(self, sequence: Sequence) -> Turn:
        """Return a sequence's sort key: priority, the tenant's counter and unfinished prompt tokens, and arrival."""
        (priority, arrival), tenant = sequence.rank, sequence.request.tenant
        return priority, max(self._spent[tenant] - self._burst, self._now), self._asked[tenant], arrival

    def room(self, sequence: Sequence, budget: int, kept: int) -> int:
        """Return the prompt tokens of a step that a row may take, of the `budget` that is left.

        While another tenant asks for little, a tenant that asks for more than a few steps may not use `kept` of the
        tokens: steps stay short for requests that arrive, at about the same throughput.
        """
        if self.several and self._asked[sequence.request.tenant] > self._burst:
            flooded = min(self._asked[tenant] for tenant in self._unfinished) > self._burst
            budget -= 0 if flooded else kept
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

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        tenant = sequence.request.tenant
        if tenant not in self._waiting:
            self._waiting[tenant] = Queue(self._long_prompt)
        self._waiting[tenant].push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        tenant = sequence.request.tenant
        self._waiting[tenant].remove(sequence)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def first(self, passed: Container[str] = (), short: Container[str] = ()) -> Sequence | None:
        """Return the waiting sequence whose turn it is, but for tenants in `passed` and long prompts of `short`."""
        heads = (queue.head(longs=name not in short) for name, queue in self._waiting.items() if name not in passed)
        return min((head for head in heads if head is not None), key=self.turn, default=None)

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that will run."""
        self._now = max(self._now, min(self._spent[tenant] for tenant in self._waiting))
        self.remove(sequence)

    def victim(
        self, sequence: Sequence, need: int, held: Mapping[Sequence, int], left: Items[Sequence], total: tuple[int, int]
    ) -> Sequence | None:
        """Return the row that a waiting sequence may preempt; None if its tenant has no right to more.

        Args:
            need: slots of KV memory that the sequence needs.
            held: slots of KV memory that each running row holds.
            left: rows of which one may be preempted.
            total: numbers of rows and slots of the engine.
        """
        own = sequence.request.tenant
        rows = Counter(row.request.tenant for row in held)
        if rows[own] and (rows[own] + 1) / total[0] > self._share(own):
            return None
        slots = Counter({own: need})
        for row, count in held.items():
            slots[row.request.tenant] += count
        rows[own] += 1
        load = {t: max(rows[t] / total[0], slots[t] / total[1]) / self._share(t) for t in rows}
        least = max(1.0, load[own])
        takeable = [r for r in left if load[r.request.tenant] > least and r.rank[0] >= sequence.rank[0]]
        return max(takeable, key=lambda r: (load[r.request.tenant], r.rank), default=None)

    def check(self, unfinished: Iterable[Sequence]) -> None:
        """Assert that exactly these sequences are counted."""
        assert Counter(s.request.tenant for s in unfinished) == self._unfinished, "a tenant's count is wrong"
        assert all(self._waiting.values()), "a tenant without waiting sequences has a heap"

    def _share(self, tenant: str) -> float:
        return self._weights[tenant] / sum(self._weights[other] for other in self._unfinished)
