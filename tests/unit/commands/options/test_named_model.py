"""The first word of `jswa chat` and `jswa generate`: a model, a text, or a path that is not there."""

from pathlib import Path

import pytest

from jswa.commands import cli
from jswa.commands.options.named_model import asked
from jswa.errors import ConfigError


@pytest.mark.parametrize("model", ["tiny", "OWNER/NAME", "OWNER/NAME:Q8_0", "folder", "model.gguf"])
def test_a_model_that_comes_first_is_no_text(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built in, of the hub, a folder, and a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.gguf").touch()
    assert asked([model, "Hello", "tiny"], None) == (model, ["Hello", "tiny"])
    assert asked([model], None) == (model, [])
    assert asked([model], "other") == ("other", [model]), "--model names the model"


@pytest.mark.parametrize(
    "text", ["Hello", "Hello! My name is Bruno.", "What is 3/4 of 8?", "...", "see a/b and c/d", "x" * 9999]
)
def test_a_text_that_comes_first_is_for_the_default_model(text: str) -> None:
    assert asked([text, "tiny"], None) == (None, [text, "tiny"])


def test_no_word_names_nothing() -> None:
    assert asked([], None) == (None, [])


@pytest.mark.parametrize(
    "path",
    [
        "/no/model",
        "./model",
        "../my models/gemma",
        "~/model",
        "no/such/model",
        "C:\\model",
        "model.gguf",
        "http://host/v1",
    ],
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_path_that_is_not_there_is_neither_a_model_nor_a_text(
    command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([command, path, "Hello"]) == 2
    said = capsys.readouterr().err
    assert f"model = {path!r}: there is no such file or folder" in said
    assert "name the model first" in said


def test_a_server_has_other_names() -> None:
    """Its own, not those of this machine."""
    assert asked(["gemma", "Hello"], None, ["gemma", "/data/gemma"]) == ("gemma", ["Hello"])
    assert asked(["/data/gemma"], None, ["gemma", "/data/gemma"]) == ("/data/gemma", [])
    assert asked(["tiny", "Hello"], None, ["gemma"]) == (None, ["tiny", "Hello"])
    with pytest.raises(ConfigError, match=r"model = 'google/gemma': the server serves gemma;"):
        asked(["google/gemma", "Hello"], None, ["gemma"])
