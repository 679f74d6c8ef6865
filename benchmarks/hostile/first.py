"""Time to the first token of a request whose schema of 30 properties is new, on an idle server.

    python -m benchmarks.hostile.first [--rounds 5] [--requests 50] [--tree PATH …] [--json FILE]

Each schema has other names, so that its grammar is compiled. Requests come one after the other, and the trees take
turns from request to request, since a machine's speed changes within seconds. The baseline is the same number of plain
requests: `added` is the median with a schema less the median without.
"""

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.hostile import forms
from benchmarks.hostile.client import Tree, at_rest, compared, finish, in_turns, parser, running, shown, timed
from jswa.bench.report import percentile

Waits = dict[str, list[float]]  # seconds to the first tokens, of plain requests and of those with schemas


async def one_round(trees: Sequence[Tree], requests: int) -> dict[str, Waits]:
    """Return the seconds to the first tokens, by tree, of plain requests and of those with schemas.

    Raises SystemExit if a request has no first token.
    """
    for tree in trees:
        await at_rest(tree)
    waits: dict[str, Waits] = {tree.name: {"plain": [], "schema": []} for tree in trees}
    for number, (_, tree) in zip(forms.numbers(), in_turns(trees, requests), strict=False):
        for name, form in (("plain", None), ("schema", {"json": forms.ordinary(number)})):
            answer = await timed(tree.at, forms.completion(number, form, stream=True), tree.keys[1])
            if answer.outcome != "200" or not answer.times:
                raise SystemExit(f"{tree.name}: a {name} request was answered by {answer.outcome} without a token")
            waits[tree.name][name].append(answer.ttft)
    return waits


def summary(rounds: Sequence[Waits]) -> dict[str, Any]:
    """Return the figures of a tree's rounds: medians of their medians and 99th percentiles, and the range."""
    medians = [statistics.median(each["schema"]) for each in rounds]
    plain = statistics.median(statistics.median(each["plain"]) for each in rounds)
    middle = statistics.median(medians)
    return {
        "median": middle, "least": min(medians), "most": max(medians),
        "p99": statistics.median(percentile(each["schema"], 99) for each in rounds),
        "plain": plain, "added": middle - plain, "ratio": middle / plain,
    }  # fmt: skip


def main() -> None:
    """Print a row for each tree, and the ratio to each other tree."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--requests", type=int, default=50, help="schemas of a round")
    given = options.parse_args()
    with running(given) as trees:
        asyncio.run(one_round(trees, 5))  # the first requests have programs compiled
        rounds = [asyncio.run(one_round(trees, given.requests)) for _ in range(given.rounds)]
        by_tree = {tree.name: [found[tree.name] for found in rounds] for tree in trees}
        rows = [{"tree": name, "requests": given.requests, **summary(found)} for name, found in by_tree.items()]
        for row in rows:
            shown(row)
        medians = {name: [statistics.median(each["schema"]) for each in found] for name, found in by_tree.items()}
        pairs = compared(trees, {"median time to the first token": medians})
        finish(given, trees, {"rows": rows, "compared": pairs}, None)


if __name__ == "__main__":
    main()
