"""The history: entries are appended, and lines multiply what was measured at one speed of the machine."""

import sys
from pathlib import Path

import pytest

from benchmarks.result_file import read
from benchmarks.watch import history
from benchmarks.watch.compare import Row


def rows(ratio: float, nodes: int) -> list[Row]:
    """Return a time, a count and a row without figures."""
    return [
        Row("step", "paired", (10.0,), (10.0 * ratio,)),
        Row("nodes", "counted", (320,), (nodes,)),
        Row("gpu", "counted", error="not measured: no .venv-gpu"),
    ]


def test_an_entry_is_appended_and_those_before_it_stay(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    assert history.entries(path) == []
    history.append("b", "a", rows(1.5, 320), 600.0, path)
    before = history.entries(path)
    history.append("c", "b", rows(0.5, 310), 600.0, path)
    first, second = history.entries(path)
    assert [first] == before
    assert (second["commit"], second["base"], second["seconds"]) == ("c", "b", 600)
    assert second["cpus"] is not None
    assert {"python", "jax", "numpy"} <= second["versions"].keys()
    assert [row["row"] for row in second["rows"]] == ["step", "nodes", "gpu"]
    assert list(read(path)) == ["entries"]


@pytest.mark.parametrize(("base", "said"), [("b", False), ("x", True)])
def test_what_is_in_no_entry_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], base: str, said: bool) -> None:
    path = tmp_path / "history.json"
    history.append("b", "a", rows(1.0, 320), 600.0, path)
    history.append("c", base, rows(1.0, 320), 600.0, path)
    assert ("between b (the last entry) and x (the base) is in no entry" in capsys.readouterr().out) == said


def test_lines_multiply_ratios_and_compare_counts(tmp_path: Path) -> None:
    """A machine that is slower later changes no line: only ratios count. Of the first entry they do not."""
    path = tmp_path / "history.json"
    for commit, ratio, nodes in (("b", 1.5, 320), ("c", 0.5, 320), ("d", 1.2, 240)):
        history.append(commit, "?", rows(ratio, nodes), 600.0, path)
    found = history.lines(history.entries(path))
    assert found == {"step": [(0, 1.0), (1, 0.5), (2, pytest.approx(0.6))], "nodes": [(0, 1.0), (1, 1.0), (2, 0.75)]}


def test_a_row_that_was_not_measured_has_no_point(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    history.append("b", "a", rows(1.0, 320), 600.0, path)
    history.append("c", "b", [Row("step", "paired", error="not measured: ImportError")], 600.0, path)
    history.append("d", "c", rows(0.5, 160), 600.0, path)
    assert history.lines(history.entries(path)) == {"step": [(0, 1.0), (2, 0.5)], "nodes": [(0, 1.0), (2, 0.5)]}


def test_a_picture_without_matplotlib_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install matplotlib"):
        history.draw([{"commit": "a", "rows": []}], tmp_path / "history.png")
