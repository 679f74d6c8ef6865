"""How likely a cached text is to be used again, learned from the ages at which texts were used, or not.

The chance of a use by age is that of Kaplan and Meier (1958): the uses at an age over the texts that reached it,
whether they were cached or not. Texts are ranked by the Gittins index (1979) of that distribution: the best rate of
reuse over all times for which a text may be kept. The rate is its chance of a use in that time over the mean time for
which it would be kept. If texts are used again soon or never, the index falls with age, as LRU assumes. In a loop
larger than the cache it grows up to the length of the loop; there LRU would evict every text just before its next use.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

NEW, USED, LEFT = range(3)  # kinds of text: never used again yet, used again, and left by its conversation
_BUCKETS = 48  # half octaves of age
_LOW = np.exp2(np.arange(_BUCKETS + 1) / 2) - 1  # least age of each bucket
_WIDTH = np.diff(_LOW)
_DECAY_AT = 4096.0  # events of a kind after which the past counts half
# What is believed of an age at which nothing was seen: one text in ten was used. The index falls with age, as in LRU.
_PRIOR_USES, _PRIOR_TEXTS = 0.1, 1.0
Texts = Callable[[], tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]]
_Learned = tuple[Texts, Float[np.ndarray, "3 b"], Float[np.ndarray, "3 b"]]


class Ageing:
    """Counts uses, and texts that are forgotten without one, by kind of text and age in requests."""

    def __init__(self) -> None:
        self._uses = np.zeros((3, _BUCKETS))
        self._ends = np.zeros((3, _BUCKETS))
        self._worth = _index(self._uses, self._ends)
        self._learned: _Learned | None = None  # of which no index has been computed

    def worth(self, ages: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the expected uses per passing request of texts of these ages."""
        if self._learned is not None:
            (texts, uses, ends), self._learned = self._learned, None
            waiting, of = texts()
            count = np.bincount(of * _BUCKETS + _buckets(waiting), minlength=3 * _BUCKETS).reshape(3, _BUCKETS)
            self._worth = _index(uses, ends + count)
        worth: Float[np.ndarray, " n"] = self._worth[kinds, _buckets(ages)]
        return worth

    def count(self, age: int, kind: int, *, used: bool) -> None:
        """Count a use of a text of this age, or that a text is forgotten."""
        bucket = min(_BUCKETS, ((age + 1) * (age + 1)).bit_length()) - 1
        (self._uses if used else self._ends)[kind, bucket] += 1.0

    def learn(self, texts: Texts) -> None:
        """Let the index be computed anew before a worth is asked for: visits are parts of plans, evictions seldom are.

        `texts`: returns the ages and kinds, as they are now, of all texts that may still be used.
        """
        old = self._uses.sum(axis=1) + self._ends.sum(axis=1) > _DECAY_AT
        self._uses[old] *= 0.5
        self._ends[old] *= 0.5
        self._learned = texts, self._uses.copy(), self._ends.copy()


def _buckets(ages: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    after = ages + 1.0
    buckets: Int[np.ndarray, " n"] = np.minimum(np.frexp(after * after)[1] - 1, _BUCKETS - 1)
    return buckets


def _index(uses: Float[np.ndarray, "3 b"], ends: Float[np.ndarray, "3 b"]) -> Float[np.ndarray, "3 b"]:
    """Return the index at the start of each bucket, given the uses in it and the texts of which no more is known."""
    reached = np.cumsum((uses + ends)[:, ::-1], axis=1)[:, ::-1] - 0.5 * ends
    uses, reached = _smooth(np.stack([uses, reached]))
    chance = np.minimum((uses + _PRIOR_USES) / (reached + _PRIOR_TEXTS), 0.999)
    unused, kept = np.ones((3, _BUCKETS + 1)), np.zeros((3, _BUCKETS + 1))
    np.cumprod(1.0 - chance, axis=1, out=unused[:, 1:])  # share that is not used before each bucket
    np.cumsum(_WIDTH * 0.5 * (unused[:, :-1] + unused[:, 1:]), axis=1, out=kept[:, 1:])
    # From the start of each bucket (rows) to the end of this or a later one (columns).
    gain, time = unused[:, :-1, None] - unused[:, None, 1:], kept[:, None, 1:] - kept[:, :-1, None]
    index: Float[np.ndarray, "3 b"] = np.divide(gain, time, out=np.zeros_like(gain), where=time > 0).max(axis=2)
    return index


def _smooth(counts: Float[np.ndarray, "n 3 b"]) -> Float[np.ndarray, "n 3 b"]:
    """Spread the counts of a bucket over its neighbours: few events would make a rugged index."""
    for _ in range(2):
        wider = np.concatenate([counts[..., :1], counts, counts[..., -1:]], axis=-1)
        counts = 0.25 * wider[..., :-2] + 0.5 * wider[..., 1:-1] + 0.25 * wider[..., 2:]
    return counts
