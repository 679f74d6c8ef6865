"""Ablations: three ideas of other engines that jswa is built on, each measured on and off.

    python -m benchmarks.cache.ablations [--tables freeing indices prefix] [--out benchmarks/results/cpu]
    .venv-gpu/bin/python -m benchmarks.cache.ablations --tables compiled     `indices` compiled for an H200

freeing   Local KV that has left the window is freed while a row decodes (SGLang's pull request 17220): hit rate, time
          to the first token and local tokens held, in multi-turn conversations (`ablation_freeing`).
indices   The indices of a step are computed once and not in every layer (20449, 23552, 24138): gathers, speed, equal
          tokens (`ablation_indices`).
prefix    A radix cache for sliding-window models (7367): answers, bits per byte, hit rate, time (`ablation_prefix`).

The engine has no switch for the first two: their modules turn the idea off by wrapping functions of the engine. Tables
are written to ablations.json and ablations.md; a table that --tables does not name stays as it is there.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.cache import ablation_freeing, ablation_indices, ablation_prefix

OUT = Path(__file__).parents[1] / "results" / "cpu"
MEASURE: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "freeing": ablation_freeing.results,
    "indices": ablation_indices.results,
    "compiled": ablation_indices.on_h200,
    "prefix": ablation_prefix.results,
}


def markdown(tables: dict[str, Any]) -> str:
    """Return the report: every table that has been measured."""
    found = {name: entry["results"] for name, entry in tables.items()}
    parts = []
    if "freeing" in found:
        parts.append(ablation_freeing.table(found["freeing"]))
    if "indices" in found or "compiled" in found:
        parts.append(ablation_indices.table(found.get("indices", []), found.get("compiled", [])))
    if "prefix" in found:
        parts.append(ablation_prefix.table(found["prefix"]))
    return "\n".join(["# Ablations: each idea on and off\n", *(part.markdown() for part in parts)])


def measured(name: str) -> dict[str, Any]:
    """Measure one table; return its results behind the header of a result file."""
    results = MEASURE[name]()
    return dict(result_file.rounded({**result_file.about(), "results": results}))


def main() -> None:
    """Measure the named tables, then print and write all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tables", nargs="+", choices=list(MEASURE), default=["freeing", "indices", "prefix"], help="to measure"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of ablations.json and ablations.md")
    args = parser.parse_args()
    path = args.out / "ablations.json"
    tables = result_file.read(path)
    for name in args.tables:
        tables[name] = measured(name)
        result_file.write(path, tables, header={})
    text = markdown(tables)
    (args.out / "ablations.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
