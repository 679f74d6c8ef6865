"""A runner that starts as on a GPU: it is ready with few programs, and the others follow behind its warm-up."""

import dataclasses
import time

import numpy as np
import pytest

from jswa.exec.runner import Runner
from tests.support.builders import make_plan
from tests.support.oracles import quick_compiles, small_engine_parts


@pytest.fixture
def runner() -> Runner:
    """Return a runner that has not warmed up."""
    model, params, layout, limits, _ = small_engine_parts()
    own = dataclasses.replace(limits, max_tokens=256)
    with quick_compiles():
        return Runner(model, params, layout, own, on_gpu=True, all_at_start=False)


def test_the_others_follow_behind_the_warm_up(runner: Runner) -> None:
    """Until a program is there its plans run in a larger one, and nothing is compiled in a step."""
    few = sorted(runner.configs[number].bucket.tokens for number in runner.compiled)
    assert few == [8, 256]
    plan = make_plan(np.arange(3), 0, [40, 30, 20])
    before = np.asarray(runner.launch(plan).tokens())
    time.sleep(0.2)
    assert len(runner.compiled) == 2, "nothing is compiled before the warm-up"
    with quick_compiles():
        runner.warm_up()
        until = time.monotonic() + 300
        while runner.compiled_beside < 11 and time.monotonic() < until:
            time.sleep(0.05)
    runner.close()
    sizes = {runner.configs[n].bucket.tokens for n in runner.compiled if runner.configs[n].part == "step"}
    assert sizes == {8, 128, 256}
    assert len(runner.compiled) == 2 + 11
    after = np.asarray(runner.launch(make_plan(np.arange(3), 0, [40, 30, 20])).tokens())
    assert runner.compiled_in_steps == 0
    np.testing.assert_array_equal(before, after)
