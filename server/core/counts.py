"""Counts of requests and tokens, since the start or since the last report: sums that processes may add up."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import numpy as np

from ..killable.pool import Pool
from .fairness import Lanes

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
BETWEEN = "inter_token_latency_seconds"
_GAPS = 4_096  # spans between tokens that are counted together


class Distribution(msgspec.Struct):
    """A histogram. `counts[i]` values are at most bound i and above the bounds before it; the last are above all."""

    counts: list[int]
    total: float = 0.0

    @staticmethod
    def over(bounds: tuple[float, ...]) -> "Distribution":
        """Return an empty histogram with these bounds."""
        return Distribution([0] * (len(bounds) + 1))

    def observe(self, value: float, bounds: tuple[float, ...]) -> None:
        """Count a value."""
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def observe_all(self, values: list[float], bounds: tuple[float, ...]) -> None:
        """Count many values."""
        found = np.bincount(np.searchsorted(bounds, values), minlength=len(self.counts))
        self.counts = [one + more for one, more in zip(self.counts, found.tolist(), strict=True)]
        self.total += sum(values)


class Counts(msgspec.Struct):
    """Sums over requests. `numbers` has plain counts, `responses` those of HTTP responses by "STATUS ROUTE".

    A client can add no names: all of them are this program's.
    """

    numbers: dict[str, int] = msgspec.field(default_factory=Counter)
    reasons: dict[str, int] = msgspec.field(default_factory=Counter)
    responses: dict[str, int] = msgspec.field(default_factory=Counter)
    spans: dict[str, Distribution] = msgspec.field(default_factory=dict)

    def add(self, other: "Counts") -> None:
        """Add other counts to these."""
        for own, more in (
            (self.numbers, other.numbers), (self.reasons, other.reasons), (self.responses, other.responses),
        ):  # fmt: skip
            for name, count in more.items():
                own[name] = own.get(name, 0) + count
        for name, found in other.spans.items():
            span = self.spans.setdefault(name, Distribution([0] * len(found.counts)))
            span.counts = [one + two for one, two in zip(span.counts, found.counts, strict=True)]
            span.total += found.total


class Recorder:
    """Counts what happens in one process. `counts`: since the start, or since `take`."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._gaps: list[float] = []

    def number(self, name: str, more: int = 1) -> None:
        """Add to a plain count."""
        self.counts.numbers[name] += more

    def response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        self.counts.responses[f"{status} {route}"] += 1

    def reasons(self, names: Iterable[str]) -> None:
        """Count texts by why they have ended."""
        for name in names:
            self.counts.reasons[name] += 1

    def span(self, name: str, value: float, bounds: tuple[float, ...]) -> None:
        """Count a value of a histogram."""
        self.counts.spans.setdefault(name, Distribution.over(bounds)).observe(value, bounds)

    def prompt(self, tokens: int) -> None:
        """Count the prompt tokens of a request that has its first token."""
        self.counts.numbers["prompt_tokens"] += tokens

    def first(self) -> None:
        """Count the first token of a text."""
        self.counts.numbers["generation_tokens"] += 1

    def token(self, seconds: float) -> None:
        """Count a token of a text, and the seconds since the one before it."""
        self._gaps.append(seconds)
        if len(self._gaps) == _GAPS:
            self.fold()

    def fold(self) -> None:
        """Add the tokens that were counted last to `counts`."""
        gaps, self._gaps = self._gaps, []
        if gaps:
            self.counts.numbers["generation_tokens"] += len(gaps)
            self.counts.spans.setdefault(BETWEEN, Distribution.over(SECONDS)).observe_all(gaps, SECONDS)

    def take(self) -> Counts:
        """Return the counts and begin anew."""
        self.fold()
        counts, self.counts = self.counts, Counts()
        return counts


class Load(msgspec.Struct):
    """What the routes of one process have to do at this moment, and their refusals since its start.

    `adapters_running`, `adapters_waiting`: requests by adapter, since their first step and before it.
    """

    requests: int = 0
    tasks: int = 0
    body_bytes: int = 0
    bodies_refused: int = 0
    answer_bytes: int = 0
    answers_refused: int = 0
    helper_waiting: int = 0
    helper_refused: int = 0
    template_waiting: int = 0
    template_refused: int = 0
    template_killed: int = 0
    form_waiting: int = 0
    form_refused: int = 0
    form_killed: int = 0
    image_waiting: int = 0
    image_refused: int = 0
    image_killed: int = 0
    adapters_running: dict[str, int] = msgspec.field(default_factory=dict)
    adapters_waiting: dict[str, int] = msgspec.field(default_factory=dict)


class Report(msgspec.Struct):
    """What the routes of one process have counted since their last report, and their load."""

    counts: Counts
    load: Load


def added(one: Load, other: Load) -> Load:
    """Return the sum of two loads."""
    pairs = ((getattr(one, name), getattr(other, name)) for name in Load.__struct_fields__)
    return Load(*(_sum(left, right) for left, right in pairs))


def _sum(one: int | dict[str, int], other: int | dict[str, int]) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in one | other}
    return cast(int, one) + cast(int, other)


def image_load(fetching: Lanes, preparing: Pool | None) -> Load:
    """Return how many images wait to be fetched or prepared, how many were refused, and how many were too costly."""
    lanes = [fetching] if preparing is None else [fetching, preparing.lanes]
    waiting, refused = sum(one.waiting for one in lanes), sum(one.refused for one in lanes)
    return Load(image_waiting=waiting, image_refused=refused, image_killed=0 if preparing is None else preparing.killed)
