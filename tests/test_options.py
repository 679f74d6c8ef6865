"""Options that the pages name exist: each `--option` that is jswa's is in what `jswa COMMAND --help-all` prints.

Read are code in backticks and blocks of code. An option is jswa's if its code begins with it, or if it follows the word
`jswa` in its line. What follows another program's name is that program's.
"""

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from jswa.commands import cli

ROOT = Path(__file__).parents[1]
COMMANDS = ("", "serve", "bench serve", "generate", "chat", "capacity", "convert", "eval", "doctor", "env")
# History names the options of its day; the tables of coming-from.md have a test of their own (test_other_engines.py).
LEFT_OUT = {"log.md", "coming-from.md"}
# Options of other programs that stand without the program's name, or after `jswa` as an argument: whose they are.
OTHERS = {
    "--enable-deterministic-inference": "SGLang",
    "--enable-unified-memory": "SGLang",
    "--from-literal": "kubectl",
    "--hypothesis-seed": "pytest",
    "--kv-aware-session-affinity-ttl-secs": "vllm-router",
    "--machine": "benchmarks.predict.report",
    "--predicted": "benchmarks.predict.report",
    "--prefix-cache-retention-interval": "vLLM",
    "--repeats": "benchmarks.speed.deterministic",
    "--swa-full": "llama.cpp",
    "--write": "tools.aot",
}
_BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def pages() -> list[Path]:
    """All pages for readers, but those left out."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in found if path.name not in LEFT_OUT)


def options_in(text: str) -> Iterator[str]:
    """Options of jswa that a page names."""
    blocks = [line for block in _BLOCK.findall(text) for line in re.sub(r"\\\n", " ", block).splitlines()]
    for code in (*_SPAN.findall(_BLOCK.sub("", text)), *blocks):
        _, command, arguments = code.rpartition("jswa ")
        if command or code.startswith("--"):
            yield from _OPTION.findall(arguments)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The options of all commands, printed on a terminal that breaks no line."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setenv("COLUMNS", "900")
        patch.setattr(cli.app, "console", Console())
        assert [cli.run([*command.split(), "--help-all"]) for command in COMMANDS] == [0] * len(COMMANDS)
    rows = [line for line in printed.getvalue().splitlines() if line.startswith("  -")]
    return {"--help", "--help-all", "--version", *(name for row in rows for name in _OPTION.findall(row))}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_option_exists(page: Path, known: set[str]) -> None:
    assert not set(options_in(page.read_text(encoding="utf-8"))) - known - OTHERS.keys()


def test_options_of_jswa_are_told_from_others(known: set[str]) -> None:
    text = (
        "`--gone` and `jswa serve tiny --port 1 --away`, `vllm serve --lost`.\n"
        "```\ndocker run --gpus all image jswa serve tiny \\\n    --missing\npip install --no-deps x\n```\n"
    )
    assert list(options_in(text)) == ["--gone", "--port", "--away", "--missing"]
    assert "--port" in known
    assert not known & {"--gone", "--away", "--missing"}


def test_every_exception_is_used(known: set[str]) -> None:
    named = {option for page in pages() for option in options_in(page.read_text(encoding="utf-8"))}
    assert OTHERS.keys() <= named - known
