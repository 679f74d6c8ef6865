"""The engine's thread: events arrive in order, aborts free rows at once, and a dead engine fails all requests."""

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jswa.errors import HostLost, InvalidPrompt
from jswa.plan import Request, TokenEvent
from jswa.types import SamplingParams
from server.core.bridge import Bridge
from server.http.errors import ApiError
from tests.support.server.fake_engine import FakeEngine, count_up

Inbox = asyncio.Queue[TokenEvent | ApiError]


@asynccontextmanager
async def running(
    engine: FakeEngine, on_death: Callable[[], None] = lambda: None, **options: Any
) -> AsyncIterator[Bridge]:
    bridge = Bridge(engine, on_death, **options)
    del engine
    bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()


def ask(engine: FakeEngine, name: str, *, length: int = 3, tokens: int = 5) -> Request:
    return engine.request(name, np.arange(3, 3 + length), SamplingParams(max_tokens=tokens))


def submit(bridge: Bridge, *requests: Request) -> Inbox:
    """Submit requests; return the queue of their events."""
    inbox: Inbox = asyncio.Queue()
    bridge.submit(requests, inbox.put_nowait)
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


def test_a_lost_host_fails_all_requests_while_a_step_still_runs() -> None:
    async def test() -> None:
        engine, died, go_on = FakeEngine(), asyncio.Event(), threading.Event()

        def stuck() -> list[TokenEvent]:
            go_on.wait(10)
            return []

        engine.step = stuck  # type: ignore[method-assign]
        async with running(engine, died.set) as bridge:
            inbox = submit(bridge, ask(engine, "a"))
            await asyncio.sleep(0.02)  # by then the engine's thread is in its step
            threading.Thread(target=engine.report_lost, args=(HostLost("host 1 is gone"),)).start()
            error = await inbox.get()
            assert isinstance(error, ApiError)
            assert error.status == 500
            await died.wait()
            assert bridge.state == "dead"
            go_on.set()

    run(test)


def test_a_host_that_shuts_down_starts_the_drain() -> None:
    async def test() -> None:
        engine, left = FakeEngine(), asyncio.Event()
        async with running(engine, on_leaving=left.set) as bridge:
            threading.Thread(target=engine.report_leaving, args=(HostLost("host 1 has been told to end"),)).start()
            await left.wait()
            assert bridge.state == "up"

    run(test)


def test_an_idle_engine_runs_no_steps() -> None:
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
            inbox = submit(bridge, ask(engine, "a", tokens=200))
            await inbox.get()
            bridge.abort(["a", "never heard of"])
            before = engine.steps
            await until(lambda: not engine.running)
            assert engine.steps - before <= 2
            while not inbox.empty():
                event = inbox.get_nowait()
                assert isinstance(event, TokenEvent)
                assert event.finish_reason is None, "an aborted request must get no more events"

    run(test)


def test_an_abort_by_the_operator_is_reported_to_the_request() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.005
        async with running(engine) as bridge:
            inbox = submit(bridge, ask(engine, "a", tokens=200))
            await inbox.get()
            bridge.abort(["a"], deliver_last=True)
            assert (await last_event(inbox)).finish_reason == "abort"
            assert bridge.active == 0

    run(test)


def test_a_request_that_the_engine_refuses_does_not_harm_others() -> None:
    async def test() -> None:
        engine = FakeEngine(max_model_len=10)
        async with running(engine) as bridge:
            bad = submit(bridge, ask(engine, "bad", length=10))
            good = submit(bridge, ask(engine, "good", tokens=1))
            error = await bad.get()
            assert isinstance(error, ApiError)
            assert (error.status, error.code) == (400, "context_length_exceeded")
            assert isinstance(await good.get(), TokenEvent)
            assert bridge.state == "up"

    run(test)


def test_calls_run_in_the_engines_thread_and_raise_its_errors() -> None:
    async def test() -> None:
        async with running(FakeEngine()) as bridge:
            assert await bridge.call(lambda _: threading.current_thread().name) == "engine"

            def refuse(_: object) -> None:
                raise InvalidPrompt("prompt", 1, "no")

            with pytest.raises(InvalidPrompt):
                await bridge.call(refuse)
            assert bridge.state == "up"

    run(test)


def test_a_dead_engine_fails_all_requests() -> None:
    async def test() -> None:
        engine, died = FakeEngine(max_rows=1), asyncio.Event()
        engine.steps_left = 3
        async with running(engine, died.set) as bridge:
            inbox = submit(bridge, ask(engine, "a", tokens=100), ask(engine, "waits", tokens=100))
            got = [await inbox.get() for _ in range(5)]
            assert [isinstance(one, ApiError) for one in got] == [False] * 3 + [True] * 2
            assert [one.status for one in got if isinstance(one, ApiError)] == [500, 500]
            await died.wait()
            assert bridge.state == "dead"
            with pytest.raises(ApiError, match="engine has failed"):
                bridge.submit([ask(engine, "b")], inbox.put_nowait)
            with pytest.raises(ApiError, match="engine has failed"):
                await bridge.call(lambda e: e.stats())

    run(test)


def test_pending_calls_fail_if_the_engine_dies() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left, engine.delay = 0, 0.05
        async with running(engine) as bridge:
            bridge.submit([ask(engine, "a")], lambda _: None)
            await asyncio.sleep(0.02)
            with pytest.raises(ApiError, match="engine has failed"):
                await bridge.call(lambda e: e.stats())

    run(test)


def test_a_dead_engine_is_rebuilt_and_its_requests_are_not_run_again() -> None:
    async def test() -> None:
        engine, second = FakeEngine(max_rows=1), FakeEngine()
        gone = weakref.ref(engine)
        engine.steps_left = 3

        def rebuild() -> FakeEngine:
            assert gone() is None, "the failed engine must be freed before another one is built"
            time.sleep(0.05)
            return second

        request = ask(engine, "a", tokens=100)
        async with running(engine, rebuild=rebuild) as bridge:
            del engine
            inbox = submit(bridge, request)
            got = [await inbox.get() for _ in range(4)]
            error = got[-1]
            assert isinstance(error, ApiError)
            assert (error.status, error.code) == (500, "engine_dead")
            del got, error
            with pytest.raises(ApiError) as refused:
                bridge.submit([request], inbox.put_nowait)
            assert (refused.value.status, refused.value.code) == (503, "engine_restarting")
            with pytest.raises(ApiError, match="restarting"):
                await bridge.call(lambda e: e.stats())
            await until(lambda: bridge.state == "up")
            assert bridge.engine is second
            assert bridge.restarts == 1
            assert not second.seen, "no earlier request may run"
            bridge.submit([ask(second, "b")], inbox.put_nowait)
            tokens = [await inbox.get() for _ in range(5)]
            assert all(isinstance(event, TokenEvent) for event in tokens)
            assert bridge.active == 0

    run(test)


def test_requests_submitted_while_the_engine_dies_get_an_error() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left, engine.delay = 0, 0.05
        second = FakeEngine()
        async with running(engine, rebuild=lambda: second) as bridge:
            inbox = submit(bridge, ask(engine, "a"))
            await asyncio.sleep(0.02)
            bridge.submit([ask(engine, "b")], inbox.put_nowait)  # it is still in the inbox when the step fails
            call = asyncio.ensure_future(bridge.call(lambda e: e.stats()))
            assert [isinstance(await inbox.get(), ApiError) for _ in range(2)] == [True, True]
            with pytest.raises(ApiError, match="engine has failed"):
                await call
            await until(lambda: bridge.state == "up")
            assert not second.seen

    run(test)


@pytest.mark.parametrize("cause", ["it fails again and again", "it cannot be built"])
def test_an_engine_that_cannot_be_restarted_is_dead(cause: str) -> None:
    async def test() -> None:
        built, died = 0, asyncio.Event()

        def rebuild() -> FakeEngine:
            nonlocal built
            if cause == "it cannot be built":
                raise MemoryError("no memory")
            built += 1
            return failing()

        def failing() -> FakeEngine:
            engine = FakeEngine()
            engine.steps_left = 0
            return engine

        async with running(failing(), died.set, rebuild=rebuild) as bridge:
            while not died.is_set():
                with contextlib.suppress(ApiError):
                    bridge.submit([ask(FakeEngine(), "a")], lambda _: None)
                await asyncio.sleep(0.001)
            assert bridge.state == "dead"
            assert built == (3 if cause == "it fails again and again" else 0)

    run(test)


def test_a_hung_step_counts_as_a_dead_engine() -> None:
    async def test() -> None:
        engine, died = FakeEngine(), asyncio.Event()
        engine.delay = 1.0
        async with running(engine, died.set, step_timeout=0.1) as bridge:
            await asyncio.sleep(0.3)
            assert bridge.failure is None, "an idle engine is not hung"
            begin = time.monotonic()
            inbox = submit(bridge, ask(engine, "a", tokens=100))
            assert isinstance(await inbox.get(), ApiError)
            assert time.monotonic() - begin < 0.6
            assert bridge.state == "dead"
            assert died.is_set()

    run(test)


def test_programs_are_compiled_while_steps_run() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay, engine.prepare_delay = 0.002, 0.3
        async with running(engine) as bridge:
            bridge.submit([ask(engine, "a", tokens=200)], lambda _: None)
            await until(lambda: engine.steps > 0)
            before = engine.steps
            wanted = SamplingParams(logprobs=1)
            await asyncio.gather(*(bridge.prepare(wanted) for _ in range(50)))
            assert engine.steps > before + 30, "steps must go on during the compilation"
            await bridge.prepare(SamplingParams())
            assert engine.prepared == [wanted], "a program must be compiled once"
            await bridge.prepare(SamplingParams(prompt_logprobs=1))
            assert len(engine.prepared) == 2
            await until(lambda: len(engine.completed) == 2)  # the programs that no request waits for

    run(test)


def test_the_engine_waits_for_a_slow_event_loop() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as bridge:
            inbox = submit(bridge, ask(engine, "a", tokens=200))
            await inbox.get()
            before = engine.steps
            time.sleep(0.3)  # noqa: ASYNC251 - block the event loop; the fake engine could run all 200 steps meanwhile
            assert engine.steps - before <= 5
            await last_event(inbox)
            assert engine.steps >= 200

    run(test)


def test_an_error_in_a_call_goes_to_its_caller_and_the_engine_goes_on() -> None:
    """Any exception is raised in the caller of `call`; other requests get their tokens."""

    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as bridge:
            inbox = submit(bridge, ask(engine, "good", tokens=50))
            for _ in range(5):
                with pytest.raises(ZeroDivisionError) as caught:
                    await bridge.call(lambda e: 1 / 0)
                assert caught.value.__traceback__ is not None
            got = [await inbox.get() for _ in range(50)]
            assert [e.token for e in got if isinstance(e, TokenEvent)] == [count_up([0] * 3, k) for k in range(50)]
            assert bridge.state == "up"

    run(test)


def test_an_error_while_a_request_is_queued_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gets an internal error, and the engine drops it."""

    async def test() -> None:
        engine = FakeEngine()
        add = engine.add

        def fail(request: Request) -> None:
            add(request)
            if request.request_id == "bad":
                raise IndexError("a fault of our own")

        monkeypatch.setattr(engine, "add", fail)
        async with running(engine) as bridge:
            good = submit(bridge, ask(engine, "good", tokens=20))
            bad = submit(bridge, ask(engine, "bad", tokens=20))
            error = await bad.get()
            assert isinstance(error, ApiError)
            assert (error.status, error.message) == (500, "internal error")
            assert (await last_event(good)).finish_reason == "length"
            assert await bridge.call(lambda e: e.has_work()) is False
            assert (bridge.active, bridge.state) == (0, "up")

    run(test)


def test_an_error_while_a_request_is_aborted_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with other requests, and accepts new ones."""

    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.001

        def fail(request_id: str) -> None:
            raise IndexError("a fault of our own")

        monkeypatch.setattr(engine, "abort", fail)
        async with running(engine) as bridge:
            bad = submit(bridge, ask(engine, "bad", tokens=200))
            bridge.abort(["bad"], deliver_last=True)
            while not isinstance(event := await bad.get(), ApiError):
                pass
            assert event.status == 500
            good = submit(bridge, ask(engine, "good", tokens=20))
            assert (await last_event(good)).finish_reason == "length"
            assert (bridge.active, bridge.state) == (0, "up")

    run(test)
