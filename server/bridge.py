"""The engine's thread, and the way between it and the event loop.

One thread runs the engine for ever. It takes closures from an inbox between two steps, and hands the events of each
step to the event loop in one call, which puts them where their request wants them. Nothing else touches the engine.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from jaxtyping import Int

from jswa.cache.stats import CacheStats
from jswa.config import Limits
from jswa.errors import JswaError
from jswa.sched.scheduler import SchedulerStats
from jswa.types import Request, SamplingParams, TokenEvent

from .errors import ApiError, engine_dead

_log = logging.getLogger("jswa.server")


class Model(Protocol):
    """What the server asks of the model."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...


class EngineLike(Protocol):
    """What the server needs of an engine; `jswa.engine.Engine` is one, tests have a fake."""

    @property
    def model(self) -> Model:
        """What it runs."""
        ...

    @property
    def limits(self) -> Limits:
        """What it runs with."""
        ...

    def request(
        self,
        request_id: str,
        prompt: Int[np.ndarray, " P"],
        params: SamplingParams,
        *,
        bad_words: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Validate a prompt. Of all methods, only this one may be called beside the engine's thread."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request."""
        ...

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request; None where it has ended already."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def step(self) -> list[TokenEvent]:
        """One step."""
        ...

    def stats(self) -> SchedulerStats:
        """Rows and pages."""
        ...

    def cache_stats(self) -> CacheStats:
        """What the prefix cache holds."""
        ...

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        ...


Put = Callable[[TokenEvent | ApiError], None]
Work = Callable[[], None]


class Bridge:
    """An engine in its own thread. All methods are for the event loop; `put` is called there too."""

    def __init__(self, engine: EngineLike, on_death: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.on_death = on_death
        self.steps = 0
        self.dead: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._puts: dict[str, Put] = {}
        self._calls: set[asyncio.Future[object]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self, timeout: float = 5.0) -> None:
        """Stop the thread after the step it is in."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, timeout)

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return len(self._puts)

    def submit(self, requests: Iterable[Request], put: Put) -> None:
        """Queue requests. `put` gets the events of all of them, or the error that ends all."""
        if self.dead is not None:
            raise engine_dead()
        for request in requests:
            self._puts[request.request_id] = put
            self._inbox.put(lambda request=request: self._add(request))  # type: ignore[misc]

    def abort(self, request_ids: Iterable[str], *, tell: bool = False) -> None:
        """End requests before the next step. Their last event is delivered only where `tell` is set."""
        for request_id in request_ids:
            known = request_id in self._puts if tell else self._puts.pop(request_id, None) is not None
            if known:
                self._inbox.put(lambda request_id=request_id: self._abort(request_id))  # type: ignore[misc]

    async def call[T](self, function: Callable[[EngineLike], T]) -> T:
        """Run a function on the engine between two steps."""
        if self.dead is not None:
            raise engine_dead()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._calls.discard)

        def work() -> None:
            try:
                result = function(self.engine)
            except JswaError as error:
                loop.call_soon_threadsafe(_settle, future, None, error)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._inbox.put(work)
        return await future

    def _run(self) -> None:
        try:
            while self._drain():
                if self.engine.has_work():
                    events = self.engine.step()
                    self.steps += 1
                    if events:
                        self._tell(self._deliver, events)
        except BaseException as error:
            _log.critical("the engine has died", exc_info=error)
            self._tell(self._die, error)

    def _drain(self) -> bool:
        """Do what is in the inbox; waits for some where the engine has nothing to do. False: stop."""
        while True:
            try:
                work = self._inbox.get(block=not self.engine.has_work())
            except queue.Empty:
                return True
            if work is None:
                return False
            work()

    def _add(self, request: Request) -> None:
        try:
            self.engine.add(request)
        except JswaError as error:
            self._tell(self._refuse, request.request_id, error)

    def _abort(self, request_id: str) -> None:
        event = self.engine.abort(request_id)
        if event is not None:
            self._tell(self._deliver, [event])

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            _log.debug("the event loop is gone")

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            put = self._puts.get(event.request_id)
            if put is None:
                continue  # aborted meanwhile
            if event.finish_reason is not None:
                del self._puts[event.request_id]
            put(event)

    def _refuse(self, request_id: str, error: JswaError) -> None:
        put = self._puts.pop(request_id, None)
        if put is not None:
            put(ApiError.of(error))

    def _die(self, error: BaseException) -> None:
        self.dead = error
        puts, self._puts = self._puts, {}
        for put in puts.values():
            put(engine_dead())
        for future in list(self._calls):
            _settle(future, None, engine_dead())
        self.on_death()


def _settle[T](future: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]
