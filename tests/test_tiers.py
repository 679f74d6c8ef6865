"""Which tests run when (tests/tiers.py, tests/support/nights.py)."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests import tiers
from tests.support import nights
from tests.support.nights import LONG, NIGHTS, long_first, sample, turns
from tests.tiers import TIERS, changed, expression, tier_of, write_passed

# What tests of tiers import beside the sources: the whole engine, plain values and errors.
BESIDE = {
    *("jswa.llm", "jswa.engine", "jswa.commands.cli", "jswa.config", "jswa.errors", "jswa.plan", "jswa.types"),
    *("jswa.architecture", "jswa.cache.layout", "jswa.exec", "jswa.exec.buckets", "jswa.frontend.outputs"),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one source and one test of each tier, which have all passed."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    names = ["pallas_kernels/kernel.py", "tests/e2e/kernels/test_kernel.py", "tools/tool.py", "server/app.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("before\n")
    write_passed(list(TIERS), tmp_path)
    assert changed(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("name", "must_run"),
    [
        ("pallas_kernels/kernel.py", ["kernels", "model", "engine"]),
        ("jswa/model/new.py", ["kernels", "model", "engine"]),
        ("jswa/storage/new.py", ["model", "engine"]),
        ("tests/unit/model/hf/test_new.py", ["model"]),
        ("tests/e2e/kernels/test_kernel.py", ["kernels"]),
        ("tools/tool.py", ["tools"]),
        ("tests/unit/tools/test_new.py", ["tools"]),
        ("tools/cases/new.py", ["kernels", "model", "engine", "tools"]),
        ("tools/programs/new.py", ["model", "tools"]),
        ("requirements.lock", list(TIERS)),
        ("server/app.py", ["server"]),
        ("jswa/text/new.py", ["text", "server"]),
        ("jswa/sched/new.py", ["engine"]),
        ("jswa/frontend/new.py", ["server"]),
        ("jswa/commands/new.py", []),
        ("tests/unit/sched/test_new.py", []),
    ],
)
def test_a_tier_runs_when_its_sources_have_changed(checkout: Path, name: str, must_run: list[str]) -> None:
    """Whether git tracks the file or not; and no more when they are again those that passed."""
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else None
    path.write_text("after\n")
    assert changed(checkout) == must_run
    write_passed(must_run, checkout)
    assert changed(checkout) == []
    path.unlink()
    assert changed(checkout) == must_run
    if before is not None:
        path.write_text(before)
        assert changed(checkout) == must_run


def test_files_that_git_ignores_change_nothing(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("*.so\n")
    (checkout / "pallas_kernels" / "library.so").write_text("built here")
    assert changed(checkout) == []


def test_all_tiers_run_where_nothing_says_that_they_passed(tmp_path: Path) -> None:
    """Without the file, and in a copy without git."""
    subprocess.run(["git", "init", "-q", str(tmp_path / "new")], check=True)
    assert changed(tmp_path / "new") == list(TIERS)
    assert changed(tmp_path) == list(TIERS)


def test_a_test_has_the_tier_of_its_folder() -> None:
    assert tier_of("tests/e2e/kernels/test_mosaic.py") == "kernels"
    assert tier_of("tests/unit/tools/test_lock.py") == "tools"
    assert tier_of("tests/unit/benchmarks/published/test_published.py") is None  # a change of docs/ breaks it
    assert tier_of("tests/unit/sched/test_scheduler.py") is None
    assert tier_of("tests/unit/server/core/test_streams.py") == "server"
    assert tier_of("tests/unit/server/core/test_clocks.py") is None  # any file may read a clock


def test_only_tiers_that_need_not_run_are_left_out() -> None:
    assert expression(list(TIERS)) == tiers.ELSEWHERE
    others = [name for name in TIERS if name != "kernels"]
    assert expression(others) == f"{tiers.ELSEWHERE} and not kernels"


def test_sources_and_tests_of_tiers_exist() -> None:
    """A folder that moves takes its tier along."""
    for tier in TIERS.values():
        for name in (*tier.sources, *tier.tests, *tier.always):
            assert (tiers.ROOT / name).exists(), name


@pytest.mark.parametrize("name", list(TIERS))
def test_each_tier_has_a_target_and_runs_every_night(name: str) -> None:
    makefile = (tiers.ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\ntest-{name}:" in makefile
    found = re.search(r"^nightly-long:.*\n(?:\t.*\n)+", makefile, re.MULTILINE)
    assert found is not None
    assert name in re.findall(r"\w+", found[0].partition('-m "(')[2].partition(")")[0])


@pytest.mark.parametrize("name", ["kernels", "model", "engine", "text", "server"])
def test_what_a_tiers_tests_import_is_among_its_sources(name: str) -> None:
    """But the whole engine, plain values and errors, which the other tests hold."""
    tier = TIERS[name]
    missing = set()
    files = sorted(path for test in tier.tests for path in files_of(tiers.ROOT / test))
    for file in (path for path in files if tier.has(path.relative_to(tiers.ROOT).as_posix())):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            path = module.replace(".", "/")
            own = module.startswith(("jswa.", "pallas_kernels.", "server.")) and module not in BESIDE
            if own and not f"{path}/".startswith(tier.sources) and f"{path}.py" not in tier.sources:
                missing.add(module)
    assert not missing


def files_of(test: Path) -> list[Path]:
    """Return the test files of a folder, or the file."""
    return [test] if test.is_file() else list(test.rglob("*.py"))


@pytest.mark.parametrize("every", [1, 3, 12])
def test_each_case_runs_always_or_nightly(every: int) -> None:
    """One in `every` with each change, and these are always the same."""
    found = sample("abcdefghijklm", every)
    always = [param.values[0] for param in found if not param.marks]
    assert [param.values[0] for param in found] == list("abcdefghijklm")
    assert always == list("abcdefghijklm")[: -(-13 // every)]
    assert all(param.marks == (pytest.mark.nightly,) for param in found[len(always) :])


@pytest.mark.parametrize("key", NIGHTS)
def test_the_table_names_tests_that_are_there_and_no_case_waits_longer_than_a_week(key: str) -> None:
    file, _, test = key.partition("::")
    text = (tiers.ROOT / file).read_text()
    assert f"def {test or 'test_'}" in text
    assert "nightly" in text or "sample" in text
    assert 2 <= NIGHTS[key] <= 7


@pytest.mark.parametrize("key", sorted(LONG))
def test_the_long_tests_are_there(key: str) -> None:
    file, _, test = key.partition("::")
    assert f"def {test}(" in (tiers.ROOT / file).read_text()


def test_each_case_has_its_turn_once_in_so_many_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of a file with equal parameters have the same night; other files have all of theirs each night."""
    monkeypatch.setattr(nights, "NIGHTS", {"a.py": 3, "b.py::one": 2})
    cases = [(f"a.py::{test}", f"{number}]") for test in ("one", "two") for number in range(7)]
    cases += [(f"b.py::{test}", f"{number}]") for test in ("one", "two") for number in range(4)]
    table = {
        case: [night for night in range(6) if turns(cases, 100 + night)[index]] for index, case in enumerate(cases)
    }
    for (test, parameters), found in table.items():
        every = {"a.py": 3, "b.py::one": 2}.get(test if test == "b.py::one" else test[:4], 1)
        assert len(found) == 6 // every
        assert len({night % every for night in found}) == 1
        assert found == table[test.replace("two", "one"), parameters] or test == "b.py::two"


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("places", [[], [11], [0, 1, 2, 3], [2, 5, 7, 9, 11], list(range(12))])
def test_each_process_begins_with_its_share_of_the_long_tests(places: list[int], processes: int) -> None:
    found = long_first(range(12), [place in places for place in range(12)], processes)
    assert sorted(found) == list(range(12)), "each test once"
    shares: list[list[int]] = []
    rest = found
    for others in reversed(range(processes)):  # as xdist divides them
        size = len(rest) // (others + 1)
        shares, rest = [*shares, rest[:size]], rest[size:]
    counts = [sum(case in places for case in share) for share in shares]
    assert max(counts) - min(counts) <= 1 or len(places) == 12
    for share, count in zip(shares, counts, strict=True):
        assert all(case in places for case in share[:count])


def test_tests_without_parameters_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a file each night."""
    monkeypatch.setattr(nights, "NIGHTS", {"a.py": 3})
    cases = [(f"a.py::{test}", "") for test in ("one", "two", "three")]
    assert sorted(turns(cases, number) for number in range(3)) == [
        [number == turn for number in range(3)] for turn in (2, 1, 0)
    ]
