"""How far a prefix cache could go: the bound and the policy that knows the future, on a small mix of live traffic."""

import pytest

from benchmarks.cache.limits.foresight import Foresight
from benchmarks.cache.limits.program import hit_bound
from benchmarks.cache.replay import Engine, Infinite, replay
from benchmarks.cache.traces import Mix, expand
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from tools.cases.geometry import model_of, slabs_of_tokens

RUNNING = 4


def test_knowing_the_future_helps_and_stays_below_the_bound() -> None:
    """With room for all text nothing is lost but a few tokens of pages that several texts share."""
    requests = expand(Mix(2.0, seed=3, pool=16_384).lines())[:80]
    longest = max(len(request.prompt) + len(request.output) for request in requests)
    layout, ideal = KVLayout.of(model_of("gemma-3-27b"), 64), replay(Infinite(), requests, running=1).hit_rate
    for share, sure in ((1, False), (16, True)):
        slabs = share * slabs_of_tokens("gemma-3-27b", layout, 16_384)
        found = []
        for knows in (False, True):
            engine = Engine(layout, Limits(longest, RUNNING, 2048, 64, num_slabs=1 + slabs))
            if knows:
                Foresight(engine.scheduler.cache.prefix, requests, engine.begun)
            found.append(replay(engine, requests, running=RUNNING, strict=True).hit_rate)
            engine.scheduler.check()
        bound = hit_bound(requests, layout, slabs * layout.pages_per_slab, RUNNING)
        assert found[0] <= found[1] <= bound + 1e-9
        assert bound <= ideal + 1e-9
        assert (found[1] == pytest.approx(ideal, abs=1e-3)) == sure
        assert (found[0] < found[1] - 0.05) != sure
