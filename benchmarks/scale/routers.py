"""Routers of a simulated fleet. A router knows the requests that it has sent and how many of them have not ended.

* `random`: any replica, with equal chances.
* `least-loaded`: the replica with the fewest outstanding requests; ties at random.
* `prefix-aware`: the router remembers the prefixes that it has sent to each replica. It follows the rule that SMG
  documents for its policy cache_aware (docs/concepts/routing/cache-aware.md of lightseekorg/smg; the thresholds are its
  defaults). If loads differ by more than `abs_threshold` requests and by the factor `rel_threshold`, load alone
  decides. Otherwise the request goes to the replica that was sent the longest prefix of it (the least loaded of
  several), if that prefix is more than `cache_threshold` of the prompt, and to the least loaded replica if not.
* `kv-aware`: the same rule with the full-attention KV that a replica really holds, as a router knows it that follows
  events of stored and dropped blocks. It does not know whether the replica has the windows that a row needs as well.
* `resume-aware`: the same rule with the position from which a row would really start, windows included.

The last two query the caches of the `most_asked` replicas with the longest prefix in the router's memory; no other
replica can hold more. Prefixes are remembered in blocks of 64 tokens. SMG forgets the oldest prefixes beyond 64M
tokens; this router forgets nothing, and a simulation ends before that.
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
_POSITION = np.random.default_rng(8).integers(1, 2**63, 2**15, dtype=np.int64) * 2 + 1


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the rule above, with the defaults of SMG."""

    cache_threshold: float = 0.3
    abs_threshold: int = 64
    rel_threshold: float = 1.5
    most_asked: int = 16


@dataclass
class Memory:
    """The replicas that each prefix was sent to, as bits, by the hash of all blocks of the prefix.

    A replica that was sent a prefix was sent all shorter ones, so the sets shrink along a text and allow bisection.
    """

    replicas_of: dict[int, int] = field(default_factory=dict)

    def add(self, keys: list[int], replica: int) -> None:
        """Note that the text was sent to this replica."""
        bit = 1 << replica
        for key in keys[self._first(keys, lambda found: not found & bit) :]:
            self.replicas_of[key] = self.replicas_of.get(key, 0) | bit

    def longest(self, keys: list[int], least: int) -> list[tuple[int, int]]:
        """Return (tokens of a prefix, replicas as bits), longest prefix first, until `least` replicas are named."""
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
        """Return the index of the first prefix whose replicas satisfy `ends`; all longer prefixes satisfy it too."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if ends(self.replicas_of.get(keys[middle], 0)):
                high = middle
            else:
                low = middle + 1
        return low


def block_keys(tokens: Int[np.ndarray, " T"]) -> list[int]:
    """Return a hash of each prefix of whole blocks."""
    count = len(tokens) // BLOCK
    blocks = tokens[: count * BLOCK].reshape(count, BLOCK).astype(np.int64) @ _MIX
    mixed = (blocks ^ (blocks >> 29)) * _POSITION[:count]
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
    """Return the router of a policy: a function from a request to the number of a replica.

    Args:
        look: brings the scheduler and cache of a replica up to date before they are queried.

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
        """Return the most prompt tokens that a replica has, and the replicas that have so many."""
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
    """Return the prompt tokens that the replica holds: in full KV, or with all that a row needs to start there."""
    at = replica.scheduler.cache.match("", request.prompt, len(request.prompt) - 1).resume
    return at.full_to if policy == "kv-aware" else at.start
