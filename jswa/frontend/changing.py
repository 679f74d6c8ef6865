"""Changes of an engine that take more than one step, for threads and event loops: new weights, and pauses."""

import asyncio
from typing import Any

from jswa.errors import EngineDead
from jswa.frontend.driver import Driver
from jswa.frontend.engine_thread import EngineThread
from jswa.running.turnover import InFlight, WhilePaused

_POLL = 0.005  # seconds between looks at whether older requests have ended


def update_weights(driver: Driver[Any], source: object, in_flight: InFlight) -> int:
    """Change the weights of an engine, and return their version once steps run with them. Raises JswaError.

    They are read and converted first, while other threads' steps go on.
    """
    params = driver.engine.stager.stage(source)
    version: int = driver.between(lambda: driver.engine.turnover.update(params, in_flight))
    while driver.engine.turnover.version < version:
        driver.advance()
    return version


def pause(driver: Driver[Any], requests: WhilePaused) -> None:
    """Pause an engine; with "wait" once its requests have ended. Raises RequestError."""
    driver.between(lambda: driver.engine.turnover.pause(requests))
    while driver.engine.turnover.pausing:
        driver.advance()


async def update_weights_of(thread: EngineThread, source: object, in_flight: InFlight) -> int:
    """Do what `update_weights` does to the engine of a thread, one change at a time."""
    async with thread.loading:
        restarts, params = thread.restarts, await asyncio.to_thread(thread.engine.stager.stage, source)
        version = await thread.call(lambda engine: engine.turnover.update(params, in_flight))
        while thread.engine.turnover.version < version:
            await _poll(thread, restarts)
    return version


async def pause_of(thread: EngineThread, requests: WhilePaused) -> None:
    """Do what `pause` does to the engine of a thread."""
    restarts = thread.restarts
    await thread.call(lambda engine: engine.turnover.pause(requests))
    while thread.engine.turnover.pausing:
        await _poll(thread, restarts)


async def _poll(thread: EngineThread, restarts: int) -> None:
    """Wait a little. Raises EngineDead if another engine runs by now than the one that was told to change."""
    await asyncio.sleep(_POLL)
    if thread.restarts > restarts:
        raise EngineDead("the engine has failed")
