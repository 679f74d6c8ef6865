"""Docstrings say which errors their functions raise.

Of every public function of a public class or module that itself raises an error, the docstring says "Raises X" or has a
section "Raises:" with X, where X is the error's class or one that it derives from. If the error comes from a helper
(`raise invalid(...)`), any error's class will do. What the function catches itself does not leave it, and SystemExit is
the exit status of a program, which its help explains.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("jswa", "server", "pallas_kernels")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees(folder: str) -> dict[str, ast.Module]:
    """The syntax trees of all modules of a folder, by path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def errors() -> dict[str, set[str]]:
    """All classes of errors by name, each with itself and those that it derives from, but for Exception."""
    found = {
        name: {base.__name__ for base in kind.__mro__} - {"Exception", "BaseException", "object"}
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    nodes = [node for folder in CODE for tree in trees(folder).values() for node in ast.walk(tree)]
    classes = {n.name: [last(base) for base in n.bases] for n in nodes if isinstance(n, ast.ClassDef)}
    left = dict(classes)
    while ready := [name for name, bases in left.items() if not left.keys() & set(bases) - {name}]:
        for name in ready:
            above = [found[base] for base in left.pop(name) if base in found]
            found |= {name: {name}.union(*above)} if above else {}
    return found


def last(node: ast.expr) -> str:
    """The last component of the name of what is called or named; "" if it has none."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def raised(node: ast.AST, caught: frozenset[str] = frozenset()) -> Iterator[str]:
    """The names of what the statements below a node raise and do not catch; not those of functions inside."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        name = last(node.exc)
        if name != "SystemExit" and not errors().get(name, set()) & caught:
            yield name
    handled = set[str]()
    if isinstance(node, ast.Try):
        types = [handler.type for handler in node.handlers if handler.type is not None]
        handled = {last(one) for kind in types for one in (kind.elts if isinstance(kind, ast.Tuple) else [kind])}
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            inside = isinstance(node, ast.Try) and child in node.body
            yield from raised(child, caught | handled if inside else caught)


def public(node: ast.AST, name: str = "") -> Iterator[tuple[str, Function]]:
    """The public functions and methods below a module or class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{name}{child.name}.")
            else:
                yield f"{name}{child.name}", child
        elif isinstance(child, ast.If | ast.Try):
            yield from public(child, name)


def untold(function: Function) -> list[str]:
    """The errors that a function raises and its docstring does not name."""
    told = re.search(r"\bRaises?\b.*", ast.get_docstring(function) or "", re.DOTALL)
    named = {word.removesuffix("s") for word in re.findall(r"\w+", told[0])} if told else set()
    return [name for name in dict.fromkeys(raised(function)) if not named & errors().get(name, errors().keys())]


@pytest.mark.parametrize("folder", CODE)
def test_docstrings_name_what_functions_raise(folder: str) -> None:
    functions = [(path, *found) for path, tree in trees(folder).items() for found in public(tree)]
    assert any(list(raised(function)) for _, _, function in functions)
    assert not [f"{path} {name}: {error}" for path, name, function in functions for error in untold(function)]


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ('def f():\n    """Do it."""\n    raise ConfigError("a", 1, "b")', ["ConfigError"]),
        (
            'def f():\n    """Do it. A ConfigError is not raised."""\n    raise ConfigError("a", 1, "b")',
            ["ConfigError"],
        ),
        ('def f():\n    """Do it. Raises CheckpointError."""\n    raise ConfigError("a", 1, "b")', ["ConfigError"]),
        ('def f():\n    """Do it. Raises ConfigError."""\n    raise ConfigError("a", 1, "b")', []),
        ('def f():\n    """Raise ValueError."""\n    raise ConfigError("a", 1, "b")', []),
        (
            'def f():\n    """Do.\n\n    Raises:\n        JswaError: it.\n    """\n    raise ConfigError("a", 1, "b")',
            [],
        ),
        ('def f():\n    """Do it. Raises it."""\n    raise invalid("a")', ["invalid"]),
        ('def f():\n    """Do it. Raises ApiError."""\n    raise invalid("a")', []),
        ('def f():\n    """Do it."""\n    try:\n        raise KeyError\n    except LookupError:\n        pass', []),
        (
            'def f():\n    """Do it."""\n    try:\n        g()\n    except KeyError:\n        raise OSError from None',
            ["OSError"],
        ),
        ('def f():\n    """Do it."""\n    try:\n        g()\n    except KeyError:\n        raise', []),
        ('def f():\n    """Do it."""\n    def g():\n        raise OSError\n    raise SystemExit(1)', []),
    ],
)
def test_what_is_not_told_is_seen(code: str, missing: list[str]) -> None:
    ((_, function),) = public(ast.parse(code))
    assert untold(function) == missing
