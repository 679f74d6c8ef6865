"""Mutants are found again by function and text, and changed there and nowhere else."""

import ast
from pathlib import Path

import pytest

from tools.mutants.places import Mutant, applied, find, load
from tools.mutants.rooms import PER_ROOM, ROOMS, ROOT
from tools.mutants.run import files_of

SOURCE = '''"""A module."""


class Pool:
    def free(self, count: int) -> int:
        """Count."""
        if count < self.size and count < self.size:
            return self.size - count
        return 0
'''
MUTANT = Mutant("cache-1", "pool.py", "Pool.free", "compare", "count < self.size", "count <= self.size", 1)


def written(folder: Path, name: str, source: str) -> Path:
    (folder / name).write_text(source, encoding="utf-8")
    return folder


def changed(folder: Path, mutant: Mutant = MUTANT, files: tuple[str, ...] = ()) -> str:
    """The changed module."""
    place = find(mutant, folder, files)
    assert place is not None
    return applied((folder / place.file).read_text(encoding="utf-8"), place.node, mutant.after)


def test_only_the_place_changes(tmp_path: Path) -> None:
    expected = SOURCE.replace("and count < self.size", "and (count <= self.size)")
    assert changed(written(tmp_path, "pool.py", SOURCE)) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Pool", "# A line.\n\nLIMIT = 3\n\n\nclass Pool"),
        ("count < self.size", "count < (\n            self.size  # a comment\n        )"),
        ("return 0", "print('ä', count)\n        return 0"),
        ("        if", "        assert count < self.size\n        if"),
    ],
    ids=["lines before it", "broken lines", "other statements", "an assertion"],
)
def test_a_place_is_found_after_the_code_around_it_has_changed(tmp_path: Path, old: str, new: str) -> None:
    source = changed(written(tmp_path, "pool.py", SOURCE.replace(old, new)))
    assert source.count("count <= self.size") == 1
    assert source.index("count <= self.size") > source.index("count < ")
    ast.parse(source)


def test_a_place_is_found_in_another_file_if_one_alone_has_it(tmp_path: Path) -> None:
    written(written(tmp_path, "new.py", SOURCE), "other.py", SOURCE.replace("Pool", "Queue"))
    assert "count <= self.size" in changed(tmp_path, files=("new.py", "other.py"))
    written(tmp_path, "third.py", SOURCE)
    assert find(MUTANT._replace(file="moved.py"), tmp_path, ("new.py", "third.py")) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [("and count < self.size", ""), ("count <", "count >"), ("def free", "def take"), ("class Pool", "class Pages")],
)
def test_a_place_that_has_changed_is_gone(tmp_path: Path, old: str, new: str) -> None:
    assert find(MUTANT, written(tmp_path, "gone.py", SOURCE.replace(old, new)), ("gone.py",)) is None


def test_the_list_has_forty_mutants_of_each_room_that_differ_and_compile() -> None:
    mutants, files = load(), files_of(ROOT)
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    assert all([mutant.room for mutant in mutants].count(room) == PER_ROOM for room in ROOMS)
    for mutant in mutants:
        place = find(mutant, ROOT, files)
        if place is not None:
            source = (ROOT / place.file).read_text(encoding="utf-8")
            new = applied(source, place.node, mutant.after)
            assert ast.dump(ast.parse(new)) != ast.dump(ast.parse(source)), mutant.id
