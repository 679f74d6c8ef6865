"""Per-row inputs of the step besides pages: sampling parameters, adapters, and extras (penalties and masks)."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from jswa.plan import SAMPLING, Constraint, ExtrasEntry, Request
from jswa.sched.sequence import Sequence


class RowTable:
    """Columns by row id, so that a plan gathers them with one index, and the ids of the extras tables.

    Attributes:
        sampling: packed sampling parameters, columns `SAMPLING`.
        cached: `full_write_from` and `local_visible_from` of each row.
        adapters: index of the LoRA adapter; 0: none.
    """

    def __init__(self, max_rows: int, max_extras: int) -> None:
        self.sampling = np.zeros((max_rows, len(SAMPLING)), np.int32)
        self.cached = np.zeros((max_rows, 2), np.int32)
        self.adapters = np.zeros(max_rows, np.int32)
        self._no_extras = max_rows
        self._max_extras = max_extras
        self._free_extras = list(range(max_extras - 1, -1, -1))
        self._masks: dict[int, Int[np.ndarray, " words"]] = {}  # the device's masks by extras id

    @property
    def any_extras(self) -> bool:
        """Whether any running row has extras."""
        return bool(self._masks)

    def has_room(self, request: Request) -> bool:
        """Whether there is an extras id for this request, if it needs one."""
        return request.constraint is None or bool(self._free_extras)

    def admit(self, sequence: Sequence) -> ExtrasEntry | None:
        """Fill the columns of the row; return its entry in the extras tables, if it needs one."""
        request = sequence.request
        params, constraint = request.params, request.constraint
        sequence.extras_id = self._no_extras if constraint is None else self._free_extras.pop()
        columns = self.sampling[sequence.row_id]
        assert sequence.lease is not None
        self.cached[sequence.row_id] = sequence.lease.full_write_from, sequence.lease.local_visible_from
        self.adapters[sequence.row_id] = request.adapter
        real = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        columns[[SAMPLING.index(name) for name in names]] = np.array(real, np.float32).view(np.int32)
        columns[SAMPLING.index("top_k")] = max(params.top_k, 0)
        keys = [SAMPLING.index("key_high"), SAMPLING.index("key_low")]
        columns[keys] = np.array(request.key, np.uint32).view(np.int32)
        columns[SAMPLING.index("extras")] = sequence.extras_id
        columns[SAMPLING.index("prompt_length")] = len(request.prompt)
        if constraint is None:
            return None
        mask = _mask(sequence, constraint, sequence.num_known)
        self._masks[sequence.extras_id] = mask
        skipped = sequence.tokens[: sequence.launched].copy()
        return ExtrasEntry(sequence.extras_id, mask, constraint.bias, skipped, len(request.prompt))

    def release(self, sequence: Sequence) -> None:
        """Free the row's extras id."""
        if self._masks.pop(sequence.extras_id, None) is not None:
            self._free_extras.append(sequence.extras_id)

    def update(self, sequence: Sequence, position: int) -> ExtrasEntry | None:
        """Return the new mask for sampling the token at `position`, if the mask changes."""
        constraint = sequence.request.constraint
        if constraint is None:
            return None
        mask = _mask(sequence, constraint, position)
        if mask is self._masks[sequence.extras_id] or np.array_equal(mask, self._masks[sequence.extras_id]):
            return None
        self._masks[sequence.extras_id] = mask
        return ExtrasEntry(sequence.extras_id, mask)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that exactly the constrained rows among `running` have an extras id, and that none leaked."""
        used = [s.extras_id for s in running if s.request.constraint is not None]
        assert sorted(used) == sorted(self._masks), "extras ids differ from the rows that have constraints"
        assert not set(used) & set(self._free_extras), "the extras id of a running row is free"
        assert len(used) + len(self._free_extras) == self._max_extras, "an extras id leaked"


def _mask(sequence: Sequence, constraint: Constraint, position: int) -> Int[np.ndarray, " words"]:
    """Return the tokens allowed at `position`: no stop token before min_length, no last token of a bad word begun."""
    mask = constraint.mask if position >= constraint.min_length else constraint.early_mask
    text = sequence.tokens[len(sequence.request.prompt) : position]
    banned = [
        word[-1]
        for word in constraint.bad_words
        if len(word) - 1 <= len(text) and tuple(text[len(text) - len(word) + 1 :].tolist()) == word[:-1]
    ]
    if banned:
        mask = mask.copy()
        for token in banned:
            mask[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
    return mask
