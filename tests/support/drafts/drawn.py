"""The number of drafts of each step, drawn: all step programs run, and after each other."""

import random
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from jswa.sched.drafts.choice import DraftChoice


class Drawn(DraftChoice):
    """Draws the number of drafts of each step."""

    def __init__(self, chance: random.Random, max_rows: int) -> None:
        super().__init__(max_rows)
        self._chance = chance

    def kept(self, rows: int) -> None:
        """No choice holds."""

    def choose(self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: Callable[[], tuple[int, ...]]) -> int:
        """Return any."""
        return self._chance.choice((0, *lengths()))

    def best(
        self, row_ids: Int[np.ndarray, " E"], rows: int, lengths: tuple[int, ...], *, beside_prompts: bool = False
    ) -> int:
        """Return any, for a step that runs prompts."""
        return self._chance.choice((0, *lengths))
