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


def perplexity(results: Results) -> Table:
    """Return the perplexity of each engine and file."""
    rows = [[*_case(row), f"{row['perplexity']:.3f}"] for row in results("cpu/real-perplexity")["rows"]]
    return ("engine", "file", "options", "perplexity"), rows


def speed(results: Results) -> Table:
    """Return rates, their ratios to llama.cpp in the same round, and memory."""
    head = (
        *("engine", "file", "options", "prefill, tokens/s", "times llama.cpp", "decode, tokens/s", "times llama.cpp"),
        *("second turn, ms", "times as fast", "peak memory, MiB"),
    )
    rows = []
    for row in results("cpu/real-speed")["rows"]:
        rates = [f"{row[name]['median']:,.0f}" for name in ("prefill", "decode")]
        ratios = [_ratio(row[f"{name} ratio"]) for name in ("prefill", "decode", "second")]
        if row["engine"] == "llamacpp":
            ratios = ["1"] * 3
        second = f"{1000 * row['second']['median']:,.0f}"
        memory = f"{row['memory']['peak']:,.0f}"
        rows.append([*_case(row), rates[0], ratios[0], rates[1], ratios[1], second, ratios[2], memory])
    return head, rows


def _case(row: Mapping[str, Any]) -> list[str]:
    return [_NAMES.get(row["engine"], row["engine"]), row["file"], row["options"]]


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"
