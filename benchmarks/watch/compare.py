"""Figures of two trees as rows: ratios of pairs, and what must be equal."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.watch.sides import Figures

Rule = Literal["paired", "equal", "counted"]
WIDTH = 76  # columns of a name
# A row is called slower or faster if its median differs from 1 by so much, and so many of its pairs agree that chance
# would do it less often than this.
CLEAR, CHANCE = 0.02, 1 / 16


@dataclass(frozen=True)
class Row:
    """A figure of both trees. Less is better, unless the rule is "equal".

    Attributes:
        rule: paired: it varies from turn to turn, and ratios of pairs are compared. equal: it must be the same.
            counted: it never varies, and may differ.
        base, here: by turn.
        error: why there are no figures.
        note: what else a reader must know of them.
    """

    name: str
    rule: Rule
    base: tuple[float, ...] = ()
    here: tuple[float, ...] = ()
    error: str | None = None
    note: str = ""
    ratios: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.base, self.here, strict=True)
        object.__setattr__(self, "ratios", tuple(here / base for base, here in pairs if base))

    @property
    def is_different(self) -> bool:
        """Whether what must be equal is not."""
        return self.rule == "equal" and self.base != self.here

    @property
    def verdict(self) -> str:
        """What the row says, in a word or none."""
        if self.rule == "equal":
            return "DIFFERENT" if self.is_different else "equal"
        if self.rule == "counted":
            return "" if self.base == self.here else "more" if self.here > self.base else "fewer"
        middle, more = statistics.median(self.ratios), sum(ratio > 1 for ratio in self.ratios)
        if middle >= 1 + CLEAR and _by_chance(more, len(self.ratios)) <= CHANCE:
            return "slower"
        fewer = len(self.ratios) - more
        return "faster" if middle <= 1 - CLEAR and _by_chance(fewer, len(self.ratios)) <= CHANCE else ""

    def line(self) -> str:
        """Return the row as it is printed."""
        if self.error is not None:
            return f"{self.name:{WIDTH}} {self.error}"
        base, here = statistics.median(self.base), statistics.median(self.here)
        spread = ""
        if self.rule == "paired":
            spread = f"{statistics.median(self.ratios):7.3f} ({min(self.ratios):.3f} to {max(self.ratios):.3f})"
        shown = f"{self.name:{WIDTH}} {_shown(base):>11} {_shown(here):>11} {spread:26} {self.verdict}"
        return f"{shown} {self.note}".rstrip()

    def record(self) -> dict[str, Any]:
        """Return the row as the history keeps it."""
        if self.error is not None:
            return {"row": self.name, "error": self.error}
        base, here = statistics.median(self.base), statistics.median(self.here)
        found: dict[str, Any] = {"row": self.name, "rule": self.rule, "base": base, "here": here}
        if self.rule == "paired":
            least, most = min(self.ratios), max(self.ratios)
            found |= {"ratio": statistics.median(self.ratios), "least": least, "most": most, "pairs": len(self.ratios)}
        return {**found, "note": self.note} if self.note else found


def rows_of(rule: Rule, base: Sequence[Figures], here: Sequence[Figures], note: str = "") -> list[Row]:
    """Return a row per figure from the turns of both trees, which took turns: number n of each is a pair.

    A figure that only one tree has is a row with an error.
    """
    rows = []
    for name in dict.fromkeys(name for figures in (*here, *base) for name in figures):
        sides = [tuple(figures[name] for figures in turns if name in figures) for turns in (base, here)]
        if len(sides[0]) == len(sides[1]):
            rows.append(Row(name, rule, sides[0], sides[1], note=note))
        else:
            missing = "the base" if sides[1] else "this tree"
            rows.append(Row(name, rule, error=f"not measured: {missing} has no such figure"))
    return rows


def _by_chance(agree: int, pairs: int) -> float:
    """Return the chance that so many pairs or more agree if each says either with the same chance (the sign test)."""
    return float(sum(math.comb(pairs, count) for count in range(agree, pairs + 1)) / 2**pairs)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.4g}"
