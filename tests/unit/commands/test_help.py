"""What --help shows: every option in one group, whole sentences, nothing mangled, and no slow imports."""

import dataclasses
import re
import subprocess
import sys
from collections import Counter
from typing import Annotated

import pytest
from cyclopts import App, Parameter

from jswa.bench import cli as bench
from jswa.bench.load import BenchConfig
from jswa.commands import cli
from jswa.commands.options import groups as option_groups
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
    found, group = {}, ""
    for line in text.splitlines():
        if head := re.match(r"╭─ (.*?) ─+╮", line):
            group = head[1]
        elif row := re.match(r"│ +(\S.*?)(?:  +(\S.*?))? +│$", line):
            name = row[1].split()[0]
            if name.startswith("--no-") or group == "Commands":
                continue  # the second name of a switch, on a line of its own
            found[name] = (group, re.sub(r"( \[(choices|default|required)\b[^\]]*\])+$", "", row[2] or ""))
    return found


def printed(command: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    """What `jswa COMMAND --help` prints on a terminal that is wide enough for every text."""
    patch.setenv("COLUMNS", "900")
    assert cli.run([*command.split(), "--help"]) == 0
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
    program = App(name="program", help_format="plaintext", version_flags=[])
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
    assert "╭─ " in done.stdout
    assert "--empty-" not in done.stdout
