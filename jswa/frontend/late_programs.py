"""Compile programs of variants and for late masks beside the engine's thread, when a request first needs any."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from jswa.frontend.engine_protocol import EngineLike
from jswa.ribs.table import needs_of
from jswa.types import SamplingParams

_log = logging.getLogger("jswa")
_PAUSE = 3.0  # compiling programs that are not urgent takes a quarter of the time of a busy engine


class LatePrograms:
    """What has been compiled for one engine. The methods are called on the event loop, but for `wait`.

    Args:
        notify: calls a function with arguments on the event loop, from any thread.
        stop: whether to compile no more programs.
    """

    def __init__(self, notify: Callable[..., None], stop: Callable[[], bool]) -> None:
        self._notify = notify
        self._stop = stop
        self._ready: set[str] = set()
        self._turn = asyncio.Lock()
        self._helper: threading.Thread | None = None

    def has(self, params: SamplingParams, *, images: bool) -> bool:
        """Return whether a request with these parameters needs no program that has not been compiled."""
        return _families(params, images=images) <= self._ready

    async def compile(self, engine: Callable[[], EngineLike], params: SamplingParams, *, images: bool) -> float:
        """Compile what is missing, and wait for the fewest programs that suffice; return the seconds of the wait.

        Args:
            engine: returns the engine, or raises the error of this call if the engine has failed meanwhile.
        """
        begin = time.monotonic()
        async with self._turn:
            missing = _families(params, images=images) - self._ready
            if missing:
                _log.info("a request waits until programs are compiled: %s", ", ".join(sorted(missing)))
                ready = self._ready
                await asyncio.shield(self._begin(engine(), params, images=images))
                ready |= missing
                _log.info("the programs are compiled (%.1f s)", time.monotonic() - begin)
        return time.monotonic() - begin

    def forget(self) -> None:
        """Begin anew: the engine has failed. What is being compiled for it is not for the next one."""
        self._ready = set()

    def wait(self) -> None:
        """Wait in another thread than the event loop's until nothing is compiled any more."""
        if self._helper is not None:
            self._helper.join()

    def _begin(self, engine: EngineLike, params: SamplingParams, *, images: bool) -> asyncio.Future[None]:
        """Compile in a thread of its own; the future is done once the fewest programs that suffice are compiled.

        Such a thread neither occupies the thread pool of other requests nor delays the end of the process. A coroutine
        that awaits the future holds no reference to the engine.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._helper

        def run(engine: EngineLike | None) -> None:
            assert engine is not None
            error: BaseException | None = None
            try:
                engine.prepare(params, images=images, fewest=True, stop=self._stop)
            except BaseException as raised:
                error = raised.with_traceback(None)
            self._notify(resolve, done, None, error)
            if before is not None:
                before.join()  # only one thread at a time compiles the remaining programs
            if error is None:
                engine.prepare(params, images=images, pause=_PAUSE, stop=self._stop)

        self._helper = threading.Thread(target=run, args=(engine,), name="prepare", daemon=True)
        self._helper.start()
        return done


def _families(params: SamplingParams, *, images: bool) -> set[str]:
    """Return the families of programs that a request needs besides those that are compiled at the start."""
    late = {"structured outputs"} if params.masks_follow_text else set()
    return late | needs_of(params, images=images).variants


def resolve[T](future: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    """Set the error or the result of a future that is not done."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]
