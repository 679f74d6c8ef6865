"""This tree against another commit, in turns: times, memory, cache hits, GPU programs, and lines to read.

    python -m benchmarks.watch.run [--base COMMIT] [--part PART ...] [--record]        (make bench BASE=COMMIT)

Takes ten minutes on two cores. Both trees are measured by the programs of this one; where these fail on the base, by
the base's own, and the row says so. A part runs in the two trees in turns, base and here, then here and base; each turn
gives a pair and its ratio, since the machine's speed may change within minutes. Printed are the medians of both, and
the median of the ratios with the least and the most. "slower" or "faster" stands where the median differs from 1 by 2 %
or more and so many pairs agree that chance would do it once in 16 times at most (all of 4, 13 of 18). Hits must be
equal to the token, or the row says DIFFERENT, and the exit status is 1.

    host      processor time of the host in a decode step of 16, 256 and 1,400 rows (speed.host_overhead)
    cpu       prefill and decode of two small models (speed.offline)
    start     a process that makes an engine on `tiny` and answers, without and with kept programs; peak memory
    hits      tokens that the prefix cache finds in four traces (cache.radix)
    gpu       nodes and ptxas calls of two programs for an H200; needs .venv-gpu, but no GPU
    reading   functions, lines and files of a decode step (tools.read_step)

--record appends an entry to the history (`watch.history`), by default on the commit of the entry before.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.watch import history
from benchmarks.watch.compare import WIDTH, Row, Rule, rows_of
from benchmarks.watch.sides import GPU_PYTHON, CannotMeasure, Figures, Side, Worker, commit_of, is_changed, sides


@dataclass(frozen=True)
class Part:
    """What is measured together.

    Attributes:
        rounds: pairs of new processes: addresses and caches differ from process to process.
        turns: of each pair of processes.
        first: turns before these, which are not counted.
        seconds: a process may take.
    """

    rule: Rule
    rounds: int = 1
    turns: int = 1
    first: int = 0
    seconds: float = 600.0
    python: Path = Path(sys.executable)


PARTS = {
    "host": Part("paired", rounds=3, turns=6),
    "cpu": Part("paired", rounds=2, turns=6, first=1),
    "start": Part("paired", turns=4),
    "hits": Part("equal"),
    "gpu": Part("counted", python=GPU_PYTHON),
    "reading": Part("counted"),
}


def main() -> None:
    """Measure, print a row per figure, and record if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit to compare with (default: that of the last entry, else the one before)")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--record", action="store_true", help="append the figures to the history")
    options = parser.parse_args()
    begin, entries = _clock(), history.entries()
    try:
        changed, here = is_changed(), commit_of("HEAD")
        if options.record and (changed or options.part != list(PARTS)):
            raise SystemExit("--record: only a commit is recorded, with all parts; here are changes, or parts left out")
        base = commit_of(options.base or (entries[-1]["commit"] if entries else "HEAD~"))
        print(f"base {base}, here {here}{' and changes' * changed}{', the same sources' * (base == here)}")
        with tempfile.TemporaryDirectory() as folder:
            rows = measured(options.part, *sides(base, Path(folder)))
    except CannotMeasure as error:
        raise SystemExit(str(error)) from None
    print(f"all took {_since(begin)}")
    if options.record:
        history.append(here, base, rows, _clock()[0] - begin[0])
    if different := [row.name for row in rows if row.is_different]:
        raise SystemExit(f"DIFFERENT: {'; '.join(different)}")


def measured(names: Sequence[str], base: Side, here: Side) -> list[Row]:
    """Return the rows of some parts, printed as soon as they are there."""
    print(f"{'':{WIDTH}} {'base':>11} {'here':>11}   ratio (least to most)")
    found: list[Row] = []
    for name in names:
        begin = _clock()
        rows = rows_of_part(name, PARTS[name], base, here)
        for row in rows:
            print(row.line())
        print(f"  {name} took {_since(begin)}", flush=True)
        found += rows
    return found


def rows_of_part(name: str, part: Part, base: Side, here: Side) -> list[Row]:
    """Return the rows of a part; one row with an error if a tree cannot be measured."""
    if not part.python.exists():
        return [Row(name, part.rule, error=f"not measured: no {part.python.parents[1].name}")]
    own, note = base.by_its_own(), ""
    try:
        turns = turns_of(name, part, base, here)
    except CannotMeasure as error:
        if own is None:
            return [Row(name, part.rule, error=f"not measured: {error}")]
        try:
            turns, note = turns_of(name, part, own, here), f"(base by its own programs: {error})"
        except CannotMeasure:
            return [Row(name, part.rule, error=f"not measured: {error}")]
    return rows_of(part.rule, *turns, note=note)


def turns_of(name: str, part: Part, base: Side, here: Side) -> tuple[list[Figures], list[Figures]]:
    """Return the figures of the base's turns, and of this tree's. Raises CannotMeasure, which names the tree."""
    found: tuple[list[Figures], list[Figures]] = [], []
    for _ in range(part.rounds):
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(name, side, str(part.python), part.seconds)) for side in (base, here)]
            for number in range(part.first + part.turns):
                pair = _pair(workers, together=part.rule != "paired", swapped=number % 2 == 1)
                if number >= part.first:
                    for turns, figures in zip(found, pair, strict=True):
                        turns.append(figures)
    return found


def _pair(workers: Sequence[Worker], *, together: bool, swapped: bool) -> list[Figures]:
    """Have both trees measure once, at the same time or one after the other."""
    if together:  # what is counted does not depend on what else runs
        with ThreadPoolExecutor() as pool:
            return list(pool.map(Worker.turn, workers))
    answers = [worker.turn() for worker in (reversed(workers) if swapped else workers)]
    return answers[::-1] if swapped else answers


def _clock() -> tuple[float, float]:
    """Return seconds of the wall's clock, and of the processor in processes that have ended."""
    times = os.times()
    return time.perf_counter(), times.children_user + times.children_system


def _since(begin: tuple[float, float]) -> str:
    seconds, used = (now - then for now, then in zip(_clock(), begin, strict=True))
    return f"{seconds:.0f} s, and {used:.0f} s of processors"


if __name__ == "__main__":
    main()
