"""The tables of docs/results.md on real weights, from the results of `benchmarks.real.run`."""

from collections.abc import Callable, Mapping
from typing import Any

Results = Callable[[str], Mapping[str, Any]]
Table = tuple[tuple[str, ...], list[list[str]]]
_NAMES = {"llamacpp": "llama.cpp"}


def tokens(results: Results) -> Table:
    """Return on how many prompts each engine's tokens are the reference's, and how close the others were."""
    found = results("cpu/real-tokens")
    head = (
        "engine", "file", "options", f"prompts, of {found['prompts']}, with the same {found['steps']} tokens",
        "gap of the logits at the first difference, median (most)", "prompts with the same ids",
    )  # fmt: skip
    rows = []
    for row in found["rows"]:
        gaps = sorted(one["gap"] for one in row["differences"])
        gap = f"{gaps[len(gaps) // 2]:.2g} ({gaps[-1]:.2g})" if gaps else "–"
        rows.append([*_case(row), str(row["same"]), gap, str(row["same ids"])])
    return head, rows


def _case(row: Mapping[str, Any]) -> list[str]:
    return [_NAMES.get(row["engine"], row["engine"]), row["file"], row["options"]]
