"""Threads that drive an engine by turns: neither Ctrl-C nor an error leaves half of a step behind."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jswa.errors import EngineDead
from jswa.frontend.driver import Driver
from jswa.frontend.outputs import Receiver
from jswa.plan import StepEvents
from jswa.types import SamplingParams
from tests.support.server.fake_engine import FakeEngine, count_up


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Let SIGINT be KeyboardInterrupt, as in a program of one's own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def driver_of(engine: FakeEngine) -> tuple[Driver[FakeEngine], list[int]]:
    """Return a driver with one request, and the list of its tokens."""
    driver, tokens = Driver(engine), list[int]()
    request = engine.request("a", np.arange(3, 6), SamplingParams(max_tokens=20))
    driver.add(request, Receiver(tokens.append, lambda event: tokens.append(event.token)))
    return driver, tokens


def interrupted(function: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """Return a function in whose middle Ctrl-C is pressed."""

    def call(*arguments: Any) -> Any:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments)

    return call


def test_ctrl_c_waits_for_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's tokens are delivered, and the next step goes on from there."""
    driver, tokens = driver_of(FakeEngine())
    for count in range(1, 4):
        with monkeypatch.context() as patch:
            patch.setattr(driver.engine, "step", interrupted(driver.engine.step))
            with pytest.raises(KeyboardInterrupt):
                driver.advance()
        assert tokens == [count_up([0] * 3, at) for at in range(2 * count - 1)]
        driver.advance()
        assert len(tokens) == 2 * count
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("call", ["between", "abort"])
def test_ctrl_c_waits_for_the_end_of_other_calls(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = driver_of(FakeEngine())
    monkeypatch.setattr(driver.engine, "abort", interrupted(driver.engine.abort))
    with pytest.raises(KeyboardInterrupt):
        driver.between(lambda: driver.engine.abort("a")) if call == "between" else driver.abort("a")
    assert not driver.engine.has_work()
    driver.advance()


def test_a_second_ctrl_c_ends_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has failed then."""
    driver, tokens = driver_of(FakeEngine())
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine, "step", interrupted(driver.engine.step, times=2))
        with pytest.raises(KeyboardInterrupt):
            driver.advance()
    assert not tokens
    assert driver.engine.steps == 0, "the step has run on"
    with pytest.raises(EngineDead, match="make another LLM"):
        driver.advance()


def test_an_engine_whose_step_has_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows may wait for ever for the tokens of that step. The calls that wait get the reason, later ones too."""
    driver, _ = driver_of(FakeEngine())
    with monkeypatch.context() as patch:
        patch.setattr(driver.engine, "step", lambda: StepEvents(1 / 0))  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            driver.advance()
    for call in (driver.advance, lambda: driver.between(driver.engine.stats), lambda: driver_add(driver)):
        with pytest.raises(EngineDead, match="a step of the engine has failed"):
            call()
    driver.abort("a")
    assert driver.num_unfinished == 0
    driver.close()


def driver_add(driver: Driver[FakeEngine]) -> None:
    """Add another request."""
    request = driver.engine.request("b", np.arange(3, 6), SamplingParams(max_tokens=20))
    driver.add(request, Receiver(print, print))
