"""The thread that runs the engine for callers on an event loop: `jswa.AsyncLLM` and the server.

The thread runs the engine until it is closed. Between two steps it runs the closures of an inbox. It sends the events
of each step to the event loop in one callback, which passes them to the requests. Nothing else touches the engine.

If the engine fails, all requests end with an error. If it may be rebuilt, the thread builds a new engine and goes on
with that one. A thread that hangs in a step cannot be interrupted: the engine then counts as dead.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from jswa.errors import EngineDead, EngineError, EngineRestarting, InternalError, JswaError
from jswa.frontend.engine_protocol import EngineLike, Readers, figures_of
from jswa.frontend.late_programs import LatePrograms, resolve
from jswa.frontend.outputs import Receiver
from jswa.frontend.receivers import Receivers
from jswa.plan import Request, StepEvents, TokenEvent
from jswa.types import SamplingParams

_log = logging.getLogger("jswa")

Put = Callable[[TokenEvent | JswaError], None]
Work = Callable[[], None]
State = Literal["up", "restarting", "dead"]
_RESTARTS, _WITHIN = 3, 600.0  # an engine that fails more than _RESTARTS times within _WITHIN seconds is not rebuilt
_FRESH = 0.25  # seconds after which the figures of a working engine are read again
_SHARE = 0.01  # largest share of the engine thread's time for reading the figures
_BROKEN = (AssertionError, EngineError)  # an invariant is broken: the pages of other requests may be wrong
_STUCK = 0.5  # seconds for a thread to end; then the process ends without it


class EngineThread:
    """An engine in a thread of its own. All methods are for the event loop, which also calls what gets the events.

    Args:
        on_death: called when the engine has failed and will not be rebuilt.
        on_leaving: called when a host that shares the model was told to exit.
        rebuild: builds a new engine after a failure, in the engine's thread; the old one has been dropped by then.
        step_timeout: seconds after which a step counts as hung and the engine as dead; 0 means no limit.

    Attributes:
        ahead: steps with events by which the engine may be ahead of the handling of events.
        loading: held while weights or adapters are loaded.
        readers: get the events of all steps if they are set; requests then get only errors, and their last events if
            they are aborted.
        on_state: called when `state` changes.
    """

    def __init__(
        self,
        engine: EngineLike,
        on_death: Callable[[], None] = lambda: None,
        on_leaving: Callable[[], None] = lambda: None,
        *,
        rebuild: Callable[[], EngineLike] | None = None,
        step_timeout: float = 0.0,
    ) -> None:
        self.on_death = on_death
        self.on_leaving = on_leaving
        self.readers: Readers | None = None
        self.on_state: Callable[[], None] = lambda: None
        self.state: State = "up"
        self.steps, self.ahead = 0, 2
        self.restarts = 0
        self.figures = figures_of(engine)  # as the engine's thread read them last: no reader waits for a step
        self._read_again = 0.0
        self._engine: EngineLike | None = engine
        self._rebuild = rebuild
        self._step_timeout = step_timeout
        self._busy_since: float | None = None
        self._queued = self._delivered = 0  # steps with events: given to the event loop, and delivered by it
        self._caught_up = threading.Event()
        self._failures: deque[float] = deque(maxlen=_RESTARTS)
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._receivers = Receivers(self._queue_abort)
        self._calls: set[asyncio.Future[object]] = set()
        self._late_programs = LatePrograms(self._notify, lambda: self._closed or self.state != "up")
        self.loading = asyncio.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def engine(self) -> EngineLike:
        """The engine. Raises EngineDead while it is dead or restarting, and EngineError after `close`."""
        self._require_up()
        assert self._engine is not None
        return self._engine

    @property
    def failure(self) -> EngineDead | None:
        """The error for every request while the engine is dead or restarting; None while it is up."""
        if self.state == "restarting":
            return EngineRestarting("the engine has failed and is restarting")
        return EngineDead("the engine has failed") if self.state == "dead" else None

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the engine's thread, and deliver its events on the running event loop."""
        self._loop = asyncio.get_running_loop()
        if self._engine is not None:
            self._engine.when_lost(self._lost, self._leaving)
        self._thread.start()
        if self._step_timeout:
            self._watch = asyncio.ensure_future(self._watch_steps())

    async def close(self, timeout: float = 5.0) -> None:
        """Stop the engine's thread after its current step. Wait at most `timeout` seconds, less for a dead engine.

        Requests and calls that have not ended get an EngineError.
        """
        if self._watch is not None:
            self._watch.cancel()
        self._closed = True
        self._inbox.put(None)
        end = time.monotonic() + (timeout if self.state != "dead" else _STUCK)
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.005)
        self._end_all(lambda: EngineError("the engine was closed"))
        if not self.stuck:
            self._engine = None

    @property
    def stuck(self) -> bool:
        """Whether the engine's thread still runs. After `close` this means that it cannot be stopped.

        A thread that compiles may run as well; it ends after its program, and nobody waits for it.
        """
        return self._thread.is_alive()

    @property
    def active(self) -> int:
        """Number of requests that have not ended."""
        return len(self._receivers)

    def submit(
        self, requests: Iterable[Request], put: Put, tokens: Mapping[str, Callable[[int], object]] | None = None
    ) -> None:
        """Queue requests; `put` gets their events or the final error. Raises EngineDead or EngineError.

        Args:
            tokens: functions by request id that get a token that comes alone, in place of `put`.
        """
        self._require_up()
        for request in requests:
            name = request.request_id
            each = tokens or {name: lambda token, name=name: put(TokenEvent(name, token))}  # type: ignore[misc]
            self._receivers.add(name, Receiver(each[name], put))
            self._inbox.put(lambda request=request: self._add(request))  # type: ignore[misc]

    def abort(self, request_ids: Iterable[str], *, deliver_last: bool = False) -> None:
        """End requests before the next step. Their last events are delivered only if `deliver_last` is set."""
        for request_id in request_ids:
            if request_id in self._receivers:
                if not deliver_last:
                    self._receivers.forget(request_id)
                self._queue_abort(request_id)

    def _queue_abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._abort(request_id))

    async def prepare(self, params: SamplingParams, *, images: bool = False) -> float:
        """Compile the programs that a request with these parameters needs, while the engine runs other requests.

        It waits for the fewest programs that suffice, and returns the seconds of the wait; the others are compiled
        while steps run. Raises EngineDead.
        """
        if self._late_programs.has(params, images=images):
            return 0.0
        return await self._late_programs.compile(lambda: self.engine, params, images=images)

    async def call[T](self, function: Callable[[EngineLike], T]) -> T:
        """Run a function on the engine between two steps and return its result. Raises EngineDead or EngineError."""
        self._require_up()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._calls.discard)

        def work() -> None:
            try:
                assert self._engine is not None
                result = function(self._engine)
            except _BROKEN:
                raise  # the call ends as all requests do
            except Exception as error:
                # The frames of the traceback would hold a reference to the engine.
                loop.call_soon_threadsafe(resolve, future, None, error.with_traceback(None))
            else:
                loop.call_soon_threadsafe(resolve, future, result, None)

        self._inbox.put(work)
        return await future

    def _require_up(self) -> None:
        """Raise EngineDead while the engine is dead or restarting, and EngineError after `close`."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise EngineError("the engine was closed")

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                return
            except BaseException:
                # The log gets the traceback as text: a log record with the error would hold a reference to the engine.
                _log.critical("the engine has died\n%s", traceback.format_exc())
            # The error has been freed here, and with it the frames that hold a reference to the engine.
            if self._engine is not None:
                with contextlib.suppress(Exception):  # a failed engine may be in any state
                    self.figures = figures_of(self._engine)
            self._busy_since = None
            if not self._revive():
                return

    def _serve(self) -> None:
        engine = self._engine
        assert engine is not None
        while self._drain(engine):
            if engine.has_work():
                self._busy_since = time.monotonic()
                events = engine.step()
                self._busy_since = None
                self.steps += 1
                self._read_figures(engine)
                if events:
                    self._hand_over(events)

    def _read_figures(self, engine: EngineLike) -> None:
        """Read old figures again, and always before the events of a last step: its client may ask for them at once."""
        begin = time.monotonic()
        if begin >= self._read_again or not engine.has_work():
            self.figures = figures_of(engine)
            end = time.monotonic()
            self._read_again = end + max(_FRESH, (end - begin) / _SHARE)

    def _hand_over(self, events: StepEvents) -> None:
        """Send the events of a step, and wait if their handling is too far behind, as /health needs the lock too."""
        readers = self.readers
        if readers is None or self._queued > self._delivered or not readers.send(events):
            self._queued += 1
            self._notify(self._deliver_step, events)
        if self._queued - self._delivered > self.ahead:
            self._caught_up.clear()
            if self._queued - self._delivered > self.ahead:
                self._caught_up.wait(1.0)  # not for ever: the event loop may have ended
        if readers is not None:
            readers.wait(max(0, self.ahead - self._queued + self._delivered))

    def _drain(self, engine: EngineLike) -> bool:
        """Run the closures of the inbox; wait for one if the engine has no work. Return False to stop the thread."""
        while True:
            idle = not engine.has_work()
            if idle:
                self._read_figures(engine)
            if not idle and self._inbox.empty():
                return True
            if self.readers is not None:
                self.readers.flush()
            work = self._inbox.get()  # nobody else takes from it
            if work is None:
                return False
            self._busy_since = time.monotonic()
            work()
            self._busy_since = None

    def _revive(self) -> bool:
        """Build a new engine in the engine's thread. Return False if that is not allowed or fails, or after `close`."""
        now, failures = time.monotonic(), self._failures
        often = len(failures) == _RESTARTS and now - failures[0] < _WITHIN
        failures.append(now)
        rebuild = None if often else self._rebuild
        failed = threading.Event()
        self._notify(self._fail, "dead" if rebuild is None else "restarting", failed)
        if rebuild is None:
            return False
        failed.wait()  # from then on all earlier requests have ended, and none is submitted
        with contextlib.suppress(queue.Empty):
            while self._inbox.get(block=False) is not None:
                pass
            return False
        self._late_programs.wait()  # the thread that compiles for the old engine holds a reference to it
        self._engine = None  # `rebuild` drops the other references
        try:
            self._engine = rebuild()
        except BaseException as error:
            _log.critical("the engine could not be rebuilt", exc_info=error)
            self._notify(self._fail, "dead", failed)
            return False
        self._notify(self._revived)
        return True

    def _add(self, request: Request) -> None:
        assert self._engine is not None
        try:
            self._engine.add(request)
        except JswaError as error:
            self._notify(self._receivers.end, request.request_id, error.with_traceback(None))
        except Exception:
            _log.exception("request %s cannot be queued; the engine goes on", request.request_id)
            self._engine.abort(request.request_id)  # the engine may have queued a part of it
            self._notify(self._receivers.end, request.request_id, InternalError("the request could not be queued"))

    def _abort(self, request_id: str) -> None:
        assert self._engine is not None
        try:
            event = self._engine.abort(request_id)
        except _BROKEN:
            raise
        except Exception:
            _log.exception("request %s cannot be aborted; the engine goes on", request_id)
            self._notify(self._receivers.end, request_id, InternalError("the request could not be aborted"))
            return
        if event is not None:
            self._notify(self._receivers.end, event.request_id, event)

    def _notify(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # no coroutine is left that waits for the call
            _log.debug("the event loop has closed")

    def _deliver_step(self, events: StepEvents) -> None:
        try:
            if self.readers is None:
                self._receivers.deliver(events)
            else:
                self.readers.deliver(events)
        finally:
            self._delivered += 1
            self._caught_up.set()
            self._receivers.forget_ended(events)

    def _fail(self, state: State, failed: threading.Event) -> None:
        """Set the state and end all requests and calls with an error. In the state "dead", call `on_death` too."""
        self.state = state
        self.on_state()
        self._late_programs.forget()
        self._end_all(lambda: EngineDead("the engine has failed"))
        failed.set()
        if state == "dead":
            self.on_death()

    def _end_all(self, error: Callable[[], JswaError]) -> None:
        """End all requests and calls, each with an error of its own."""
        self._receivers.end_all(error)
        for future in list(self._calls):
            resolve(future, None, error())

    def _revived(self) -> None:
        self.state = "up"
        self.restarts += 1
        self.on_state()
        _log.warning("the engine has been rebuilt: its prefix cache is empty, and its weights are those of its start")

    def _lost(self, error: JswaError) -> None:
        """Declare the engine dead after the loss of a host: the engine's thread may hang in a step for ever."""
        _log.critical("the engine has died: %s", error)
        self._notify(self._fail, "dead", threading.Event())

    def _leaving(self, error: JswaError) -> None:
        _log.warning("%s", error)
        self._notify(self.on_leaving)

    async def _watch_steps(self) -> None:
        """Declare the engine dead once a step hangs. Looks are counted, as no time passes for a stopped process."""
        pause, looks, since = min(1.0, self._step_timeout / 4), 0, self._busy_since
        while self.state != "dead":
            await asyncio.sleep(pause)
            looks, since = looks + 1 if since == self._busy_since is not None else 0, self._busy_since
            if looks * pause >= self._step_timeout:
                _log.critical("a step has not ended after %g s: the engine hangs", self._step_timeout)
                self._fail("dead", threading.Event())
