"""Three ideas that this engine grew from, each measured as it was published and here, with it and without.

    python -m benchmarks.cache.ablations [--tables freeing indices prefix] [--out benchmarks/results/cpu]
    .venv-gpu/bin/python -m benchmarks.cache.ablations --tables compiled     `indices` for an H200

freeing   local KV that has left the window is freed while a row decodes (SGLang's pull request 17220): hit rate, time
          to the first token and local tokens held, in multi-turn conversations (`seeds_freeing`)
indices   a step's indices are computed once, not in every layer (20449, 23552, 24138): gathers, speed, equal tokens
          (`seeds_indices`)
prefix    the radix cache for sliding-window models (7367): answers, bits per byte, hit rate, time (`seeds_prefix`)

The engine has no switch for the first two: "off" wraps its functions inside the benchmark, as those modules say. Tables
are written to seeds.json and seeds.md; those that are not named stay as they were there.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.cache import ablation_freeing as seeds_freeing
from benchmarks.cache import ablation_indices as seeds_indices
from benchmarks.cache import ablation_prefix as seeds_prefix
from jswa import __version__

OUT = Path(__file__).parents[1] / "results" / "cpu"
MEASURE: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "freeing": seeds_freeing.results,
    "indices": seeds_indices.results,
    "compiled": seeds_indices.on_h200,
    "prefix": seeds_prefix.results,
}


def markdown(tables: dict[str, Any]) -> str:
    """All tables that have been measured."""
    found = {name: entry["results"] for name, entry in tables.items()}
    parts = []
    if "freeing" in found:
        parts.append(seeds_freeing.table(found["freeing"]))
    if "indices" in found or "compiled" in found:
        parts.append(seeds_indices.table(found.get("indices", []), found.get("compiled", [])))
    if "prefix" in found:
        parts.append(seeds_prefix.table(found["prefix"]))
    return "\n".join(part.markdown() for part in parts)


def measured(name: str) -> dict[str, Any]:
    """One table's results, with what they were measured on and what else that had to do."""
    before = os.getloadavg()
    results = MEASURE[name]()
    return {
        "versions": {"jswa": __version__, "python": platform.python_version(), "jax": jax.__version__},
        "cpus": os.cpu_count(),
        "load_average": {"before": before, "after": os.getloadavg()},
        "results": results,
    }


def main() -> None:
    """Measure what is named, print all tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(MEASURE), default=["freeing", "indices", "prefix"])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    path = args.out / "seeds.json"
    tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.tables:
        tables[name] = measured(name)
        path.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    text = markdown(tables)
    (args.out / "seeds.md").write_text(f"# The seeds, on and off\n\n{text}", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
