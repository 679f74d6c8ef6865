"""Drafts from the texts of earlier weights, on the real engine: they are right where the texts are, and change none."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jswa.engine import Engine
from jswa.exec.runner import Runner
from jswa.plan import RequestOptions, TokenEvent
from jswa.speculation import Speculation
from jswa.types import SamplingParams
from tests.support.drafts.drawn import Drawn
from tests.support.late import programs_compiled_when_run
from tests.support.oracles import small_engine_parts

PROMPT = np.array([3, 4, 5, 6, 9, 11, 2], np.int32)
NAMES = iter(map(str, range(1_000)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine that looks its drafts up in texts behind the same five tokens."""
    model, params, layout, limits, _ = small_engine_parts()
    drafts = Speculation("suffix", 3, longest=5, shortest=5).of_length(200)
    limits = dataclasses.replace(limits, max_model_len=200, max_rows=2, max_tokens=16, num_slabs=60, speculation=drafts)
    with programs_compiled_when_run():
        yield Engine(model, limits, layout, Runner(model, params, layout, limits))


def ask(engine: Engine, salt: str = "") -> tuple[list[int], int]:
    """Return the tokens of a sampled text, and how many of them were drafted right."""
    engine.scheduler.drafting.choice = Drawn(random.Random(0), 2)
    request = engine.request(
        next(NAMES),
        PROMPT,
        SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
        RequestOptions(cache_salt=salt),
    )
    engine.add(request)
    events: list[TokenEvent] = []
    while engine.has_work():
        events += engine.step()
        engine.check()
    assert {event.finish_reason for event in events} <= {None, "length"}
    tokens = [event.token for event in events if event.token is not None]
    drafts = next(event.drafts for event in events if event.finish_reason is not None)
    return tokens, 0 if drafts is None else drafts[0]


@pytest.mark.nightly  # what is looked up in which texts, tests/unit/sched/drafts/test_earlier.py tests too
def test_texts_of_earlier_weights_are_drafts(engine: Engine) -> None:
    """Behind the same prompt and salt, however the weights were changed; not once the cache was flushed."""
    runner: Any = engine.runner
    turnover, params = engine.turnover, dict(runner.params)
    first, by_chance = ask(engine)
    again = {"the same weights": ask(engine)}
    turnover.update(params, "continue")
    assert ask(engine, salt="another") == (first, by_chance)
    again["new weights"] = ask(engine)
    for mode in ("abort", "finish"):
        turnover.update(params, mode)
        again[mode] = ask(engine)
    turnover.sleep(2)
    turnover.update(params, "continue")
    turnover.update(params, "continue")
    turnover.wake()
    again["sleep"] = ask(engine)
    for how, (tokens, right) in again.items():
        assert tokens == first, how
        assert right > by_chance + 10, how
    turnover.update(params, "continue")
    engine.flush_cache()
    assert ask(engine) == (first, by_chance)
