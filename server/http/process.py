"""The process: listens, drains on SIGTERM, and exits with a status that says how it went."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core.service import Served, Service
from ..options import ServeConfig
from . import limits
from .app import create_app, create_metrics_app
from .cross_site import is_loopback

_log = logging.getLogger("jswa.server")
_KEEP_ALIVE = 75  # seconds for an idle connection: longer than clients keep theirs, so that it is they who close it
# The engine's thread, back from waiting for the device, gets the interpreter from a busy event loop after so long; it
# is 5 ms by default, as long as a step.
_SWITCH_SECONDS = 2e-4
_DEATH_GRACE = 1.0  # seconds in which a dead engine's server still answers, with errors


class HeaderLimit(HttpToolsProtocol):
    """HTTP/1.1 whose headers are bounded: a request with more is answered with 400, and the connection closed.

    So is, without an answer, a connection on which a request has not come to its end after `READ_SECONDS`, and one on
    which nobody has read anything of an answer for `WRITE_SECONDS`.
    """

    _header_bytes = 0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._expect_nothing()
        self._paused = False
        self._watch(0)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A new request."""
        self._header_bytes = 0
        self._expect()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """All of it is here."""
        self._expect_nothing()
        super().on_message_complete()

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def pause_writing(self) -> None:
        """More waits to be read than the connection should hold; until `resume_writing` nothing is added."""
        super().pause_writing()
        self._paused = True
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Most of it has been read."""
        super().resume_writing()
        self._paused = False
        self._watch(self.transport.get_write_buffer_size())

    def on_response_complete(self) -> None:
        """All of an answer has been written; the end of it may lie here."""
        super().on_response_complete()
        if not self._paused:
            self._watch(self.transport.get_write_buffer_size())

    def _watch(self, size: int) -> None:
        """Look again later, unless there is nothing to be read."""
        if self._unread is not None:
            self._unread.cancel()
        self._unread = self.loop.call_later(limits.WRITE_SECONDS, self._check_read, size) if size else None

    def _check_read(self, before: int) -> None:
        self._unread = None
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._watch(size)
            return
        _log.warning("a connection is cut: nobody has read from it for %g s", limits.WRITE_SECONDS)
        service: Service | None = self.app_state.get("service")
        if service is not None:
            service.unread += 1
        self.transport.abort()

    def _expect(self) -> None:
        self._expect_nothing()
        self._late = self.loop.call_later(limits.READ_SECONDS, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > limits.MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")


class Server(uvicorn.Server):
    """uvicorn, but signals are ours. `says`: what the log says of where it listens."""

    def __init__(self, config: uvicorn.Config, says: str = "listening on %s") -> None:
        super().__init__(config)
        self._says = says

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave them alone."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if not self.started:
            return
        config = self.config
        where = f"unix:{config.uds}"
        if config.uds is None:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if config.is_ssl else "http"
            where = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        _log.info(self._says, where)


class Shutdown:
    """Going down: first no new work, then the end of what runs, then the end."""

    def __init__(self, service: Service, server: Server) -> None:
        self._service = service
        self._server = server
        self._drain: asyncio.Task[None] | None = None
        self.signals = 0

    def ask(self) -> None:
        """A signal: the first one drains, the second one does not wait."""
        self.signals += 1
        if self.signals == 1:
            self.drain()
            return
        _log.warning("second signal: going down at once")
        if self._drain is not None:
            self._drain.cancel()
        self._end()
        self._server.force_exit = True

    def drain(self) -> None:
        """No new requests; the end when those that run have finished."""
        if self._drain is not None:
            return
        timeout = self._service.config.shutdown_timeout
        _log.info("going down; requests that run have %g s to finish: %d", timeout, self._service.running)
        self._service.draining = True
        self._drain = asyncio.ensure_future(self._wait(timeout))

    def engine_died(self) -> None:
        """Nothing can be served any more."""
        asyncio.get_running_loop().call_later(_DEATH_GRACE, self._end)

    async def _wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._service.running and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._end()

    def _end(self) -> None:
        if self._service.running:
            _log.warning("aborting %d requests", self._service.running)
        self._service.abort_all()
        self._server.should_exit = True


def run(model: Served, config: ServeConfig) -> int:
    """Serve until a signal comes or the engine dies; the exit status of the process."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    service = Service(model, config)
    if not config.api_key and config.uds is None and not is_loopback(config.host):
        _log.warning("no --api-key: whoever reaches %s, port %d, can use this server", config.host, config.port)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file; 1024 are the usual soft limit
    server = Server(
        _listening(
            create_app(service),
            host=config.host,
            port=config.port,
            uds=config.uds,
            root_path=config.root_path,
            ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
            ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
        )
    )
    beside = _beside(service)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        asked = runner.run(_serve(service, server, beside))
    status = 1 if service.bridge.state == "dead" or not asked else 0
    if not server.started:
        status = 3
    if service.bridge.stuck:
        # A thread in a step or in the compiler cannot be stopped, and Python would not end well beside it.
        _log.warning("a thread of the engine does not stop; the process ends without it")
        logging.shutdown()
        os._exit(status)
    return status


def _listening(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """The settings of a server of this process."""
    return uvicorn.Config(
        app,
        http=HeaderLimit,
        loop="uvloop",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=_KEEP_ALIVE,
        **options,
    )


def _beside(service: Service) -> contextlib.AbstractAsyncContextManager[None]:
    """Serve /metrics on a port of its own meanwhile, where one is asked for; the port is taken at once."""
    config = service.config
    if config.metrics_port is None:
        return contextlib.nullcontext()
    host = config.metrics_host or config.host
    settings = _listening(create_metrics_app(service), host=host, port=config.metrics_port, lifespan="off")
    return _serving(Server(settings, "metrics are at %s/metrics"), settings.bind_socket())


@contextlib.asynccontextmanager
async def _serving(server: Server, at: socket.socket) -> AsyncGenerator[None]:
    serving = asyncio.ensure_future(server.serve([at]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _serve(service: Service, server: Server, beside: contextlib.AbstractAsyncContextManager[None]) -> bool:
    """Whether a signal has asked for the end, not only another host."""
    shutdown = Shutdown(service, server)
    service.bridge.on_death, service.bridge.on_leaving = shutdown.engine_died, shutdown.drain
    loop = asyncio.get_running_loop()
    handlers: dict[signal.Signals, Callable[[], None]] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), shutdown.ask)
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    # What is there at the start stays. Looked at in each full collection it takes 0.1 s, in which no thread runs.
    gc.collect()
    gc.freeze()
    async with beside:
        await server.serve()
    return shutdown.signals > 0


def set_up_logging(config: ServeConfig) -> None:
    """Log to stderr, as text or as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jswa").setLevel(config.log_level.upper())


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object per record; `extra` fields of a record under `data`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
