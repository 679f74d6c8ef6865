"""Three ideas that this engine grew from, each measured as it was published and here, with it and without.

    python -m benchmarks.cache.ablations [--tables freeing indices prefix] [--out benchmarks/results/cpu]
    .venv-gpu/bin/python -m benchmarks.cache.ablations --tables compiled     `indices` for an H200

freeing   local KV that has left the window is freed while a row decodes (SGLang's pull request 17220): hit rate, time
          to the first token and local tokens held, in multi-turn conversations (`ablation_freeing`)
indices   a step's indices are computed once, not in every layer (20449, 23552, 24138): gathers, speed, equal tokens
          (`ablation_indices`)
prefix    the radix cache for sliding-window models (7367): answers, bits per byte, hit rate, time (`ablation_prefix`)

The engine has no switch for the first two: "off" wraps its functions inside the benchmark, as those modules say. Tables
are written to ablations.json and ablations.md; those that are not named stay as they were there.
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
    """One table's results, with what they were measured on and what else that had to do."""
    results = MEASURE[name]()
    return result_file.rounded({**result_file.about(), "results": results})


def main() -> None:
    """Measure what is named, print all tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(MEASURE), default=["freeing", "indices", "prefix"])
    parser.add_argument("--out", type=Path, default=OUT)
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
