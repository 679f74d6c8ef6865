"""Fairness between API keys: whose turn it is, and what part of the queue is whose.

Turns are start-time fair queueing (Goyal, Vin and Cheng, 1996) with tokens as the cost, as in the virtual token counter
of Sheng et al. (2024): a key's next text starts, in virtual time, where its texts before have ended, or now. Texts run
in the order of their starts. Virtual time is the latest start that has come to run. A key that was idle gains nothing
by it, and one that asks for much only waits for itself.
"""

import math
from collections.abc import Mapping, Sequence

from ..http.errors import ApiError

Key = str | None
_SCALE = 1_000  # of virtual time, so that weights below one keep their meaning in whole numbers


def weights_of(keys: Sequence[str], weights: Sequence[float]) -> dict[Key, float]:
    """The weight of each key; a server without keys has one tenant."""
    return dict(zip(keys, weights or [1.0] * len(keys), strict=True)) if keys else {None: 1.0}


class Turns:
    """Virtual starts of texts. With one tenant all are 0: order of arrival is all there is."""

    def __init__(self, weights: Mapping[Key, float]) -> None:
        self._weights = weights
        self._now = 0
        self._next: dict[Key, int] = {}

    def take(self, key: Key, tokens: Sequence[int]) -> list[int]:
        """The starts of some texts with so many prompt tokens each."""
        if len(self._weights) == 1:
            return [0] * len(tokens)
        starts = []
        for count in tokens:
            starts.append(max(self._now, self._next.get(key, 0)))
            self._next[key] = starts[-1]
            self.charge(key, count)
        return starts

    def charge(self, key: Key, tokens: int) -> None:
        """Tokens that a key has used: a prompt's, or generated ones as they come."""
        if tokens and len(self._weights) > 1:
            self._next[key] = self._next.get(key, 0) + math.ceil(_SCALE * tokens / self._weights[key])

    def runs(self, start: int) -> None:
        """A text with this start has come to run."""
        self._now = max(self._now, start)


class Admission:
    """The bounded queue: texts accepted that have no token yet, by count and by prompt tokens. Beyond that: 429.

    Half of it is for whoever comes first. The other half is divided by weight, and a key's part is kept for it.
    """

    def __init__(self, most_texts: int, most_tokens: int, weights: Mapping[Key, float] | None = None) -> None:
        weights = weights or {None: 1.0}
        whole = 2 * sum(weights.values()) if len(weights) > 1 else float("inf")
        self.refused = 0
        self._most = (most_texts, most_tokens)
        self._kept = {key: (most_texts * w / whole, most_tokens * w / whole) for key, w in weights.items()}
        self._used = {key: [0, 0] for key in weights}

    @property
    def texts(self) -> int:
        """Texts that wait."""
        return sum(used[0] for used in self._used.values())

    @property
    def tokens(self) -> int:
        """Their prompt tokens."""
        return sum(used[1] for used in self._used.values())

    def enter(self, key: Key, texts: int, tokens: int) -> None:
        """Take texts with so many prompt tokens. An empty queue takes any one request. Raises ApiError."""
        for kind, new in enumerate((texts, tokens)):
            others = [max(self._used[k][kind], self._kept[k][kind]) for k in self._used if k != key]
            if self._used[key][kind] + new + sum(others) > self._most[kind] and self.texts:
                self.refused += 1
                raise ApiError(
                    429,
                    f"the queue is full: {self.texts} texts with {self.tokens} prompt tokens wait; try again later",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
        self._used[key][0] += texts
        self._used[key][1] += tokens

    def leave(self, key: Key, texts: int, tokens: int) -> None:
        """These have their first token, or have ended."""
        self._used[key][0] -= texts
        self._used[key][1] -= tokens
