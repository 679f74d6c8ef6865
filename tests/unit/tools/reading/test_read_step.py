"""What a reader of one decode step reads: how it is counted, and that it does not grow unseen."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from tools import read_step

# What `python -m tools.read_step` counts. Lower them when you cut. A change that needs more raises them, and its commit
# says what the reader gets for it.
MOST = {"functions": 251, "lines": 2170, "files": 54}

MODULE = '''"""A module."""


def outer(numbers: list[int]) -> int:
    """Return a sum.

    Its docstring has several lines.
    """
    # A comment.

    def inner(n: int) -> int:
        return n + 1  # counted

    def never(n: int) -> int:
        return n

    return sum(map(lambda n: 2 * inner(n), numbers))


class Shape:
    """A class."""

    def area(self) -> str:
        text = """two
        lines"""
        return text
'''


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """The module, as a file that has been run."""
    path = tmp_path / "shapes.py"
    path.write_text(MODULE)
    found = ModuleType("shapes")
    exec(compile(MODULE, str(path), "exec"), found.__dict__)  # noqa: S102 - the text above
    return found


def codes(module: ModuleType) -> dict[str, CodeType]:
    """Return the code of the module's functions by name."""
    outer: CodeType = module.outer.__code__
    inside = {c.co_name: c for c in outer.co_consts if isinstance(c, CodeType)}
    return {"outer": outer, "area": module.Shape.area.__code__, **inside}


def test_lines_of_code_are_counted_once(module: ModuleType, tmp_path: Path) -> None:
    """A function that ran inside of another is counted by itself; one that did not is part of what is read."""
    code = codes(module)
    found = read_step.functions_of(
        [("host", code["outer"]), ("host", code["<lambda>"]), ("host", code["inner"]), ("host", code["area"])], tmp_path
    )
    assert [(f.name, len(f.code)) for f in found] == [("outer", 4), ("outer.inner", 2), ("Shape.area", 4)]
    assert read_step.sums(found) == {"functions": 3, "lines": 10, "files": 1}


def test_a_function_belongs_to_the_part_in_which_it_first_runs(module: ModuleType, tmp_path: Path) -> None:
    code = codes(module)
    found = read_step.functions_of(
        [("host", code["area"]), ("pages", code["outer"]), ("pages", code["area"])], tmp_path
    )
    assert [(f.part, f.name) for f in found] == [("host", "Shape.area"), ("pages", "outer")]


def test_bodies_of_modules_and_classes_are_no_functions(tmp_path: Path) -> None:
    path = tmp_path / "shapes.py"
    path.write_text(MODULE)
    whole = compile(MODULE, str(path), "exec")
    bodies = [whole, *(c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == "Shape")]
    assert len(bodies) == 2
    assert not read_step.functions_of([("host", body) for body in bodies], tmp_path)


@pytest.fixture(scope="module")
def read() -> dict[str, Any]:
    """What the program says, in a process of its own: what other tests have traced is not traced again."""
    command = [sys.executable, "-m", "tools.read_step", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(read_step.__file__).parents[1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_decode_step_is_no_longer_to_read_than_before(read: dict[str, Any]) -> None:
    found = {name: read[name] for name in MOST}
    assert all(found[name] <= most for name, most in MOST.items()), f"{found}, and at most {MOST}; see MOST"


def test_the_page_follows_the_step_in_the_order_of_execution(read: dict[str, Any]) -> None:
    """Every function that docs/a-decode-step.md names runs in a step, and no section goes back."""
    names = [function["name"] for function in read["read"]]
    page = (Path(read_step.__file__).parents[1] / "docs" / "a-decode-step.md").read_text()
    named = 0
    for section in page.split("\n## ")[1:-1]:
        found = re.findall(r"`([A-Za-z_.]+)`", section)
        functions = [name for name in found if name not in ("FROM_DEVICE", "StepEvents", "tiny")]
        assert not set(functions) - set(names), f"{section[:40]!r} names what no step runs"
        places = [names.index(name) for name in functions]
        assert places == sorted(places), f"{section[:40]!r} goes back"
        named += len(functions)
    assert named >= 60


@pytest.mark.parametrize(
    ("part", "first", "among"),
    [
        ("host", "Engine.step", "Scheduler.plan"),
        ("pages", None, "CacheManager.grow_by_page"),
        ("program", "jit_step", "Attention.__call__"),
    ],
)
def test_each_part_begins_at_its_beginning(read: dict[str, Any], part: str, first: str | None, among: str) -> None:
    names = [row["name"] for row in read["read"] if row["part"] == part]
    assert among in names
    assert first is None or names[0] == first
