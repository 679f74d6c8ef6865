"""The gaps between tenant B's tokens while tenant A sends schemas, one after the other: which schema stalls B?

    python -m benchmarks.hostile.schemas schemas.jsonl [--count 10000] [--tree PATH …] [--json FILE]

`benchmarks.hostile.draw` writes the file. B always has two long streams. A schema's excess is B's longest gap between
two tokens while the schema was in progress, less the median of all gaps. A gap may be the machine's: the schemas with
the largest excess, those above 50 ms among them, are sent once more with another title, and the smaller excess counts.
The bar: none is above 50 ms, and no answer is an error of the server.
"""

import asyncio
import json
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.hostile import forms
from benchmarks.hostile.client import Timed, Tree, at_rest, finish, parser, running, server_errors, shown, timed
from jswa.bench.report import percentile

MOST = 0.050  # seconds of excess
WORST, AGAIN = 10, 50  # schemas that are reported, and the fewest that are sent once more
ALONE = 10.0  # seconds in which B streams alone first
LONG = 1_500  # tokens of a stream


def gaps(streams: Sequence[Timed]) -> list[float]:
    """Return all times between two successive tokens of a stream, in seconds."""
    return [later - one for stream in streams for one, later in pairwise(stream.times)]


def longest(streams: Sequence[Timed], begin: float, end: float) -> float:
    """Return the longest time between two successive tokens of which a part lies between two moments; 0 if none."""
    found = 0.0
    for times in (stream.times for stream in streams if stream.begin < end and begin < stream.end):
        first, last = max(bisect_right(times, begin) - 1, 0), bisect_left(times, end)
        found = max([found, *(later - one for one, later in pairwise(times[first : last + 1]))])
    return found


@asynccontextmanager
async def streaming(tree: Tree) -> AsyncIterator[list[Timed]]:
    """Keep two streams of B running meanwhile; at the end, the list has all of them.

    The first of them has half the tokens, so that the two seldom begin anew at the same time.
    """
    ended, streams = asyncio.Event(), list[Timed]()

    async def place(tokens: int) -> None:
        while not ended.is_set():
            body = forms.completion(len(streams), max_tokens=tokens, ignore_eos=True, stream=True)
            streams.append(await timed(tree.at, body, tree.keys[1]))
            tokens = LONG

    tasks = [asyncio.ensure_future(place(tokens)) for tokens in (LONG // 2, LONG)]
    yield streams
    ended.set()
    await asyncio.gather(*tasks)


async def send(tree: Tree, schemas: Sequence[Any]) -> tuple[list[Timed], list[Timed]]:
    """Send A's schemas one after the other; return the answers, and B's streams meanwhile."""
    bodies = [forms.completion(number, {"json": schema}) for number, schema in enumerate(schemas)]
    async with streaming(tree) as streams:
        await asyncio.sleep(1)
        answers = []
        for number, body in enumerate(bodies):
            answers.append(await timed(tree.at, body, tree.keys[0]))
            if number % 1_000 == 999:
                print(f"{tree.name}: {number + 1} schemas", flush=True)
    return answers, streams


def excesses(answers: Sequence[Timed], streams: Sequence[Timed]) -> list[float]:
    """Return the excess of each schema in seconds."""
    middle = statistics.median(gaps(streams))
    return [max(longest(streams, each.begin, each.end) - middle, 0.0) for each in answers]


def renamed(schema: Any, title: str) -> Any:
    """Return a schema that accepts the same, but is new to a server; `true` and `false` stay."""
    return {**schema, "title": title} if isinstance(schema, dict) else schema


async def measure(tree: Tree, schemas: Sequence[Any]) -> dict[str, Any]:
    """Return the figures of a tree, with its worst schemas. Raises SystemExit if B's streams have no gaps."""
    await at_rest(tree)
    async with streaming(tree) as alone:
        await asyncio.sleep(ALONE)
    answers, streams = await send(tree, schemas)
    if not gaps(alone) or not gaps(streams):
        raise SystemExit(f"{tree.name}: tenant B had no tokens: {Counter(each.outcome for each in (*alone, *streams))}")
    first = excesses(answers, streams)
    order = sorted(range(len(schemas)), key=first.__getitem__, reverse=True)
    order = order[: max(AGAIN, sum(each > MOST for each in first))]
    repeated, beside = await send(tree, [renamed(schemas[number], "once more") for number in order])
    rows: list[dict[str, Any]] = [
        {
            "line": number + 1, "excess": min(first[number], again), "first": first[number], "again": again,
            "status": answers[number].outcome, "seconds": answers[number].end - answers[number].begin,
            "schema": json.dumps(schemas[number])[:400],
        }
        for number, again in zip(order, excesses(repeated, beside), strict=True)
    ]  # fmt: skip
    rows.sort(key=lambda row: row["excess"], reverse=True)
    outcomes = Counter(each.outcome for each in answers)
    return {
        "tree": tree.name, "schemas": len(schemas), "excess": rows[0]["excess"],
        "over": sum(each > MOST for each in first), "over_again": sum(row["excess"] > MOST for row in rows),
        "alone_p50": statistics.median(gaps(alone)), "alone_worst": max(gaps(alone)),
        "beside_p50": statistics.median(gaps(streams)), "beside_p99": percentile(gaps(streams), 99),
        "answers": dict(outcomes), "errors": server_errors(outcomes),
        "failed": sum(each.outcome != "200" for each in (*alone, *streams, *beside)), "worst": rows[:WORST],
    }  # fmt: skip


def main() -> None:
    """Print the figures of each tree and its worst schemas; exit with status 1 if this tree misses the bar."""
    options = parser(__doc__ or "")
    options.add_argument("file", type=Path, help="a schema on each line")
    options.add_argument("--count", type=int, default=10_000, help="schemas of the file to send")
    given = options.parse_args()
    schemas = [json.loads(line) for line in given.file.read_text(encoding="utf-8").splitlines()[: given.count]]
    with running(given) as trees:
        rows = [asyncio.run(measure(tree, schemas)) for tree in trees]
        for row in rows:
            shown(row, ["worst"])
            for schema in row["worst"]:
                shown(schema)
        here = rows[0]
        bars = {
            f"{here['over_again']} schemas stall B for more than 50 ms": here["over_again"],
            f"{here['errors']} schemas were answered by an error of the server": here["errors"],
            f"{here['failed']} of B's streams failed": here["failed"],
        }
        missed = [line for line, count in bars.items() if count]
        finish(given, trees, {"rows": rows}, missed)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
