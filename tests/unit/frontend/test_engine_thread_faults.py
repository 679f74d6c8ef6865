"""The engine's thread when something fails: a dead engine fails all requests, any other error one request alone."""

import asyncio
import contextlib
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from jswa.errors import EngineDead, EngineRestarting, HostLost, InternalError, JswaError
from jswa.plan import Request, StepEvents, TokenEvent
from tests.support.server.fake_engine import FakeEngine, count_up
from tests.support.server.threaded import ask, last_event, run, running, submit, until


def test_a_lost_host_fails_all_requests_while_a_step_still_runs() -> None:
    async def test() -> None:
        engine, died, go_on = FakeEngine(), asyncio.Event(), threading.Event()

        def stuck() -> StepEvents:
            go_on.wait(10)
            return StepEvents()

        engine.step = stuck  # type: ignore[method-assign]
        async with running(engine, died.set) as thread:
            inbox = submit(thread, ask(engine, "a"))
            await asyncio.sleep(0.02)  # by then the engine's thread is in its step
            threading.Thread(target=engine.report_lost, args=(HostLost("host 1 is gone"),)).start()
            error = await inbox.get()
            assert isinstance(error, EngineDead)
            await died.wait()
            assert thread.state == "dead"
            go_on.set()

    run(test)


def test_a_dead_engine_fails_all_requests() -> None:
    async def test() -> None:
        engine, died = FakeEngine(max_rows=1), asyncio.Event()
        engine.steps_left = 3
        async with running(engine, died.set) as thread:
            inbox = submit(thread, ask(engine, "a", tokens=100), ask(engine, "waits", tokens=100))
            got = [await inbox.get() for _ in range(5)]
            assert [isinstance(one, EngineDead) for one in got] == [False] * 3 + [True] * 2
            await died.wait()
            assert thread.state == "dead"
            with pytest.raises(EngineDead, match="engine has failed"):
                thread.submit([ask(engine, "b")], inbox.put_nowait)
            with pytest.raises(EngineDead, match="engine has failed"):
                await thread.call(lambda e: e.stats())

    run(test)


def test_pending_calls_fail_if_the_engine_dies() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left, engine.delay = 0, 0.05
        async with running(engine) as thread:
            thread.submit([ask(engine, "a")], lambda _: None)
            await asyncio.sleep(0.02)
            with pytest.raises(EngineDead, match="engine has failed"):
                await thread.call(lambda e: e.stats())

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
        async with running(engine, rebuild=rebuild) as thread:
            del engine
            inbox = submit(thread, request)
            got = [await inbox.get() for _ in range(4)]
            error = got[-1]
            assert type(error) is EngineDead
            del got, error
            with pytest.raises(EngineRestarting):
                thread.submit([request], inbox.put_nowait)
            with pytest.raises(EngineRestarting, match="restarting"):
                await thread.call(lambda e: e.stats())
            await until(lambda: thread.state == "up")
            assert thread.engine is second
            assert thread.restarts == 1
            assert not second.seen, "no earlier request may run"
            thread.submit([ask(second, "b")], inbox.put_nowait)
            tokens = [await inbox.get() for _ in range(5)]
            assert all(isinstance(event, TokenEvent) for event in tokens)
            assert thread.active == 0

    run(test)


def test_requests_submitted_while_the_engine_dies_get_an_error() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left, engine.delay = 0, 0.05
        second = FakeEngine()
        async with running(engine, rebuild=lambda: second) as thread:
            inbox = submit(thread, ask(engine, "a"))
            await asyncio.sleep(0.02)
            thread.submit([ask(engine, "b")], inbox.put_nowait)  # it is still in the inbox when the step fails
            call = asyncio.ensure_future(thread.call(lambda e: e.stats()))
            assert [isinstance(await inbox.get(), EngineDead) for _ in range(2)] == [True, True]
            with pytest.raises(EngineDead, match="engine has failed"):
                await call
            await until(lambda: thread.state == "up")
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

        async with running(failing(), died.set, rebuild=rebuild) as thread:
            while not died.is_set():
                with contextlib.suppress(EngineDead):
                    thread.submit([ask(FakeEngine(), "a")], lambda _: None)
                await asyncio.sleep(0.001)
            assert thread.state == "dead"
            assert built == (3 if cause == "it fails again and again" else 0)

    run(test)


def test_a_hung_step_counts_as_a_dead_engine() -> None:
    async def test() -> None:
        engine, died = FakeEngine(), asyncio.Event()
        engine.delay = 1.0
        async with running(engine, died.set, step_timeout=0.1) as thread:
            await asyncio.sleep(0.3)
            assert thread.failure is None, "an idle engine is not hung"
            begin = time.monotonic()
            inbox = submit(thread, ask(engine, "a", tokens=100))
            assert isinstance(await inbox.get(), EngineDead)
            assert time.monotonic() - begin < 0.6
            assert thread.state == "dead"
            assert died.is_set()

    run(test)


def test_a_process_that_was_stopped_has_no_hung_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs on while a debugger, or the machine's owner, stops the process in the middle of a step."""

    async def test() -> None:
        engine, late = FakeEngine(), [0.0]
        step = engine.step

        def stopped() -> StepEvents:
            late[0] += 1000.0
            time.sleep(1.1 if engine.steps == 1 else 0.0)  # there is a look in this time
            return step()

        engine.step = stopped  # type: ignore[method-assign]
        async with running(engine, step_timeout=4.0) as thread:
            clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0])
            monkeypatch.setattr("jswa.frontend.engine_thread.time", clock)
            assert (await last_event(submit(thread, ask(engine, "a")))).finish_reason == "length"
            assert thread.state == "up"

    run(test)


def test_an_error_in_a_call_goes_to_its_caller_and_the_engine_goes_on() -> None:
    """Any exception is raised in the caller of `call`; other requests get their tokens."""

    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as thread:
            inbox = submit(thread, ask(engine, "good", tokens=50))
            for _ in range(5):
                with pytest.raises(ZeroDivisionError) as caught:
                    await thread.call(lambda e: 1 / 0)
                assert caught.value.__traceback__ is not None
            got = [await inbox.get() for _ in range(50)]
            assert [e.token for e in got if isinstance(e, TokenEvent)] == [count_up([0] * 3, k) for k in range(50)]
            assert thread.state == "up"

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
        async with running(engine) as thread:
            good = submit(thread, ask(engine, "good", tokens=20))
            bad = submit(thread, ask(engine, "bad", tokens=20))
            error = await bad.get()
            assert isinstance(error, InternalError)
            assert (await last_event(good)).finish_reason == "length"
            assert await thread.call(lambda e: e.has_work()) is False
            assert (thread.active, thread.state) == (0, "up")

    run(test)


def test_an_error_while_a_request_is_aborted_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with other requests, and accepts new ones."""

    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.001

        def fail(request_id: str) -> None:
            raise IndexError("a fault of our own")

        monkeypatch.setattr(engine, "abort", fail)
        async with running(engine) as thread:
            bad = submit(thread, ask(engine, "bad", tokens=200))
            thread.abort(["bad"], deliver_last=True)
            while not isinstance(await bad.get(), InternalError):
                pass
            good = submit(thread, ask(engine, "good", tokens=20))
            assert (await last_event(good)).finish_reason == "length"
            assert (thread.active, thread.state) == (0, "up")

    run(test)


@pytest.mark.parametrize("at", [1, 7, 20])
def test_a_request_that_cannot_handle_its_events_ends_alone(at: int) -> None:
    """At a token, or at its end: those behind it in the step get theirs, and the engine does not wait for it."""

    async def test() -> None:
        engine, told = FakeEngine(), list[TokenEvent | JswaError]()

        def fail(event: TokenEvent | JswaError) -> None:
            told.append(event)
            if len(told) == at:
                raise IndexError("a fault of our own")

        async with running(engine) as thread:
            first = submit(thread, ask(engine, "first", tokens=100))
            thread.submit([ask(engine, "bad", tokens=20 if at == 20 else 200)], fail)
            last = submit(thread, ask(engine, "last", tokens=100))
            begin = time.monotonic()
            for inbox in (first, last):
                got = [await inbox.get() for _ in range(100)]
                assert [e.token for e in got if isinstance(e, TokenEvent)] == [count_up([0] * 3, k) for k in range(100)]
            assert time.monotonic() - begin < 10, "the engine has waited a second at each step"
            assert isinstance(told[-1], InternalError)
            assert len(told) == at + 1
            assert await thread.call(lambda e: e.has_work()) is False
            assert (thread.active, thread.state) == (0, "up")

    run(test)


def test_a_request_that_cannot_be_told_its_end_holds_up_no_restart() -> None:
    """The others are told that the engine has failed, and new ones run."""

    async def test() -> None:
        engine = FakeEngine()
        engine.steps_left = 3

        def fail(event: TokenEvent | JswaError) -> None:
            if isinstance(event, EngineDead):
                raise IndexError("a fault of our own")

        async with running(engine, rebuild=FakeEngine) as thread:
            thread.submit([ask(engine, "bad", tokens=100)], fail)
            inbox = submit(thread, ask(engine, "good", tokens=100))
            while not isinstance(await inbox.get(), EngineDead):
                pass
            await until(lambda: thread.state == "up")
            assert (await last_event(submit(thread, ask(engine, "new")))).finish_reason == "length"

    run(test)
