"""Sampling masks on the host: which steps list the tokens, and which events carry the lists."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jswa.plan import PLAIN, Request, StepResults, TokenEvent
from jswa.ribs.rib import NO_SECTION, Known, Landed, Needs, Rib, Section, Variant
from jswa.types import SamplingParams

NAME = "sampling_mask"
MASKED = "sampling_mask"  # the variant


def needs_of(params: SamplingParams, images: bool) -> Needs:
    """Return what a sampling mask needs: a program draws each token, also one that a grammar forces."""
    return Needs(frozenset({MASKED}), watched=True, sampled=True) if params.return_sampling_mask else Needs()


class SamplingMaskRows:
    """Which rows want sampling masks.

    Attributes:
        wants: [max_rows].
        count: the number of rows that do.
    """

    def __init__(self, max_rows: int) -> None:
        self.wants, self.count = np.zeros(max_rows, bool), 0

    def begins(self, row: int, request: Request) -> None:
        """Enter a request that wants them."""
        self.wants[row] = True
        self.count += 1

    def leaves(self, row: int) -> None:
        """Clear the entry of a row."""
        self.wants[row] = False
        self.count -= 1

    def variant(self, launched: Int[np.ndarray, " max_rows"], row_ids: Int[np.ndarray, " R"] | None = None) -> str:
        """Return the variant of a step of these rows; None: of any step."""
        if not self.count:
            return PLAIN
        return MASKED if row_ids is None or self.wants[row_ids].any() else PLAIN

    def section(self, tokens: int, known: Sequence[Known]) -> Section:
        """Need nothing of the tokens of a step."""
        return NO_SECTION

    def applied(self, landed: Landed, results: StepResults | None, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events with the masks of their tokens. A mask of more tokens than the program lists is empty."""
        if results is None or not landed.request.params.return_sampling_mask:
            return events
        ids, count = results.drawn[NAME]
        room = ids.shape[1]
        places = range(landed.place, landed.place + len(events))
        masks = [ids[place, : count[place] if count[place] <= room else 0].copy() for place in places]
        return [
            event if event.token is None else event._replace(sampling_mask=mask)
            for event, mask in zip(events, masks, strict=True)
        ]

    def check(self, used: Int[np.ndarray, " n"]) -> None:
        """Assert that rows which no request has are clear, and that the count is right."""
        wants = np.flatnonzero(self.wants)
        assert set(wants.tolist()) <= set(used.tolist()), "an unused row id wants a sampling mask"
        assert self.count == len(wants)


SAMPLING_MASK = Rib(
    NAME, ("return_sampling_mask",), {MASKED: Variant(finish=MASKED, asked=True)}, needs_of, SamplingMaskRows
)
