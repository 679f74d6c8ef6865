"""What --help shows: every option in one group, whole sentences, nothing mangled, and no slow imports."""

import dataclasses
import re
import subprocess
import sys
from collections import Counter
from typing import Annotated

import pytest
from cyclopts import App, Parameter
from rich.console import Console

from jswa.bench import cli as bench
from jswa.bench.config import BenchConfig
from jswa.commands import cli
from jswa.commands.options import groups as option_groups
from jswa.commands.options.help import COMMON, Printed
from jswa.config import EngineConfig
from server.options import GROUPS, ServeConfig

COMMANDS = ("serve", "bench serve", "generate", "chat", "capacity", "convert", "eval", "doctor", "env")


@pytest.mark.parametrize(
    ("kind", "groups"), [(EngineConfig, option_groups.ENGINE), (ServeConfig, GROUPS), (BenchConfig, bench.GROUPS)]
)
def test_every_option_is_in_one_group(kind: type, groups: option_groups.Groups) -> None:
    """A new option needs a place in `GROUPS` of its module; without one it is shown below "Other options"."""
    named = Counter(name for names in groups.values() for name in names)
    assert named == Counter(field.name for field in dataclasses.fields(kind))


def shown(text: str) -> dict[str, tuple[str, str]]:
    """The group and the text of each option in a printed help, without choices and default."""
    found: dict[str, tuple[str, str]] = {}
    group = name = ""
    for line in text.splitlines():
        if head := re.fullmatch(r"(\S.*):", line):
            group = head[1]
        elif row := re.fullmatch(r"  (\S.*?)(?:  +(\S.*))?", line):
            name = row[1].split()[0].rstrip(",")
            found[name] = (group, row[2] or "")
        elif (more := re.fullmatch(r" {32}(\S.*)", line)) and name:
            found[name] = (group, f"{found[name][1]} {more[1]}".strip())
    ends = r"( \[(choices: |default: |required)[^\]]*\])+$"
    return {name: (group, re.sub(ends, "", words)) for name, (group, words) in found.items() if group != "Commands"}


def set_width(columns: int, patch: pytest.MonkeyPatch) -> None:
    """Set the width of the terminal, also of the console that the command line has kept from an earlier test."""
    patch.setenv("COLUMNS", str(columns))
    patch.setattr(cli.app, "console", Console())


def printed(command: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    """What `jswa COMMAND --help-all` prints on a terminal that is wide enough for every text."""
    set_width(900, patch)
    assert cli.run([*command.split(), "--help-all"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_text_is_made_of_whole_sentences(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with a capital letter (or a choice of the option), and ends with a full stop."""
    text = printed(command, capsys, monkeypatch)
    assert "--empty-" not in text
    options = shown(text)
    assert options or command in ("doctor", "env")
    for name, (_, words) in options.items():
        assert re.fullmatch(r"(?:[A-Z]|auto ).*\.", words), f"{name}: {words!r}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_breaks_no_name(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns: at most 60 lines. --help-all has every option, and all names are whole there too."""
    set_width(80, monkeypatch)
    texts = []
    for flag in ("--help", "--help-all"):
        assert cli.run([*command.split(), flag]) == 0
        texts.append(capsys.readouterr().out)
        assert all(len(line) <= 80 for line in texts[-1].splitlines())
    assert len(texts[0].splitlines()) <= 60
    assert cli.run([*command.split(), "-h"]) == 0
    assert capsys.readouterr().out == texts[0]
    short, whole = shown(texts[0]), shown(texts[1])
    assert short.items() <= {name: (group, short.get(name, ("", ""))[1]) for name, (group, _) in whole.items()}.items()
    assert all(words.endswith(".") for _, words in short.values())
    if command == "serve":
        assert set(whole) == set(shown(printed(command, capsys, monkeypatch)))
        assert option_groups.OTHER not in texts[1]
        assert COMMON & set(whole) == COMMON & set(short) == COMMON


def test_options_are_shown_in_their_groups_and_keep_their_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shown(printed("serve", capsys, monkeypatch))
    assert found["--port"][0] == "HTTP"
    assert found["--max-num-seqs"][0] == "Scheduling"
    assert '"*.example.com"' in found["--allowed-hosts"][1], "stars are no markup"
    assert option_groups.OTHER not in {group for group, _ in found.values()}
    assert set(found) >= {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(ServeConfig)}
    options = option_groups.grouped(EngineConfig, {})
    assert dataclasses.asdict(options(seed=3)) == dataclasses.asdict(EngineConfig(seed=3))


def test_every_option_with_a_size_is_there() -> None:
    """Those that count tokens or bytes are read by `options.sizes`, and the others are not."""
    kinds = (EngineConfig, ServeConfig, BenchConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind) if "int" in str(field.type)}
    assert names >= option_groups.TOKENS | option_groups.BYTES
    assert {name for name in names if name.endswith("bytes")} <= option_groups.BYTES


@dataclasses.dataclass(frozen=True)
class Config:
    """Options.

    Attributes:
        a: Take this
            number.
        b: Take that number.
    """

    a: int = 1
    b: int = 2


GROUPED = option_groups.grouped(Config, {"First": ("a",)})


def test_an_option_without_a_group_is_shown_below_other_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*, config: Annotated[GROUPED, Parameter(name="*")] = GROUPED()) -> None:  # type: ignore[valid-type]  # noqa: B008
        """Do it."""

    monkeypatch.setenv("COLUMNS", "200")
    program = App(
        name="program", help_format="plaintext", version_flags=[], help_formatter=Printed(whole=True, long_groups=())
    )
    program.default(command)
    with pytest.raises(SystemExit):
        program(["--help"])
    found = shown(capsys.readouterr().out)
    assert found["--a"] == ("First", "Take this number.")
    assert found["--b"] == (option_groups.OTHER, "Take that number.")


@pytest.mark.parametrize("words", [["--moe-backend", "xla"], ["--moe-backend=xla"]])
@pytest.mark.parametrize("command", [["serve", "tiny"], ["generate", "x"]])
def test_a_former_option_names_what_it_has_become(
    command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*command, *words]) == 2
    assert "--moe-backend is now --kernels=experts=NAME." in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["bench", "serve"]])
def test_help_is_printed_without_slow_imports(command: list[str]) -> None:
    """HTTP, metrics, numpy and renderers of markup are imported only after the options have been read."""
    slow = {"fastapi", "uvicorn", "prometheus_client", "numpy", "jax", "markdown_it", "docutils"}
    code = f"import sys; from jswa.commands.cli import run; run([*{command}, '--help'])"
    code = f"{code}; assert not {slow} & set(sys.modules), {slow} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "--help-all shows all options" in done.stdout
    assert "--empty-" not in done.stdout
