"""Whether drafts that are looked up would be right, found on the host from the texts alone: it costs no step.

While no drafts run, the tokens that have come back say what a lookup would have drafted in their place. The host looks
for three tokens where the device looks for the longest match, so it rather finds too few drafts right than too many.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int, UInt64

from jswa.sched.rows import Rows
from jswa.speculation import PROGRAMS

_CONTEXT = 3  # tokens that must be found again
_BEFORE = 2_048  # tokens of a prompt, the last ones
_MOST = 64  # tokens of a row at once, the last ones
_FEWEST = 4
_BITS = 13  # of a place in a table: twice the tokens of a prompt and a reference
# Odd numbers of 64 bits by which tokens are multiplied and added up: the upper bits are a hash (Knuth, TAOCP 6.4).
_CONTEXT_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_TOKEN_FACTOR = 0xD6E8FEB86659FD93
_WORD = (1 << 64) - 1


class Watch:
    """The token that followed each three tokens of the running rows, by row id.

    A row has a table of hashes, 64 KiB: at the place that three tokens hash to, a hash of these and the token after
    them; 0 is none. A newer entry overwrites an older one.
    """

    def __init__(self, max_rows: int) -> None:
        self._tables = np.zeros((max_rows, 1 << _BITS), np.uint64)
        self._end = np.zeros(max_rows, np.int64)  # of the tokens that have been compared
        self._foretold: list[list[tuple[int, int]]] = [[] for _ in range(max_rows)]  # from and to, not compared yet

    def begin(self, row_id: int, text: Int[np.ndarray, " T"], reference: Int[np.ndarray, " n"] | None) -> None:
        """Enter a row with its known tokens, and earlier texts if drafts are looked up in any."""
        table = self._tables[row_id]
        table[:] = 0
        for known in (reference, text[-_BEFORE:]):
            if known is not None and len(known) > _CONTEXT:
                places, entries = _hashes(known)
                table[places] = entries
        self._foretold[row_id].clear()
        # Of the known tokens the rows' arrays have only the last one.
        self._end[row_id] = len(text) - 1 + _CONTEXT

    def hits(self, rows: Rows, row_ids: Iterable[int]) -> dict[int, list[bool]]:
        """Return which of the tokens that came back since the last call would have been drafted, by row.

        At most the last 64 of each row; rows with few are left out. The tokens of a text that was foretold count as one
        token, since they take one step. A text that is longer than the drafts of a step counts as wrong.
        """
        found: dict[int, list[bool]] = {}
        for row_id in row_ids:
            known = rows.known.item(row_id)
            compared = min(known - self._end.item(row_id), _MOST)
            if compared >= _FEWEST:
                self._end[row_id] = known
                right = self._compare(row_id, rows.recent(row_id, known - compared - _CONTEXT).tolist())
                found[row_id] = self._joined(row_id, right, known - compared) if self._foretold[row_id] else right
        return found

    def foretold(self, row_id: int, start: int, end: int) -> None:
        """Note the positions of tokens that a grammar has forced."""
        self._foretold[row_id].append((start, end))

    def _joined(self, row_id: int, right: list[bool], first: int) -> list[bool]:
        """Join the tokens of each foretold text, which is right if all of them are; `first`: position of the first.

        A wrong token is put after each such text: it takes the places of several drafts, and few are left after it.
        """
        for start, end in reversed(self._foretold[row_id]):
            if end > first:
                text = slice(max(start - first, 0), end - first)
                right[text] = [end - start <= PROGRAMS[-1] and all(right[text]), False]
        self._foretold[row_id].clear()
        return right

    def _compare(self, row_id: int, text: list[int]) -> list[bool]:
        """Return which of the tokens after the first three were found after the three before them; enter them all.

        By a loop: for a few rows with some tokens each, numpy takes as long, and longer for one.
        """
        table = memoryview(self._tables[row_id])
        a, b, c = _CONTEXT_FACTORS
        found = []
        for i in range(len(text) - _CONTEXT):
            key = (text[i] * a + text[i + 1] * b + text[i + 2] * c) & _WORD
            found.append((key >> 64 - _BITS, (key + text[i + 3] * _TOKEN_FACTOR + 1) & _WORD))
        right = [table[place] == entry for place, entry in found]
        for place, entry in found:
            table[place] = entry
        return right


def _hashes(text: Int[np.ndarray, " T"]) -> tuple[Int[np.ndarray, " n"], UInt64[np.ndarray, " n"]]:
    """Return the place of each three tokens that a token follows, and the hash of all four."""
    tokens = text.astype(np.uint64)
    ends = len(tokens) - _CONTEXT
    first, second, third = (tokens[i : i + ends] * np.uint64(factor) for i, factor in enumerate(_CONTEXT_FACTORS))
    keys = first + second + third
    # Plus one: of four tokens of id 0 the hash is not that of an empty place.
    entries = keys + tokens[_CONTEXT:] * np.uint64(_TOKEN_FACTOR) + np.uint64(1)
    return (keys >> np.uint64(64 - _BITS)).astype(np.int64), entries
