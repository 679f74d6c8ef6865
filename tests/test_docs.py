"""The sources of the documentation's site: guides that exist, and reference pages that name all that the code has."""

import dataclasses
import re
from pathlib import Path

import pytest

from jswa.config import EngineConfig
from server.options import ServeConfig
from tools import routes
from tools.docs import GUIDES, REST, attributes, reference, schema, write

ROOT = Path(__file__).parents[1]
LONGEST = 120  # characters of a line outside of tables, code and pictures
LONG = {ROOT / "docs" / "log.md"}  # for developers: some lines are longer


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The generated pages."""
    return reference()


def test_every_option_is_there_with_its_text(pages: dict[str, str]) -> None:
    for name, kind in (("reference/serve", ServeConfig), ("reference/engine", EngineConfig)):
        for field in dataclasses.fields(kind):
            text = attributes(kind)[field.name]
            assert len(text.split()) > 3
            assert f"| `{field.name}` | " in pages[name]
            assert text.replace("|", "\\|") in pages[name]


def test_every_route_is_there_with_its_fields(pages: dict[str, str]) -> None:
    for path, methods in schema()["paths"].items():
        for method in methods:
            assert f"## {method.upper()} {path}\n" in pages["reference/api"]
    for field in ("`messages` (required)", "`temperature`", "`stream_options`", "`max_completion_tokens`"):
        assert field in pages["reference/api"]


def test_the_guide_has_the_table_of_all_routes() -> None:
    page = routes.PAGE.read_text(encoding="utf-8")
    assert routes.filled(page) == page, "python -m tools.routes"


def test_every_promise_names_a_test_that_is_there() -> None:
    promised = (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("## What the server promises")[2]
    promises = promised.partition("A way around")[0].split("\n- ")[1:]
    assert len(promises) > 10
    for promise in promises:
        tests = re.findall(r"`(tests/[\w/.]+)`", promise)
        assert tests, promise
        assert all((ROOT / test).is_file() for test in tests), tests


def test_every_metric_and_code_is_there(pages: dict[str, str]) -> None:
    for name in ("jswa:prefix_cache_misses_total", "jswa:time_to_first_token_seconds", "jswa:kv_pages"):
        assert f"`{name}`" in pages["reference/metrics"]
    for code in ("queue_full", "invalid_api_key", "context_length_exceeded", "engine_dead"):
        assert f"| `{code}` |" in pages["reference/errors"]
    assert "PromptTooLong" in pages["reference/errors"]


def test_every_page_of_the_index_is_written(tmp_path: Path, pages: dict[str, str]) -> None:
    write(tmp_path)
    names = [*(f"docs/{name}" for chapter in GUIDES.values() for name in chapter), *REST, *pages]
    assert not [name for name in names if not (tmp_path / f"{name}.md").is_file()]
    listed = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed <= set(names)


@pytest.mark.parametrize("path", sorted(set((ROOT / "docs").rglob("*.md")) - LONG), ids=lambda path: path.stem)
def test_lines_are_short(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if len(line) > LONGEST and not line.startswith(("|", "!["))]
    assert not lines
