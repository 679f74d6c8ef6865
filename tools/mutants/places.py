"""Mutants, and where they are: a function and the text of an expression or statement in it, never a line's number.

So a mutant is found again after the code around it has changed, and after its function has moved to another file.
"""

import ast
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("list.json")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOGS = ("log", "logger", "_log", "_logger", "logging", "warnings")


class Mutant(NamedTuple):
    """One change of the code.

    Attributes:
        file: where it was drawn, relative to the root.
        function: its qualified name in the file.
        before, after: normal forms of the code (`ast.unparse`): spaces, parentheses and broken lines do not count.
        nth: which one of equal places in the function, from 0.
        equivalent: why no test can tell it from the original; empty if one can.
    """

    id: str
    file: str
    function: str
    operator: str
    before: str
    after: str
    nth: int = 0
    equivalent: str = ""

    @property
    def room(self) -> str:
        """The room that it was drawn for."""
        return self.id.rsplit("-", 1)[0]


class Place(NamedTuple):
    """Where a mutant is now: a file, and the node of its tree."""

    file: str
    node: ast.stmt | ast.expr

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line, from 1."""
        return self.node.lineno, self.node.end_lineno or self.node.lineno


def load(path: Path = LIST) -> list[Mutant]:
    """Read the list of mutants."""
    return [Mutant(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def save(mutants: Iterable[Mutant], path: Path = LIST) -> None:
    """Write the list, without empty fields."""
    entries = [{key: value for key, value in mutant._asdict().items() if value} for mutant in mutants]
    path.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield all functions of a module with their qualified names, also those inside others, in the order of the file.

    Left out are what only checks, shows or declares: `check` methods, `__repr__`, blocks for the type checker.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not (node.name.startswith("check") or node.name in ("__repr__", "__str__")):
                yield prefix + node.name, node
                yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from functions(node, prefix)


def code(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Yield the statements and expressions of a function's own body, outer ones first.

    Left out are inner functions, docstrings, annotations, assertions, raised errors, texts with fields, and logging.
    """
    for part in node.body if isinstance(node, Function) else _children(node):
        if isinstance(part, Function | ast.ClassDef | ast.Assert | ast.Raise | ast.JoinedStr) or _is_silent(part):
            continue
        if isinstance(part, ast.stmt | ast.expr):
            yield part
        yield from code(part)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "ctx", "decorator_list", "type_params"):
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def _is_silent(node: ast.AST) -> bool:
    """Whether a statement is a docstring or a call that logs."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    named = (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in _LOGS
    )
    return named or isinstance(call, ast.Constant)


def matches(function: Function, before: str) -> list[ast.stmt | ast.expr]:
    """Return the places of a function whose code has this normal form. A statement and its only expression are one."""
    found: dict[tuple[int, int], ast.stmt | ast.expr] = {}
    for node in code(function):
        if ast.unparse(node) == before:
            found.setdefault((node.lineno, node.col_offset), node)
    return list(found.values())


@cache
def _functions(path: Path) -> list[tuple[str, Function]]:
    return list(functions(ast.parse(path.read_text(encoding="utf-8")))) if path.exists() else []


def find(mutant: Mutant, root: Path, files: Iterable[str]) -> Place | None:
    """Return where a mutant is: in its file, or in the only one of `files` that has its function and its text.

    None if it is gone.
    """

    def inside(file: str) -> list[Place]:
        named = [function for name, function in _functions(root / file) if name == mutant.function]
        return [Place(file, node) for function in named for node in matches(function, mutant.before)]

    here = inside(mutant.file)
    others = [] if here else [places for file in files if len(places := inside(file)) > mutant.nth]
    places = others[0] if len(others) == 1 else here
    return places[mutant.nth] if len(places) > mutant.nth else None


def applied(source: str, node: ast.stmt | ast.expr, after: str) -> str:
    """Return a module's source with other code in place of a node; an expression keeps its rank by parentheses."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    new = after if isinstance(node, ast.stmt) else f"({after})"
    return b"".join([*lines[:first], head, new.encode(), tail, *lines[last + 1 :]]).decode()
