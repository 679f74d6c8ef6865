"""An engine's thread with the fake engine, and what its requests receive."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from jswa.errors import JswaError
from jswa.frontend.engine_thread import EngineThread
from jswa.plan import Request, TokenEvent
from jswa.types import SamplingParams
from tests.support.server.fake_engine import FakeEngine

Inbox = asyncio.Queue[TokenEvent | JswaError]


@asynccontextmanager
async def running(
    engine: FakeEngine, on_death: Callable[[], None] = lambda: None, **options: Any
) -> AsyncIterator[EngineThread]:
    thread = EngineThread(engine, on_death, **options)
    del engine
    thread.start()
    try:
        yield thread
    finally:
        await thread.close()


def ask(engine: FakeEngine, name: str, *, length: int = 3, tokens: int = 5) -> Request:
    return engine.request(name, np.arange(3, 3 + length), SamplingParams(max_tokens=tokens))


def submit(thread: EngineThread, *requests: Request) -> Inbox:
    """Submit requests; return the queue of their events."""
    inbox: Inbox = asyncio.Queue()
    thread.submit(requests, inbox.put_nowait)
    return inbox


async def last_event(inbox: Inbox) -> TokenEvent:
    """Return the event that ends a request."""
    while True:
        event = await inbox.get()
        assert isinstance(event, TokenEvent), event
        if event.finish_reason is not None:
            return event


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        await asyncio.sleep(0.001)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))
