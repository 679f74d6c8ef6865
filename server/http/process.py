"""The server's process: it listens, drains on SIGTERM, and exits with a status that says whether the server failed."""

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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jswa.frontend.engine_thread import EngineThread

from ..core.service import Served, Service
from ..gate.cross_site import is_loopback
from ..gate.unix_socket import bound
from ..options import ServeConfig
from . import limits
from .app import create_app, create_metrics_app

_log = logging.getLogger("jswa.server")
_KEEP_ALIVE = 75  # seconds until an idle connection is closed: longer than clients wait, so that they close it first
# After this time a busy event loop hands the GIL to the engine's thread, when that is back from waiting for the device.
# Python's default is 5 ms, which is as long as a step.
_SWITCH_SECONDS = 2e-4
DEATH_GRACE = 1.0  # seconds in which the server still answers, with errors, after the engine has died


class ConnectionWriter:
    """Writes parts of one answer, whose head was sent, to its connection. `sent`: when it has written last."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._closing = cycle.transport.is_closing
        self._write = cycle.transport.write
        self.sent = 0.0

    @property
    def ready(self) -> bool:
        """Whether the client is there and has read enough."""
        return not (self._flow.write_paused or self._cycle.disconnected or self._closing())

    def write(self, data: bytes, now: float) -> None:
        """Write a part of the body; `now` is the time of `time.monotonic`."""
        self.sent = now
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._cycle.chunked_encoding else data)


class HeaderLimit(HttpToolsProtocol):
    """HTTP/1.1 with bounded headers and times. A request with larger headers gets status 400, and is disconnected.

    A connection is closed without an answer if a request on it has not ended after `READ_SECONDS`, or if its client has
    read nothing of an answer for `WRITE_SECONDS`.
    """

    _header_bytes = 0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request when a client connects."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers when the connection is closed."""
        self._expect_nothing()
        self._paused = False
        self._watch(0)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Restart the header count and the time limit when a request begins."""
        self._header_bytes = 0
        self._expect()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Stop the time limit when a request is complete."""
        self._expect_nothing()
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Let the answer's stream write to the connection."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope["jswa.writer"] = ConnectionWriter(self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """Count a piece of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header field."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def pause_writing(self) -> None:
        """Watch the write buffer when it is full: nothing is added to it until `resume_writing`."""
        super().pause_writing()
        self._paused = True
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Watch the rest of the write buffer when most of it has been read."""
        super().resume_writing()
        self._paused = False
        self._watch(self.transport.get_write_buffer_size())

    def on_response_complete(self) -> None:
        """Watch the end of an answer, which may still be in the write buffer."""
        super().on_response_complete()
        if not self._paused:
            self._watch(self.transport.get_write_buffer_size())

    def _watch(self, size: int) -> None:
        """Check after `WRITE_SECONDS` whether the client has read from a buffer of `size` bytes; 0 stops the check."""
        if self._unread is not None:
            self._unread.cancel()
        self._unread = self.loop.call_later(limits.WRITE_SECONDS, self._check_read, size) if size else None

    def _check_read(self, before: int) -> None:
        self._unread = None
        size = self.transport.get_write_buffer_size()
        if size < before:
            self._watch(size)
            return
        _log.warning("a connection is closed: its client has read nothing for %g s", limits.WRITE_SECONDS)
        service: Service | None = self.app_state.get("service")
        if service is not None:
            service.recorder.number("unread_connections")
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
    """uvicorn's server without its signal handlers.

    Attributes:
        says: the log message with the address, when it listens; None: no message.
        on_started: called when it listens.
    """

    def __init__(self, config: uvicorn.Config, says: str | None = "listening on %s") -> None:
        super().__init__(config)
        self.says = says
        self.on_started: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers: `Shutdown` handles signals."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and log the address."""
        await super().startup(sockets)
        if not self.started:
            return
        if self.says is not None:
            _log.info(self.says, address_of(self.config, self.servers[0].sockets[0]))
        self.on_started()

    async def shutdown(self, sockets: Any = None) -> None:
        """Close the connections and stop the application, also if nobody waits for its answers.

        uvicorn leaves the application as it is if `force_exit` is set, and logs its end as an error.
        """
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


class Shutdown:
    """The shutdown of a server: it refuses new requests, waits for those that run, and ends the server."""

    def __init__(self, service: Service, server: Server) -> None:
        self._service = service
        self._server = server
        self._drain: asyncio.Task[None] | None = None
        self.signals = 0

    def ask(self) -> None:
        """Handle a signal: the first one drains the server, the second one ends it at once."""
        self.signals += 1
        if self.signals == 1:
            self.drain()
            return
        _log.warning("second signal: shutting down at once")
        if self._drain is not None:
            self._drain.cancel()
        self._end()
        self._server.force_exit = True

    def drain(self) -> None:
        """Refuse new requests, and end the server when those that run have finished or the timeout has passed."""
        if self._drain is not None:
            return
        timeout = self._service.config.shutdown_timeout
        _log.info("shutting down; running requests have %g s to finish: %d", timeout, self._service.running)
        self._service.draining = True
        self._drain = asyncio.ensure_future(self._wait(timeout))

    def engine_died(self) -> None:
        """End the server soon after the death of its engine."""
        asyncio.get_running_loop().call_later(DEATH_GRACE, self._end)

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


def serve_alone(model: Served, config: ServeConfig) -> int:
    """Serve in the engine's process until a signal arrives or the engine dies, and return the exit status.

    The status is 0 after a signal, 1 if the engine has died or another host has ended, and 3 if the server could not
    start. If the engine's thread cannot be stopped, this function ends the process itself.
    """
    begin(config)
    service = Service(model, config)
    most_files()
    server = Server(settings_of(create_app(service), config))
    beside = _beside(service)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        asked = runner.run(_serve(service, server, beside))
    status = 1 if service.local.thread.state == "dead" or not asked else 0
    if not server.started:
        status = 3
    return end_process(service.local.thread, status)


def begin(config: ServeConfig) -> None:
    """Prepare the process that has the engine."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    if not config.api_key and config.uds is None and not is_loopback(config.host):
        _log.warning(
            "no --api-key: every client that reaches %s, port %d, can use this server", config.host, config.port
        )


def end_process(thread: EngineThread, status: int) -> int:
    """Return the exit status, unless the engine's thread cannot be stopped: then end the process."""
    if thread.stuck:
        # A thread in a step cannot be stopped, and Python might crash at its exit while it runs.
        _log.warning("the engine's thread does not stop; the process exits without waiting for it")
        logging.shutdown()
        os._exit(status)
    return status


def most_files() -> None:
    """Allow as many open files as possible: a connection is a file, and the usual soft limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def freeze() -> None:
    """Exempt the objects that exist now from garbage collection, since they live until the end.

    To traverse them takes each full collection 0.1 s, in which no other thread runs.
    """
    gc.collect()
    gc.freeze()


def address_of(config: uvicorn.Config, listens: socket.socket) -> str:
    """Return the address at which a socket listens, for people."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listens.getsockname()[:2]
    scheme = "https" if config.is_ssl else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def settings_of(app: Any, config: ServeConfig) -> uvicorn.Config:
    """Return the uvicorn settings of a server's application."""
    return listening(
        app,
        host=config.host,
        port=config.port,
        uds=config.uds,
        root_path=config.root_path,
        ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
        ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
    )


def listening(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return the uvicorn settings of a server of this process."""
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
    """Return a context in which /metrics is served on --metrics-port, if that is set. The port is bound at once."""
    config = service.config
    if config.metrics_port is None:
        return contextlib.nullcontext()
    host = config.metrics_host or config.host
    return serving_metrics(service, uvicorn.Config("", host=host, port=config.metrics_port).bind_socket())


@contextlib.asynccontextmanager
async def serving_metrics(service: Service, at: socket.socket) -> AsyncGenerator[None]:
    """Serve /metrics alone at a socket within the context."""
    server = Server(listening(create_metrics_app(service), lifespan="off"), "metrics are at %s/metrics")
    serving = asyncio.ensure_future(server.serve([at]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _serve(service: Service, server: Server, beside: contextlib.AbstractAsyncContextManager[None]) -> bool:
    """Serve until the end. Return whether a signal has ended the server, and not only another host."""
    shutdown = Shutdown(service, server)
    service.local.thread.on_death, service.local.thread.on_leaving = shutdown.engine_died, shutdown.drain
    loop = asyncio.get_running_loop()
    handlers: dict[signal.Signals, Callable[[], None]] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), shutdown.ask)
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    freeze()
    config = service.config
    listens = None if config.uds is None else [bound(config.uds, int(config.uds_mode, 8))]
    async with beside:
        await server.serve(listens)
    return shutdown.signals > 0


def set_up_logging(config: ServeConfig) -> None:
    """Set up logging to stderr, as text or as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("jswa").setLevel(config.log_level.upper())


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """A formatter that writes one JSON object per record, with the fields of the record's `data`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
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
