"""The `jswa` commands that pages show, and what the command line makes of them without running them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from jswa.commands import cli
from jswa.commands.server_package import load_server

_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Served:
    """What `jswa serve` would start.

    Attributes:
        engine: its `EngineConfig`.
    """

    model: str
    engine: Any


def shown(text: str) -> Iterator[list[str]]:
    """Yield the words after `jswa` of each command in the code blocks of a page, without its comment."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("jswa "):
                yield shlex.split(line, comments=True)[1:]


def read(words: list[str], patch: pytest.MonkeyPatch) -> Served | None:
    """Have the command line read a command; return what `jswa serve` would start, None for another command.

    Raises CycloptsError or JswaError if the command line refuses it.
    """
    asked: list[Served] = []

    def start(model: str, server: object, engine: Any) -> int:
        asked.append(Served(model, engine))
        return 0

    patch.setattr(load_server("cli"), "import_server_module", lambda name: SimpleNamespace(launch=start))
    patch.setattr(import_module("jswa.bench.cli"), "run", lambda options: 0)
    words = ["--tensor-parallel-size" if word == "-tp" else word for word in words]  # as `jswa.commands.cli.run` does
    if words[0] == "serve":
        assert load_server("cli").main(words[1:]) == 0
        return asked[0]
    if words[:2] == ["bench", "serve"]:
        from jswa.bench import cli as bench

        assert bench.main(words[2:]) == 0
        return None
    cli.app.parse_args(words, print_error=False, exit_on_error=False)
    return None
