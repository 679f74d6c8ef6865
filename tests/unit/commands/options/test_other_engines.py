"""Options of other engines are answered with jswa's own, or taken, and docs/coming-from.md has the same table."""

import dataclasses
import re
from pathlib import Path

import pytest

from jswa.commands import cli
from jswa.commands.options.other_engines import ENGINES, HARMLESS, SAME, hint, translated
from jswa.config import EngineConfig
from jswa.errors import ConfigError
from server.config_file import read_file
from server.options import ServeConfig

PAGE = Path(__file__).parents[4] / "docs" / "coming-from.md"
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")
OWN = {
    f"--{negative}{field.name.replace('_', '-')}"
    for kind in (EngineConfig, ServeConfig)
    for field in dataclasses.fields(kind)
    for negative in ("", "no-")
} | {"--config", "--help", "--model"}


def rows(engine: str) -> dict[str, str]:
    """Right column of the page's table by each option of another engine in the left column."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {engine}\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    found = {
        flag: right for left, right in cells for code in re.findall(r"`[^`]*`", left) for flag in FLAG.findall(code)
    }
    return {flag: right for flag, right in found.items() if flag not in OWN}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_and_the_hints_have_the_same_options(engine: str) -> None:
    assert rows(engine).keys() == ENGINES[engine].keys()


@pytest.mark.parametrize(("engine", "flag"), [(engine, flag) for engine in ENGINES for flag in ENGINES[engine]])
def test_a_hint_names_the_options_that_the_page_names(engine: str, flag: str) -> None:
    """They exist, and the option of the other engine does not."""
    said = ENGINES[engine][flag]
    named = set(FLAG.findall(said))
    assert named == set(FLAG.findall(rows(engine)[flag]))
    assert named <= OWN
    assert flag not in OWN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--enable-prefix-caching=false"], "vLLM's --enable-prefix-caching is not needed: it is always on;"),
        (["--no-enable-prefix-caching"], "vLLM's --no-enable-prefix-caching is --no-prefix-cache here."),
        (["--enforce-eager"], "vLLM's --enforce-eager has no counterpart: every step is compiled."),
        (["--context_length", "4096"], "SGLang's --context-length is --max-model-len here."),
        (["-c", "4096"], "llama.cpp's -c is --max-model-len here."),
        (["-ngl", "99"], "llama.cpp's -ngl has no counterpart: a model runs on its devices as a whole."),
        (["--tokenizer", "x"], "vLLM's --tokenizer has no counterpart: the tokenizer is the checkpoint's."),
    ],
)
@pytest.mark.parametrize("command", [["serve", "tiny"], ["chat", "tiny"]])
def test_an_option_of_another_engine_is_answered_by_name(
    command: list[str], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*command, *words]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "Did you mean" not in found


def test_a_hint_names_no_option_that_the_command_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    """`jswa capacity` has no context."""
    assert cli.run(["capacity", "tiny", "--ctx-size", "2"]) == 2
    assert "--max-model-len" not in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_marks_the_options_that_are_taken(engine: str) -> None:
    taken = {flag for flag, right in rows(engine).items() if right.startswith("*taken*")}
    assert taken == (HARMLESS | SAME.keys()) & ENGINES[engine].keys()


def test_every_option_that_is_taken_is_of_another_engine() -> None:
    """-tp and -dcp are vLLM's short forms."""
    assert (HARMLESS | SAME.keys()) - {"-tp", "-dcp"} <= {flag for table in ENGINES.values() for flag in table}
    assert set(SAME.values()) <= OWN


@pytest.mark.parametrize("command", [["capacity", "tiny"], ["eval", "tiny", "--limit", "0"], ["serve", "--port", "x"]])
def test_harmless_options_are_taken_with_a_warning_each(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else is wrong is said after them."""
    flags = sorted(HARMLESS)
    cli.run([*command, *flags, "--enable_prefix_caching=True"])
    lines = capsys.readouterr().err.splitlines()
    warned = [line.split()[1] for line in lines if re.fullmatch(r"WARNING: --\S+ has no effect: .+", line)]
    assert warned == [*flags, "--enable-prefix-caching"]
    assert "nknown option" not in "".join(lines)


def test_other_names_are_translated_up_to_the_end_of_options() -> None:
    words = ["serve", "--tp", "2", "--tp_size=4", "-tp", "8", "--model-path", "a/b", "--", "--tp", "--jinja"]
    own = "--tensor-parallel-size"
    expected = ["serve", own, "2", f"{own}=4", own, "8", "--model", "a/b", "--", "--tp", "--jinja"]
    assert translated(words) == (expected, [])


def test_keys_of_the_file_are_taken_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model-path: a/b\ntp: 2\nenable_prefix_caching: true\nenable-chunked-prefill: true\n")
    options, switches = ["model", "tensor_parallel_size", "prefix_cache"], ["prefix_cache"]
    assert read_file(path, options, switches) == {"model": "a/b", "tensor_parallel_size": 2}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" has no effect: ")[0] for line in lines] == [
        "WARNING: c.yaml: --enable-prefix-caching",
        "WARNING: c.yaml: --enable-chunked-prefill",
    ]
    path.write_text("enable_prefix_caching: false\n")
    with pytest.raises(ConfigError, match="is not an option; vLLM's --enable-prefix-caching is not needed"):
        read_file(path, options, switches)


def test_a_key_of_the_file_is_answered_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("context_length: 4096\n")
    assert cli.run(["serve", "tiny", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "is not an option; SGLang's --context-length is --max-model-len here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "near"), [("--prot", "--port"), ("--max-model-length", "--max-model-len"), ("--zzz", "")]
)
def test_a_misspelt_option_has_a_near_name_only_if_one_is_near(
    flag: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hint(flag) is None
    assert cli.run(["serve", "tiny", flag, "1"]) == 2
    found = capsys.readouterr().err
    assert (f"Did you mean {near}?" in found) if near else ("Did you mean" not in found)
