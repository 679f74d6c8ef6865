"""Run tests on a mutant: the cheapest first of those that reach it, until one fails."""

import math
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tools.mutants.places import Mutant, find
from tools.mutants.plugin import Task, Told
from tools.mutants.rooms import ROOMS, TRACED, sources, tests
from tools.mutants.scratch import Ran, Tree

BUDGET = 60  # CPU seconds of tests, as measured without a mutant, that a mutant is given
_START = 60  # CPU seconds to import and compile
_SLOWER = 4  # a mutant that takes so many times the measured seconds hangs


class Result(NamedTuple):
    """What became of a mutant.

    Attributes:
        state: "caught", "survived", "equivalent" (not run) or "gone" (its place is not found).
        by: the first test that failed; "timeout", "import" or "crash" if the tests did not end as tests do.
    """

    id: str
    state: str
    by: str = ""


class Workers:
    """Runs jobs at once, each with a tree of its own."""

    def __init__(self, trees: Iterable[Tree]) -> None:
        self._free: SimpleQueue[Tree] = SimpleQueue()
        self._count = 0
        for tree in trees:
            self._free.put(tree)
            self._count += 1

    def map[Job, Out](self, work: Callable[[Tree, Job], Out], jobs: Iterable[Job]) -> list[Out]:
        """Return what `work` returns for each job, in order; the first error ends the jobs that have not begun."""

        def one(job: Job) -> Out:
            tree = self._free.get()
            try:
                return work(tree, job)
            finally:
                self._free.put(tree)

        with ThreadPoolExecutor(self._count) as pool:
            futures = [pool.submit(one, job) for job in jobs]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()


def files_of(root: Path) -> list[str]:
    """Return all files that mutants are looked for in."""
    return sorted({file for room in ROOMS for file in sources(room, root)})


def measure(root: Path, workers: Workers, mutants: Sequence[Mutant], files: Sequence[str]) -> list[Told]:
    """Run all TESTS of the tree at `root` without a mutant; return what each costs and reaches.

    Raises SystemExit if one fails.
    """

    def one(tree: Tree, path: str) -> list[Told]:
        places: dict[str, list[tuple[int, int, str]]] = {}
        for mutant in mutants:
            place = find(mutant, tree.root, files)
            if place is not None:
                places.setdefault(str(tree.root / place.file), []).append((*place.lines, mutant.id))
        ran = tree.pytest([path], Task(places))
        failed = [told.test for told in ran.told if told.failed]
        if ran.status:
            raise SystemExit(f"without a mutant {path} ends with status {ran.status}: {' '.join(failed)}")
        return ran.told

    return [told for some in workers.map(one, tests(root)) for told in some]


def chosen(mutant: Mutant, told: Sequence[Told], budget: float = BUDGET, *, known: str = "") -> list[Told]:
    """Return the tests to run on a mutant, in order: files by cost, in each the cheapest first, up to the budget.

    Of code that JAX traces all tests of a file that reaches it are taken, after those that do.

    `known`: the test that caught the mutant last; it runs first, and the budget is for the others.
    """
    files: dict[str, list[Told]] = {}
    for one in told:
        if mutant.id in one.reached:
            files.setdefault(_file(one.test), []).append(one)
    if mutant.file.startswith(TRACED):
        for one in told:
            if mutant.id not in one.reached and _file(one.test) in files:
                files[_file(one.test)].append(one)
    out = list[Told]()
    for some in sorted(files.values(), key=lambda some: sum(one.seconds for one in some)):
        for one in sorted(some, key=lambda one: (mutant.id not in one.reached, one.seconds)):
            fits = not out or sum(other.seconds for other in out) + one.seconds <= budget
            if fits and one.test != known:
                out.append(one)
    return [*(one for one in told if one.test == known), *out]


def run(tree: Tree, mutant: Mutant, order: Sequence[Told], files: Sequence[str]) -> Result:
    """Run these tests on a mutant until one fails."""
    if mutant.equivalent:
        return Result(mutant.id, "equivalent")
    if find(mutant, tree.root, files) is None:
        return Result(mutant.id, "gone")
    if not order:
        return Result(mutant.id, "survived", "no test reaches it")
    seconds = _START + _SLOWER * round(sum(one.seconds for one in order))
    paths = list(dict.fromkeys(_file(one.test) for one in order))
    with tree.mutated(mutant, files):
        return result(mutant, tree.pytest(paths, Task({}, [one.test for one in order]), "-x", seconds=seconds))


def result(mutant: Mutant, ran: Ran) -> Result:
    """Read how a test process has ended."""
    failed = [told.test for told in ran.told if told.failed]
    if ran.status == 0:
        return Result(mutant.id, "survived")
    if ran.status == 1 and failed:
        return Result(mutant.id, "caught", failed[0])
    if ran.status == 5:
        raise RuntimeError(f"{mutant.id}: pytest found none of the tests")
    ended = {-signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout", 2: "import", 4: "import"}
    return Result(mutant.id, "caught", ended.get(ran.status, "crash"))


def held(
    workers: Workers, mutants: Sequence[Mutant], told: Sequence[Told], test: str, files: Sequence[str]
) -> list[Result]:
    """Return of each mutant that a test catches what the other tests make of it.

    Args:
        told: what all tests have told without a mutant.
        test: a file, or a test without or with its parameters. Raises SystemExit if it is none of `told`.
    """
    mine = [one for one in told if one.test == test or one.test.startswith((f"{test}::", f"{test}["))]
    others = [one for one in told if one not in mine]
    if not mine:
        raise SystemExit(f"{test} is none of the tests that are asked about mutants (tools/mutants/rooms.py)")

    def by_others(tree: Tree, mutant: Mutant) -> Result | None:
        order = chosen(mutant, mine, budget=math.inf)
        if not order or run(tree, mutant, order, files).state != "caught":
            return None
        return run(tree, mutant, chosen(mutant, others), files)

    return [found for found in workers.map(by_others, mutants) if found is not None]


def _file(test: str) -> str:
    return test.split("::")[0]
