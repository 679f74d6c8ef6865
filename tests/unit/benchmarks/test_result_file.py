"""Result files of the benchmarks: their form, and that every file in the repository has it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache import ablations
from benchmarks.quality import report as quality
from benchmarks.result_file import ROOT, about, read, rounded, write
from benchmarks.scale import report as scale

FILES = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
HEADER = {"command", "commit", "date", "cpu", "cpus", "load_average", "versions"}


def test_a_file_has_a_header_and_a_row_per_line(tmp_path: Path) -> None:
    rows = [{"name": "a", "seconds": {"median": 0.123456, "max": 2.0}}, {"name": "b", "seconds": None}]
    write(tmp_path / "new" / "out.json", {"settings": {"rows": 3}, "rows": rows})
    lines = (tmp_path / "new" / "out.json").read_text(encoding="utf-8").splitlines()
    assert lines[-5:] == [
        '"rows": [',
        ' {"name": "a", "seconds": {"median": 0.1235, "max": 2.0}},',
        ' {"name": "b", "seconds": null}',
        "]",
        "}",
    ]
    found = read(tmp_path / "new" / "out.json")
    assert found.keys() == HEADER | {"settings", "rows"}
    assert found["settings"] == {"rows": 3}


def test_floats_have_four_digits_and_nothing_else_changes() -> None:
    value = {"big": 123456.7, "small": 1.23456e-12, "count": 1234567, "nested": [[0.5], {"flag": True, "none": None}]}
    assert rounded(value) == {**value, "big": 123500.0, "small": 1.235e-12}


def test_the_command_is_recorded_without_output_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither `--json FILE` nor `--out=DIR` says anything about the measurement."""
    monkeypatch.setattr(sys, "argv", ["x.py", "--rows", "3", "--json", "/tmp/out.json", "--out=/tmp", "two words"])
    assert about()["command"].endswith("--rows 3 'two words'")


def test_a_missing_file_reads_as_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("name", "markdown"),
    [("ablations", ablations.markdown), ("quality", quality.markdown), ("scale_sim", scale.markdown)],
    ids=["ablations", "quality", "scale_sim"],
)
def test_tables_are_made_from_the_file_beside_them(name: str, markdown: Callable[[dict[str, Any]], str]) -> None:
    folder = ROOT / "benchmarks" / "results" / "cpu"
    assert (folder / f"{name}.md").read_text(encoding="utf-8") == markdown(read(folder / f"{name}.json"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_files_of_the_repository_have_this_form(path: Path) -> None:
    """A header (per table or entry of files that have several), four digits, no dates in names, no machine's paths."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found == rounded(found)
    tables = {"ablations": list(found.values()), "history": found.get("entries")}.get(path.stem) or [found]
    assert all(table.keys() >= HEADER for table in tables)
    assert not re.match(r"\d{4}-", path.name)
    assert "/tmp/" not in path.read_text(encoding="utf-8")
