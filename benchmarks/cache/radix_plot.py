"""Plot of the hit rates that `benchmarks.cache.radix` has measured, as sessions in any order outgrow the pool.

    python -m benchmarks.cache.radix_plot benchmarks/results/cpu/radix.json hit-rate.png

Needs matplotlib (`pip install matplotlib`).
"""

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import result_file

BASELINES = {
    "an infinite cache": "ideal",
    "full KV on every layer, jswa's cache": "full_jswa",
    "full KV on every layer, LRU": "full_lru",
}
STYLES = dict(zip(BASELINES, ("k:", "k-.", "k--"), strict=True))


def points(results: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (sessions in % of the pool, hit rate in %) by line of the plot, from sessions in any order."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in results:
        found = re.match(r"sessions in any order, (\d+) %", row["workload"])
        if found is None:
            continue
        share = int(found[1])
        lines.setdefault(f"jswa, {row['model']}", []).append((share, 100 * row["jswa"]))
        for name, key in BASELINES.items():
            line = lines.setdefault(name, [])
            if row[key] is not None and share not in [x for x, _ in line]:
                line.append((share, 100 * row[key]))
    return {name: sorted(line) for name, line in lines.items()}


def plot(lines: dict[str, list[tuple[int, float]]], to: Path) -> None:
    """Draw the lines of `points`."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), STYLES.get(name, "o-"), label=name, markersize=4)
    axes.set(xlabel="sessions in any order, % of the pool (as full KV)", ylabel="prompt tokens not computed, %", ylim=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(to, dpi=120)


def main() -> None:
    """Read the result file and write the picture."""
    source, to = map(Path, sys.argv[1:])
    plot(points(result_file.read(source)["rows"]), to)


if __name__ == "__main__":
    main()
