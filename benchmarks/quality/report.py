"""Tables and plot of the results of `benchmarks.quality.run`."""

from pathlib import Path
from typing import Any

Result = dict[str, Any]


def markdown(result: Result) -> str:
    """Return two tables: evidence of each configuration, and accuracy by task, distance and configuration."""
    configurations = result["configurations"]
    lines = [
        "# Quality: every configuration against a cold run",
        "",
        f"`python -m benchmarks.quality.run`: {result['model']} on {result['device']}, "
        f"jswa {result['versions']['jswa']}, jax {result['versions']['jax']}; "
        f"at most {result['limit']} items of each task and distance, "
        f"{result['too_long']} too long for the model.",
        "",
        "| configuration | evidence | right | tokens compared | ties | largest log probability error | differences |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in configurations:
        right = sum(row["correct"] or 0 for row in one["rows"])
        asked = sum(row["count"] for row in one["rows"] if row["correct"] is not None)
        off = f"{one['furthest_logprob']:.1e}" if one["furthest_logprob"] else "0"
        compared = f"{one['compared_tokens']:,}"
        cells = [one["name"], evidence(one), f"{right} of {asked}", compared, str(one["ties"]), off]
        lines.append(f"| {' | '.join(cells)} | {len(one['differences'])} |")
    names = [one["name"] for one in configurations]
    lines += ["", f"| task | distance | items | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for row in configurations[0]["rows"]:
        found = [_shown(_row(one, row)) for one in configurations]
        distance = "–" if row["distance"] is None else row["distance"]
        lines.append(f"| {row['task']} | {distance} | {row['count']} | {' | '.join(found)} |")
    tails = [one["tail_bits_per_token"] for one in configurations]
    if tails[0] is not None:
        shown = " | ".join("–" if x is None else f"{x:#.4g}" for x in tails)
        lines.append(f"| texts, last {result['tail']} tokens, bits/token | – | – | {shown} |")
    lines += ["", f"{len(result['problems'])} problems.", *(f"* {line}" for line in result["problems"][:50])]
    return "\n".join(lines) + "\n"


def evidence(one: dict[str, Any]) -> str:
    """Return the evidence that a configuration really ran."""
    kind = one["name"].partition(" ")[0]
    # Files of before November 23, 2026 do not say how many tokens that took.
    rebuilt = f" from {one['rebuilt_tokens']:,} tokens" if "rebuilt_tokens" in one else ""
    cached = f"{one['cached_tokens']:,} of {one['prompt_tokens']:,} prompt tokens from the cache"
    return {
        "cold": f"{one['requests']:,} requests one at a time, at most {one['most_tokens']:,} tokens a step",
        "prefix-cached": f"{cached}; {one['hits']:,} of {one['requests']:,} requests hit",
        "revived": f"{cached}; {one['revivals']:,} windows rebuilt{rebuilt}",
        "chunked": f"at most {one['most_tokens']:,} tokens a step; {one['chunks']:,} chunks ended inside a prompt",
        "batched": f"up to {one['most_rows']} rows and {one['most_tokens']:,} tokens a step",
        "preempted": f"{one['preemptions']:,} preemptions, {one['preempted_answers']:,} requests within their answer",
    }[kind]


def plot(result: Result, path: Path) -> None:
    """Plot accuracy by distance: a panel per task, a line per configuration, 95 % intervals of the cold run as bars."""
    from matplotlib import pyplot

    rows = [row for row in result["configurations"][0]["rows"] if row["correct"] is not None]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not tasks:
        raise SystemExit("--plot needs tasks whose answers are right or wrong")
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(2.6 * len(tasks) + 1.5, 3.2), sharey=True, squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        ours = [row for row in rows if row["task"] == task]
        for number, one in enumerate(result["configurations"]):
            shift = 0.06 * (number - (len(result["configurations"]) - 1) / 2)  # or equal lines would hide each other
            found = [_row(one, row) for row in ours]
            heights = [100 * row["accuracy"] for row in found if row is not None]
            positions = [i + shift for i, row in enumerate(found) if row is not None]
            if number == 0:
                spread = [
                    [100 * (r["accuracy"] - r["low"]) for r in ours],
                    [100 * (r["high"] - r["accuracy"]) for r in ours],
                ]
                axes.errorbar(positions, heights, yerr=spread, color="0.6", capsize=2, zorder=0)
            axes.plot(positions, heights, marker="o", markersize=3, linewidth=0.8, label=one["name"])
        axes.set_xticks(range(len(ours)), ["–" if row["distance"] is None else str(row["distance"]) for row in ours])
        axes.set(title=task, xlabel="distance, tokens", ylim=(-3, 103))
    panels[0][0].set_ylabel("right, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="center right", fontsize="small")
    figure.tight_layout(rect=(0, 0, 1 - 1.5 / (2.6 * len(tasks) + 1.5), 1))
    figure.savefig(path, dpi=120)


def _row(one: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Return a configuration's row of the same task and distance."""
    same = (row for row in one["rows"] if (row["task"], row["distance"]) == (wanted["task"], wanted["distance"]))
    return next(same, None)


def _shown(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['accuracy']:.1%}" if row["correct"] is not None else f"{row['bits_per_byte']:#.4g} bits/byte"
