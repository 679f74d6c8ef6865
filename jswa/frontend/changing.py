"""Changes an engine's weights, pauses it and frees its memory between two steps, for threads and event loops."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jswa.errors import EngineDead
from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.engine_thread import EngineThread
from jswa.running.turnover import InFlight, WhilePaused

PAUSE = 0.02  # seconds after which a call looks again whether a paused engine runs
_POLL = 0.005  # seconds between looks at whether older requests have ended


class Changing(ABC):
    """Changes the weights of an engine, pauses it and frees its memory."""

    @property
    @abstractmethod
    def engine(self) -> EngineLike:
        """The engine."""

    @abstractmethod
    def advance(self) -> None:
        """Run one step."""

    @abstractmethod
    def _between_steps(self) -> AbstractContextManager[EngineLike]:
        """Hold the engine alone."""

    def _between[T](self, function: Callable[[], T]) -> T:
        with self._between_steps():
            return function()

    def update_weights(self, source: Any, *, in_flight: InFlight = "continue") -> int:
        """Change the weights between two steps, and return their version: the first ones have 0.

        The prefix cache shares nothing between versions. Other threads' requests go on while the weights are converted.

        Args:
            source: a tree of arrays (dict, nnx state, …), or an iterable of (name, array), with the names of a Hugging
                Face checkpoint or the decoder's own; or a checkpoint folder. Arrays on devices are converted there,
                without the host. They are float32, bfloat16 or float16, and not used afterwards.
            in_flight: unfinished requests go on with the new weights and the KV that they have ("continue"; `versions`
                of an output says which weights each token comes from), end at once ("abort"), or run to their end with
                the old weights while new requests wait ("finish"; the call waits too).

        Needs memory for a second copy of the weights, unless `sleep(2)` has freed the first. Raises WeightsError, and
        changes nothing, if a tensor is missing, unknown, or of a wrong shape or type.
        """
        params = self.engine.stager.stage(source)
        with self._between_steps() as engine:
            version = engine.turnover.update(params, in_flight)
        while self.engine.turnover.version < version:
            self.advance()
        return version

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next step runs with."""
        return self.engine.turnover.version

    def pause(self, requests: WhilePaused = "keep") -> None:
        """Run no step until `resume`. Unfinished requests wait with their KV ("keep"), or end ("abort")."""
        with self._between_steps() as engine:
            engine.turnover.pause(requests)

    def resume(self) -> None:
        """Run steps again. Raises RequestError while the engine sleeps."""
        with self._between_steps() as engine:
            engine.turnover.resume()

    def sleep(self, level: int = 1) -> None:
        """Pause, and free the KV arena (1), and the weights too (2). Compiled programs stay.

        The prefix cache is emptied. Unfinished requests wait, and compute their KV again after `wake`.
        """
        with self._between_steps() as engine:
            engine.turnover.sleep(level)

    def wake(self) -> None:
        """Allocate the arena and resume. Raises RequestError if the weights were freed and not given again."""
        with self._between_steps() as engine:
            engine.turnover.wake()


async def update_weights(thread: EngineThread, source: object, in_flight: InFlight) -> int:
    """Change the weights, one change at a time, and return their version once steps run with them. Raises JswaError.

    They are read and converted in a thread, while the engine works.
    """
    async with thread.loading:
        restarts, params = thread.restarts, await asyncio.to_thread(thread.engine.stager.stage, source)
        version = await thread.call(lambda engine: engine.turnover.update(params, in_flight))
        while thread.engine.turnover.version < version:
            await asyncio.sleep(_POLL)
            if thread.restarts > restarts:
                raise EngineDead("the engine has failed")
    return version
