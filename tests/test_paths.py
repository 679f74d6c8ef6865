"""Paths and modules that the pages name exist.

A path in backticks starts at the repository's root or at the folder of its page; one of a result file may start at
`benchmarks/results`. Words with a space between them are read one by one, so paths in commands count. A word is a path
if it is under a folder that the repository has, or ends as a source file does. `file.py:7` needs that line,
`file.py::test_name` that test, and a pattern with `*` or `{a,b}` a file that it fits.
"""

import ast
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folders of code and pages. Others beside them are made by make, and are not part of a clone.
FOLDERS = ("jswa", "server", "pallas_kernels", "tests", "benchmarks", "tools", "docs", "examples")
RESULTS = ROOT / "benchmarks" / "results"
# History: these name the files of their day.
HISTORY = ("docs/log.md", "CHANGELOG.md", "benchmarks/results/")
# Words that look like paths of the repository and are none, with the reason.
OTHERS = {
    "jswa/_server": "the name of `server` in a wheel",
    "report.md": "written by `benchmarks.predict.report`",
    "summary.md": "written by `make gpu`",
}
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_WORD = re.compile(r"(?P<path>[\w.*{},-]+(?:/[\w.*{},-]*)*)(?::(?P<line>\d+)|::(?P<test>\w+))?")
_SOURCE = re.compile(r"[^/]\.(py|md|sh|cc|h|js|css|html|toml|lock)$")
_MODULE = re.compile(rf"-m ((?:{'|'.join(FOLDERS)})\.[a-z_][\w.]*)\b")


def pages() -> list[Path]:
    """All pages, but those of history."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(HISTORY))


@cache
def folder_names() -> set[str]:
    """The names of all folders of the repository, at any depth, but for those that are owners on the hub."""
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_dir())
    return {*FOLDERS, *(path.name for path in below if not path.name.startswith("__") and "configs" not in path.parts)}


def is_path(word: str) -> bool:
    """Whether a word, without a line or a test after it, claims to be a path of the repository."""
    first, slash, _ = word.partition("/")
    return word not in OTHERS and bool((slash and first in folder_names()) or _SOURCE.search(word))


def fitting(word: str, page: Path) -> list[Path]:
    """The files and folders that a path of a page may mean."""
    options = [part.split(",") if at % 2 else [part] for at, part in enumerate(re.split(r"[{}]", word.rstrip("/")))]
    bases = [ROOT, page.parent, *([RESULTS] if word.endswith(".json") else [])]
    names = ["".join(parts) for parts in product(*options)]
    found = [[path for base in bases for path in base.glob(name)] for name in names]
    return [path for paths in found for path in paths] if all(found) else []


def names_in(path: Path) -> set[str]:
    """The names of the functions and classes of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def false_paths(page: Path, text: str) -> list[str]:
    """The paths, lines and tests of a page that are not there."""
    found = []
    for word in (word for span in _SPAN.findall(_CODE.sub("", text)) for word in span.split()):
        parts = _WORD.fullmatch(word)
        if parts and is_path(parts["path"]):
            paths = fitting(parts["path"], page)
            lines = int(parts["line"] or 0)
            right = any(
                (not parts["test"] or parts["test"] in names_in(path))
                and (not lines or lines <= len(path.read_text(encoding="utf-8").splitlines()))
                for path in paths
            )
            found += [] if right else [word]
    return found


def false_modules(text: str) -> list[str]:
    """The modules that a page runs with `-m`, in blocks of code too, and that are not there."""
    names = _MODULE.findall(text)
    paths = {name: ROOT / name.replace(".", "/") for name in names}
    return [name for name, path in paths.items() if not (path.with_suffix(".py").is_file() or path.is_dir())]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not [*false_paths(page, text), *false_modules(text)]


@pytest.mark.parametrize(
    "word",
    [
        *(
            "jswa/gone.py",
            "exec/buckets.py",
            "buckets.py",
            "gone/page.md",
            "programs/gone",
            "docs/gone/",
            "cpu/no.json",
        ),
        *("tests/test_paths.py:9999", "tests/test_paths.py::test_gone", "tests/gone_*.py", "jswa/{engine,gone}.py"),
        "python -m pytest tests/gone",
    ],
)
def test_a_false_path_is_seen(word: str) -> None:
    assert false_paths(ROOT / "README.md", f"`jswa/engine.py` and `{word}`") == [word.split()[-1]]


@pytest.mark.parametrize(
    "word",
    [
        *("jswa/engine.py", "test_paths.py", "e2e/kernels", "unit/model/", "tests/test_paths.py:3", "jswa/*.py"),
        *("tests/test_paths.py::test_every_path_exists", "jswa/{engine,llm}.py", "h200/points.json"),
        *("/v1/models", "google/gemma-3-4b-it", "config.json", "OWNER/NAME", "a / b", "jswa.llm", "<b>/x</b>"),
    ],
)
def test_what_is_true_or_no_path_is_left(word: str) -> None:
    assert false_paths(ROOT / "tests" / "README.md", f"`{word}`\n```\n`jswa/gone.py`\n```\n") == []


def test_a_false_module_is_seen() -> None:
    assert false_modules("python -m benchmarks.gone; python -m tools.docs out") == ["benchmarks.gone"]


def test_every_exception_is_used() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    assert not [word for word in OTHERS if not any(f"`{word}`" in text for text in texts)]
