"""The limits of CONTRIBUTING.md on the lines of files and functions.

A function's lines are counted from `def` to its end, functions inside it too, without its docstring: what it does takes
the space that it takes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("jswa", "server", "pallas_kernels", "tools", "benchmarks", "tests")
# Functions that may be longer, by `path:name`, with the reason.
LONG = {
    "pallas_kernels/attention/triton/kernel.py:attend": "33 parameters, and one loop whose state is in registers",
    "pallas_kernels/sampling/kernel_draw.py:draw": "34 parameters",
}


def stated() -> tuple[int, int]:
    """The most lines of a file and of a function that CONTRIBUTING.md states."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    found = re.search(r"files of at most (\d+) lines, functions of at most (\d+)", text)
    assert found
    return int(found[1]), int(found[2])


def sizes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The name of each function, and its lines without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            docstring = range(first.lineno, (first.end_lineno or 0) + 1) if told else range(0)
            yield node.name, (node.end_lineno or 0) + 1 - node.lineno - len(docstring)


def longer(folder: str) -> list[str]:
    """The files and functions of a folder that are longer than what is stated."""
    of_file, of_function = stated()
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        found += [name] if len(text.splitlines()) > of_file else []
        found += [f"{name}:{function}" for function, lines in sizes(ast.parse(text)) if lines > of_function]
    return found


@pytest.mark.parametrize("folder", CODE)
def test_files_and_functions_are_as_short_as_stated(folder: str) -> None:
    """Longer ones are split, or listed in `LONG`; what is listed and no longer long is taken off the list."""
    assert longer(folder) == [name for name in LONG if name.startswith(f"{folder}/")]


def test_lines_are_counted_without_the_docstring() -> None:
    code = 'def f(\n    x,\n):\n    """Say.\n\n    More.\n    """\n    def g():\n        return x\n    return g\n'
    assert list(sizes(ast.parse(code))) == [("f", 6), ("g", 2)]
