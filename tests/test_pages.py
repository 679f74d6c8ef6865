"""Pages for readers: every relative link and anchor resolves, the README is short, and the index lists every page."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for folder in (".", "docs", "docs/deploy", "docs/design", "docs/recipes", "tests", "benchmarks", "benchmarks/gpu")
    for path in (ROOT / folder).glob("*.md")
)
ROOMS = [path for path in PAGES if path.parent == ROOT / "docs" / "design"]
MOST_WORDS = 900  # of each page of docs/design, and of how-jswa-differs.md
MOST_WORDS_OF_README = 700  # with a letter or digit
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links(text: str) -> list[str]:
    """Targets of the links and pictures of a page, outside of code, that do not name another site."""
    found = _LINK.findall(_CODE.sub("", text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and most viewers make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(path: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_resolves(path: Path) -> None:
    assert broken(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("target", ["nowhere.md", "README.md#no-such-heading", "#nor-this", "docs/nowhere.svg"])
def test_a_broken_link_is_seen(target: str) -> None:
    text = f"See [this]({target}), [that](README.md#install) and `[code](not/a/link)`."
    assert broken(ROOT / "README.md", text) == [target]


def asked_of_an_index(text: str) -> list[str]:
    """The places of a text that name jswa with an extra as pip would look for it on an index."""
    return re.findall(r"\bjswa\[[a-z]\w*", text)


def test_no_text_installs_jswa_from_an_index() -> None:
    """jswa is on none, where anybody may take its name. Errors say `jswa.errors.install`; pages name a clone."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".html", ".js", ""}
    files = [ROOT / name for name in listed.split("\0") if name and Path(name).suffix in suffixes]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file() and path != Path(__file__)}
    assert len(texts) > 500
    assert not [(path, found) for path, text in texts.items() if (found := asked_of_an_index(text))]


@pytest.mark.parametrize(
    "text", ["pip install jswa[server]", 'pip install "jswa[server,chat]"', "install jswa[cuda13]"]
)
def test_jswa_of_an_index_is_seen(text: str) -> None:
    assert asked_of_an_index(text)
    assert not asked_of_an_index('pip install ".[server]"; "dist/jswa-0.1.0-py3-none-any.whl[server]"; jswa[0]')


def test_the_readme_is_short() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert sum(re.search(r"\w", word) is not None for word in words) <= MOST_WORDS_OF_README


def laws(text: str) -> list[list[str]]:
    """The cells of the rows of a page's table of laws."""
    _, _, after = text.partition("\n## Laws\n")
    rows = [row.strip("|").split("|") for row in after.partition("\n## ")[0].splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


@pytest.mark.parametrize("path", [*ROOMS, ROOT / "docs" / "how-jswa-differs.md"], ids=lambda path: path.stem)
def test_a_page_of_the_design_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.parametrize("path", [*ROOMS, ROOT / "docs" / "laws.md"], ids=lambda path: path.stem)
def test_each_law_has_its_test(path: Path) -> None:
    found = laws(path.read_text(encoding="utf-8"))
    assert found or path.name == "README.md"
    for law, tests in found:
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named or "`make " in tests, law
        assert all((ROOT / name).exists() for name in named), law


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text(encoding="utf-8"))}
    missing = {path.relative_to(ROOT) for path in PAGES if path not in listed} - {
        Path("README.md"),
        Path("docs/README.md"),
    }
    assert not missing
