"""Every `jswa` command in a code block of a page is one that the command line reads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from jswa.speculation import parse
from tests.support.shown_commands import read, shown

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each page with each of its commands."""
    for page in PAGES:
        for words in shown(page.read_text(encoding="utf-8")):
            yield page.relative_to(ROOT).as_posix(), words


@pytest.mark.parametrize(("page", "words"), list(commands()), ids=lambda value: " ".join(value).replace("/", "."))
def test_the_command_line_reads_what_a_page_shows(page: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the JSON of --speculative-config."""
    served = read(words, monkeypatch)
    assert served is None or parse(served.engine.speculative_config) is not None or not any("spec" in w for w in words)


def test_commands_are_found_in_blocks_alone_and_without_comments() -> None:
    text = "`jswa serve a`\n```\njswa serve b  # c\nother\njswa eval \\\n  d\n```\njswa serve e\n"
    assert list(shown(text)) == [["serve", "b"], ["eval", "d"]]
    assert len(list(commands())) > 30


@pytest.mark.parametrize(
    "words",
    [["serve", "tiny", "--no-such-option"], ["capacity"], ["bench", "serve", "--n", "3"], ["eval", "tiny", "words"]],
)
def test_a_false_command_is_seen(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CycloptsError):
        read(words, monkeypatch)


def test_what_would_be_served_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form of an option too."""
    served = read(["serve", "a/b", "-tp", "4", "--quantization", "int8"], monkeypatch)
    assert served is not None
    assert (served.model, served.engine.tensor_parallel_size, served.engine.quantization) == ("a/b", 4, "int8")
