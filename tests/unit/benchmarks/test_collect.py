"""The engine of benchmarks.speed.collect does nothing, but has all that a driver asks of an engine."""

from typing import Any

import numpy as np
import pytest

from benchmarks.speed.collect import PROMPT, NoEngine
from jswa.frontend.driver import Driver
from jswa.frontend.outputs import Receiver
from jswa.types import SamplingParams


@pytest.mark.parametrize("arrays", [True, False])
def test_a_driver_gets_every_token_of_the_engine_that_does_nothing(arrays: bool) -> None:
    engine: Any = NoEngine(np.arange(50, dtype=np.int32), arrays=arrays)
    driver = Driver(engine)
    alone: dict[str, list[int]] = {"a": [], "b": []}
    others: dict[str, list[Any]] = {"a": [], "b": []}
    for name in alone:
        request = engine.request(name, np.zeros(PROMPT, np.int32), SamplingParams(max_tokens=4))
        driver.add(request, Receiver(alone[name].append, others[name].append))
    for _ in range(4):
        driver.advance()
    for name in alone:
        assert len(alone[name]) == (2 if arrays else 0)
        assert len(alone[name]) + len(others[name]) == 4
        assert others[name][-1].finish_reason == "length"
