"""The engine's process beside front ends: it starts them, starts those anew that end, and drains all on SIGTERM."""

import asyncio
import dataclasses
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

import jswa
from jswa.frontend.engine_protocol import EngineLike

from ..core.service import Served
from ..engine.local import LocalEngine
from ..gate.unix_socket import bound
from ..http.process import DEATH_GRACE, address_of, begin, end_process, freeze, serve_alone, settings_of
from ..options import ServeConfig
from . import frames
from .hub import Connection, Hub
from .remote import EngineFacts
from .serving import Hello, send_hello

_log = logging.getLogger("jswa.server")
_SCRIPT = Path(__file__).with_name("front_end.py")
_START_SECONDS = 120.0  # for a front end to listen
_TURN = 0.1  # seconds between two looks at the processes
_LONGEST_PAUSE = 30.0  # seconds before a front end that does not start is tried again
_EXIT_SECONDS = 8.0  # for a front end to exit


@dataclass
class FrontEndPlace:
    """One of the front ends, and those that take its place when it ends.

    Attributes:
        failures: how often in a row one has ended before it listened.
        again: time of `time.monotonic` from which the next may be started.
    """

    listen: socket.socket
    metrics: socket.socket | None
    process: subprocess.Popen[bytes] | None = None
    connection: Connection | None = None
    failures: int = 0
    again: float = 0.0


class Fleet:
    """The front ends of a server."""

    def __init__(self, model: Served, config: ServeConfig, hub: Hub, sockets: list[socket.socket]) -> None:
        """Prepare to start front ends.

        Args:
            sockets: one for each front end to listen on, and behind them the one for the metrics, if there is one.
        """
        count = config.api_server_count
        metrics = [*sockets[count:], *[None] * count]
        self.places = [FrontEndPlace(*pair) for pair in zip(sockets[:count], metrics[:count], strict=True)]
        self.draining = self.ending = False
        self._hub = hub
        self._hello = _packed(model, config, hub.engine.thread.engine)

    async def start(self) -> bool:
        """Start all front ends, and wait until they listen. Return whether they do."""
        for place in self.places:
            await self._begin(place)
        end = time.monotonic() + _START_SECONDS
        while not all(place.connection is not None and place.connection.ready.is_set() for place in self.places):
            if self.ending or time.monotonic() > end or any(_gone(place) for place in self.places):
                return False
            await asyncio.sleep(0.01)
        return True

    async def watch(self) -> None:
        """Start front ends anew when they end, until `ending` is set."""
        while not self.ending:
            await asyncio.sleep(_TURN)
            stuck = self._hub.check()
            for place in self.places:
                if place.connection in stuck and place.process is not None:
                    _log.error("front end %d does not respond: it is killed", place.process.pid)
                    place.process.kill()
                if _gone(place):
                    self._lost(place)
                if place.process is None and time.monotonic() >= place.again and not self.ending:
                    await self._begin(place)

    async def stop(self, *, now: bool = False) -> None:
        """End all front ends; kill those that do not exit."""
        self.ending = True
        self._hub.tell(frames.End(now))
        end = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < end and any(_runs(place) for place in self.places):
            await asyncio.sleep(0.02)
        for place in self.places:
            if place.process is not None:
                place.process.kill()
                place.process.wait()

    def drain(self) -> None:
        """Let all front ends refuse new requests."""
        self.draining = True
        self._hub.tell(frames.Drain())

    def _lost(self, place: FrontEndPlace) -> None:
        assert place.process is not None
        began = place.connection is not None and place.connection.ready.is_set()
        _log.error("front end %d has ended with status %s", place.process.pid, place.process.returncode)
        place.failures = 0 if began else place.failures + 1
        place.again = time.monotonic() + min(_LONGEST_PAUSE, 2.0**place.failures - 1)
        place.process = None
        if len({id(one.listen) for one in self.places}) > 1:
            # The kernel would give the dead front end's socket its share of new connections, which would wait for the
            # next front end. A socket that does not listen yet gets none, so the others get all.
            old = place.listen
            place.listen = _bound_to(old.family, old.type, old.proto, old.getsockname())
            old.close()

    async def _begin(self, place: FrontEndPlace) -> None:
        own, other = socket.socketpair()
        counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with other:
            place.process = _spawned(place, other, counter)
        try:
            metrics = -1 if place.metrics is None else place.metrics.fileno()
            await asyncio.to_thread(send_hello, own, self._hello, place.listen.fileno(), metrics)
        except OSError:  # it has ended, which `watch` sees
            own.close()
            os.close(counter)
            place.connection = None
            return
        own.setblocking(False)
        place.connection = await self._hub.connect(own, counter)
        if self.draining:
            place.connection.channel.tell(frames.Drain())


def _packed(model: Served, config: ServeConfig, engine: EngineLike) -> bytes:
    """Return what each front end gets at its start."""
    hello = Hello(
        dataclasses.asdict(config), facts_of(engine), model.tokenizer, model.chat_template,
        model.answer_template, model.default_sampling, model.model, tuple(model.chat_examples), model.pooling,
        int(time.time()),
    )  # fmt: skip
    return pickle.dumps(tuple(hello)[:-2])


def facts_of(engine: EngineLike) -> EngineFacts:
    """Return what front ends know of an engine."""
    return EngineFacts(engine.limits, engine.grammars is not None, engine.images)


def _bound(config: ServeConfig) -> list[socket.socket]:
    """Return a socket for each front end, and behind them the one for --metrics-port, if that is set. Raises OSError.

    Connections are spread over sockets of the same address by the kernel.
    """
    count = config.api_server_count
    if config.uds is not None:
        sockets = [bound(config.uds, int(config.uds_mode, 8))] * count
    else:
        sockets = same_port(config.host, config.port, count)
    if config.metrics_port is not None:
        host = config.metrics_host or config.host
        sockets.append(uvicorn.Config("", host=host, port=config.metrics_port).bind_socket())
    return sockets


def same_port(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets that are bound to the same address. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # A first socket without SO_REUSEPORT finds out whether another program listens there.
    with _bound_to(family, kind, protocol, address, shared=False) as first:
        address = first.getsockname()
    return [_bound_to(family, kind, protocol, address) for _ in range(count)]


def _bound_to(family: int, kind: int, protocol: int, address: Any, *, shared: bool = True) -> socket.socket:
    """Return a socket that is bound and does not listen; if `shared`, several may be bound to the address."""
    one = socket.socket(family, kind, protocol)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(address)
    return one


def run(model: Served, config: ServeConfig) -> int:
    """Serve until a signal arrives or the engine dies, and return the exit status of the process (`serve_alone`)."""
    if not config.api_server_count:
        return serve_alone(model, config)
    begin(config)
    engine = LocalEngine(model.build, model.tokenizer, config)
    try:
        sockets = _bound(config)
    except OSError as error:
        _log.error("cannot listen: %s", error)
        return 3
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(_Serving(model, config, engine, sockets).run())
    return end_process(engine.thread, status)


class _Serving:
    """One run of the engine's process."""

    def __init__(self, model: Served, config: ServeConfig, engine: LocalEngine, sockets: list[socket.socket]) -> None:
        self._config = config
        self._engine = engine
        self._fleet = Fleet(model, config, Hub(engine), sockets)
        self._signals = 0
        self._end = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop, thread, fleet = asyncio.get_running_loop(), self._engine.thread, self._fleet
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        thread.on_death = self._died
        thread.on_leaving = self._begin_drain
        await self._engine.begin()
        freeze()
        started = await fleet.start()
        if started:
            _log.info("listening on %s", address_of(settings_of(None, self._config), fleet.places[0].listen))
            watching = asyncio.ensure_future(fleet.watch())
            await self._end.wait()
            fleet.ending = True
            await watching
        await fleet.stop(now=self._signals > 1)
        await self._engine.close()
        if not started and not self._signals:
            return 3
        return 1 if thread.state == "dead" or not self._signals else 0

    def _died(self) -> None:
        asyncio.get_running_loop().call_later(DEATH_GRACE, self._end.set)

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._begin_drain()
            return
        _log.warning("second signal: shutting down at once")
        self._end.set()

    def _begin_drain(self) -> None:
        """Refuse new requests, and end when those that run have finished or the timeout has passed."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._wait(self._config.shutdown_timeout))

    async def _wait(self, timeout: float) -> None:
        self._fleet.drain()
        end, running = time.monotonic() + timeout, (await self._engine.load()).requests
        _log.info("shutting down; running requests have %g s to finish: %d", timeout, running)
        while running and time.monotonic() < end:
            await asyncio.sleep(0.05)
            running = (await self._engine.load()).requests
        if running:
            _log.warning("aborting %d requests", running)
        self._end.set()


def _spawned(place: FrontEndPlace, control: socket.socket, counter: int) -> subprocess.Popen[bytes]:
    root, package = str(Path(jswa.__file__).parent.parent), __package__.rpartition(".")[0]
    return subprocess.Popen(  # not asyncio's: uvloop forks, which jax's threads do not survive
        # With -P the folder of the script does not precede the libraries on the module path.
        [sys.executable, "-P", str(_SCRIPT), root, package, str(control.fileno()), str(counter)],
        stdin=subprocess.DEVNULL,
        pass_fds=[counter, *(one.fileno() for one in (control, place.listen, place.metrics) if one is not None)],
        start_new_session=True,  # Ctrl-C must reach the engine's process only
    )


def _runs(place: FrontEndPlace) -> bool:
    return place.process is not None and place.process.poll() is None


def _gone(place: FrontEndPlace) -> bool:
    return place.process is not None and place.process.poll() is not None
