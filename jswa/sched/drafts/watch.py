"""Whether drafts that are looked up would be right, found on the host from the texts alone: it costs no step.

While no drafts run, the tokens that have come back say what a lookup would have drafted in their place. The host looks
for three tokens where the device looks for the longest match, so it rather finds too few drafts right than too many.
"""

import numpy as np
from jaxtyping import Int

from jswa.sched.rows import Rows

_CONTEXT = 3  # tokens that must be found again
_BEFORE = 2_048  # tokens of a prompt, the last ones
_MOST = 64  # tokens of a row at once, the last ones
_FEWEST = 4
_BITS = 20  # of a token in a key: ids that are larger may share a key, which costs accuracy alone


class Watch:
    """The token that followed each three tokens of the running rows, by row id."""

    def __init__(self) -> None:
        self._followers: dict[int, dict[int, int]] = {}
        self._end: dict[int, int] = {}  # of what has been compared

    def begin(self, row_id: int, text: Int[np.ndarray, " T"], reference: Int[np.ndarray, " n"] | None) -> None:
        """Enter a row with its known tokens, and earlier texts if drafts are looked up in any."""
        followers = dict(_followers(text[-_BEFORE:]))
        if reference is not None:
            followers.update(_followers(reference))
        # Of the known tokens the rows' arrays have the last one alone.
        self._followers[row_id], self._end[row_id] = followers, len(text) - 1 + _CONTEXT

    def hits(self, rows: Rows, row_id: int) -> list[bool]:
        """Return whether each of the tokens that came back since the last call would have been drafted; at most 64."""
        known, followers = int(rows.known[row_id]), self._followers.get(row_id)
        if followers is None or known - self._end[row_id] < _FEWEST:
            return []
        first, self._end[row_id] = max(self._end[row_id], known - _MOST), known
        found = []
        for key, token in _followers(rows.recent(row_id, first - _CONTEXT)):
            found.append(followers.get(key) == token)
            followers[key] = token
        return found


def _followers(text: Int[np.ndarray, " T"]) -> list[tuple[int, int]]:
    """Return a key of each three tokens, and the token behind them."""
    tokens = text.astype(np.int64)
    keys = tokens[:-3] << 2 * _BITS | tokens[1:-2] << _BITS | tokens[2:-1]
    return list(zip(keys.tolist(), tokens[3:].tolist(), strict=True))
