"""The engine's thread, and the way between it and the event loop.

One thread runs the engine for ever. It takes closures from an inbox between two steps, and hands the events of each
step to the event loop in one call, which puts them where their request wants them. Nothing else touches the engine.

An engine that fails ends all requests. Where it can be built anew, the thread does that, and goes on with the new one.
A thread that is stuck in a step cannot be helped: that is death.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from jswa.errors import EngineError, JswaError
from jswa.plan import Request, TokenEvent
from jswa.types import SamplingParams

from ..http.errors import ApiError, engine_dead, engine_restarting
from .engine_protocol import EngineLike, figures_of

_log = logging.getLogger("jswa.server")


Put = Callable[[TokenEvent | ApiError], None]
Work = Callable[[], None]
State = Literal["up", "restarting", "dead"]
_RESTARTS, _WITHIN = 3, 600.0  # an engine that fails more often than so many times in so many seconds stays dead
_FRESH = 0.25  # seconds after which a working engine's figures are read anew
_SHARE = 0.01  # of the engine's thread that this may take
_AHEAD = 2  # steps that the engine may be ahead of the event loop
_PAUSE = 3.0  # programs that are not urgent take a quarter of the time of a busy engine
_STUCK = 0.5  # seconds that a thread has to end before the process ends without it


class Bridge:
    """An engine in its own thread. All methods are for the event loop; `put` is called there too.

    Args:
        on_death: is called when the engine is dead for good.
        on_leaving: is called when a host that shares the model has been told to end.
        rebuild: makes a new engine where one has failed, in the thread; the old one has been let go of by then.
        step_timeout: seconds after which a step counts as stuck, and the engine as dead; 0: never.
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
        self.state: State = "up"
        self.steps = 0
        self.restarts = 0
        self.figures = figures_of(engine)  # as last read by its thread: nobody has to wait for a step
        self._read_again = 0.0
        self._engine: EngineLike | None = engine
        self._rebuild = rebuild
        self._step_timeout = step_timeout
        self._busy_since: float | None = None
        self._sent = self._delivered = 0  # steps with events, on their way to the event loop
        self._caught_up = threading.Event()
        self._failures: deque[float] = deque(maxlen=_RESTARTS)
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._puts: dict[str, Put] = {}
        self._calls: set[asyncio.Future[object]] = set()
        self._prepared: set[str] = set()
        self._preparing = asyncio.Lock()
        self._helper: threading.Thread | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def engine(self) -> EngineLike:
        """The engine. Raises ApiError while there is none."""
        if self._engine is None or self.state != "up":
            raise self.failure or engine_dead()
        return self._engine

    @property
    def failure(self) -> ApiError | None:
        """Why no request can be served now, if so."""
        return {"up": None, "restarting": engine_restarting(), "dead": engine_dead()}[self.state]

    @property
    def step_seconds(self) -> float:
        """Seconds that the present step takes so far; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        if self._engine is not None:
            self._engine.when_lost(self._lost, self._leaving)
        self._thread.start()
        if self._step_timeout:
            self._watch = asyncio.ensure_future(self._watch_steps())

    async def close(self, timeout: float = 5.0) -> None:
        """Stop the thread after the step it is in."""
        if self._watch is not None:
            self._watch.cancel()
        self._closed = True
        self._inbox.put(None)
        end = time.monotonic() + (timeout if self.state != "dead" else _STUCK)
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.005)
        end = time.monotonic() + _STUCK  # the helper may be between two programs
        while self.stuck and time.monotonic() < end:
            await asyncio.sleep(0.005)

    @property
    def stuck(self) -> bool:
        """Whether a thread still runs: after `close`, that it cannot be stopped."""
        return self._thread.is_alive() or (self._helper is not None and self._helper.is_alive())

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._puts)

    def submit(self, requests: Iterable[Request], put: Put) -> None:
        """Queue requests. `put` gets the events of all of them, or the error that ends all."""
        if self.failure is not None:
            raise self.failure
        for request in requests:
            self._puts[request.request_id] = put
            self._inbox.put(lambda request=request: self._add(request))  # type: ignore[misc]

    def abort(self, request_ids: Iterable[str], *, tell: bool = False) -> None:
        """End requests before the next step. Their last event is delivered only where `tell` is set."""
        for request_id in request_ids:
            known = request_id in self._puts if tell else self._puts.pop(request_id, None) is not None
            if known:
                self._inbox.put(lambda request_id=request_id: self._abort(request_id))  # type: ignore[misc]

    async def prepare(self, params: SamplingParams) -> None:
        """Compile what a request with these parameters needs, while the engine goes on with the others.

        It waits for as many programs as suffice. The others are compiled in what time the steps leave.
        """
        wanted = {name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) is not None}
        if wanted <= self._prepared:
            return
        async with self._preparing:
            if not wanted <= self._prepared:
                await asyncio.shield(self._beside(self.engine, params))
                self._prepared |= wanted

    async def call[T](self, function: Callable[[EngineLike], T]) -> T:
        """Run a function on the engine between two steps."""
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._calls.discard)

        def work() -> None:
            try:
                assert self._engine is not None
                result = function(self._engine)
            except Exception as error:
                # Without the frames, which keep the engine.
                loop.call_soon_threadsafe(_settle, future, None, error.with_traceback(None))
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._inbox.put(work)
        return await future

    def _beside(self, engine: EngineLike, params: SamplingParams) -> asyncio.Future[None]:
        """Compile in a thread that holds up neither the pool that others use nor the end of the process.

        Whoever awaits it holds nothing of the engine.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._helper

        def run(engine: EngineLike | None) -> None:
            assert engine is not None
            error: BaseException | None = None
            try:
                engine.prepare(params, fewest=True)
            except BaseException as raised:
                error = raised.with_traceback(None)
            self._tell(_settle, done, None, error)
            if before is not None:
                before.join()  # one thread at a time fills in what is missing
            if error is None:
                engine.prepare(params, pause=_PAUSE, stop=lambda: self._closed or self.state != "up")

        self._helper = threading.Thread(target=run, args=(engine,), name="prepare", daemon=True)
        self._helper.start()
        return done

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                return
            except BaseException:
                # As text: a record with the error itself would keep the engine.
                _log.critical("the engine has died\n%s", traceback.format_exc())
            # Here the error is gone, and with it the frames that hold the engine.
            if self._engine is not None:
                with contextlib.suppress(Exception):  # it may be in any state
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
        """Have fresh figures for whoever asks. Before the events of a last step: its client may ask at once."""
        begin = time.monotonic()
        if begin >= self._read_again or not engine.has_work():
            self.figures = figures_of(engine)
            end = time.monotonic()
            self._read_again = end + max(_FRESH, (end - begin) / _SHARE)

    def _hand_over(self, events: list[TokenEvent]) -> None:
        """Give a step's events to the event loop, and wait where it is too far behind.

        Else steps that are quicker than what they cause would take the interpreter for themselves: everything queues
        up, and not even /health answers.
        """
        self._sent += 1
        self._tell(self._deliver_step, events)
        if self._sent - self._delivered > _AHEAD:
            self._caught_up.clear()
            if self._sent - self._delivered > _AHEAD:
                self._caught_up.wait(1.0)  # not for ever: the loop may be gone

    def _drain(self, engine: EngineLike) -> bool:
        """Do what is in the inbox; waits for some where the engine has nothing to do. False: stop."""
        while True:
            idle = not engine.has_work()
            if idle:
                self._read_figures(engine)
            try:
                work = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            self._busy_since = time.monotonic()
            work()
            self._busy_since = None

    def _revive(self) -> bool:
        """Build a new engine, in its thread. False: none may be built, or it cannot be, or nobody wants one."""
        now, failures = time.monotonic(), self._failures
        often = len(failures) == _RESTARTS and now - failures[0] < _WITHIN
        failures.append(now)
        rebuild = None if often else self._rebuild
        told = threading.Event()
        self._tell(self._fail, "dead" if rebuild is None else "restarting", told)
        if rebuild is None:
            return False
        told.wait()  # what was submitted before has ended by then, and from then on nothing is
        with contextlib.suppress(queue.Empty):
            while self._inbox.get(block=False) is not None:
                pass
            return False
        if self._helper is not None:
            self._helper.join()  # it compiles for the old engine, and holds it
        self._engine = None  # `rebuild` lets go of what else holds it
        try:
            self._engine = rebuild()
        except BaseException as error:
            _log.critical("the engine could not be built anew", exc_info=error)
            self._tell(self._fail, "dead", told)
            return False
        self._tell(self._revived)
        return True

    def _add(self, request: Request) -> None:
        assert self._engine is not None
        try:
            self._engine.add(request)
        except JswaError as error:
            self._tell(self._refuse, request.request_id, ApiError.of(error))
        except Exception:
            _log.exception("request %s cannot be queued; the engine goes on", request.request_id)
            self._engine.abort(request.request_id)  # it may be queued in part
            self._tell(self._refuse, request.request_id, ApiError(500, "internal error"))

    def _abort(self, request_id: str) -> None:
        assert self._engine is not None
        try:
            event = self._engine.abort(request_id)
        except EngineError:
            raise  # a law is broken: the others' pages may be wrong
        except Exception:
            _log.exception("request %s cannot be aborted; the engine goes on", request_id)
            self._tell(self._refuse, request_id, ApiError(500, "internal error"))
            return
        if event is not None:
            self._tell(self._deliver, [event])

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            _log.debug("the event loop is gone")

    def _deliver_step(self, events: list[TokenEvent]) -> None:
        self._deliver(events)
        self._delivered += 1
        self._caught_up.set()

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            put = self._puts.get(event.request_id)
            if put is None:
                continue  # aborted meanwhile
            if event.finish_reason is not None:
                del self._puts[event.request_id]
            put(event)

    def _refuse(self, request_id: str, error: ApiError) -> None:
        put = self._puts.pop(request_id, None)
        if put is not None:
            put(error)

    def _fail(self, state: State, told: threading.Event) -> None:
        """All requests end; with the state "dead" so does everything."""
        self.state = state
        self._prepared.clear()
        puts, self._puts = self._puts, {}
        for put in puts.values():
            put(engine_dead())
        for future in list(self._calls):
            _settle(future, None, engine_dead())
        told.set()
        if state == "dead":
            self.on_death()

    def _revived(self) -> None:
        self.state = "up"
        self.restarts += 1
        _log.warning("the engine has been built anew; its prefix cache is empty")

    def _lost(self, error: JswaError) -> None:
        """A host is gone, and the thread may be in a step for ever."""
        _log.critical("the engine has died: %s", error)
        self._tell(self._fail, "dead", threading.Event())

    def _leaving(self, error: JswaError) -> None:
        _log.warning("%s", error)
        self._tell(self.on_leaving)

    async def _watch_steps(self) -> None:
        """Take an engine whose step does not end for dead."""
        while self.state != "dead":
            await asyncio.sleep(min(1.0, self._step_timeout / 4))
            if self.step_seconds > self._step_timeout:
                _log.critical("a step has not ended after %g s: the engine is stuck", self._step_timeout)
                self._fail("dead", threading.Event())


def _settle[T](future: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]
