"""How the bench that watches measures two trees: real processes, in trees that hold next to nothing."""

import sys
from pathlib import Path

import pytest

from benchmarks.result_file import ROOT
from benchmarks.watch import run
from benchmarks.watch.compare import Row
from benchmarks.watch.run import Part
from benchmarks.watch.sides import CannotMeasure, Side, commit_of, sides

ONCE = Part("paired")
DECODE = "def decode(rows, context, *, blocked):\n    return {'total': 2.0 * rows}\n"
TOTALS = [32.0, 512.0, 2800.0]


def write(path: Path, text: str = "") -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree(folder: Path, *modules: str, program: str = f"import jswa.scheduler\n{DECODE}") -> Path:
    """Write a tree that has these modules of jswa, and a measuring program, which needs jswa.scheduler."""
    for name in ("jswa/__init__.py", "pallas_kernels/__init__.py", *(f"jswa/{module}.py" for module in modules)):
        write(folder / name)
    write(folder / "benchmarks/speed/host_overhead.py", program)
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Side:
    """A tree that can be measured."""
    return Side("here", tree(tmp_path / "here", "scheduler"))


def test_both_trees_are_measured_in_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        f"import pathlib, jswa\ndef decode(rows, context, *, blocked):\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        f"        file.write(pathlib.Path(jswa.__file__).parts[-3][0] * (rows == 16))\n"
        f"    return {{'total': 2.0 * rows}}\n"
    )
    base, here = (Side(name, tree(tmp_path / name, program=program)) for name in ("base", "here"))
    rows = run.rows_of_part("host", Part("paired", rounds=2, turns=2, first=1), base, here)
    assert log.read_text() == "bhhbbh" * 2
    assert [(row.base, row.here) for row in rows] == [((total,) * 4, (total,) * 4) for total in TOTALS]


def test_a_base_that_lacks_an_interface_is_named_with_its_error(tmp_path: Path, here: Side) -> None:
    (row,) = run.rows_of_part("host", ONCE, Side("base", tree(tmp_path / "base")), here)
    assert row.error == "not measured: base: ModuleNotFoundError: No module named 'jswa.scheduler'"


def test_a_base_with_programs_of_its_own_is_measured_by_these(tmp_path: Path, here: Side) -> None:
    base = Side("base", tree(tmp_path / "base", "planner"))
    write(tmp_path / "base-own/benchmarks/speed/host_overhead.py", f"import jswa.planner\n{DECODE}")
    rows = run.rows_of_part("host", ONCE, base, here)
    assert [row.base for row in rows] == [(total,) for total in TOTALS]
    assert all("base by its own programs" in row.line() and "No module named" in row.line() for row in rows)


def test_an_installed_package_is_never_measured_in_place_of_a_tree(tmp_path: Path, here: Side) -> None:
    """The environment has jswa installed, from another folder."""
    (tmp_path / "empty").mkdir()
    (row,) = run.rows_of_part("host", ONCE, Side("base", tmp_path / "empty"), here)
    assert row.error is not None
    assert "is imported from" in row.error or "No module named" in row.error


def test_a_tree_has_the_files_of_its_commit_and_programs_that_are_linked(tmp_path: Path) -> None:
    """A program that looks for a file of the kernels beside itself finds that of the tree."""
    base, here = sides("HEAD", tmp_path)
    for side in (base, here):
        assert (side.folder / "jswa/assets").is_dir()
        assert (side.folder / "tools/aot/device.py").samefile(ROOT / "tools/aot/device.py")
        assert (side.folder / "pallas_kernels/tuning/h200.txtpb").is_file()
    own = base.by_its_own()
    assert own is not None
    assert own.own is not None
    assert not (own.own / "tools").is_symlink()
    assert (own.own / "pallas_kernels/tuning/h200.txtpb").samefile(base.folder / "pallas_kernels/tuning/h200.txtpb")
    assert here.by_its_own() is None


def test_a_process_that_hangs_is_killed_and_its_row_says_so(tmp_path: Path, here: Side) -> None:
    base = Side("base", tree(tmp_path / "base", "scheduler"))
    write(base.folder / "jswa/scheduler.py", "import time\ntime.sleep(600)")
    (row,) = run.rows_of_part("host", Part("paired", seconds=0.5), base, here)
    assert row.error == "not measured: base: it took more than 0.5 s"


def test_programs_for_a_gpu_need_their_environment(tmp_path: Path, here: Side) -> None:
    (row,) = run.rows_of_part("gpu", Part("counted", python=tmp_path / ".venv-gpu/bin/python"), here, here)
    assert row.error == "not measured: no .venv-gpu"


def test_a_commit_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(CannotMeasure, match="git"):
        commit_of("no-such-commit")


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, whose trees have been measured: they find different prefixes."""
    monkeypatch.setattr(run, "is_changed", lambda: False)
    monkeypatch.setattr(run, "commit_of", lambda revision: revision)
    monkeypatch.setattr(run, "sides", lambda base, folder: (base, "here"))
    monkeypatch.setattr(run, "measured", lambda names, base, here: [Row("a trace", "equal", (10,), (11,))])


@pytest.mark.usefixtures("without_measuring")
def test_the_exit_status_tells_of_different_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--base", "HEAD"])
    with pytest.raises(SystemExit, match="DIFFERENT: a trace"):
        run.main()


@pytest.mark.usefixtures("without_measuring")
@pytest.mark.parametrize("changed", [False, True])
def test_only_whole_runs_of_commits_are_recorded(monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    monkeypatch.setattr(run, "is_changed", lambda: changed)
    monkeypatch.setattr(sys, "argv", ["run", "--record", *([] if changed else ["--part", "hits"])])
    with pytest.raises(SystemExit, match="only a commit is recorded, with all parts"):
        run.main()
