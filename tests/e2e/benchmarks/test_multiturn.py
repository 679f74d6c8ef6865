"""Hit rates, pages held and host work in conversations of many turns, with the loads and traces of the benchmarks."""

import dataclasses
import math
from functools import cache

import numpy as np
import pytest

from benchmarks.cache import radix
from benchmarks.cache.replay import FullEverywhere, Infinite, replay
from benchmarks.cache.traces import expand, multi_turn
from benchmarks.speed.multiturn import Settings, geometry_engine, run
from jswa.engine import Engine
from jswa.llm import LLM
from jswa.types import SamplingParams
from tests.support.tiny import SHAPES

LOAD = Settings(clients=10, rounds=10, request=300, output=3000, parallel=10, rate=0.0, barrier=True)


@pytest.mark.parametrize("memory", ["ample", "four windows per client"])
def test_ten_rounds_hit_nearly_all_and_hold_windows_only(memory: str) -> None:
    """In MiMo-V2-Flash's geometry, 300 tokens in and 3,000 out, at least 97.5 % hit, and 98.5 % in round 10.

    At every step running rows hold at most 1.5 % of full-length local KV.
    """
    engine = geometry_engine("MiMo-V2-Flash", LOAD, 2**20)
    layout, length = engine.layout, LOAD.rounds * (LOAD.request + LOAD.output)
    if memory != "ample":
        slots = LOAD.clients * (layout.full_pages(length) + 4 * layout.window_pages(length) * layout.pages_per_slab)
        slabs = 1 + math.ceil(slots / layout.pages_per_slab)
        limits = dataclasses.replace(engine.limits, num_slabs=slabs)
        engine = Engine(engine.model, limits, layout, engine.runner)
    whole = LOAD.clients * layout.touch(length)

    def watch(engine: Engine) -> None:
        held = sum(len(lease.local.held) for lease in engine.scheduler.cache.leases)
        assert held <= 0.015 * whole

    result = run(engine, LOAD, watch)
    assert result["hit_rate"] >= 0.975
    assert result["hit_rate_by_round"][-1] >= 0.985
    assert result["preemptions"] == 0
    engine.check()


def test_tiny_hits_all_but_a_page_per_turn() -> None:
    """The same load at a fortieth of the length with real steps: a turn misses at most a page of the earlier text."""
    load = dataclasses.replace(LOAD, clients=2, parallel=2, rounds=5, request=15, output=75)
    with LLM("tiny", **SHAPES) as llm:
        result = run(llm.engine, load)
        page = llm.engine.limits.page_size
    for number, rate in enumerate(result["hit_rate_by_round"]):
        prompt = number * 90 + 15
        assert rate >= (prompt - 15 - 1 - page) / prompt
    assert result["hit_rate"] >= 0.8


def test_decode_steps_within_a_page_do_no_tree_work() -> None:
    """The tree counts edges visited: between its admission and its end a row visits none, whatever it generates."""
    engine = geometry_engine("gemma-3-27b", dataclasses.replace(LOAD, clients=2, parallel=2), 2**17)
    for number in range(2):
        prompt = [10 + number] * 100
        engine.add(engine.request(str(number), np.array(prompt, np.int32), SamplingParams(max_tokens=2_000)))
    for _ in range(4):
        engine.step()
    tree = engine.scheduler.cache.prefix.tree
    visits, evictions = tree.visits, engine.scheduler.cache.prefix.retention.evictions
    for _ in range(1_000):
        engine.step()
    assert (tree.visits, engine.scheduler.cache.prefix.retention.evictions) == (visits, evictions)


# The most that jswa may lose to an infinite cache, and the least that it must gain over full KV on every layer with
# pages of 64 tokens and LRU eviction in the same bytes. Where everything fits, the gain is that of hits to the token
# over hits to the page. At 200 % sessions that take turns are the worst case of LRU.
BOUNDS = {
    "sessions, 25 % of the pool": (0.001, 0.02),
    "sessions, 50 %": (0.001, 0.02),
    "sessions, 100 %": (0.001, 0.02),
    "sessions, 200 %": (0.01, 0.6),
    "64 questions, one system prompt": (0.001, 0.001),
}


@cache
def infinite_and_full(name: str) -> tuple[float, float]:
    """Hit rates of an infinite cache and of full KV on every layer, which depend on no model."""
    work = radix.WORKLOADS[name]
    requests = expand(work.lines())
    full = FullEverywhere(work.tokens // radix.PAGE, radix.PAGE)
    return (
        replay(Infinite(), requests, running=1).hit_rate,
        replay(full, requests, running=work.running, barrier=work.barrier).hit_rate,
    )


@pytest.mark.parametrize("model", ["gemma-3-27b", "gpt-oss-20b", "MiMo-V2-Flash"])
@pytest.mark.parametrize("name", list(BOUNDS))
def test_hit_rates_are_near_an_infinite_cache_and_above_full_kv_on_every_layer(name: str, model: str) -> None:
    """Sessions that take turns fill pools to different shares; questions over one system prompt arrive at once."""
    work = radix.WORKLOADS[name]
    requests = expand(work.lines())
    longest = max(len(r.prompt) + len(r.output) for r in requests)
    engine = radix.engine(model, work.tokens, work.running, longest)
    result = replay(engine, requests, running=work.running, barrier=work.barrier)
    infinite, full = infinite_and_full(name)
    lost, gained = BOUNDS[name]
    assert infinite - lost <= result.hit_rate <= infinite
    assert result.hit_rate >= full + gained
    engine.scheduler.check()


def test_a_loop_larger_than_the_pool_does_not_collapse() -> None:
    """Sessions of three times the pool take turns: LRU finds next to nothing, jswa keeps a part of them whole."""
    requests = expand(multi_turn(96, 8, 384, 128))
    engine = radix.engine("gpt-oss-20b", 131_072, 16, 4096)
    result = replay(engine, requests, running=16)
    assert result.hit_rate > 0.7 * replay(Infinite(), requests, running=1).hit_rate
    lru = replay(FullEverywhere(131_072 // radix.PAGE, radix.PAGE), requests, running=16)
    assert lru.hit_rate < 0.1
