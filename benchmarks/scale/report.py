"""Tables and a plot of the results of `benchmarks.scale.run`.

    python -m benchmarks.scale.report benchmarks/results/cpu/scale_sim.json      writes scale_sim.md and .png beside it

The plot needs matplotlib (`pip install matplotlib`).
"""

import importlib.util
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from benchmarks.cache.ablation_table import spread
from benchmarks.scale.routers import POLICIES, Thresholds
from benchmarks.scale.simulate import SERVED, Served, fleet_of
from benchmarks.scale.traces import SHAPES

Row = dict[str, Any]
_HEAD = (
    "replicas, router",
    "hit rate, %",
    "window lost, %",
    "good, %",
    "goodput: requests/s, tokens/s per replica",
    "TTFT p50 / p95 / p99, s",
    "TPOT p50 / p95 / p99, ms",
    "busy, %",
    "max/mean",
    "evictions, preemptions",
)
# Output tokens/s of one H200 in the performance overview of TensorRT-LLM, by tokens in and out.
_PUBLISHED = {
    ("gpt-oss-120b", 1000, 1000): 6868,
    ("gpt-oss-120b", 8000, 1000): 1828,
    ("gpt-oss-20b", 1000, 1000): 13858,
    ("gpt-oss-20b", 8000, 1000): 4015,
}


def markdown(found: dict[str, Any]) -> str:
    """Return the whole report."""
    rows: list[Row] = found["rows"]
    assumed, limits = found["assumed"], Thresholds()
    parts = [
        "# Simulated fleets, in virtual time\n",
        f"    {found['command']}\n    python -m benchmarks.scale.report FILE\n",
        "**No kernel was timed on a GPU.** Schedulers, prefix caches and routers are real and run every request; the "
        "time of a step is computed from its bytes, its FLOP, the data sheet's peaks of an "
        f"{found['device']['name']}, and assumed shares of these: {assumed['bandwidth']:.0%} of the bandwidth, "
        f"{assumed['flops']:.0%} of the FLOP, {assumed['link']:.0%} of the links. Absolute times and rates are as good "
        "as these assumptions; the ranking of the routers depends on them little (see other assumptions, below).\n",
        "Replicas start empty; figures count the requests that arrived in the last part of the simulated time "
        f"({_spans(rows)}). The load per replica does not depend on their number. Hit rate: share of prompt tokens "
        "that no layer computed. Window lost: share of prompt tokens whose full-attention KV was cached, but which "
        "were computed again because their window was not. Goodput: answers within the trace's limits of time to first "
        "token (TTFT) and time per output token (TPOT); a slow fleet also has fewer requests, because its users wait "
        "for an answer before they go on. Busy: share of the time in which the device ran a step. Max/mean: tokens "
        "computed by the busiest replica over the mean. "
        f"Router thresholds: {limits.cache_threshold} of the prompt, {limits.abs_threshold} requests and a factor of "
        f"{limits.rel_threshold}.\n",
    ]
    parts += [_orientation()]
    for name, shape in SHAPES.items():
        chosen = [row for row in rows if row["section"] == "main" and row["trace"] == name]
        if chosen:
            parts.append(
                f"## {name}, {chosen[0]['model']}\n\n{chosen[0]['rate']:.2f} sessions/s per replica; good: TTFT up to "
                f"{shape.ttft:g} s, TPOT up to {1000 * shape.tpot:.0f} ms; shape: {shape.source}.\n\n"
                + _table(chosen, lambda row: str(row["replicas"]))
            )
    parts += _section(rows, "models", "Other models", lambda row: f"{row['model']}, {row['trace']}")
    parts += _section(rows, "load", "More and less load", lambda row: f"{row['trace']}, {row['rate']:.2f}/s")
    parts += _section(
        rows,
        "assumed",
        "Other assumptions: half of the load, and half of the shares of the peaks",
        lambda row: f"{row['trace']}, {row['bandwidth']:.0%}, {row['flops']:.0%}",
    )
    parts += _windows([row for row in rows if row["section"] == "windows"])
    return "\n".join(parts)


def _windows(rows: Sequence[Row]) -> list[str]:
    """Return the table of the routers that know prefixes, with median and range over seeds."""
    if not rows:
        return []
    head = ("setting, router", "hit rate, %", "window lost, %", "good, %", "TTFT p50, s", "TTFT p99, s", "max/mean")
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    for trace, policy in product(SHAPES, POLICIES):
        chosen = [row for row in rows if (row["trace"], row["policy"]) == (trace, policy)]
        if chosen:
            lines.append(
                (
                    f"{trace}, {chosen[0]['rate']:.2f}/s, {policy}",
                    *(spread([100 * row[key] for row in chosen], 1) for key in ("hit_rate", "window_lost")),
                    spread([100 * row["good_share"] for row in chosen], 1),
                    *(spread([row["ttft"][at] for row in chosen], 2) for at in ("p50", "p99")),
                    spread([row["computed_max_over_mean"] for row in chosen], 2),
                )
            )
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    seeds = len({row["seed"] for row in rows})
    title = f"## The value of knowing windows\n\n{rows[0]['replicas']} replicas, {seeds} seeds: median (range).\n\n"
    return [f"{title}{table}\n"]


def _spans(rows: Sequence[Row]) -> str:
    spans = sorted({(row["warm"], row["seconds"]) for row in rows})
    return " or ".join(f"{warm:g} to {end:g} s" for warm, end in spans)


def _section(rows: Sequence[Row], name: str, title: str, setting: Any) -> list[str]:
    chosen = [row for row in rows if row["section"] == name]
    if not chosen:
        return []
    replicas = ", ".join(sorted({str(row["replicas"]) for row in chosen}))
    return [f"## {title}\n\n{replicas} replicas.\n\n" + _table(chosen, setting, "setting, router")]


def _table(rows: Sequence[Row], setting: Any, first: str = _HEAD[0]) -> str:
    """Return a table, ordered by setting and then by router."""
    lines = [(first, *_HEAD[1:]), ("---", *["---:"] * (len(_HEAD) - 1))]
    order = {setting(row): at for at, row in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda row: (order[setting(row)], POLICIES.index(row["policy"]))):
        ttft, tpot = row["ttft"], row["tpot"]
        lines.append(
            (
                f"{setting(row)}, {row['policy']}",
                f"{100 * row['hit_rate']:.1f}",
                f"{100 * row['window_lost']:.1f}",
                f"{100 * row['good_share']:.1f}",
                f"{row['goodput_per_s']:.2f}, {row['good_tokens_per_s']:.0f}",
                " / ".join(f"{ttft[at]:.2f}" for at in ("p50", "p95", "p99")),
                " / ".join(f"{1000 * tpot[at]:.0f}" for at in ("p50", "p95", "p99")),
                f"{100 * row['busy']:.0f}",
                f"{row['computed_max_over_mean']:.2f}",
                f"{row['evictions']}, {row['preemptions']}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _orientation() -> str:
    """Return a table of the step-time model beside published figures."""
    cells = []
    for (model, prompt, output), published in _PUBLISHED.items():
        cells.append(
            f"| {model}, one H200, {prompt:,} in and {output:,} out | {throughput(model, prompt, output):,.0f} | "
            f"{published:,} |"
        )
    head = "| output tokens/s, 256 rows, nothing cached | this model | TensorRT-LLM, published |\n| --- | ---: | ---: |"
    return "\n".join(
        [
            "The assumptions are optimistic: this model is faster than the published figures of a tuned engine.\n",
            head,
            *cells,
            "",
        ]
    )


def throughput(model: str, prompt: int, output: int, rows: int = 256) -> float:
    """Return output tokens per second of one device with full batches, from the step-time model alone."""
    served = Served(model, 1, expert_bits=4.25) if model not in SERVED or SERVED[model].devices > 1 else SERVED[model]
    time = fleet_of(served, longest=prompt + output).time
    chunks = [(at, min(2048, prompt - at)) for at in range(0, prompt, 2048)]
    prefill = sum(float(time.seconds(time.work(np.array([at]), np.array([n]), 0))) for at, n in chunks)
    lengths = np.full(rows, prompt + output // 2)
    decode = float(time.seconds(time.work(lengths, np.ones(rows, np.int64), rows)))
    return rows * output / (rows * prefill + output * decode)


def plot(rows: Sequence[Row], to: Path) -> None:
    """Plot hit rate, share of good answers and p99 of the time to first token by number of replicas and trace."""
    from matplotlib import pyplot

    kinds = (("hit_rate", "hit rate, %", 100), ("good_share", "good answers, %", 100), ("ttft", "TTFT p99, s", 1))
    shown = [name for name in SHAPES if any(row["trace"] == name for row in rows)]
    figure, axes = pyplot.subplots(3, len(shown), figsize=(3.2 * len(shown), 7), sharex=True, squeeze=False)
    for column, name in enumerate(shown):
        for policy in POLICIES:
            chosen = [row for row in rows if (row["trace"], row["policy"]) == (name, policy)]
            chosen.sort(key=lambda row: int(row["replicas"]))
            for line, (key, label, scale) in enumerate(kinds):
                values = [row[key]["p99"] if key == "ttft" else scale * row[key] for row in chosen]
                style = "o-" if len(chosen) > 2 else "x"
                axes[line][column].plot([row["replicas"] for row in chosen], values, style, label=policy, markersize=4)
                axes[line][0].set_ylabel(label)
        axes[0][column].set_title(name)
        axes[2][column].set(xscale="log", ylim=(0, None), xlabel="replicas")
        axes[0][column].set_ylim(0, 100)
        axes[1][column].set_ylim(0, 103)
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[1][0].legend(fontsize=7, loc="lower left")
    figure.suptitle(f"{rows[0]['model']}, step times computed, not measured", fontsize=9)
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main() -> None:
    """Read the result file; write the tables and the picture beside it."""
    source = Path(sys.argv[1])
    found = result_file.read(source)
    source.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    rows = [row for row in found["rows"] if row["section"] == "main"]
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    elif rows:
        plot(rows, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
