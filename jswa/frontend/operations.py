"""What operators ask of an engine: one table, which threads (`LLM`) and event loops (`AsyncLLM`, the server) run.

read       in any thread, while steps run: adapters and weights come from files
do         between two steps
pending    steps go on until it has its effect: requests end before a pause, or run to the end with old weights
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from jswa.errors import EngineDead
from jswa.frontend.driver import Driver
from jswa.frontend.engine_protocol import EngineLike
from jswa.frontend.engine_thread import EngineThread

Verb = Literal[
    "flush_cache", "load_lora", "unload_lora", "update_weights", "pause", "resume", "sleep", "wake", "profile"
]  # fmt: skip
_POLL = 0.005  # seconds between looks at whether older requests have ended


class Operation(NamedTuple):
    """How an engine does what a verb says.

    Attributes:
        do: returns the result, from the engine and the verb's arguments.
        reader: from the engine, returns what reads the first argument and takes its place. It holds no reference to the
            engine, which may be replaced meanwhile. None: nothing is read.
        pending: from the engine and the result, returns whether it still has no effect.
    """

    do: Callable[..., int | None]
    reader: Callable[[EngineLike], Callable[[Any], Any]] | None = None
    pending: Callable[[EngineLike, Any], bool] = lambda *_: False


# Arguments: load_lora(folder, name, replace), unload_lora(name), update_weights(source, in_flight) → their version,
# pause(requests), sleep(level), profile(folder, or None to end it). See `jswa.llm.LLM` for what they mean.
OPERATIONS: Mapping[Verb, Operation] = {
    "flush_cache": Operation(lambda engine: engine.flush_cache()),
    "load_lora": Operation(
        lambda engine, adapter, name, replace: engine.load_lora(name, adapter, replace=replace),
        lambda engine: engine.lora_reader.read,
    ),
    "unload_lora": Operation(lambda engine, name: engine.unload_lora(name)),
    "update_weights": Operation(
        lambda engine, params, in_flight: engine.turnover.update(params, in_flight),
        lambda engine: engine.stager.stage,
        lambda engine, version: engine.turnover.version < version,
    ),
    "pause": Operation(
        lambda engine, requests: engine.turnover.pause(requests), pending=lambda engine, _: engine.turnover.pausing
    ),
    "resume": Operation(lambda engine: engine.turnover.resume()),
    "sleep": Operation(lambda engine, level: engine.turnover.sleep(level)),
    "wake": Operation(lambda engine: engine.turnover.wake()),
    "profile": Operation(lambda engine, folder: engine.profile(folder)),
}


def operate(driver: Driver[Any], verb: Verb, *arguments: Any) -> int | None:
    """Do what a verb says with the engine of a driver, and return the result. Raises JswaError, and changes nothing."""
    operation = OPERATIONS[verb]
    if operation.reader is not None:
        arguments = (operation.reader(driver.engine)(arguments[0]), *arguments[1:])
    done = driver.between(lambda: operation.do(driver.engine, *arguments))
    while operation.pending(driver.engine, done):
        driver.advance()
    return done


async def operate_on(thread: EngineThread, verb: Verb, *arguments: Any) -> int | None:
    """Do what a verb says with the engine of a thread, and return the result; what reads files, one at a time.

    Raises JswaError, and changes nothing; EngineDead if another engine runs by now than the one that was told.
    """
    operation = OPERATIONS[verb]
    if operation.reader is None:
        return await _do(thread, operation, arguments, thread.restarts)
    async with thread.loading:
        restarts = thread.restarts
        first = await asyncio.to_thread(operation.reader(thread.engine), arguments[0])
        return await _do(thread, operation, (first, *arguments[1:]), restarts)


async def _do(thread: EngineThread, operation: Operation, arguments: tuple[Any, ...], restarts: int) -> int | None:
    done = await thread.call(lambda engine: operation.do(engine, *arguments))
    while operation.pending(thread.engine, done):
        await asyncio.sleep(_POLL)
        if thread.restarts > restarts:
            raise EngineDead("the engine has failed")
    return done
