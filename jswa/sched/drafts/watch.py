"""Whether drafts that are looked up would be right, found on the host from the texts alone: it costs no step.

While no drafts run, the tokens that have come back say what a lookup would have drafted in their place. The host looks
for three tokens where the device looks for the longest match, so it rather finds too few drafts right than too many.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt64

from jswa.sched.rows import Rows

_CONTEXT = 3  # tokens that must be found again
_BEFORE = 2_048  # tokens of a prompt, the last ones
_MOST = 64  # tokens of a row at once, the last ones
_FEWEST = 4
_FEW = 2  # rows for which some thirty calls of numpy, whose code is in no cache by then, take longer than loops
_BITS = 13  # of a place in a table: twice the tokens of a prompt and a reference
# Odd numbers of 64 bits by which tokens are multiplied and added up: the upper bits are a hash (Knuth, TAOCP 6.4).
_CONTEXT_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_TOKEN_FACTOR = 0xD6E8FEB86659FD93
_WORD = (1 << 64) - 1


class Hits(NamedTuple):
    """Which of the last tokens of R rows would have been drafted.

    Attributes:
        right: of the last n tokens of each row; False where a token was not compared.
        compared: tokens of each row, the last ones.
    """

    row_ids: Int[np.ndarray, " R"]
    right: Bool[np.ndarray, "R n"]
    compared: Int[np.ndarray, " R"]


class Watch:
    """The token that followed each three tokens of the running rows, by row id.

    A row has a table of hashes, 64 KiB: at the place that three tokens hash to, a hash of these and the token behind
    them; 0 is none. A newer entry overwrites an older one.
    """

    def __init__(self, max_rows: int) -> None:
        self._tables = np.zeros((max_rows, 1 << _BITS), np.uint64)
        self._end = np.zeros(max_rows, np.int64)  # of the tokens that have been compared

    def begin(self, row_id: int, text: Int[np.ndarray, " T"], reference: Int[np.ndarray, " n"] | None) -> None:
        """Enter a row with its known tokens, and earlier texts if drafts are looked up in any."""
        table = self._tables[row_id]
        table[:] = 0
        for known in (reference, text[-_BEFORE:]):
            if known is not None and len(known) > _CONTEXT:
                places, entries = _hashes(known[None])
                table[places[0]] = entries[0]
        # Of the known tokens the rows' arrays have the last one alone.
        self._end[row_id] = len(text) - 1 + _CONTEXT

    def hits(self, rows: Rows, row_ids: Int[np.ndarray, " R"]) -> Hits:
        """Compare the tokens that came back since the last call, at most 64 of each row; rows with few are left out."""
        if len(row_ids) <= _FEW:
            return self._hits_of_few(rows, row_ids)
        new = rows.known.take(row_ids) - self._end.take(row_ids)
        row_ids, new = row_ids[new >= _FEWEST], new[new >= _FEWEST]
        if not len(row_ids):
            return Hits(row_ids, np.zeros((0, 0), bool), new)
        compared = np.minimum(new, _MOST)
        width = int(compared.max())
        self._end[row_ids] = rows.known.take(row_ids)
        places, entries = _hashes(rows.last_several(row_ids, width + _CONTEXT))
        own = row_ids[:, None]
        was_compared = np.arange(width, 0, -1) <= compared[:, None]
        right = (self._tables[own, places] == entries) & was_compared
        self._tables[np.broadcast_to(own, places.shape)[was_compared], places[was_compared]] = entries[was_compared]
        return Hits(row_ids, right, compared)

    def _hits_of_few(self, rows: Rows, row_ids: Int[np.ndarray, " R"]) -> Hits:
        """Return the same as `hits`, by loops."""
        found: dict[int, list[bool]] = {}
        for row_id in row_ids.tolist():
            known = rows.known.item(row_id)
            compared = min(known - self._end.item(row_id), _MOST)
            if compared >= _FEWEST:
                self._end[row_id] = known
                found[row_id] = self._compare_row(row_id, rows.recent(row_id, known - compared - _CONTEXT).tolist())
        compared_of = np.array([len(right) for right in found.values()], np.int64)
        width = max(map(len, found.values()), default=0)
        lines = [[False] * (width - len(right)) + right for right in found.values()]
        return Hits(np.array([*found], np.int64), np.array(lines, bool).reshape(len(lines), width), compared_of)

    def _compare_row(self, row_id: int, text: list[int]) -> list[bool]:
        """Return which of the tokens behind the first three were found behind the three before them; enter them all."""
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


def _hashes(text: Int[np.ndarray, "R T"]) -> tuple[Int[np.ndarray, "R n"], UInt64[np.ndarray, "R n"]]:
    """Return the place of each three tokens that a token follows, and the hash of all four."""
    tokens = text.astype(np.uint64)
    ends = tokens.shape[1] - _CONTEXT
    first, second, third = (tokens[:, i : i + ends] * np.uint64(factor) for i, factor in enumerate(_CONTEXT_FACTORS))
    keys = first + second + third
    # Plus one: of four tokens of id 0 the hash is not that of an empty place.
    entries = keys + tokens[:, _CONTEXT:] * np.uint64(_TOKEN_FACTOR) + np.uint64(1)
    return (keys >> np.uint64(64 - _BITS)).astype(np.int64), entries
