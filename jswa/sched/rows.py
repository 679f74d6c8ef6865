"""What the device must know about the row in each slot besides its pages: sampling parameters, and extras."""

import numpy as np
from jaxtyping import Int

from jswa.plan import SAMPLING, Constraint, ExtrasEntry, Request
from jswa.sched.sequence import Sequence


class RowTable:
    """Columns by row slot, so that a plan gathers them in one go, and the places of the extras tables.

    `sampling`: packed parameters; `cached`: the row's `full_lo` and `local_lo`; `adapters`: which it runs with.
    """

    def __init__(self, max_rows: int, places: int) -> None:
        self.sampling = np.zeros((max_rows, len(SAMPLING)), np.int32)
        self.cached = np.zeros((max_rows, 2), np.int32)
        self.adapters = np.zeros(max_rows, np.int32)
        self._no_place = max_rows
        self._free_places = list(range(places - 1, -1, -1))
        self._masks: dict[int, Int[np.ndarray, " words"]] = {}  # what the device has, by place

    @property
    def any_extras(self) -> bool:
        """Whether any running row has extras."""
        return bool(self._masks)

    def has_room(self, request: Request) -> bool:
        """Whether a row of this request can be entered now."""
        return request.constraint is None or bool(self._free_places)

    def enter(self, sequence: Sequence) -> ExtrasEntry | None:
        """Fill the columns of the row's slot; what to enter in the extras tables before its first step, if anything."""
        request = sequence.request
        params, constraint = request.params, request.constraint
        sequence.place = self._no_place if constraint is None else self._free_places.pop()
        columns = self.sampling[sequence.slot]
        assert sequence.lease is not None
        self.cached[sequence.slot] = sequence.lease.full_lo, sequence.lease.local_lo
        self.adapters[sequence.slot] = request.adapter
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
        columns[SAMPLING.index("extras")] = sequence.place
        columns[SAMPLING.index("prompt_length")] = len(request.prompt)
        if constraint is None:
            return None
        mask = _mask(sequence, constraint, sequence.num_known)
        self._masks[sequence.place] = mask
        skipped = sequence.tokens[: sequence.launched].copy()
        return ExtrasEntry(sequence.place, mask, constraint.bias, skipped, len(request.prompt))

    def leave(self, sequence: Sequence) -> None:
        """Give the row's place back."""
        if self._masks.pop(sequence.place, None) is not None:
            self._free_places.append(sequence.place)

    def update(self, sequence: Sequence, position: int) -> ExtrasEntry | None:
        """What to change before the row samples the token at `position`, if anything."""
        constraint = sequence.request.constraint
        if constraint is None:
            return None
        mask = _mask(sequence, constraint, position)
        if mask is self._masks[sequence.place] or np.array_equal(mask, self._masks[sequence.place]):
            return None
        self._masks[sequence.place] = mask
        return ExtrasEntry(sequence.place, mask)


def _mask(sequence: Sequence, constraint: Constraint, position: int) -> Int[np.ndarray, " words"]:
    """Tokens allowed at `position`: stop tokens only from min_length on, and no bad word's end after its beginning."""
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
