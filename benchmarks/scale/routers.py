"""Which of N replicas a request goes to. A router knows what it has sent, and how many requests each has not ended.

* `random`: any, all alike.
* `least-loaded`: the fewest outstanding requests; ties at random.
* `prefix-aware`: what routers do that see only requests, after the rule that SMG documents for its policy cache_aware
  (docs/concepts/routing/cache-aware.md of lightseekorg/smg; thresholds are its defaults). It remembers the prefixes
  that it has sent to each replica. Where loads differ by more than `abs_threshold` requests and by the factor
  `rel_threshold`, load alone decides. Otherwise the request goes to the replica that was sent the longest prefix of
  it, the least loaded of several, if that is more than `cache_threshold` of the prompt, and else to the least loaded.
* `kv-aware`: the same rule by the full-attention KV that replicas really hold, as routers know it that follow events
  of blocks stored and dropped. It does not know whether the windows are there that a row needs besides.
* `resume-aware`: the same rule by where a row would really start, windows and all.

The last two ask the caches themselves, the `most_asked` replicas with the longest prefix in the router's memory: no
other has more. Prefixes are remembered by blocks of 64 tokens. SMG forgets the oldest beyond 64M tokens; here nothing
is forgotten, and a simulation ends before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from benchmarks.cache.traces import TraceRequest
from benchmarks.scale.replica import Replica

POLICIES = ("random", "least-loaded", "prefix-aware", "kv-aware", "resume-aware")
BLOCK = 64
_MIX = np.random.default_rng(7).integers(1, 2**63, BLOCK, dtype=np.int64) * 2 + 1
_PLACE = np.random.default_rng(8).integers(1, 2**63, 2**15, dtype=np.int64) * 2 + 1


@dataclass(frozen=True)
class Thresholds:
    """Of the rule above; SMG's defaults."""

    cache_threshold: float = 0.3
    abs_threshold: int = 64
    rel_threshold: float = 1.5
    most_asked: int = 16


@dataclass
class Memory:
    """Prefixes by the hash of all their blocks: the set of replicas they were sent to, as bits.

    Who was sent a prefix was sent all shorter ones, so sets shrink along a text and can be searched by bisection.
    """

    replicas_of: dict[int, int] = field(default_factory=dict)

    def add(self, keys: list[int], replica: int) -> None:
        """The text was sent there."""
        bit = 1 << replica
        for key in keys[self._first(keys, lambda found: not found & bit) :]:
            self.replicas_of[key] = self.replicas_of.get(key, 0) | bit

    def longest(self, keys: list[int], least: int) -> list[tuple[int, int]]:
        """(Tokens of the prefix, replicas as bits) from the longest prefix on, until `least` replicas are named."""
        named, found = 0, []
        end = self._first(keys, lambda replicas: not replicas)
        while end and named.bit_count() < least:
            fresh = self.replicas_of[keys[end - 1]] & ~named
            found.append((end * BLOCK, fresh))
            named |= fresh
            others = ~named
            end = self._first(keys, lambda replicas, others=others: not replicas & others)  # type: ignore[misc]
        return found

    def _first(self, keys: list[int], ends: Callable[[int], bool]) -> int:
        """Index of the first prefix whose replicas satisfy `ends`, which all longer ones then do."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if ends(self.replicas_of.get(keys[middle], 0)):
                high = middle
            else:
                low = middle + 1
        return low


def block_keys(tokens: Int[np.ndarray, " T"]) -> list[int]:
    """A hash for each prefix of whole blocks."""
    count = len(tokens) // BLOCK
    blocks = tokens[: count * BLOCK].reshape(count, BLOCK).astype(np.int64) @ _MIX
    mixed = (blocks ^ (blocks >> 29)) * _PLACE[:count]
    keys: list[int] = np.cumsum(mixed).tolist()
    return keys


Route = Callable[[TraceRequest], int]


def make_router(
    policy: str,
    replicas: Sequence[Replica],
    seed: int,
    thresholds: Thresholds | None = None,
    *,
    look: Callable[[int], None],
) -> Route:
    """The router of a policy, as a function from a request to a replica's number.

    Args:
        look: brings a replica's scheduler and cache up to date before they are asked.

    Raises ValueError for a policy that is not among `POLICIES`.
    """
    rng, limits = np.random.default_rng(seed), thresholds or Thresholds()

    def least_loaded(among: Sequence[int] | range) -> int:
        loads = [replicas[i].outstanding for i in among]
        least = min(loads)
        tied = [i for i, load in zip(among, loads, strict=True) if load == least]
        return tied[int(rng.integers(len(tied)))] if len(tied) > 1 else tied[0]

    everyone = range(len(replicas))
    if policy == "random":
        return lambda request: int(rng.integers(len(replicas)))
    if policy == "least-loaded":
        return lambda request: least_loaded(everyone)
    if policy not in POLICIES:
        raise ValueError(f"policy = {policy!r}: must be one of {', '.join(POLICIES)}")
    memory = Memory()

    def known(keys: list[int], request: TraceRequest) -> tuple[int, list[int]]:
        """Most tokens that any replica has of the prompt, and which have so many."""
        asked = memory.longest(keys, 1 if policy == "prefix-aware" else limits.most_asked)
        sent = [(tokens, i) for tokens, bits in asked for i in _members(bits)]
        if policy != "prefix-aware":
            asked_now = [i for _, i in sent[: limits.most_asked]]
            for i in asked_now:
                look(i)
            sent = [(_held(replicas[i], request, policy), i) for i in asked_now]
        most = max((tokens for tokens, _ in sent), default=0)
        return most, [i for tokens, i in sent if tokens == most]

    def route(request: TraceRequest) -> int:
        keys = block_keys(request.prompt)
        loads = [replica.outstanding for replica in replicas]
        most, least = max(loads), min(loads)
        if most - least > limits.abs_threshold and most > limits.rel_threshold * least:
            chosen = least_loaded(everyone)
        else:
            tokens, having = known(keys, request)
            wanted = tokens > limits.cache_threshold * len(request.prompt)
            chosen = least_loaded(having if wanted else everyone)
        memory.add(keys, chosen)
        return chosen

    return route


def _members(bits: int) -> list[int]:
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def _held(replica: Replica, request: TraceRequest, policy: str) -> int:
    """Tokens of the prompt that the replica really has: full KV alone, or all that a row needs to start behind them."""
    at = replica.scheduler.cache.match("", request.prompt, len(request.prompt) - 1).resume
    return at.full_to if policy == "kv-aware" else at.start
