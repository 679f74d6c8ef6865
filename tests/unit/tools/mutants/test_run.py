"""Tests are run on mutants in a copy of the tree: one is caught, one survives, one hangs."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.mutants.places import Mutant
from tools.mutants.plugin import Task, Told
from tools.mutants.rooms import ROOT
from tools.mutants.run import BUDGET, Result, Workers, chosen, held, result, run
from tools.mutants.score import lost, read, report, write
from tools.mutants.scratch import Ran, Tree, trees

MODULE = """def bounded(a: int) -> int:
    while a > 9:
        a -= 1
    return max(a, 0)


def unseen(a: int) -> int:
    return a + 1
"""
TESTS = """from module import bounded, unseen


def test_nothing() -> None:
    unseen(1)


def test_bounds() -> None:
    assert bounded(12) == 9


def test_successor() -> None:
    assert unseen(bounded(8)) == 9
"""
LOW = Mutant("room-1", "module.py", "bounded", "opposite", "max(a, 0)", "min(a, 0)")
HANGS = Mutant("room-2", "module.py", "bounded", "remove", "a -= 1", "pass")
UNSEEN = Mutant("room-3", "module.py", "unseen", "arithmetic", "a + 1", "a - 1")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """A copy of a small repository with one module and one test file."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "tools/mutants", root / "tools/mutants", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("module.py", MODULE), ("test_module.py", TESTS), ("pytest.ini", "[pytest]\npythonpath = .\n")):
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    with trees(root, 1) as (copy,):
        assert copy.root != root
        yield copy
        assert (root / "module.py").read_text() == MODULE == (copy.root / "module.py").read_text()


def test_a_test_tells_what_it_reaches_and_catches_it(tree: Tree) -> None:
    lines = {LOW.id: 4, UNSEEN.id: 8}
    places = {str(tree.root / "module.py"): [(line, line, name) for name, line in lines.items()]}
    ran = tree.pytest(["test_module.py"], Task(places))
    nothing, bounds, successor = (f"test_module.py::test_{name}" for name in ("nothing", "bounds", "successor"))
    reached = {told.test: told.reached for told in ran.told}
    assert reached == {nothing: [UNSEEN.id], bounds: [LOW.id], successor: [LOW.id, UNSEEN.id]}
    assert run(tree, LOW, ran.told[:2], []) == Result(LOW.id, "caught", bounds)
    assert run(tree, UNSEEN, ran.told[:2], []) == Result(UNSEEN.id, "survived")
    # Which of the mutants that a test catches do others catch?
    found = held(Workers([tree]), [LOW, UNSEEN], ran.told, successor, [])
    assert found == [Result(LOW.id, "caught", bounds), Result(UNSEEN.id, "survived")]
    with pytest.raises(SystemExit, match="absent"):
        held(Workers([tree]), [LOW], ran.told, "test_absent.py", [])


def test_a_mutant_that_hangs_is_killed(tree: Tree) -> None:
    with tree.mutated(HANGS, []):
        ran = tree.pytest(["test_module.py"], Task({}), seconds=4)
    assert result(HANGS, ran) == Result(HANGS.id, "caught", "timeout")


def test_mutants_that_need_no_test(tree: Tree) -> None:
    assert run(tree, LOW._replace(equivalent="it is"), [], []).state == "equivalent"
    assert run(tree, LOW._replace(function="moved"), [], []).state == "gone"
    assert run(tree, LOW, [], []) == Result(LOW.id, "survived", "no test reaches it")


@pytest.mark.parametrize(
    ("status", "failed", "expected"),
    [
        (0, False, Result("room-1", "survived")),
        (1, True, Result("room-1", "caught", "test_a")),
        (2, False, Result("room-1", "caught", "import")),
        (-signal.SIGSEGV, False, Result("room-1", "caught", "crash")),
    ],
)
def test_how_a_process_ended(status: int, failed: bool, expected: Result) -> None:
    assert result(LOW, Ran(status, [Told("test_a", 0.1, [], failed)])) == expected


def test_a_run_without_its_tests_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="none of the tests"):
        result(LOW, Ran(5, []))


def test_tests_that_reach_a_mutant_run_cheapest_first_within_the_budget() -> None:
    mutant = Mutant("sched-1", "jswa/sched/fair_queue.py", "f", "swap", "a", "b")
    told = [
        Told("dear.py::a", BUDGET, ["sched-1"], False),
        Told("cheap.py::b", 2.0, ["sched-1"], False),
        Told("cheap.py::c", 1.0, ["sched-1"], False),
        Told("cheap.py::d", 0.1, [], False),
    ]
    assert [one.test for one in chosen(mutant, told)] == ["cheap.py::c", "cheap.py::b"]
    again = [one.test for one in chosen(mutant, told, known="dear.py::a")]
    assert again == ["dear.py::a", "cheap.py::c", "cheap.py::b"], "the test that caught it last, and the others"
    traced = mutant._replace(file="jswa/exec/pack.py")
    assert [one.test for one in chosen(traced, told)] == ["cheap.py::c", "cheap.py::b", "cheap.py::d"]


def test_workers_return_in_order_and_pass_errors_on() -> None:
    workers = Workers([Tree(Path("a")), Tree(Path("b"))])
    assert workers.map(lambda _, job: job * 2, range(5)) == [0, 2, 4, 6, 8]
    with pytest.raises(ZeroDivisionError):
        workers.map(lambda _, job: 1 // job, [1, 0, 1])


def test_the_score_counts_by_room_and_tells_what_was_caught_before(tmp_path: Path) -> None:
    mutants = [LOW, HANGS, UNSEEN, LOW._replace(id="other-1")]
    before = [Result(mutant.id, "caught", "test_a") for mutant in mutants]
    after = [*before[:1], Result(HANGS.id, "survived"), Result(UNSEEN.id, "equivalent"), before[3]]
    path = tmp_path / "score.json"
    write(before, mutants, path)
    assert read(path) == {one.id: one for one in before}
    assert lost(read(path), after) == [HANGS.id]
    lines = report(mutants, after).splitlines()
    assert lines[-3:] == [
        "room: 1 of 2 caught (50.0%); 1 equivalent, 0 gone",
        "other: 1 of 1 caught (100.0%); 0 equivalent, 0 gone",
        "all: 2 of 3 caught (66.7%); 1 equivalent, 0 gone",
    ]
    write(after[1:2], mutants[1:], path)
    assert [read(path)[one.id].state for one in mutants[1:]] == ["survived", "caught", "caught"]
    assert LOW.id not in read(path)
