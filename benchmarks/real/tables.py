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
    """Return the perplexity of a text by each engine and file."""
    rows = [[*_case(row), f"{row['perplexity']:.2f}"] for row in results("cpu/real-perplexity")["rows"]]
    return ("engine", "file", "options", "perplexity"), rows


def speed(results: Results) -> Table:
    """Return rates and times of each engine, and how they compare with llama.cpp's of the same rounds."""
    head = (
        "file", "engine", "options", "prefill, tokens/s", "decode, tokens/s", "first token of the second turn, s",
        "most memory, MiB",
    )  # fmt: skip
    rows = []
    for row in results("cpu/real-speed")["rows"]:
        engine, file, options = _case(row)
        figures = [_figure(row, name, digits) for name, digits in (("prefill", 0), ("decode", 1), ("second", 3))]
        rows.append([file, engine, options, *figures, f"{row['memory']['peak']:.0f}"])
    return head, rows


def _figure(row: Mapping[str, Any], name: str, digits: int) -> str:
    own = f"{row[name]['median']:.{digits}f}"
    ratio = row[f"{name} ratio"]
    if row["engine"] == "llamacpp":
        return own
    return f"{own}: {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def _case(row: Mapping[str, Any]) -> list[str]:
    return [_NAMES.get(row["engine"], row["engine"]), row["file"], row["options"]]
