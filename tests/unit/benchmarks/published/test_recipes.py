"""docs/recipes: figures are what `jswa capacity` computes, commands are of models that fit, and pages are short."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.memory.recipes import MINISTRAL, PAGES, SPARK, figures
from benchmarks.result_file import rounded
from jswa.exec.sizing import weight_bytes
from jswa.model.hf.config import parse_config
from tests.support.shown_commands import read, shown

FOLDER = published.ROOT / "docs" / "recipes"
MOST_WORDS = 350  # of prose
_NO_PROSE = re.compile(r"^```.*?^```|^\|.*?$|<!--.*?-->", re.MULTILINE | re.DOTALL)


def rows(page: str) -> list[dict[str, Any]]:
    """The rows of the result file for a page."""
    return [row for row in published.results("computed/recipes")["rows"] if row["page"] == page]


def prose(path: Path) -> int:
    """The words of a page outside of code blocks and tables."""
    return len(_NO_PROSE.sub("", path.read_text(encoding="utf-8")).split())


def test_the_file_is_what_is_computed_today() -> None:
    """One page every time; all of them at night."""
    assert rounded(list(figures("gpt-oss"))) == rows("gpt-oss"), "python -m benchmarks.memory.recipes writes it anew"


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_the_file_is_what_is_computed_today_for_each_page(page: str) -> None:
    assert rounded(list(figures(page))) == rows(page)


def test_each_page_has_its_figures_and_each_figure_its_page() -> None:
    """And the pages are those of the folder."""
    assert {path.stem for path in FOLDER.glob("*.md")} == {*PAGES, "README"}
    found = [row["page"] for row in published.results("computed/recipes")["rows"]]
    assert list(dict.fromkeys(found)) == list(PAGES)
    for page, setups in PAGES.items():
        assert [(row["model"], row["quantization"]) for row in rows(page)[::4]] == [
            (setup.model, setup.quantization) for setup in setups
        ]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_recipe_are_of_models_that_fit(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each serves a model of the page's table, held as there, on as many GPUs as some row has; none is left out."""
    fitting = {(row["model"], row["quantization"], row["devices"]) for row in rows(page)}
    asked = set()
    for words in shown((FOLDER / f"{page}.md").read_text(encoding="utf-8")):
        served = read(words, monkeypatch)
        assert served is not None
        asked.add((served.model, served.engine.quantization, served.engine.tensor_parallel_size))
    assert asked <= fitting
    left_out = {(setup.model, setup.quantization) for setup in PAGES[page]} - {one[:2] for one in asked}
    assert not left_out


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_a_recipe_is_short(path: Path) -> None:
    assert prose(path) <= MOST_WORDS


@pytest.mark.parametrize(("name", "billions"), [("3B", 3.4), ("8B", 8.4), ("14B", 13.5)])
def test_ministral_has_as_many_parameters_as_its_card_says(name: str, billions: float) -> None:
    """Of the language model, from the sizes that the recipes' figures rest on. Cards cut the second decimal."""
    config = parse_config(MINISTRAL[f"Ministral-3-{name}"], weights=False)
    assert weight_bytes(config, None, "auto", "bfloat16") / 2e9 == pytest.approx(billions + 0.05, abs=0.06)


def test_spark_has_as_many_parameters_as_its_checkpoints() -> None:
    """The 4B's index counts them; of the 1.7B only the first two digits are known."""
    sizes = {
        name: weight_bytes(parse_config(config, weights=False), None, "auto", "bfloat16") // 2
        for name, config in SPARK.items()
    }
    assert sizes["Spark-X2.5-4B"] == 4_112_079_360
    assert sizes["Spark-X2.5-1.7B"] == pytest.approx(1.7e9, rel=0.02)
