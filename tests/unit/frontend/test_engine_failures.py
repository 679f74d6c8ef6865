"""An error at any place of an engine's step, or of a call between two steps: every request ends, and the next one runs.

The engine is the real one on a device without jax, which checks that no row reads a page of another text.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.engine import Engine
from jswa.env import Switches
from jswa.errors import EngineDead, EngineError
from jswa.frontend.engine_thread import EngineThread
from jswa.plan import StepPlan, TokenEvent
from jswa.types import SamplingParams
from tests.support.builders import make_layer, make_model
from tests.support.fakes import FakeRunner
from tests.support.server.threaded import Inbox, run, running, until
from tests.support.text.model import TextModel

TEXTS = TextModel(1000)
LAYER, FULL = make_layer(6, (1, 2, 2)), make_layer(None, (1, 2, 2))
HYBRID = make_model(LAYER, LAYER, FULL, vocab=TEXTS.vocab)
PROMPTS = [list(range(3, 3 + length)) for length in (5, 9, 17, 4, 30)]  # more than rows
TOKENS = 12
# At which of its calls each stage fails: the figures are read before the first step, and after it.
STAGES = dict.fromkeys(["reports", "plan", "launch", "tidy", "tokens", "results", "apply", "log"], 6)
STAGES |= {"figures": 2, "settle": 1}
Faults = dict[str, tuple[int, Exception]]  # by stage: the number of calls until it fails, and how


def failing(stage: str, function: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    """Return a function that fails once if its stage is among the faults."""

    def call(*arguments: Any, **named: Any) -> Any:
        calls, error = faults.pop(stage, (0, None))
        if calls > 1 and error is not None:
            faults[stage] = calls - 1, error
        elif error is not None:
            raise error
        return function(*arguments, **named)

    return call


def make_engine(faults: Faults) -> Engine:
    """Return an engine that fails at the stages among `faults`."""
    limits, layout = Limits(64, 3, 16, 4, num_slabs=40), KVLayout.of(HYBRID, 4)
    runner = FakeRunner(
        layout, limits, TEXTS, lambda slot: next(s for s in engine.scheduler.running if s.row_id == slot)
    )
    launch = failing("launch", runner.launch, faults)

    def launched(plan: StepPlan) -> Any:
        step = launch(plan)
        step.tokens = failing("tokens", step.tokens, faults)
        step.results = failing("results", lambda: None, faults)
        return step

    runner.launch = launched  # type: ignore[method-assign]
    engine = Engine(HYBRID, limits, layout, runner, switches=Switches(check=True))  # type: ignore[arg-type]
    places: dict[str, tuple[Any, str]] = {
        "settle": (engine.turnover, "settle"),
        "reports": (engine.turnover, "reports"),
        "plan": (engine.scheduler, "plan"),
        "tidy": (engine.scheduler, "tidy"),
        "apply": (engine.scheduler, "apply"),
        "log": (engine.stepping.log, "applied"),
        "figures": (engine, "stats"),
        "flush": (engine.scheduler.cache, "flush"),
    }
    for stage, (owner, name) in places.items():
        setattr(owner, name, failing(stage, getattr(owner, name), faults))
    return engine


def submit(thread: EngineThread, name: str) -> list[Inbox]:
    """Submit a request for each prompt."""
    inboxes: list[Inbox] = [asyncio.Queue() for _ in PROMPTS]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for number, (prompt, inbox) in enumerate(zip(PROMPTS, inboxes, strict=True)):
        request = thread.engine.request(f"{name} {number}", np.array(prompt), params)
        thread.submit([request], inbox.put_nowait)
    return inboxes


async def ends(inboxes: list[Inbox]) -> list[list[int] | Exception]:
    """Return the tokens of each request, or the error with which it ends."""

    async def end(inbox: Inbox) -> list[int] | Exception:
        tokens: list[int] = []
        while isinstance(event := await inbox.get(), TokenEvent):
            tokens += [] if event.token is None else [event.token]
            if event.finish_reason is not None:
                return tokens
        return event

    return [await end(inbox) for inbox in inboxes]


def alone() -> list[list[int]]:
    """Return the tokens of requests that run alone."""
    return [TEXTS.generate(prompt, (), len(prompt) + TOKENS)[0] for prompt in PROMPTS]


async def assert_sound(thread: EngineThread) -> None:
    """Assert that the engine runs new requests right, and that they leave no page behind."""
    await until(lambda: thread.state == "up")
    assert await ends(submit(thread, "new")) == alone()
    stats = await thread.call(lambda engine: engine.stats())
    assert (thread.active, stats.running, stats.waiting, stats.full_pages, stats.local_pages) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_a_step_ends_all_requests(stage: str, restart: bool) -> None:
    """Also those that wait. With a restart there is a new engine for new ones, otherwise they are refused."""

    async def test() -> None:
        died, faults = asyncio.Event(), {stage: (STAGES[stage], ZeroDivisionError(stage))}
        rebuild = (lambda: make_engine({})) if restart else None
        async with running(make_engine(faults), died.set, rebuild=rebuild) as thread:  # type: ignore[arg-type]
            inboxes = submit(thread, "old")
            if stage == "settle":  # it runs only while an engine is to pause, or has new weights
                await thread.call(lambda engine: engine.turnover.pause("wait"))
            found = await ends(inboxes)
            assert any(isinstance(end, EngineDead) for end in found)
            assert all(isinstance(end, EngineDead) or end == text for end, text in zip(found, alone(), strict=True))
            if restart:
                await assert_sound(thread)
                assert thread.restarts == 1
            else:
                await died.wait()
                with pytest.raises(EngineDead):
                    submit(thread, "new")

    run(test)


@pytest.mark.parametrize(
    ("stage", "error", "restarts"),
    [
        ("apply", ZeroDivisionError("the step in flight is lost"), 1),
        ("flush", EngineError("a page is free twice"), 1),
        ("flush", AssertionError("a law of our own"), 1),
        ("flush", OSError("the disk is full"), 0),
    ],
)
def test_an_error_in_a_call_between_steps(stage: str, error: Exception, restarts: int) -> None:
    """It ends the call. If the state of the engine is unknown by then, it ends all requests too."""

    async def test() -> None:
        faults: Faults = {}

        def work(engine: Any) -> None:
            faults[stage] = 1, error
            if stage == "flush":
                engine.flush_cache()
            engine.turnover.pause("keep")

        async with running(make_engine(faults), rebuild=lambda: make_engine({})) as thread:  # type: ignore[arg-type]
            inboxes = submit(thread, "old")
            await until(lambda: thread.steps > 3)
            with pytest.raises(EngineDead if restarts else type(error)):
                await thread.call(work)
            found = await ends(inboxes)
            assert any(isinstance(end, EngineDead) for end in found) == bool(restarts)
            assert all(isinstance(end, EngineDead) or end == text for end, text in zip(found, alone(), strict=True))
            await assert_sound(thread)
            assert thread.restarts == restarts

    run(test)
