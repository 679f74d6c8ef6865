"""Load the model of `jswa serve` and serve it. This module imports the modules that are slow to import."""

import dataclasses
import gc
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from jswa.config import EngineConfig
from jswa.errors import ConfigError
from jswa.frontend.engine_protocol import EngineLike
from jswa.stages import LOG
from jswa.text.answers.template import AnswerTemplate
from jswa.text.chat_template import NO_TEMPLATE, ChatTemplate
from jswa.text.history.probes import PROBE_TOOL
from jswa.text.shipped import REPLACES, shipped_template
from jswa.text.tokenizer import Tokenizer
from jswa.types import SamplingParams

from .core.service import Served
from .gate.key_file import with_keys
from .http.process import set_up_logging
from .options import ServeConfig
from .processes.supervisor import run

_log = logging.getLogger("jswa.server")


def launch(model: str, server: ServeConfig, engine: EngineConfig) -> int:
    """Load the model and serve it until a signal arrives or the engine fails. Return the exit status."""
    set_up_logging(server)
    LOG.info("loading %s", model)
    if not engine.node_rank:  # other hosts do not listen
        server = with_keys(server)
        check_address(server)
    with loaded(model, server, engine) as (served, options):
        return run(served, options)


def check_address(server: ServeConfig) -> None:
    """Raise ConfigError if the server could not listen, or could not read its TLS files: loading may take minutes."""
    addresses = [("port", server.host, server.port)] if server.uds is None else []
    if server.metrics_port is not None:
        addresses.append(("metrics_port", server.metrics_host or server.host, server.metrics_port))
    for name, host, port in addresses:
        flag = f"--{name.replace('_', '-')}"
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise ConfigError("host", host, "is no address of this machine: choose another --host") from error
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(address)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                limit = f"cannot listen on {host}: {reason}: choose another {flag} (0 takes a free one) or --host"
                raise ConfigError(name, port, limit) from error
    for name in ("ssl_keyfile", "ssl_certfile"):
        file = getattr(server, name)
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(name, str(file), "is no file that can be read")


@contextmanager
def loaded(model: str, server: ServeConfig, engine: EngineConfig) -> Iterator[tuple[Served, ServeConfig]]:
    """Load the model; yield it with the server's options, in which `served_model_name` is set. Raises JswaError."""
    from jswa.llm import LLM

    if not server.served_model_name:
        server = dataclasses.replace(server, served_model_name=(model,))
    for name in engine.adapters:
        if name in server.served_model_name:
            raise ConfigError("lora_modules", name, "is a name of the model itself: the adapter needs another name")
    if server.restart_engine and engine.nnodes > 1:
        raise ConfigError(
            "restart_engine", True, "works on one host only: with nnodes > 1 your launcher must restart all hosts"
        )
    llm = LLM(model, **dataclasses.asdict(engine))

    def engines() -> Iterator[EngineLike]:
        nonlocal llm
        while True:
            if server.warm_logprobs:
                llm.engine.prepare(SamplingParams(logprobs=0, prompt_logprobs=0))
            if llm.engine.grammars is not None:
                llm.engine.grammars.delimit(() if answers is None else answers.delimiters)
                with suppress(ConfigError):  # who asks for a grammar is told why there is none
                    llm.engine.grammars.warm_up()
            yield llm.engine
            llm.close()
            gc.collect()  # free the old engine's arrays before the new engine allocates its own
            llm = LLM(model, **dataclasses.asdict(engine))

    named = {} if llm.tokenizer is None else llm.tokenizer.special.named
    template = choose_template(server.chat_template, llm.chat_template, named)
    answers = llm.answer_template(server.response_template, template, probe=False)
    say_limits(llm.tokenizer, template, answers)
    try:
        parts = llm.tokenizer, template, answers, llm.default_sampling, model, llm.chat_examples, llm.pooling
        yield Served(engines().__next__, *parts), server
    finally:
        llm.close()


def say_limits(tokenizer: Tokenizer | None, template: ChatTemplate | None, answers: AnswerTemplate | None) -> None:
    """Log which requests are refused whatever they say, and by which template answers are read."""
    reason = "the checkpoint has no tokenizer.json" if tokenizer is None else None
    if reason is None and template is None:
        reason = f"{NO_TEMPLATE}; --chat-template takes a file, or a name: {', '.join(REPLACES)}"
    elif reason is None and template is not None:
        reason = template.refusal()
    if reason is not None or template is None:
        _log.warning("chats are refused: %s", reason)
        return
    if (reason := template.refusal([PROBE_TOOL])) is not None:
        _log.warning("requests with tools are refused: they %s", reason)
    if answers is None:
        _log.info("no response template: reasoning and tool calls stay in the text; --response-template names one")
    else:
        _log.info("answers are read by the response template %s; --response-template names another", answers.name)


def choose_template(wanted: str | None, own: ChatTemplate | None, named: Mapping[str, str]) -> ChatTemplate | None:
    """Return the chat template to serve: the checkpoint's `own`, or the `wanted` one (a name or a file).

    `named`: the special tokens for a template that is not the checkpoint's. Raises ConfigError.
    """
    if wanted is None:
        return own
    if own is not None and wanted in own.sources:
        return ChatTemplate({"default": own.sources[wanted]}, own.special_tokens)
    if wanted in REPLACES:
        return ChatTemplate({"default": shipped_template(wanted)}, named)
    try:
        source = Path(wanted).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        has = ", ".join(sorted(own.sources)) if own is not None else "none"
        raise ConfigError(
            "chat_template",
            wanted,
            f"must be a file, or the name of one of the checkpoint's templates ({has}) or of one that ships with jswa "
            f"({', '.join(REPLACES)})",
        ) from error
    return ChatTemplate({"default": source}, named)
