"""`jswa --install-completion`: what bash completes, and scripts for the other shells."""

import subprocess
from pathlib import Path

import pytest

from jswa.commands import cli
from jswa.commands.completion import completed

# Calls the function of the script as bash does at Tab, with the words of the line, the last of them to be completed.
BASH = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _jswa; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash."""
    path = tmp_path_factory.mktemp("completion") / "jswa"
    path.write_text(completed(cli.app).generate_completion(shell="bash"))  # noqa: S604 - it names the shell
    return path


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ser"], ["serve"]),
        (["bench", ""], ["serve"]),
        (["serve", "--max-mod"], ["--max-model-len"]),
        (["serve", "tiny", "--port", "80", "--max-queued-t"], ["--max-queued-tokens"]),
        (["serve", "--quantization", "i"], ["int8"]),
        (["serve", "--no-pre"], ["--no-prefix-cache"]),
        (["serve", "--help-"], ["--help-all"]),
        (["bench", "serve", "--request-"], ["--request-rate"]),
        (["chat", "--too"], ["--tools"]),
        (["--ins"], ["--install-completion"]),
    ],
)
def test_bash_completes_commands_options_and_choices(script: Path, words: list[str], found: list[str]) -> None:
    """Those of serve and bench serve too, whose parsers are their own."""
    done = subprocess.run(["bash", "-c", BASH, script, "jswa", *words], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (found, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_where_the_shell_looks(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZSH", raising=False)
    monkeypatch.delenv("ZSH_CUSTOM", raising=False)
    assert cli.run(["--install-completion", "--shell", shell]) == 0
    shown = capsys.readouterr().out
    (path,) = [path for path in tmp_path.rglob("*jswa*") if path.is_file()]
    assert str(path) in shown
    assert path.read_text().count("max-model-len") >= 4  # of serve, chat, generate and eval
    assert (tmp_path / ".bashrc").exists() == (shell == "bash")
