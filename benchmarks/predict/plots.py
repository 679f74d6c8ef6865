"""Plots of a report: the roofline of attention, step time by context, and the share of a step by scope.

What is drawn is gathered by `roofline_points`, `step_lines` and `scope_bars`, which need no matplotlib. A roof is the
one that was measured in the same run; the prediction's is never drawn as measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.predict.constants import Constants
from benchmarks.predict.counts import FORMATS
from benchmarks.predict.figures import known
from benchmarks.predict.results import File, Results, formats_of, model_of, title_of
from benchmarks.predict.step import SCOPES, Load, roof_of, seconds_of, works_of

Line = list[tuple[float, float]]


class StepLine(NamedTuple):
    """Decode steps of one model and number of rows: (tokens of context, ms), by ascending context."""

    model: str
    rows: int
    measured: Line
    predicted: Line
    roof: Line


def roofline_points(kernels: File) -> dict[str, Line]:
    """Return (FLOP per byte, TFLOP/s) of each measured call, by implementation."""
    points: dict[str, Line] = {}
    for row in kernels["attention"]:
        for name, seconds in row["seconds"].items():
            if isinstance(seconds, dict):
                rate = row["flops"] / seconds["median"] / 1e12
                points.setdefault(name, []).append((row["flops"] / row["bytes"], rate))
    return points


def step_lines(results: Results, constants: Constants | None) -> list[StepLine]:
    """Return the measured decode steps, with prediction and its roof if there are constants."""
    found = []
    for path, file in results.stages["steps"]:
        name, formats = model_of(path, file), formats_of(file)
        rows = [row for row in file["steps"] if "seconds" in row and row["tokens"] == 1]
        for count in sorted({row["rows"] for row in rows}):
            of_count = sorted((row["context"], row["seconds"]["median"]) for row in rows if row["rows"] == count)
            line = StepLine(title_of(path, file), count, [(at, 1e3 * seconds) for at, seconds in of_count], [], [])
            if constants is not None and name is not None and formats is not None:
                for at, _ in of_count:
                    works = works_of(known(name, FORMATS[formats]), Load(count, at))
                    line.predicted.append((at, 1e3 * seconds_of(works, constants)))
                    line.roof.append((at, 1e3 * roof_of(works, constants)))
            found.append(line)
    return found


def scope_bars(results: Results, constants: Constants | None) -> dict[str, dict[str, float]]:
    """Return the predicted share of each scope, by step: of each model and number of rows, the longest context."""
    bars: dict[str, dict[str, float]] = {}
    for path, file in results.stages["steps"]:
        name, formats = model_of(path, file), formats_of(file)
        if constants is None or name is None or formats is None:
            continue
        longest: dict[int, int] = {}
        for row in file["steps"]:
            if "seconds" in row and row["tokens"] == 1:
                longest[row["rows"]] = max(longest.get(row["rows"], 0), row["context"])
        for rows, context in sorted(longest.items()):
            works = works_of(known(name, FORMATS[formats]), Load(rows, context))
            total = seconds_of(works, constants)
            bars[f"{name}, {rows} x {context:,}"] = {work.scope: work.seconds(constants) / total for work in works}
    return bars


def plot_roofline(kernels: File, path: Path) -> None:
    """Plot FLOP per second over FLOP per byte, a colour per implementation, under the roof of the same run."""
    from matplotlib import pyplot

    ceilings = kernels["ceilings"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    reach = [0.1, ceilings["flops"] / ceilings["copy_bytes_per_s"], 1e5]
    roof = [min(x * ceilings["copy_bytes_per_s"], ceilings["flops"]) / 1e12 for x in reach]
    axes.loglog(reach, roof, "k-", label="copy and matrix product of this run")
    for name, line in roofline_points(kernels).items():
        axes.loglog(*zip(*line, strict=True), "o", label=name, markersize=4)
    axes.set(xlabel="FLOP per byte moved", ylabel="TFLOP/s", title=f"attention on {kernels['device']}")
    axes.legend(fontsize=8)
    _save(figure, path)


def plot_steps(lines: Sequence[StepLine], device: str, machine: str | None, path: Path) -> None:
    """Plot step time over context: points are measured, dashed lines predicted, dotted ones the prediction's roof."""
    from matplotlib import pyplot

    models = list(dict.fromkeys(line.model for line in lines))
    figure, axes = pyplot.subplots(1, len(models), figsize=(4.2 * len(models), 3.8), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for line in (each for each in lines if each.model == model):
            (drawn,) = axis.plot(*zip(*line.measured, strict=True), "o-", markersize=4, label=f"rows: {line.rows}")
            for points, style in ((line.predicted, "x--"), (line.roof, "_:")):
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=drawn.get_color(), markersize=4)
        axis.set(title=model, xlabel="tokens of context", ylabel="ms per decode step", xscale="log")
        axis.set_ylim(0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    beside = "" if machine is None else f"; dashed: predicted for {machine}, dotted: its roof"
    figure.suptitle(f"measured on {device}{beside}", fontsize=9)
    _save(figure, path)


def plot_scopes(bars: dict[str, dict[str, float]], machine: str, path: Path) -> None:
    """Plot the predicted share of a step by scope, a bar per step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.4 * len(bars)))
    left = [0.0] * len(bars)
    for number, scope in enumerate(SCOPES):
        widths = [100 * shares.get(scope, 0.0) for shares in bars.values()]
        if any(widths):
            axes.barh(list(bars), widths, left=left, label=scope, color=pyplot.get_cmap("tab20")(number))
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlim=(0, 100), xlabel="% of the step", title=f"share by scope, predicted for {machine}, not measured")
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
