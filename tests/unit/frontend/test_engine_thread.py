"""The engine's thread: events arrive in order, aborts free rows at once, and calls run between two steps."""

import asyncio
import threading
import time

import pytest

from jswa.errors import HostLost, InvalidPrompt, PromptTooLong
from jswa.plan import TokenEvent
from jswa.types import SamplingParams
from tests.support.server.fake_engine import FakeEngine, count_up
from tests.support.server.threaded import Inbox, ask, last_event, run, running, submit, until


def test_each_request_gets_its_events_in_order() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as thread:
            inboxes: list[Inbox] = [asyncio.Queue() for _ in range(20)]
            for i, inbox in enumerate(inboxes):
                thread.submit([ask(engine, str(i), length=i + 1)], inbox.put_nowait)
            for i, inbox in enumerate(inboxes):
                got = [await inbox.get() for _ in range(5)]
                assert [e.token for e in got if isinstance(e, TokenEvent)] == [
                    count_up([0] * (i + 1), k) for k in range(5)
                ]
                assert isinstance(got[-1], TokenEvent)
                assert got[-1].finish_reason == "length"
            assert thread.active == 0

    run(test)


def test_a_host_that_shuts_down_starts_the_drain() -> None:
    async def test() -> None:
        engine, left = FakeEngine(), asyncio.Event()
        async with running(engine, on_leaving=left.set) as thread:
            threading.Thread(target=engine.report_leaving, args=(HostLost("host 1 has been told to end"),)).start()
            await left.wait()
            assert thread.state == "up"

    run(test)


def test_an_idle_engine_runs_no_steps() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as thread:
            await asyncio.sleep(0.05)
            assert thread.steps == 0
            assert await thread.call(lambda e: e.stats().running) == 0

    run(test)


def test_an_abort_frees_the_row_within_two_steps() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay = 0.005
        async with running(engine) as thread:
            inbox = submit(thread, ask(engine, "a", tokens=200))
            await inbox.get()
            thread.abort(["a", "never heard of"])
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
        async with running(engine) as thread:
            inbox = submit(thread, ask(engine, "a", tokens=200))
            await inbox.get()
            thread.abort(["a"], deliver_last=True)
            assert (await last_event(inbox)).finish_reason == "abort"
            assert thread.active == 0

    run(test)


def test_a_request_that_the_engine_refuses_does_not_harm_others() -> None:
    async def test() -> None:
        engine = FakeEngine(max_model_len=10)
        async with running(engine) as thread:
            bad = submit(thread, ask(engine, "bad", length=10))
            good = submit(thread, ask(engine, "good", tokens=1))
            assert isinstance(await bad.get(), PromptTooLong)
            assert isinstance(await good.get(), TokenEvent)
            assert thread.state == "up"

    run(test)


def test_calls_run_in_the_engines_thread_and_raise_its_errors() -> None:
    async def test() -> None:
        async with running(FakeEngine()) as thread:
            assert await thread.call(lambda _: threading.current_thread().name) == "engine"

            def refuse(_: object) -> None:
                raise InvalidPrompt("prompt", 1, "no")

            with pytest.raises(InvalidPrompt):
                await thread.call(refuse)
            assert thread.state == "up"

    run(test)


def test_programs_are_compiled_while_steps_run() -> None:
    async def test() -> None:
        engine = FakeEngine()
        engine.delay, engine.prepare_delay = 0.002, 0.3
        async with running(engine) as thread:
            thread.submit([ask(engine, "a", tokens=200)], lambda _: None)
            await until(lambda: engine.steps > 0)
            before = engine.steps
            wanted = SamplingParams(logprobs=1)
            await asyncio.gather(*(thread.prepare(wanted) for _ in range(50)))
            assert engine.steps > before + 30, "steps must go on during the compilation"
            await thread.prepare(SamplingParams())
            assert engine.prepared == [wanted], "a program must be compiled once"
            await thread.prepare(SamplingParams(prompt_logprobs=1))
            assert len(engine.prepared) == 2
            await until(lambda: len(engine.completed) == 2)  # the programs that no request waits for

    run(test)


def test_the_engine_waits_for_a_slow_event_loop() -> None:
    async def test() -> None:
        engine = FakeEngine()
        async with running(engine) as thread:
            inbox = submit(thread, ask(engine, "a", tokens=200))
            await inbox.get()
            before = engine.steps
            time.sleep(0.3)  # noqa: ASYNC251 - block the event loop; the fake engine could run all 200 steps meanwhile
            assert engine.steps - before <= 5
            await last_event(inbox)
            assert engine.steps >= 200

    run(test)
