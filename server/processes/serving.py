"""What the process of a front end does: the server's application on an engine in another process."""

import asyncio
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, NoReturn

from jswa.text.answers.template import AnswerTemplate
from jswa.text.chat_template import ChatTemplate
from jswa.text.pooling import PoolingConfig
from jswa.text.tokenizer import Tokenizer

from ..core.service import Served, Service
from ..http.app import create_app
from ..http.process import DEATH_GRACE, Server, freeze, most_files, serving_metrics, set_up_logging, settings_of
from ..options import ServeConfig
from .remote import EngineFacts, RemoteEngine

_LENGTH = struct.Struct("<Q")


class Hello(NamedTuple):
    """What a front end gets at its start.

    Attributes:
        options: fields of the server's `ServeConfig` by name: its class has another module in a wheel.
        facts: fields of `EngineFacts`.
        created: the time at which the server was started.
        listen, metrics: file descriptors of the sockets to listen on; -1: not this process.
    """

    options: dict[str, Any]
    facts: tuple[Any, ...]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    answer_template: AnswerTemplate | None
    default_sampling: Mapping[str, Any]
    model: str
    chat_examples: Sequence[str]
    pooling: PoolingConfig
    created: int
    listen: int = -1
    metrics: int = -1


def send_hello(end: socket.socket, model: bytes, listen: int, metrics: int) -> None:
    """Send what a front end needs. It is pickled: both processes are this program.

    Args:
        model: the pickled `Hello` without sockets.
    """
    data = pickle.dumps((model, listen, metrics))
    end.sendall(_LENGTH.pack(len(data)) + data)


def receive_hello(end: socket.socket) -> Hello:
    """Wait for what `send_hello` has sent."""
    with end.makefile("rb", buffering=0) as stream:
        parts, missing = [], _LENGTH.unpack(stream.read(_LENGTH.size))[0]
        while missing:
            parts.append(stream.read(min(missing, 2**20)))
            missing -= len(parts[-1])
            if not parts[-1]:
                sys.exit(1)  # the engine's process has ended
    model, listen, metrics = pickle.loads(b"".join(parts))  # noqa: S301
    return Hello._make((*pickle.loads(model), listen, metrics))  # noqa: S301


def serve(control: int, counter: int) -> int:
    """Serve the engine at the other end of a socket, and return the exit status. `counter`: see `RemoteEngine`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process says when to end
    end = socket.socket(fileno=control)
    hello = receive_hello(end)
    config = ServeConfig(**hello.options)
    set_up_logging(config)
    most_files()
    parts = hello.tokenizer, hello.chat_template, hello.answer_template, hello.default_sampling
    served = Served(_no_engine, *parts, hello.model, hello.chat_examples, hello.pooling)
    engine = RemoteEngine(end, counter, EngineFacts(*hello.facts), config)
    service = Service(served, config, engine, hello.created)
    server = Server(settings_of(create_app(service), config), says=None)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_run(service, engine, server, hello))
    return 0 if server.started else 3


async def _run(service: Service, engine: RemoteEngine, server: Server, hello: Hello) -> None:
    def drain() -> None:
        service.draining = True

    def end(now: bool) -> None:
        service.abort_all()
        server.should_exit = True
        server.force_exit = now

    def lost() -> None:
        asyncio.get_running_loop().call_later(DEATH_GRACE, end, True)

    engine.on_drain, engine.on_end, engine.on_lost = drain, end, lost
    server.on_started = engine.listens
    freeze()
    async with AsyncExitStack() as stack:
        if hello.metrics >= 0:
            await stack.enter_async_context(serving_metrics(service, socket.socket(fileno=hello.metrics)))
        await server.serve([socket.socket(fileno=hello.listen)])


def _no_engine() -> NoReturn:
    raise AssertionError("the engine is in another process")
