"""Hostile and ordinary requests of two tenants for a long time: does the server grow, or keep anything?

    python -m benchmarks.hostile.soak [--minutes 20] [--tree PATH …] [--json FILE]

The load runs for a fifth of --minutes; then the server is counted at rest, and the load runs on for --minutes. Every
5 s the memory (PSS), open files and threads of the server's processes are read, and what /server_info says. Each tree
has a time of its own, as two loads at once would measure each other. The bars: the most memory of the last quarter is
at most 3 % above that of the third, and at rest the server has no more processes, files, tasks, rows or pages than
after the warm-up. A process that is killed and forked anew begins with less memory, so that the sum falls and rises
again; its largest values show what is kept. Threads are counted too; pools start theirs when they are wanted.
"""

import argparse
import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hostile import forms
from benchmarks.hostile.client import ADMIN, Tree, at_rest, family, finish, parser, server_errors, shown, started, timed
from benchmarks.serve.load import ROOT, ask, get_json

CLIENTS = 12
EVERY = 5.0  # seconds from one sample to the next
WARM_UP = 0.2  # of the minutes
MOST_GROWTH = 0.03
LOAD = ("tasks", "running", "waiting", "requests", "full_pages", "local_pages")
COUNTS = ("processes", "files", "tasks", "running", "waiting", "used_slots")  # no more of them at the end


class Sent(NamedTuple):
    """A request of the load. `hasty`: the client closes its connection within a second."""

    body: bytes
    path: str = forms.COMPLETE
    hostile: bool = True
    hasty: bool = False


Maker = Callable[[int], Sent]


def _schema(kind: str, *, hasty: bool = False) -> Maker:
    return lambda number: Sent(forms.completion(number, {"json": forms.KINDS[kind](number)}), hasty=hasty)


LOADS: dict[str, Maker] = {
    **{kind: _schema(kind) for kind in forms.KINDS if kind != "mixed"},
    "left": _schema("mixed", hasty=True),
    "lark": lambda number: Sent(forms.completion(number, {"grammar": forms.lark(number)})),
    "regex": lambda number: Sent(forms.completion(number, {"regex": forms.regex(number)})),
    "ordinary": lambda number: Sent(forms.completion(number, {"json": forms.ordinary(number)}), hostile=False),
    "tools": lambda number: Sent(forms.tools_chat(number), forms.CHAT, hostile=False),
    "stream": lambda number: Sent(forms.completion(number, max_tokens=200, stream=True), hostile=False),
}


async def load(tree: Tree, seconds: float, numbers: Iterator[int]) -> Counter[str]:
    """Send requests of random kinds from `CLIENTS` clients; return how many of each kind ended how."""
    ended, end, chance = Counter[str](), time.monotonic() + seconds, random.Random(1)

    async def client() -> None:
        while time.monotonic() < end:
            kind = chance.choice(list(LOADS))
            sent = LOADS[kind](next(numbers))
            key = tree.keys[0] if sent.hostile else tree.keys[1]
            leave = chance.random() if sent.hasty else None
            answer = await timed(tree.at, sent.body, key, path=sent.path, leave_after=leave)
            ended[f"{kind}: {answer.outcome}"] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return ended


def of_family(pid: int) -> dict[str, float]:
    """Return the memory in MiB of a server's processes together, and how many processes, files and threads there are.

    Memory is PSS, in which pages that several processes share count once; RSS where PSS cannot be read.
    """
    found = {"memory_mib": 0.0, "processes": 0.0, "files": 0.0, "threads": 0.0}
    for one in family(pid):
        try:
            found["memory_mib"] += _memory(one)
            found["files"] += len(os.listdir(f"/proc/{one}/fd"))
            found["threads"] += len(os.listdir(f"/proc/{one}/task"))
        except OSError:
            continue  # it has ended
        found["processes"] += 1
    return found


def _memory(pid: int) -> float:
    try:
        text, name = Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss"
    except PermissionError:
        text, name = Path(f"/proc/{pid}/status").read_text(), "VmRSS"
    amount = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(amount[1]) / 1_024 if amount else 0.0  # a process that has ended has none


async def sample(tree: Tree, samples: list[dict[str, float]]) -> None:
    """Add a sample every `EVERY` seconds until the task is cancelled."""
    begin = time.monotonic()
    while True:
        now = (await get_json(tree.at, "/server_info", tree.keys[1]))["load"]
        load = {name: now[name] for name in LOAD}
        samples.append({"seconds": time.monotonic() - begin, **of_family(tree.at.pid), **load})
        await asyncio.sleep(EVERY)


async def counted(tree: Tree) -> dict[str, float]:
    """Return what a server has at rest and without a prefix cache. Raises SystemExit if it does not come to rest."""
    await at_rest(tree)
    answer = await ask(tree.at, b"", path="/flush_cache", key=ADMIN)
    assert answer.status == 200, answer.raw
    now = await at_rest(tree)
    used = now["total_slots"] - now["free_slots"]
    return {**of_family(tree.at.pid), **{name: now[name] for name in LOAD}, "used_slots": used}


def growth(memory: Sequence[float]) -> float:
    """Return by which share the largest of the last quarter of some samples exceeds that of the third quarter."""
    quarter = len(memory) // 4
    if not quarter:
        raise SystemExit("the soak is too short: it needs at least four samples")
    return max(memory[-quarter:]) / max(memory[-2 * quarter : -quarter]) - 1


def missed_bars(
    grown: float, before: Mapping[str, float], after: Mapping[str, float], ended: Counter[str]
) -> list[str]:
    """Return a line for each bar that is missed."""
    found = [f"{name}: {before[name]:g} before, {after[name]:g} after" for name in COUNTS if after[name] > before[name]]
    if grown > MOST_GROWTH:
        found.append(f"the most memory grew by {grown:.1%} from the third quarter to the last")
    outcomes = Counter[str]()
    for name, count in ended.items():
        outcomes[name.partition(": ")[2]] += count
    if errors := server_errors(outcomes):
        found.append(f"{errors} answers are errors of the server")
    return found


async def measure(tree: Tree, minutes: float) -> dict[str, Any]:
    """Return the figures of a tree, with its samples."""
    numbers, samples = forms.numbers(), list[dict[str, float]]()
    await load(tree, 60 * minutes * WARM_UP, numbers)
    before = await counted(tree)
    sampling = asyncio.ensure_future(sample(tree, samples))
    ended = await load(tree, 60 * minutes, numbers)
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling  # which raises if a sample has failed
    after = await counted(tree)
    grown = growth([one["memory_mib"] for one in samples])
    return {
        "tree": tree.name, "minutes": minutes, "growth": grown, "before": before, "after": after,
        "most": {name: max(one[name] for one in samples) for name in samples[0]},
        "answers": dict(sorted(ended.items())), "missed": missed_bars(grown, before, after, ended), "samples": samples,
    }  # fmt: skip


def main() -> None:
    """Print the figures of each tree; exit with status 1 if this tree misses a bar."""
    options: argparse.ArgumentParser = parser(__doc__ or "", urls=False)
    options.add_argument("--minutes", type=float, default=20.0)
    given = options.parse_args()
    rows, trees = list[dict[str, Any]](), list[Tree]()
    for folder in (ROOT, *given.tree):
        with started(folder) as tree:
            trees.append(tree)
            rows.append(asyncio.run(measure(tree, given.minutes)))
            shown(rows[-1], ["samples"])
    finish(given, trees, {"rows": rows}, rows[0]["missed"])
    raise SystemExit(bool(rows[0]["missed"]))


if __name__ == "__main__":
    main()
