"""How likely a cached text is to be used again, learned from the ages at which texts were used, or not.

The chance of a use by age is that of Kaplan and Meier (1958): the uses at an age over the texts that reached it,
whether they were cached or not. A text is worth the most that can be had by keeping it, over all times to keep it for:
its chance of a use in that time over the mean time for which it would be kept (the index of Gittins, 1979). Under
traffic that comes back soon or never that falls with age, as LRU assumes; in a loop larger than the cache it grows up
to the length of the loop, where LRU would evict all that is needed next.
"""

import numpy as np
from jaxtyping import Float, Int

NEW, USED, LEFT = range(3)  # kinds of text: never used again yet, used again, and left by its conversation
_BUCKETS = 48  # half octaves of age
_LOW = np.exp2(np.arange(_BUCKETS + 1) / 2) - 1  # least age of each bucket
_DECAY_AT = 4096.0  # events of a kind after which the past counts half
# What is believed of an age at which nothing was seen: one text in ten was used. The index falls with age, as in LRU.
_PRIOR_USES, _PRIOR_TEXTS = 0.1, 1.0


class Ageing:
    """Counts uses, and texts that are forgotten without one, by kind of text and age in requests."""

    def __init__(self) -> None:
        self._uses = np.zeros((3, _BUCKETS))
        self._ends = np.zeros((3, _BUCKETS))
        self._worth = np.tile(_index(self._uses[0], self._ends[0]), (3, 1))

    def worth(self, ages: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the expected uses per passing request of texts of these ages."""
        worth: Float[np.ndarray, " n"] = self._worth[kinds, _buckets(ages)]
        return worth

    def count(self, age: int, kind: int, *, used: bool) -> None:
        """Count a use of a text of this age, or that a text is forgotten."""
        bucket = min(_BUCKETS, ((age + 1) * (age + 1)).bit_length()) - 1
        (self._uses if used else self._ends)[kind, bucket] += 1.0

    def learn(self, ages: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"]) -> None:
        """Compute the index anew. `ages`, `kinds`: of all texts that may still be used."""
        for kind in range(3):
            uses, ends = self._uses[kind], self._ends[kind]
            if uses.sum() + ends.sum() > _DECAY_AT:
                uses *= 0.5
                ends *= 0.5
            waiting = np.bincount(_buckets(ages[kinds == kind]), minlength=_BUCKETS)
            self._worth[kind] = _index(uses, ends + waiting)


def _buckets(ages: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    after = ages + 1.0
    buckets: Int[np.ndarray, " n"] = np.minimum(np.frexp(after * after)[1] - 1, _BUCKETS - 1)
    return buckets


def _index(uses: Float[np.ndarray, " b"], ends: Float[np.ndarray, " b"]) -> Float[np.ndarray, " b"]:
    """Return the index at the start of each bucket, given the uses in it and the texts of which no more is known."""
    reached = np.cumsum((uses + ends)[::-1])[::-1] - 0.5 * ends
    chance = np.minimum((_smooth(uses) + _PRIOR_USES) / (_smooth(reached) + _PRIOR_TEXTS), 0.999)
    unused = np.concatenate([[1.0], np.cumprod(1.0 - chance)])  # share that is not used before each bucket
    kept = np.concatenate([[0.0], np.cumsum(np.diff(_LOW) * 0.5 * (unused[:-1] + unused[1:]))])
    # From the start of each bucket (rows) to the end of this or a later one (columns).
    gain, time = unused[:-1, None] - unused[None, 1:], kept[None, 1:] - kept[:-1, None]
    index: Float[np.ndarray, " b"] = np.where(time > 0, gain / np.where(time > 0, time, 1.0), 0.0).max(axis=1)
    return index


def _smooth(counts: Float[np.ndarray, " b"]) -> Float[np.ndarray, " b"]:
    """Spread the counts of a bucket over its neighbours: few events would make a rugged index."""
    for _ in range(2):
        wider = np.concatenate([counts[:1], counts, counts[-1:]])
        counts = 0.25 * wider[:-2] + 0.5 * wider[1:-1] + 0.25 * wider[2:]
    return counts
