"""How likely a cached item is to be used again, learned from the ages at which items were used or evicted.

Beckmann, Chen and Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI 2018): the value of keeping
something that has not been used for `age` is the chance of a use still to come over the time it will be kept for.
Under traffic that comes back soon or never it falls with age, as LRU assumes; in a loop larger than the cache it
grows up to the length of the loop, where LRU would evict all that is needed next. Things never used again after their
first use (scans) are told from the others by a table of their own.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

_BUCKETS = 48  # half octaves of age
_RELEARN = 64  # events between two computations of the densities
_DECAY_AT = 4096.0  # events after which the past counts half


class Ageing:
    """Counts uses and evictions by age, in requests, separately for items that were reused before."""

    def __init__(self) -> None:
        # The prior behaves like LRU: equally many uses and evictions at each age, fewer of both at greater ages.
        prior = [1.0 / 2.0 ** (bucket / 2) for bucket in range(_BUCKETS)]
        self._hits = [list(prior), list(prior)]
        self._ends = [list(prior), list(prior)]
        self._events = 0
        self._density = np.array([_densities(self._hits[reused], self._ends[reused]) for reused in (0, 1)])

    def density(self, ages: Int[np.ndarray, " n"], *, reused: Bool[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the expected uses per passing request of items of these ages."""
        after = ages + 1.0
        buckets = np.minimum(np.frexp(after * after)[1] - 1, _BUCKETS - 1)
        density: Float[np.ndarray, " n"] = self._density[reused.astype(np.intp), buckets]
        return density

    def count(self, age: int, *, reused: bool, hit: bool) -> None:
        """Count a use (`hit`) or an eviction of an item of this age."""
        counts = self._hits if hit else self._ends
        counts[reused][_bucket(age)] += 1.0
        self._events += 1
        if self._events % _RELEARN:
            return
        for hits, ends in zip(self._hits, self._ends, strict=True):
            if sum(hits) + sum(ends) > _DECAY_AT:
                hits[:] = [0.5 * count for count in hits]
                ends[:] = [0.5 * count for count in ends]
        self._density = np.array([_densities(h, e) for h, e in zip(self._hits, self._ends, strict=True)])


def _bucket(age: int) -> int:
    half_octaves = ((age + 1) * (age + 1)).bit_length() - 1
    return min(_BUCKETS - 1, half_octaves)


def _densities(hits: list[float], ends: list[float]) -> list[float]:
    """Return the hit density by age bucket: Σ hits at this age or later over Σ time from this age to the event."""
    out = [0.0] * _BUCKETS
    later_hits = later_events = later_ages = 0.0
    for bucket in reversed(range(_BUCKETS)):
        low, high = 2.0 ** (bucket / 2) - 1, 2.0 ** ((bucket + 1) / 2) - 1
        events = hits[bucket] + ends[bucket]
        later_hits += hits[bucket]
        later_events += events
        later_ages += events * 0.5 * (low + high)
        out[bucket] = later_hits / max(later_ages - later_events * low, 1e-9)
    return out
