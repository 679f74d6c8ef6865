"""Goals of decode steps by the frozen prediction: with the kernels of today's defaults, and with all fast ones.

    python -m benchmarks.predict.goals

Prints the tables of docs/performance.md. Constants are those of `constants.py`, whichever kernels run. What the fast
kernels change is counted in steps compiled for an H200 (tools/aot/gates/steps.json): kernels in a layer, and how often
the logits are read or written.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.predict.constants import H200, Constants
from benchmarks.predict.counts import FORMATS
from benchmarks.predict.figures import known
from benchmarks.predict.step import DEFAULT, Backends, Drawing, Load, Predicted, Setting, Work, predict, works_of
from tools import gates

_ELEMENTWISE = "elementwise on mosaic, sampling on triton"
_OSS, _GEMMA = "gpt-oss-20b, 4 layers", "gemma-3-27b, 6 layers"
# Kernels of a draw on Triton beside those of greedy rows, and readings of the logits, of which it needs parts.
_DRAW_KERNELS, _DRAW_PASSES = 6, 1
_GREEDY_KERNELS = 11


@dataclass(frozen=True)
class Goal:
    """A goal of a decode step.

    Attributes:
        fast: the compiled step with all fast kernels that serve it, in gates/steps.json.
        seconds: at most; or
        share: of the roof, at least.
    """

    model: str
    formats: str
    load: Load
    fast: str
    seconds: float = 0.0
    share: float = 0.0

    @property
    def name(self) -> str:
        """The name in the tables."""
        size = f"{self.load.rows} x {self.load.context:,}"
        return f"{self.model}, {self.formats}, {size}, {self.load.drawing}"

    def limit(self, roof: float) -> float:
        """Return the seconds that the goal allows."""
        return self.seconds or roof / self.share


_WIDE = f"{_OSS}, 256 rows, mxfp4, {_ELEMENTWISE}, routing on triton, experts on mosaic_overlap"
_EIGHT_BITS = f"{_GEMMA}, 64 rows, fp8, fp8 KV, {_ELEMENTWISE}, linear layers on mosaic"
GOALS = (
    Goal("gpt-oss-20b", "mxfp4", Load(256, 1536), _WIDE, 6.8e-3),
    Goal("gpt-oss-20b", "mxfp4", Load(256, 1536, 1, "top-p"), _WIDE, 7.2e-3),
    Goal("gpt-oss-20b", "mxfp4", Load(1, 1536), f"{_OSS}, 1 rows, mxfp4, {_ELEMENTWISE}, routing on triton", 1.4e-3),
    Goal("gemma-3-27b", "bf16", Load(64, 8192), f"{_GEMMA}, 64 rows, {_ELEMENTWISE}", share=0.88),
    Goal("gemma-3-27b", "fp8, fp8 KV", Load(64, 8192), _EIGHT_BITS, 18e-3),
)


class Found(NamedTuple):
    """A goal by the prediction: with default kernels, and with fast ones."""

    goal: Goal
    default: Predicted
    fast: Predicted
    works: tuple[Work, ...]  # with fast ones


def fast_setting(goal: Goal) -> Setting:
    """Return the goal's model with its fast kernels, as compiled."""
    compiled = json.loads((gates.FOLDER / "steps.json").read_text(encoding="utf-8"))["figures"][goal.fast]
    greedy = compiled["logits_greedy"]
    drawn = greedy + _DRAW_PASSES, _GREEDY_KERNELS + _DRAW_KERNELS
    passes: dict[Drawing, tuple[int, int]] = {"greedy": (greedy, _GREEDY_KERNELS), "temperature": drawn, "top-p": drawn}
    routed = "routing on triton" in goal.fast  # where one kernel routes, it copies rows, and the norms sum them
    routing, gather = (1, 0) if routed else (DEFAULT.routing, DEFAULT.gather)
    backends = Backends(routing, gather, {**DEFAULT.passes, **passes}, noise=False)
    return replace(known(goal.model, FORMATS[goal.formats]), kernels=compiled["in_layer"], backends=backends)


def found(goal: Goal, constants: Constants) -> Found:
    """Predict a goal's step."""
    fast = fast_setting(goal)
    default = predict(known(goal.model, FORMATS[goal.formats]), goal.load, constants)
    return Found(goal, default, predict(fast, goal.load, constants), works_of(fast, goal.load))


def goals_table(rows: Sequence[Found]) -> list[str]:
    """Return the table of goals as lines of Markdown."""
    lines = [
        "| decode step | goal, ms | default kernels, ms | all fast kernels, ms | over the goal | share of the roof |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for goal, default, fast, _ in rows:
        limit = goal.limit(fast.roof)
        share = f" ({goal.share:.0%} of the roof)" if goal.share else ""
        lines.append(
            f"| {goal.name} | {1e3 * limit:.2f}{share} | {_ms(default, limit)} | {_ms(fast, limit)} | "
            f"{fast.seconds / limit - 1:+.0%} | {fast.roof / fast.seconds:.0%} |"
        )
    return lines


def losses_table(rows: Sequence[Found], constants: Constants, most: int = 4) -> list[str]:
    """Return a table of the scopes that lose most over their roofs, with all fast kernels."""
    lines = ["| decode step | ms over the roof, by scope |", "| --- | --- |"]
    for goal, _, _, works in rows:
        lost = sorted(((work.seconds(constants) - work.roof(constants), work.scope) for work in works), reverse=True)
        lines.append(f"| {goal.name} | {', '.join(f'{scope} {1e3 * more:.2f}' for more, scope in lost[:most])} |")
    return lines


def _ms(step: Predicted, limit: float) -> str:
    met = "met" if step.seconds <= limit else "missed"
    return f"{1e3 * step.seconds:.2f} ({1e3 * step.low:.1f} to {1e3 * step.high:.1f}), {met}"


def main() -> None:
    """Print the tables."""
    rows = [found(goal, H200.constants) for goal in GOALS]
    print("\n".join([*goals_table(rows), "", *losses_table(rows, H200.constants)]))


if __name__ == "__main__":
    main()
