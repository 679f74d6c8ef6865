"""The table of what operators ask of an engine (jswa/frontend/operations.py)."""

import asyncio
from typing import get_args

import pytest

from jswa.errors import EngineDead
from jswa.frontend.driver import Driver
from jswa.frontend.engine_thread import EngineThread
from jswa.frontend.operations import OPERATIONS, Verb, operate, operate_on
from tests.support.server.fake_engine import FakeEngine


def test_each_verb_has_an_operation() -> None:
    assert OPERATIONS.keys() == set(get_args(Verb))


def test_threads_and_event_loops_do_the_same() -> None:
    """An adapter is read first, then loaded between two steps; the fake's reader returns the folder's name."""

    async def by_loop() -> FakeEngine:
        engine = FakeEngine()
        thread = EngineThread(engine)
        thread.start()
        try:
            await operate_on(thread, "load_lora", "folder", "poet", False)
            assert await operate_on(thread, "pause", "keep") is None
        finally:
            await thread.close()
        return engine

    engine = FakeEngine()
    driver = Driver(engine)
    operate(driver, "load_lora", "folder", "poet", False)
    assert operate(driver, "pause", "keep") is None
    other = asyncio.run(by_loop())
    assert engine.adapters == other.adapters
    assert "poet" in engine.adapters
    assert engine.turnover.paused
    assert other.turnover.paused


def test_an_engine_that_is_replaced_meanwhile_has_not_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends with an error, and does not wait for what the other engine was never told."""
    waits = OPERATIONS["pause"]._replace(pending=lambda *_: True)
    monkeypatch.setitem(OPERATIONS, "pause", waits)

    async def ask() -> None:
        thread = EngineThread(FakeEngine())
        thread.start()
        try:
            asked = asyncio.ensure_future(operate_on(thread, "pause", "wait"))
            await asyncio.sleep(0.02)
            assert not asked.done()
            thread.restarts += 1
            with pytest.raises(EngineDead):
                await asked
        finally:
            await thread.close()

    asyncio.run(ask())
