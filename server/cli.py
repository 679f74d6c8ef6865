"""`jswa serve`: options from the command line, the environment (JSWA_…) and a YAML file, in this order."""

import dataclasses
import difflib
import gc
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import yaml
from cyclopts import App, Parameter
from cyclopts.config import Env, Yaml

from jswa.config import EngineConfig
from jswa.env import NAMES as SWITCHES
from jswa.errors import ConfigError
from jswa.text.chat_template import ChatTemplate
from jswa.types import SamplingParams

from .core.engine_protocol import EngineLike
from .core.service import Served
from .http.process import run, set_up_logging
from .options import ServeConfig

_SERVER, _ENGINE = ServeConfig(), EngineConfig()
_OPTIONS = [field.name for kind in (ServeConfig, EngineConfig) for field in dataclasses.fields(kind)]


def serve(
    model: str = "tiny",
    /,
    *,
    config: Path | None = None,
    server: Annotated[ServeConfig, Parameter(name="*")] = _SERVER,
    engine: Annotated[EngineConfig, Parameter(name="*", consume_multiple=True)] = _ENGINE,  # --lora-modules a=x b=y
) -> int:
    """Serve a model over HTTP, as OpenAI's API.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint, or "tiny", the model in the box.
    config
        A YAML file with any of these options by name. The command line comes before the environment (JSWA_PORT=8000),
        the environment before the file.
    server
        Options of the server.
    engine
        Options of the engine.
    """
    return start(model, server, engine)


def start(model: str, server: ServeConfig, engine: EngineConfig) -> int:
    """Load the model and serve it; the exit status."""
    set_up_logging(server)
    with loaded(model, server, engine) as (served, options):
        return run(served, options)


@contextmanager
def loaded(model: str, server: ServeConfig, engine: EngineConfig) -> Iterator[tuple[Served, ServeConfig]]:
    """A model until it is let go of, and the options of its server with its name in them. Raises JswaError."""
    from jswa.llm import LLM

    if not server.served_model_name:
        server = dataclasses.replace(server, served_model_name=(model,))
    for name in engine.adapters:
        if name in server.served_model_name:
            raise ConfigError("lora_modules", name, "is a name of the model itself: the adapter must have another one")
    if server.restart_engine and engine.nnodes > 1:
        raise ConfigError(
            "restart_engine", True, "is of one host: with nnodes > 1 whoever starts the hosts starts them all"
        )
    llm = LLM(model, **dataclasses.asdict(engine))

    def engines() -> Iterator[EngineLike]:
        nonlocal llm
        while True:
            if server.warm_logprobs:
                llm.engine.prepare(SamplingParams(logprobs=0, prompt_logprobs=0))
            yield llm.engine
            llm.close()
            gc.collect()  # its arrays go before new ones come
            llm = LLM(model, **dataclasses.asdict(engine))

    named = {} if llm.tokenizer is None else llm.tokenizer.special.named
    template = choose_template(server.chat_template, llm.chat_template, named)
    try:
        yield Served(engines().__next__, llm.tokenizer, template, llm.default_sampling), server
    finally:
        llm.close()


def choose_template(wanted: str | None, own: ChatTemplate | None, named: Mapping[str, str]) -> ChatTemplate | None:
    """The templates to serve: the checkpoint's, or the one that the operator names. Raises ConfigError."""
    if wanted is None:
        return own
    if own is not None and wanted in own.sources:
        return ChatTemplate({"default": own.sources[wanted]}, own.special_tokens)
    try:
        source = Path(wanted).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        has = ", ".join(sorted(own.sources)) if own is not None else "none"
        raise ConfigError("chat_template", wanted, f"must be a file, or one of the checkpoint's ({has})") from error
    return ChatTemplate({"default": source}, named)


def main(tokens: Sequence[str]) -> int:
    """Run `jswa serve` with these arguments; returns the exit status. Raises JswaError."""
    app = App(name="jswa serve", version_flags=[])
    app.default(serve)
    environment = Env("JSWA_", command=False)
    path = _config_path(tokens) or os.environ.get("JSWA_CONFIG")
    if path is not None:
        check_file(Path(path))
    app.config = (
        (environment,) if path is None else (environment, Yaml(path, must_exist=True, use_commands_as_keys=False))
    )
    command, bound, _ = app.parse_args(tokens)
    take_options(os.environ, _OPTIONS)
    return int(command(*bound.args, **bound.kwargs) or 0)


def _config_path(tokens: Sequence[str]) -> str | None:
    for index, word in enumerate(tokens):
        if word == "--config" and index + 1 < len(tokens):
            return tokens[index + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def check_file(path: Path) -> None:
    """Refuse a file of options that cannot be read, or that has a key which is no option. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("config", path.name, f"cannot be read as YAML: {type(error).__name__}") from error
    if not isinstance(content or {}, dict):
        raise ConfigError("config", path.name, "must be options by name")
    for key in content or {}:
        name = str(key).replace("-", "_")
        if name not in _OPTIONS:
            raise ConfigError(f"{path.name}: {key}", "...", f"is no option{_near(name, _OPTIONS)}")


def take_options(environ: MutableMapping[str, str], options: Sequence[str]) -> None:
    """Take our options out of the environment: the engine knows its own switches only. Raises ConfigError for typos."""
    known = [f"JSWA_{name.upper()}" for name in ("config", *options)]
    for name in [name for name in environ if name.startswith("JSWA_") and name not in SWITCHES]:
        if name not in known:
            raise ConfigError(name, "...", f"is no option{_near(name, [*known, *SWITCHES])}")
        del environ[name]


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
