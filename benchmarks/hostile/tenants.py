"""Time to the first token of tenant B's short completions, alone and while tenant A sends schemas that are ever new.

    python -m benchmarks.hostile.tenants [--rounds 3] [--requests 200] [--only optional] [--tree PATH …] [--json FILE]

B sends one request after the other with short pauses, in rounds without A and with A, which sends one kind of schema on
eight connections from a process of its own. `ratio` is the 99th percentile with A over that without. The bar: with A it
is at most twice as long, or 150 ms longer.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.hostile import forms
from benchmarks.hostile.client import Tree, at_rest, compared, finish, in_turns, parser, running, shown, timed
from benchmarks.serve.load import Address
from jswa.bench.report import percentile

CONNECTIONS = 8
ROUND = 60.0  # most seconds of a round
PAUSE = 0.05  # seconds between B's requests, so that a round sees many of A's schemas
WARM_UP = 40  # requests of B before the first round, which have programs compiled
MOST_RATIO, MOST_LONGER = 2.0, 0.150


async def quiet(tree: Tree, requests: int) -> tuple[list[float], Counter[str]]:
    """Send B's completions one after the other; return the seconds to their first tokens, and how they ended."""
    waits, ended, begin = list[float](), Counter[str](), time.monotonic()
    for number in range(requests):
        answer = await timed(tree.at, forms.completion(number, max_tokens=8, stream=True), tree.keys[1])
        ended[answer.outcome] += 1
        if answer.times:
            waits.append(answer.ttft)
        await asyncio.sleep(PAUSE)
        if time.monotonic() > begin + ROUND:
            break
    return waits, ended


@contextmanager
def flood(tree: Tree, kind: str) -> Iterator[Counter[str]]:
    """Send A's schemas meanwhile; at the end, the counter has how they were answered."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_flood, args=(theirs, tree.at, kind, tree.keys[0]), daemon=True)
    process.start()
    ours.recv()  # A has begun
    ended = Counter[str]()
    try:
        yield ended
    finally:
        ours.send(None)
        ended.update(ours.recv())
        process.join()


def _flood(told: Connection, at: Address, kind: str, key: str) -> None:
    """Run in A's process: send schemas until something is told."""
    os.nice(10)  # the load itself takes as little as possible of what B and the server need
    told.send(asyncio.run(_send_until_told(told, at, kind, key)))


async def _send_until_told(told: Connection, at: Address, kind: str, key: str) -> dict[str, int]:
    ended, numbers = Counter[str](), forms.numbers()

    async def connection() -> None:
        while True:
            number = next(numbers)
            answer = await timed(at, forms.completion(number, {"json": forms.KINDS[kind](number)}), key)
            ended[answer.outcome] += 1

    tasks = [asyncio.ensure_future(connection()) for _ in range(CONNECTIONS)]
    await asyncio.sleep(1)
    told.send(None)
    await asyncio.get_running_loop().run_in_executor(None, told.recv)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return dict(ended)


def figures(waits: Sequence[float]) -> dict[str, float]:
    """Return the figures of a round. Raises SystemExit if nothing was answered in it."""
    if not waits:
        raise SystemExit("not one of tenant B's requests had a first token")
    return {"p50": percentile(waits, 50), "p99": percentile(waits, 99), "worst": max(waits)}


def one_round(tree: Tree, kind: str, requests: int) -> dict[str, Any]:
    """Measure a round without A and one with A; return the figures of both."""
    asyncio.run(at_rest(tree))
    off, first = asyncio.run(quiet(tree, requests))
    with flood(tree, kind) as ended:
        on, second = asyncio.run(quiet(tree, requests))
    failed = sum(count for outcome, count in (first + second).items() if outcome != "200")
    return {"off": figures(off), "on": figures(on), "requests": len(on), "failed": failed, "answers": dict(ended)}


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of several rounds, the range of their ratios, and whether the bar is met."""
    found: dict[str, Any] = {}
    for when, figure in itertools.product(("off", "on"), ("p50", "p99")):
        found[f"{when}_{figure}"] = statistics.median(each[when][figure] for each in rounds)
    ratios = [each["on"]["p99"] / each["off"]["p99"] for each in rounds]
    failed = sum(each["failed"] for each in rounds)
    answers = sum((Counter(each["answers"]) for each in rounds), Counter[str]())
    longest = max(MOST_RATIO * found["off_p99"], found["off_p99"] + MOST_LONGER)
    return {
        **found, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        "worst": max(each["on"]["worst"] for each in rounds), "failed": failed, "answers": dict(answers),
        "meets": found["on_p99"] <= longest and not failed,
    }  # fmt: skip


def measure(trees: Sequence[Tree], kind: str, given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row of results for each tree, and the figures of their rounds that are compared."""
    rounds: dict[str, list[dict[str, Any]]] = {tree.name: [] for tree in trees}
    for _, tree in in_turns(trees, given.rounds):
        rounds[tree.name].append(one_round(tree, kind, given.requests))
    rows = []
    for name, found in rounds.items():
        rows.append({"kind": kind, "tree": name, **summary(found), "by_round": found})
        shown(rows[-1], ["by_round"])
    p99 = {name: [each["on"]["p99"] for each in found] for name, found in rounds.items()}
    return rows, {f"{kind}: p99 with A": p99}


def main() -> None:
    """Print a row for each kind of schema and tree; exit with status 1 if this tree misses the bar."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--requests", type=int, default=200, help="of B in a round, which ends after 60 s")
    options.add_argument("--only", choices=list(forms.KINDS))
    given = options.parse_args()
    rows, pairs = list[dict[str, Any]](), dict[str, Any]()
    with running(given) as trees:
        for tree in trees:
            one_round(tree, "mixed", WARM_UP)
        for kind in forms.KINDS if given.only is None else (given.only,):
            more, figure = measure(trees, kind, given)
            rows += more
            pairs |= figure
        missed = [
            f"{row['kind']}: p99 {1_000 * row['on_p99']:.0f} ms with A, {1_000 * row['off_p99']:.0f} ms without"
            for row in rows
            if row["tree"] == trees[0].name and not row["meets"]
        ]
        finish(given, trees, {"rows": rows, "compared": compared(trees, pairs)}, missed)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
