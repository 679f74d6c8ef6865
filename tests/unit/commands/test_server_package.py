"""What jswa takes from the server by name: no type checker follows `load_server`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from jswa.commands.server_package import load_server

ROOT = Path(__file__).parents[3]


def taken() -> dict[str, tuple[str, str]]:
    """Return each name that a module of jswa takes from a module of the server, by its place."""
    found: dict[str, tuple[str, str]] = {}
    for file in sorted((ROOT / "jswa").rglob("*.py")):
        text = file.read_text()
        if "load_server(" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for line, module, name in _taken_in(function):
                    found[f"{file.relative_to(ROOT)}:{line}: {module}.{name}"] = module, name
    return found


def _taken_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of what a function takes from modules that it loads."""
    nodes = list(ast.walk(function))
    kept = {  # variables that hold a module
        node.targets[0].id: module
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (module := _loaded(node.value))
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            module = kept.get(node.value.id) if isinstance(node.value, ast.Name) else _loaded(node.value)
            if module:
                yield node.lineno, module, node.attr


def _loaded(node: ast.expr) -> str | None:
    """Return the module that an expression loads; None if it loads none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load_server":
        (argument,) = node.args
        assert isinstance(argument, ast.Constant)
        return str(argument.value)
    return None


@pytest.mark.parametrize(("module", "name"), [pytest.param(*own, id=place) for place, own in taken().items()])
def test_every_name_that_is_taken_from_the_server_is_there(module: str, name: str) -> None:
    assert hasattr(load_server(module), name)


def test_names_are_found_at_all() -> None:
    assert ("cluster.relay", "ReplicaLost") in taken().values()
    assert ("cluster.replicas", "NAMES") in taken().values()
