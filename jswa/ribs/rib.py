"""The seam between an engine and its ribs, on the host. `hooks.Hooks` is the seam inside the jitted step.

    request   needs               what it needs besides tokens
    row       begins … leaves     the rib's own arrays by row
    step      variant, section    in which programs it runs, and what these need of each of its tokens
              forwarded, drawn    what the program computes besides tokens
              applied             what a row's events get of it

A request without needs costs a rib nothing: none of its methods is called for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jswa.plan import PLAIN, Request, StepPlan, StepResults, TokenEvent
from jswa.types import MissReason, SamplingParams


class Needs(NamedTuple):
    """What a request needs of the engine besides tokens.

    Attributes:
        variants: of the step programs in which it may run.
        watched: whether a rib looks at each of its tokens.
        recompute: why it may not start on cached KV; None: it may.
        sampled: whether a program must have sampled all of its tokens, also those that a grammar forces.
    """

    variants: frozenset[str] = frozenset()
    watched: bool = False
    recompute: MissReason | None = None
    sampled: bool = False


NO_NEEDS = Needs()


class Variant(NamedTuple):
    """A family of step programs that compute more than tokens.

    Attributes:
        forward, finish: the variants in which the halves of such a step run.
        embeds: whether its programs get rows in place of the embeddings of some tokens (`StepPlan.embedded`).
        every: whether its programs have the hidden states of all tokens, and get a number for each (`section`). Such
            steps have no drafts.
        asked: whether its programs are compiled only when a request asks for them, never ahead of it. They must take
            no more memory than those of the widest other variant, which the engine measures.
    """

    forward: str = PLAIN
    finish: str = PLAIN
    embeds: bool = False
    every: bool = False
    asked: bool = False


class Known(NamedTuple):
    """A row that runs known tokens in a step: all that are known, how many have run before, and how many it runs."""

    request: Request
    tokens: Int[np.ndarray, " K"]
    launched: int
    runs: int


_NO_NUMBERS = np.zeros(0, np.int32)


class Section(NamedTuple):
    """What the programs of a rib get for each of a step's T tokens.

    Attributes:
        numbers: for the hook of the forward pass; empty: it needs none.
        embedded: rows in place of the embeddings of tokens whose ids are negative (`StepPlan.embedded`).
    """

    numbers: Int[np.ndarray, " T0"] = _NO_NUMBERS
    embedded: Float[np.ndarray, "T M"] | None = None


NO_SECTION = Section()


class Landed(NamedTuple):
    """A row of a step that has come back.

    Attributes:
        notes: what ribs keep of the request, by name, also while it is preempted.
        row: its index in the plan.
        place: index of its first token among the draws of the step.
        generated: the number of its generated tokens, with those of this step.
    """

    request: Request
    notes: dict[str, Any]
    plan: StepPlan
    row: int
    place: int
    generated: int


@runtime_checkable
class RibRows(Protocol):
    """A rib's state of the running rows, `[max_rows]` each. The scheduler owns it, and calls it from its thread."""

    def begins(self, row: int, request: Request) -> None:
        """Enter a request with needs."""
        ...

    def leaves(self, row: int) -> None:
        """Clear the entries of a row that a request with needs leaves."""
        ...

    def variant(self, launched: Int[np.ndarray, " max_rows"], row_ids: Int[np.ndarray, " R"] | None = None) -> str:
        """Return the variant in which a step of these rows runs; None: the widest that any step may need now."""
        ...

    def section(self, tokens: int, known: Sequence[Known]) -> Section:
        """Return what the programs need of each of a step's tokens, `known` being the last of them.

        For variants with `every` or `embeds`. Of the ribs that meet in a step one may need numbers, and one rows.
        """
        ...

    def applied(self, landed: Landed, results: StepResults | None, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events of a row with what its request has asked for. `results`: None of a plain step."""
        ...

    def check(self, used: Int[np.ndarray, " n"]) -> None:
        """Assert that rows which no request has are clear; for tests."""
        ...


class Rib(NamedTuple):
    """One optional feature.

    Attributes:
        name: of its notes.
        fields: the sampling parameters that it serves.
        variants: of step programs, the one that computes most last. If rows of different ribs meet in a step, it runs
            in a variant of both (`table.VARIANTS`).
        needs: returns what a request with these parameters, and with or without images, needs of this rib.
        rows: makes its state for so many rows.
    """

    name: str
    fields: tuple[str, ...]
    variants: Mapping[str, Variant]
    needs: Callable[[SamplingParams, bool], Needs]
    rows: Callable[[int], RibRows]
