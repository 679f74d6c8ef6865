"""The token ids that matter to some of the running rows."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int

_FEW = 8  # ids up to which one comparison each is faster than a search


class TokenCounts:
    """Token ids that matter to some running rows, counted by row."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._ids = np.zeros(0, np.int32)  # those that matter to any

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, tokens: Iterable[int], rows: int) -> None:
        """Count a row more for each of these tokens (`rows` = 1), or one less (-1)."""
        before = len(self._counts)
        for token in tokens:
            self._counts[token] += rows
            if not self._counts[token]:
                del self._counts[token]
        if len(self._counts) != before:
            self._ids = np.array(list(self._counts), np.int32)

    def among(self, tokens: Int[np.ndarray, " R"]) -> Bool[np.ndarray, " R"]:
        """Return which of the tokens matter to some row."""
        if len(self._ids) > _FEW:
            return np.isin(tokens, self._ids)
        if not len(self._ids):
            return np.zeros(len(tokens), bool)
        first, *others = self._ids.tolist()
        found: Bool[np.ndarray, " R"] = tokens == first
        for token in others:
            found |= tokens == token
        return found
