"""The process: listens, drains on SIGTERM, and exits with a status that says how it went."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core.service import Served, Service
from ..options import ServeConfig
from . import limits
from .app import create_app

_log = logging.getLogger("jswa.server")
_KEEP_ALIVE = 75  # seconds for an idle connection: longer than clients keep theirs, so that it is they who close it
_DEATH_GRACE = 1.0  # seconds in which a dead engine's server still answers, with errors


class HeaderLimit(HttpToolsProtocol):
    """HTTP/1.1 whose headers are bounded: a request with more is answered with 400, and the connection closed.

    So is, without an answer, a connection on which a request has not come to its end after `READ_SECONDS`.
    """

    _header_bytes = 0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connects."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._expect_nothing()
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
    """uvicorn, but signals are ours."""

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
        _log.info("listening on %s", where)


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
    service = Service(model, config)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file; 1024 are the usual soft limit
    server = Server(
        uvicorn.Config(
            create_app(service),
            host=config.host,
            port=config.port,
            uds=config.uds,
            http=HeaderLimit,
            loop="uvloop",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
            ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
            timeout_graceful_shutdown=5,
            timeout_keep_alive=_KEEP_ALIVE,
        )
    )
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        asked = runner.run(_serve(service, server))
    status = 1 if service.bridge.state == "dead" or not asked else 0
    if not server.started:
        status = 3
    if service.bridge.stuck:
        # A thread in a step or in the compiler cannot be stopped, and Python would not end well beside it.
        _log.warning("a thread of the engine does not stop; the process ends without it")
        logging.shutdown()
        os._exit(status)
    return status


async def _serve(service: Service, server: Server) -> bool:
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
