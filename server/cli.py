"""`jswa serve`: read its options from the command line, the environment (JSWA_…) and a YAML file, in this order."""

import dataclasses
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.config import Dict, Env

from jswa.commands.options.groups import ENGINE, grouped, whole_lines
from jswa.commands.options.help import formatter, parser_of
from jswa.commands.server_package import import_server_module
from jswa.config import EngineConfig
from jswa.env import NAMES as SWITCHES
from jswa.errors import ConfigError
from jswa.storage.hub import names_model

from .config_file import near_option, read_file
from .options import GROUPS, ServeConfig

_FIELDS = [field for kind in (ServeConfig, EngineConfig) for field in dataclasses.fields(kind)]
_ON_OR_OFF = [field.name for field in _FIELDS if isinstance(field.default, bool)]
_OPTIONS = ["model", *(field.name for field in _FIELDS)]
_Server, _Engine = grouped(ServeConfig, GROUPS), grouped(EngineConfig, ENGINE)
_SERVER, _ENGINE = _Server(), _Engine()
if TYPE_CHECKING:
    type Server = ServeConfig
    type Engine = EngineConfig
else:
    Server = Annotated[_Server, Parameter(name="*", consume_multiple=1)]  # --api-key a b
    Engine = Annotated[_Engine, Parameter(name="*", consume_multiple=1)]  # --lora-modules a=x b=y


@whole_lines
def serve(
    model: str = "tiny",
    *,
    config: Path | None = None,
    server: Server = _SERVER,
    engine: Engine = _ENGINE,
) -> int:
    """Serve a model over HTTP with an OpenAI-compatible API.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint, a GGUF file, OWNER/NAME on the Hugging Face Hub, or "tiny", the small
        model that ships with jswa.
    config
        YAML file with the model and any of these options by name. The command line overrides the environment
        (JSWA_PORT=8000), and the environment overrides the file.
    server
        Options of the server.
    engine
        Options of the engine.
    """
    # Import the server late: HTTP, metrics and numpy would more than double the time of --help.
    return int(import_server_module(f"{__package__}.launch").launch(model, server, engine))


def parser() -> App:
    """Return the parser of `jswa serve`, with all options."""
    return parser_of("jswa serve", serve, "jswa serve [MODEL] [OPTIONS]")


def main(tokens: Sequence[str]) -> int:
    """Run `jswa serve` with these arguments and return the exit status. Raises JswaError."""
    app = parser()
    words, app.help_formatter = formatter([*tokens], {*GROUPS, *ENGINE})
    tokens = _words_first(words)
    environment = Env("JSWA_", command=False)
    path = _config_path(tokens) or os.environ.get("JSWA_CONFIG")
    file = {} if path is None else read_file(Path(path), _OPTIONS, _ON_OR_OFF)
    app.config = (environment, Dict(file, source=str(path), use_commands_as_keys=False))
    command, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    if "model" not in bound.arguments:
        _check_last(tokens, bound.arguments)
    remove_options(os.environ, _OPTIONS)
    return int(command(*bound.args, **bound.kwargs) or 0)


def _words_first(tokens: Sequence[str]) -> list[str]:
    """Return the tokens with the words behind `--option=value` at the front: that form takes one value."""
    words: list[str] = []
    others: list[str] = []
    for token in tokens:
        is_word = not token.startswith("-") and bool(others) and re.match("--[^=]+=", others[-1]) is not None
        (words if is_word else others).append(token)
    return [*words, *others]


def _check_last(tokens: Sequence[str], found: Mapping[str, object]) -> None:
    """Raise ConfigError if an option with several values has taken a last word that names a model."""
    values: dict[str, object] = {}
    for options in (found.get("server", _SERVER), found.get("engine", _ENGINE)):
        assert dataclasses.is_dataclass(options)
        values |= {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    for name, value in values.items():
        if isinstance(value, tuple) and len(value) > 1 and value[-1] == tokens[-1] and names_model(tokens[-1]):
            limit = f"is read as a value of --{name.replace('_', '-')}: name the model before the options"
            raise ConfigError("model", tokens[-1], limit)


def _config_path(tokens: Sequence[str]) -> str | None:
    for index, word in enumerate(tokens):
        if word == "--config" and index + 1 < len(tokens):
            return tokens[index + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def remove_options(environ: MutableMapping[str, str], options: Sequence[str]) -> None:
    """Delete the JSWA_ variables of these options: the engine accepts no variables but its own debug switches.

    Raises ConfigError for a JSWA_ variable that is neither an option nor a switch.
    """
    known = [f"JSWA_{name.upper()}" for name in ("config", *options)]
    for name in [name for name in environ if name.startswith("JSWA_") and name not in SWITCHES]:
        if name not in known:
            raise ConfigError(name, "...", f"is not an option{near_option(name, [*known, *SWITCHES])}")
        del environ[name]
