"""The engine's thread when something fails: a dead engine fails all requests, any other error one request alone."""

import asyncio
import contextlib
import threading
import time
import weakref

import pytest

from jswa.errors import HostLost
from jswa.plan import Request, StepEvents, TokenEvent
from server.http.errors import ApiError
from tests.support.server.bridged import ask, last_event, run, running, submit, until
from tests.support.server.fake_engine import FakeEngine, count_up


def test_a_lost_host_fails_all_requests_while_a_step_still_runs() -> None:
    async def test() -> None:
        engine, died, go_on = FakeEngine(), asyncio.Event(), threading.Event()

        def stuck() -> StepEvents:
            go_on.wait(10)
            return StepEvents()

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
