"""The history that `benchmarks.watch.run --record` writes: an entry per commit, in benchmarks/results/cpu/history.json.

    python -m benchmarks.watch.history PICTURE        draw it (.png or .svg; needs matplotlib)

An entry has figures of its commit and of its base, measured in turns. Times of different entries were measured at
different speeds of the machine: a row's line multiplies the ratios, entry after entry, and begins at 1 with the first.
An entry's base should be the commit of the entry before: what lies between is in no ratio. Counts need no ratios.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.watch.compare import Row

PATH = result_file.ROOT / "benchmarks" / "results" / "cpu" / "history.json"
_COLUMNS = 2
Entry = dict[str, Any]
Line = list[tuple[int, float]]  # number of the entry, and the figure relative to that of the first


def entries(path: Path = PATH) -> list[Entry]:
    """Return the entries, oldest first."""
    found: list[Entry] = result_file.read(path).get("entries", [])
    return found


def append(commit: str, base: str, rows: Sequence[Row], seconds: float, path: Path = PATH) -> None:
    """Append an entry; say so if commits between the last entry and this one's base are in no entry."""
    before = entries(path)
    if before and before[-1]["commit"] != base:
        print(f"what changed between {before[-1]['commit']} (the last entry) and {base} (the base) is in no entry")
    about = result_file.about()
    versions = {**about["versions"], **{name: version(name) for name in ("jax", "numpy")}}
    head = {**about, "commit": commit, "base": base, "seconds": round(seconds), "versions": versions}
    entry = {**head, "rows": [row.record() for row in rows]}
    result_file.write(path, {"entries": [*before, entry]}, header={})
    print(f"entry {len(before) + 1} of {path.name}: {commit}")


def lines(found: Sequence[Entry]) -> dict[str, Line]:
    """Return each row's line. An entry without a figure has no point, and what it changed is not known."""
    out: dict[str, Line] = {}
    first: dict[str, float] = {}
    for number, entry in enumerate(found):
        for row in entry["rows"]:
            if "error" in row:
                continue
            line = out.setdefault(row["row"], [])
            if not line:
                first[row["row"]] = row["here"]
                line.append((number, 1.0))
            elif row["rule"] == "paired":
                line.append((number, line[-1][1] * row["ratio"]))
            elif first[row["row"]]:
                line.append((number, row["here"] / first[row["row"]]))
    return out


def draw(found: Sequence[Entry], path: Path) -> None:
    """Draw a small plot per row. Raises SystemExit without matplotlib, and if there are no entries."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install matplotlib") from None
    if not found:
        raise SystemExit(f"{PATH.name} has no entries: python -m benchmarks.watch.run --record")
    drawn: Mapping[str, Line] = lines(found)
    count = -(-len(drawn) // _COLUMNS)
    figure, grid = pyplot.subplots(count, _COLUMNS, figsize=(10, 1.9 * count), squeeze=False)
    commits = [entry["commit"] for entry in found]
    for axis, (name, line) in zip(grid.flat, drawn.items(), strict=False):
        axis.axhline(1.0, color="0.7", linewidth=1)
        axis.plot(*zip(*line, strict=True), "o-", markersize=3)
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_xticks(range(len(commits)), commits, rotation=30)
        least, most = min(value for _, value in line), max(value for _, value in line)
        axis.set_ylim(min(0.9, least - 0.05), max(1.1, most + 0.05))
    for axis in grid.flat[len(drawn) :]:
        axis.set_visible(False)
    figure.suptitle("relative to the first entry", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    draw(entries(), Path(sys.argv[1]))
