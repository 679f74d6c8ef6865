"""What the measurements of this folder share: servers of several checkouts, timed requests, and comparisons.

A measurement starts `jswa serve tiny` from this checkout and from each that --tree names, with a key for each of two
tenants, and lets them take turns. A checkout without its compiled CPU kernels compiles them first, if it can; an older
one runs slower kernels (`python -m pallas_kernels.cpu.build` compiles them).
"""

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import result_file
from benchmarks.serve.load import PATH, ROOT, Address, get_json, head, server, used_seconds
from benchmarks.watch.compare import Row

A, B, ADMIN = "tenant-a", "tenant-b", "root"
# A small server has few shapes of programs to compile, some of them only at the first request that needs them.
SHAPES = ("--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")
SERVE = (
    *("-m", "jswa", "serve", "tiny", "--port", "0", "--chat-template", "chatml_tools", *SHAPES),
    *("--api-key", A, "--api-key", B, "--admin-api-key", ADMIN),
)
REST = 120.0  # most seconds until a server that is asked nothing is at rest
IDLE = 0.05  # most CPU seconds that it uses in a second then


@dataclass(frozen=True)
class Tree:
    """A server that is measured.

    Attributes:
        name: "here", the folder of another checkout, or a URL.
        at: its address; the pid is 0 if it was not started here.
        keys: the API keys of tenants A and B.
    """

    name: str
    at: Address
    keys: tuple[str, str]
    commit: str | None = None


@dataclass
class Timed:
    """The answer to a request, and when its parts came, in seconds of `time.perf_counter`.

    Attributes:
        times: of each piece that was read and held an event of a stream.
        left: the client has closed the connection before the end.
    """

    begin: float
    status: int = 0
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    left: bool = False
    error: str = ""

    @property
    def outcome(self) -> str:
        """Return the status, or what has happened instead."""
        return "left" if self.left else f"{self.status} {self.error}".strip()

    @property
    def ttft(self) -> float:
        """Return the seconds until the first streamed token. Raises IndexError if there was none."""
        return self.times[0] - self.begin


def parser(description: str, *, urls: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that measurements share. `urls`: a server that runs already can be measured."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure in turns")
    if urls:
        made.add_argument("--url", help="measure this server, and start none")
        made.add_argument("--key", nargs=2, default=(A, B), metavar=("A", "B"), help="with --url: API keys of tenants")
    made.add_argument("--json", type=Path, help="result file to write")
    return made


@contextmanager
def running(given: argparse.Namespace) -> Iterator[list[Tree]]:
    """Start the servers that the options name, this checkout's first; stop them at the end."""
    url = getattr(given, "url", None)
    if url is not None:
        parts = urlsplit(url)
        yield [Tree(url, Address(parts.hostname or "localhost", parts.port or 80, 0), tuple(given.key))]
        return
    with ExitStack() as stack:
        yield [stack.enter_context(started(folder)) for folder in (ROOT, *given.tree)]


@contextmanager
def started(folder: Path) -> Iterator[Tree]:
    """Start the server of a checkout. Raises SystemExit if Python would run the jswa of another place."""
    folder = folder.resolve()
    found = _said([sys.executable, "-c", "import jswa; print(jswa.__file__)"], folder)
    if not Path(found).is_relative_to(folder):
        raise SystemExit(f"{folder} has no package jswa: Python imports {found}")
    with server(SERVE, folder) as at:
        name = "here" if folder == ROOT else folder.name
        yield Tree(name, at, (A, B), _said(["git", "describe", "--always", "--dirty"], folder))


def _said(command: Sequence[str], folder: Path) -> str:
    """Return what a command prints; "" if it fails."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def in_turns(trees: Sequence[Tree], rounds: int) -> Iterator[tuple[int, Tree]]:
    """Yield each tree once a round, every second round in reverse order."""
    for number in range(rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            yield number, tree


async def timed(at: Address, body: bytes, key: str, *, path: str = PATH, leave_after: float | None = None) -> Timed:
    """Send a request on a connection of its own, which is closed after `leave_after` seconds; return its times."""
    answer = Timed(time.perf_counter())
    try:
        async with asyncio.timeout(leave_after):
            await _exchange(at, head(path, "POST", len(body), key) + body, answer)
    except TimeoutError:
        answer.left = True
    except OSError as error:
        answer.error = type(error).__name__
    answer.end = time.perf_counter()
    return answer


async def _exchange(at: Address, sent: bytes, answer: Timed) -> None:
    reader, writer = await asyncio.open_connection(at.host, at.port, limit=2**20)
    try:
        writer.write(sent)
        while piece := await reader.read(2**16):
            if not answer.status:
                answer.status = int(piece[9:12])
            if b"data: {" in piece:
                answer.times.append(time.perf_counter())
            if b'data: {"error"' in piece:
                answer.error = "failed in its stream"
    finally:
        writer.transport.abort()


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for one in found:  # which grows meanwhile
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue  # the thread has ended
    return found


def _used(pid: int) -> float:
    """Return the CPU seconds that a server's processes have used."""
    total = 0.0
    for one in family(pid) if pid else ():
        try:
            total += used_seconds(one)
        except OSError:
            continue  # the process has ended
    return total


async def at_rest(tree: Tree) -> dict[str, Any]:
    """Wait until a server has no request and its processes use no CPU; return its load.

    The load is read at the end, since a server tells figures that are up to some tenths of a second old. Raises
    SystemExit if the server does not come to rest, or refuses the key of tenant B.
    """
    begin = time.monotonic()
    while time.monotonic() < begin + REST:
        before = _used(tree.at.pid)
        await asyncio.sleep(1)
        used = _used(tree.at.pid) - before
        info = await get_json(tree.at, "/server_info", tree.keys[1])
        if "load" not in info:
            raise SystemExit(f"{tree.name} does not say its load: {info}")
        load: dict[str, Any] = info["load"]
        held = {name: load[name] for name in ("running", "waiting", "requests")}
        if not any(held.values()) and used <= IDLE:
            return load
    raise SystemExit(
        f"{tree.name} is not at rest after {REST:g} s: {held}, and {used:.2f} s of CPU time in the last one"
    )


def compared(trees: Sequence[Tree], figures: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Return this tree's figures against those of each other: the ratio of each round's pair, its median and range.

    `figures`: by name and then by tree, one for each round; less is better.
    """
    rows = []
    for other in trees[1:]:
        for name, by_tree in figures.items():
            row = Row(f"{name}, against {other.name}", "paired", tuple(by_tree[other.name]), tuple(by_tree["here"]))
            print(row.line(), flush=True)
            rows.append({**row.record(), "verdict": row.verdict})
    return rows


def shown(row: Mapping[str, Any], hidden: Sequence[str] = ()) -> None:
    """Print a row of results without some of its values."""
    print(result_file.rounded({name: value for name, value in row.items() if name not in hidden}), flush=True)


def finish(
    given: argparse.Namespace, trees: Sequence[Tree], results: Mapping[str, Any], missed: Sequence[str] | None
) -> None:
    """Write the result file if one is asked for, and print which bars this tree misses.

    `missed`: a line for each bar that is missed; None if the measurement has no bar.
    """
    if given.json is not None:
        about = [{"tree": tree.name, "commit": tree.commit} for tree in trees]
        result_file.write(given.json, {"trees": about, **results, "missed": missed})
    if missed is not None:
        print("\n".join(("bars that are missed:", *missed)) if missed else "all bars are met")


def server_errors(outcomes: Mapping[str, int]) -> int:
    """Return how many of the counted outcomes, as `Timed.outcome` says them, are errors of the server."""
    return sum(count for outcome, count in outcomes.items() if re.match(r"5\d\d|0|\d+ .", outcome))
