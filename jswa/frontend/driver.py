"""An engine that several threads drive by turns."""

import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from types import FrameType

from jswa.errors import EngineDead, EngineError
from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.fair_lock import FairLock
from jswa.frontend.outputs import Receiver, distribute
from jswa.plan import Request

_PAUSE = 0.02  # seconds after which a thread looks again whether a paused engine runs


class Driver[E: EngineLike]:
    """Lets several threads drive an engine: each holds it for one step at a time, in which the requests of all run.

    Ctrl-C interrupts no step: an engine that has launched half of one cannot go on.
    """

    def __init__(self, engine: E) -> None:
        self._engine: E | None = engine
        self._numbers = itertools.count()
        self._receivers: dict[str, Receiver] = {}
        self._turns = FairLock()
        self._dropped: deque[str] = deque()  # requests to abort when the engine is free
        self._failed = False  # a step has failed: rows may wait for its tokens for ever

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._receivers)

    @property
    def engine(self) -> E:
        """The engine. Raises EngineError once it is closed."""
        if self._engine is None:
            raise EngineError("this LLM is closed")
        return self._engine

    def close(self) -> None:
        """Close the engine; calls in other threads raise EngineError. Closing twice is fine."""
        with self._turns:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._receivers.clear()

    def new_id(self) -> str:
        """Return a request id that was not used before."""
        return str(next(self._numbers))

    def add(self, request: Request, receiver: Receiver) -> None:
        """Queue a request; the receiver gets its events, in the thread that runs the step. Raises PromptTooLong."""
        with self._alone() as engine:
            self._receivers[request.request_id] = receiver
            engine.add(request)

    def abort(self, request_id: str) -> None:
        """Abort a request if it has not ended, and forget it; after the step, if a thread is in one.

        It never waits: Python may end a forgotten stream anywhere, also inside a step.
        """
        self._dropped.append(request_id)
        self._abort_dropped()

    def advance(self, events: Sized = ()) -> None:
        """Run one engine step, unless another thread has run one that brought `events`, which wait for the caller.

        Several threads may call it; each gets its own events. While the engine is paused the call rests a little.
        """
        with self._alone() as engine:
            if events:
                return
            try:
                step = engine.step()
            except BaseException:
                self._failed = True
                raise
            distribute(step, self._receivers, _raise)
            paused = engine.turnover.paused
        if paused and not events:
            time.sleep(_PAUSE)

    def between[T](self, function: Callable[[], T]) -> T:
        """Return what a function returns that needs the engine alone; it is called between two steps."""
        with self._alone():
            return function()

    @contextmanager
    def _alone(self) -> Iterator[E]:
        """Hold the engine alone. Raises EngineError once it is closed, and EngineDead once a step has failed."""
        try:
            with self._turns, uninterrupted():
                if self._failed:
                    raise EngineDead("a step of the engine has failed: make another LLM")
                yield self.engine
        finally:
            self._abort_dropped()

    def _abort_dropped(self) -> None:
        """Abort what `abort` was told; if the engine is held, the holder comes here when it lets go."""
        while self._dropped and self._turns.take():
            try:
                with uninterrupted():
                    while self._dropped:
                        self._forget(self._dropped.popleft())
            finally:
                self._turns.release()

    def _forget(self, request_id: str) -> None:
        known = self._receivers.pop(request_id, None) is not None
        if known and self._engine is not None and not self._failed:
            self._engine.abort(request_id)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back a SIGINT until the block has ended. A second one comes through, as a block may hang.

    Other threads than the main one get no signals: for them the block just runs.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            before(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(*held[0])


def _raise(_: str, error: Exception) -> None:
    raise error
