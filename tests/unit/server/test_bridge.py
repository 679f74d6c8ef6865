"""The engine's thread: events arrive in order, aborts free rows at once, and its death is told to everyone."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jswa.errors import InvalidPrompt
from jswa.types import Request, SamplingParams, TokenEvent
from server.bridge import Bridge
from server.errors import ApiError
from tests.unit.server.fake_engine import FakeEngine, count_up

Inbox = asyncio.Queue[TokenEvent | ApiError]


@asynccontextmanager
async def running(engine: FakeEngine, on_death: Callable[[], None] = lambda: None) -> AsyncIterator[Bridge]:
    bridge = Bridge(engine, on_death)
    bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()


def ask(engine: FakeEngine, name: str, *, length: int = 3, tokens: int = 5) -> Request:
    return engine.request(name, np.arange(3, 3 + length), SamplingParams(max_tokens=tokens))


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        await asyncio.sleep(0.001)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_each_request_gets_its_events_in_order() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as bridge:
            inboxes: list[Inbox] = [asyncio.Queue() for _ in range(20)]
            for i, inbox in enumerate(inboxes):
                bridge.submit([ask(engine, str(i), length=i + 1)], inbox.put_nowait)
            for i, inbox in enumerate(inboxes):
                got = [await inbox.get() for _ in range(5)]
                assert [e.token for e in got if isinstance(e, TokenEvent)] == [
                    count_up([0] * (i + 1), k) for k in range(5)
                ]
                assert isinstance(got[-1], TokenEvent)
                assert got[-1].finish_reason == "length"
            assert bridge.active == 0

    run(test)


def test_an_idle_engine_is_not_stepped() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as bridge:
            await asyncio.sleep(0.05)
            assert bridge.steps == 0
            assert await bridge.call(lambda e: e.stats().running) == 0

    run(test)


def test_an_abort_frees_the_row_within_two_steps() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.005
        async with running(engine) as bridge:
            inbox: Inbox = asyncio.Queue()
            bridge.submit([ask(engine, "a", tokens=200)], inbox.put_nowait)
            await inbox.get()
            bridge.abort(["a", "never heard of"])
            before = engine.steps
            await until(lambda: not engine.running)
            assert engine.steps - before <= 2
            while not inbox.empty():
                event = inbox.get_nowait()
                assert isinstance(event, TokenEvent)
                assert event.finish_reason is None, "who has left is told nothing more"

    run(test)


def test_an_abort_by_others_is_told() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.005
        async with running(engine) as bridge:
            inbox: Inbox = asyncio.Queue()
            bridge.submit([ask(engine, "a", tokens=200)], inbox.put_nowait)
            await inbox.get()
            bridge.abort(["a"], tell=True)
            while not isinstance(event := await inbox.get(), TokenEvent) or event.finish_reason is None:
                pass
            assert event.finish_reason == "abort"
            assert bridge.active == 0

    run(test)


def test_what_the_engine_refuses_ends_that_request_alone() -> None:
    async def test() -> None:
        engine = FakeEngine(max_model_len=10)
        async with running(engine) as bridge:
            bad: Inbox = asyncio.Queue()
            good: Inbox = asyncio.Queue()
            bridge.submit([ask(engine, "bad", length=10)], bad.put_nowait)
            bridge.submit([ask(engine, "good", tokens=1)], good.put_nowait)
            error = await bad.get()
            assert isinstance(error, ApiError)
            assert (error.status, error.code) == (400, "context_length_exceeded")
            assert isinstance(await good.get(), TokenEvent)
            assert bridge.dead is None

    run(test)


def test_calls_run_in_the_engines_thread_and_bring_errors_back() -> None:
    async def test() -> None:
        async with running(FakeEngine()) as bridge:
            assert await bridge.call(lambda _: threading.current_thread().name) == "engine"

            def refuse(_: object) -> None:
                raise InvalidPrompt("prompt", 1, "no")

            with pytest.raises(InvalidPrompt):
                await bridge.call(refuse)
            assert bridge.dead is None

    run(test)


def test_when_the_engine_dies_everyone_is_told() -> None:
    async def test() -> None:
        engine, died = FakeEngine(max_rows=1), asyncio.Event()
        engine.steps_left = 3
        async with running(engine, died.set) as bridge:
            inbox: Inbox = asyncio.Queue()
            bridge.submit([ask(engine, "a", tokens=100), ask(engine, "waits", tokens=100)], inbox.put_nowait)
            got = [await inbox.get() for _ in range(5)]
            assert [isinstance(one, ApiError) for one in got] == [False] * 3 + [True] * 2
            assert [one.status for one in got if isinstance(one, ApiError)] == [500, 500]
            await died.wait()
            assert bridge.dead is not None
            with pytest.raises(ApiError, match="engine has failed"):
                bridge.submit([ask(engine, "b")], inbox.put_nowait)
            with pytest.raises(ApiError, match="engine has failed"):
                await bridge.call(lambda e: e.stats())

    run(test)


def test_calls_that_wait_fail_when_the_engine_dies() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left, engine.delay = 0, 0.05
        async with running(engine) as bridge:
            bridge.submit([ask(engine, "a")], lambda _: None)
            await asyncio.sleep(0.02)
            with pytest.raises(ApiError, match="engine has failed"):
                await bridge.call(lambda e: e.stats())

    run(test)
