"""Per-row inputs of the step besides pages: sampling parameters, adapters, and extras (penalties, biases, masks)."""

from collections.abc import Iterable

import numpy as np

from jswa.plan import NO_WORDS, SAMPLING, ExtrasEntry, Mask, RowMask, Words
from jswa.sched.constraint import banned_at, mask_words
from jswa.sched.sequence import Sequence

_REAL = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_REAL_COLUMNS = [SAMPLING.index(name) for name in _REAL]
_KEY_COLUMNS = [SAMPLING.index("key_high"), SAMPLING.index("key_low")]
_TOP_K, _EXTRAS, _PROMPT_LENGTH = map(SAMPLING.index, ("top_k", "extras", "prompt_length"))


class RowTable:
    """Columns by row id, so that a plan gathers them with one index, and the masks that the device has.

    Attributes:
        sampling: packed sampling parameters, columns `SAMPLING`.
        cached: `full_write_from` and `local_visible_from` of each row.
        adapters: index of the LoRA adapter; 0: none.
    """

    def __init__(self, max_rows: int) -> None:
        self.sampling = np.zeros((max_rows, len(SAMPLING)), np.int32)
        self.cached = np.zeros((max_rows, 2), np.int32)
        self.adapters = np.zeros(max_rows, np.int32)
        self._no_extras = max_rows
        # By row id, for rows whose mask may change: whether the device's mask lacks stop tokens, the ends of bad words
        # that it lacks, and the words of it that hence differ from `Constraint.allowed`.
        self._masks: dict[int, tuple[tuple[bool, frozenset[int]], Words]] = {}

    def admit(self, sequence: Sequence) -> ExtrasEntry | None:
        """Fill the columns of the row; return its entry in the extras tables, if it needs one."""
        request, row_id = sequence.request, sequence.row_id
        params, constraint = request.params, request.constraint
        columns = self.sampling[row_id]
        assert sequence.lease is not None
        self.cached[row_id] = sequence.lease.full_write_from, sequence.lease.local_visible_from
        self.adapters[row_id] = request.adapter
        real = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        columns[_REAL_COLUMNS] = np.array(real, np.float32).view(np.int32)
        columns[_KEY_COLUMNS] = np.array(request.key, np.uint32).view(np.int32)
        columns[_TOP_K] = max(params.top_k, 0)
        columns[_EXTRAS] = self._no_extras if constraint is None else row_id
        columns[_PROMPT_LENGTH] = len(request.prompt)
        if constraint is None:
            return None
        if sequence.num_known < constraint.min_length or constraint.bad_words:
            self._masks[row_id] = (False, frozenset()), NO_WORDS
        prompt = request.prompt if params.repetition_penalty != 1.0 else request.prompt[:0]
        counted = sequence.launched if real[3:] != (1.0, 0.0, 0.0) else 0
        generated = sequence.tokens[len(request.prompt) : counted].copy()
        return ExtrasEntry(row_id, constraint.bias_ids, constraint.bias, constraint.allowed, prompt, generated)

    def release(self, sequence: Sequence) -> None:
        """Forget the mask of a row that ends."""
        self._masks.pop(sequence.row_id, None)

    def masks(self, sequences: list[Sequence], counts: list[int]) -> tuple[RowMask, ...]:
        """Return the masks that change before a step which runs so many tokens of these rows."""
        if not self._masks:
            return ()
        ends = ((s, s.launched + count) for s, count in zip(sequences, counts, strict=True))
        found = (self._mask(s, end) for s, end in ends if s.row_id in self._masks and end >= s.num_known)
        return tuple(mask for mask in found if mask is not None)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that only running rows with a constraint have a mask that may change."""
        rows = {s.row_id for s in running if s.request.constraint is not None}
        assert set(self._masks) <= rows, "the mask of a row that does not run may change"

    def _mask(self, sequence: Sequence, position: int) -> RowMask | None:
        """Return how the mask changes for sampling the token at `position`, if it does."""
        constraint, row_id = sequence.request.constraint, sequence.row_id
        assert constraint is not None
        text = sequence.tokens[len(sequence.request.prompt) : position]
        now = position < constraint.min_length, banned_at(constraint, text)
        before, changed = self._masks[row_id]
        if now == before:
            return None
        words = mask_words(constraint, now[1], early=now[0])
        self._masks[row_id] = now, words
        if not now[0] and not constraint.bad_words:
            del self._masks[row_id]
        return RowMask(row_id, _undone(changed, words, constraint.allowed))


def _undone(before: Words, words: Words, allowed: Mask) -> Words:
    """Return words of a mask, and those of `before` that are not among them as `allowed` has them."""
    if not len(before.at):
        return words
    at = np.union1d(words.at, before.at) if len(words.at) else before.at
    bits = allowed.words(at)
    bits[np.searchsorted(at, words.at)] = words.bits
    return Words(at, bits)
