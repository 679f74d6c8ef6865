"""Fairness between API keys: the order of their texts, and each key's share of the queue.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996) with tokens as the cost, as in the virtual token
counter of Sheng et al. (2024): in virtual time a key's next text starts where its previous texts end, but not before
now. Texts run in the order of their starts. Virtual time is the latest start of a text that has run. An idle key earns
no credit, and a key with many requests delays only its own.
"""

import math
from collections.abc import Mapping, Sequence

from ..http.errors import ApiError

Key = str | None
_SCALE = 1_000  # of virtual time, so that weights below one keep their meaning in whole numbers


def weights_of(keys: Sequence[str], weights: Sequence[float]) -> dict[Key, float]:
    """Return the weight of each key; a server without keys has one tenant."""
    return dict(zip(keys, weights or [1.0] * len(keys), strict=True)) if keys else {None: 1.0}


class Turns:
    """Virtual starts of texts. With one tenant all are 0, so that arrival decides."""

    def __init__(self, weights: Mapping[Key, float]) -> None:
        self._weights = weights
        self._now = 0
        self._next: dict[Key, int] = {}

    def starts(self, key: Key, tokens: Sequence[int]) -> list[int]:
        """Return the virtual start of each text; `tokens`: its prompt tokens."""
        if len(self._weights) == 1:
            return [0] * len(tokens)
        starts = []
        for count in tokens:
            starts.append(max(self._now, self._next.get(key, 0)))
            self._next[key] = starts[-1]
            self.charge(key, count)
        return starts

    def charge(self, key: Key, tokens: int) -> None:
        """Charge a key for tokens: of a prompt, or generated."""
        if tokens and len(self._weights) > 1:
            self._next[key] = self._next.get(key, 0) + math.ceil(_SCALE * tokens / self._weights[key])

    def runs(self, start: int) -> None:
        """Advance virtual time: a text with this start runs."""
        self._now = max(self._now, start)


class Admission:
    """The bounded queue of accepted texts without a token, limited by count and by prompt tokens; beyond that: 429.

    Half of it is first come, first served. The other half is reserved for the keys in proportion to their weights.
    """

    def __init__(self, most_texts: int, most_tokens: int, weights: Mapping[Key, float] | None = None) -> None:
        weights = weights or {None: 1.0}
        whole = 2 * sum(weights.values()) if len(weights) > 1 else float("inf")
        self.refused = 0
        self._most = (most_texts, most_tokens)
        self._reserved = {key: (most_texts * w / whole, most_tokens * w / whole) for key, w in weights.items()}
        self._used = {key: [0, 0] for key in weights}

    @property
    def texts(self) -> int:
        """Number of waiting texts."""
        return sum(used[0] for used in self._used.values())

    @property
    def tokens(self) -> int:
        """Prompt tokens of the waiting texts."""
        return sum(used[1] for used in self._used.values())

    def admit(self, key: Key, texts: int, tokens: int) -> None:
        """Admit texts with `tokens` prompt tokens in all. An empty queue admits any request. Raises ApiError (429)."""
        for kind, new in enumerate((texts, tokens)):
            others = [max(self._used[k][kind], self._reserved[k][kind]) for k in self._used if k != key]
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

    def release(self, key: Key, texts: int, tokens: int) -> None:
        """Release texts that have their first token or have ended."""
        self._used[key][0] -= texts
        self._used[key][1] -= tokens
