"""Pooled hidden states on the host: which steps compute them, and which events carry them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.plan import PLAIN, Request, StepResults, TokenEvent
from jswa.ribs.rib import NO_SECTION, Known, Landed, Needs, Rib, Section, Variant
from jswa.types import SamplingParams

NAME = "pooling"
POOLED = "pooling"  # the variant


class Kept(NamedTuple):
    """The sum of the hidden states of a prompt's first `end` tokens, in float64; see `traced.PooledRows`."""

    end: int
    total: Float[np.ndarray, " M"]


def needs_of(params: SamplingParams, images: bool) -> Needs:
    """Return what pooling needs. A mean needs the hidden states of all tokens, which no cache has."""
    if params.pooling is None:
        return Needs()
    return Needs(frozenset({POOLED}), watched=True, recompute="mean pooling" if params.pooling == "mean" else None)


class PoolingRows:
    """Which rows want their prompt pooled.

    Attributes:
        prompt_to: [max_rows], the length of the prompt of a row that does, 0 of any other.
        count: the number of rows that do.
    """

    def __init__(self, max_rows: int) -> None:
        self.prompt_to, self.count = np.zeros(max_rows, int), 0

    def begins(self, row: int, request: Request) -> None:
        """Enter a request that wants it."""
        self.prompt_to[row] = len(request.prompt)
        self.count += 1

    def leaves(self, row: int) -> None:
        """Clear the entries of a row."""
        self.prompt_to[row] = 0
        self.count -= 1

    def variant(self, launched: Int[np.ndarray, " max_rows"], row_ids: Int[np.ndarray, " R"] | None = None) -> str:
        """Return the variant of a step of these rows; None: of any step."""
        if not self.count:
            return PLAIN
        prompts = launched < self.prompt_to
        return POOLED if (prompts if row_ids is None else prompts[row_ids]).any() else PLAIN

    def section(self, tokens: int, known: Sequence[Known]) -> Section:
        """Need no number of the tokens: the program has their rows."""
        return NO_SECTION

    def applied(self, landed: Landed, results: StepResults | None, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events, that of the token with the pooled hidden state."""
        pooling, prompt = landed.request.params.pooling, len(landed.request.prompt)
        if pooling is None or results is None or NAME not in results.forwarded:
            return events
        last, total = results.forwarded[NAME]
        start = int(landed.plan.starts[landed.row])
        end = start + int(landed.plan.counts[landed.row])
        if pooling == "last":
            pooled = np.array(last[landed.row], np.float32)
        else:
            before: Kept | None = landed.notes.get(NAME) if start else None  # a row that begins anew computes all
            assert (before.end if before is not None else 0) == start, "a chunk of the prompt has not been added up"
            whole = total[landed.row].astype(np.float64) + (0.0 if before is None else before.total)
            landed.notes[NAME] = Kept(end, whole)
            pooled = (whole / prompt).astype(np.float32)
        return [event if event.error is not None else event._replace(pooled=pooled) for event in events]

    def check(self, used: Int[np.ndarray, " n"]) -> None:
        """Assert that rows which no request has are clear, and that the count is right."""
        wants = np.flatnonzero(self.prompt_to)
        assert set(wants.tolist()) <= set(used.tolist()), "an unused row id wants its prompt pooled"
        assert self.count == len(wants)


POOLING = Rib(NAME, ("pooling",), {POOLED: Variant(forward=POOLED, every=True, asked=True)}, needs_of, PoolingRows)
