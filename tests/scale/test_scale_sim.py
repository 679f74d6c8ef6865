"""Simulated fleets (`benchmarks.scale.simulate`): laws of the simulation, and the gain of knowing prefixes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cache import traces
from benchmarks.cache.traces import TraceRequest, expand
from benchmarks.scale.replica import Job, Replica, new_replica, submit, tick
from benchmarks.scale.routers import POLICIES
from benchmarks.scale.run import Case, measure
from benchmarks.scale.simulate import Fleet, Outcome, check, figures, fleet_of, simulate
from benchmarks.scale.traces import SHAPES, sessions

RATES = {"chat": 1.5, "questions": 1.5, "agents": 0.3, "documents": 0.6}


@cache
def fleet(model: str = "gemma-3-27b") -> Fleet:
    """Return the fleet of a model, with texts of at most 64k tokens."""
    return fleet_of(model, longest=65_536)


def run(trace: str, policy: str, replicas: int, *, model: str = "gemma-3-27b", **rest: Any) -> Outcome:
    """Simulate twenty seconds, of which the last twelve count; assert the laws of fleet and schedulers."""
    seed = rest.pop("seed", 1)
    coming = sessions(SHAPES[trace], rate=RATES[trace], replicas=replicas, until=20.0, seed=seed)
    outcome = simulate(fleet(model), coming, replicas=replicas, policy=policy, until=20.0, warm=8.0, seed=seed, **rest)
    check(outcome)
    for replica in outcome.replicas:
        replica.scheduler.check()
    assert len(outcome.counted) > 10, "too few requests ended"
    return outcome


def seen(outcome: Outcome) -> list[tuple[object, ...]]:
    """Return all that users saw, and the replica of each request."""
    return [(j.name, j.replica, j.arrival, j.first, j.end, j.produced, j.hit) for j in outcome.jobs]


def request(length: int, output: int, start: int = 0) -> TraceRequest:
    """Return a turn whose tokens no other request has."""
    prompt = {"random": [start, length]}
    return expand([{"time": 0.0, "session": str(start), "turn": 0, "prompt": [prompt], "output": output}])[0]


@pytest.mark.parametrize(
    ("model", "trace", "policy"),
    [
        ("gemma-3-27b", "chat", "prefix-aware"),
        ("Llama-4-Scout", "agents", "resume-aware"),
        ("gemma-3-27b", "questions", "kv-aware"),
    ],
)
def test_skipping_steps_does_not_change_the_results(model: str, trace: str, policy: str) -> None:
    """All times, hits and evictions are those of a simulation that plans and applies each step."""
    plain, quick = (run(trace, policy, 2, model=model, skip=skip) for skip in (False, True))
    assert sum(replica.skipped for replica in plain.replicas) == 0
    assert sum(replica.skipped for replica in quick.replicas) > 500
    assert seen(plain) == seen(quick)
    for one, other in zip(plain.replicas, quick.replicas, strict=True):
        assert one.scheduler.cache.stats() == other.scheduler.cache.stats()
        assert one.steps == other.steps
        assert one.busy == pytest.approx(other.busy)


def test_a_seed_determines_the_result() -> None:
    """Another seed gives another result."""
    first, again, other = (run("documents", "random", 3, seed=seed) for seed in (1, 1, 2))
    assert seen(first) == seen(again)
    assert seen(first) != seen(other)


def test_one_replica_needs_no_router() -> None:
    """With one replica all policies give the same result."""
    results = [seen(run("questions", policy, 1)) for policy in POLICIES]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("trace", ["chat", "questions"])
def test_routers_that_know_prefixes_find_more_of_them(trace: str) -> None:
    """Their hit rate is higher than that of random routing, and their first tokens come earlier."""
    informed = ("prefix-aware", "resume-aware")
    found = {policy: figures([run(trace, policy, 3)], 2.0, 0.1) for policy in ("random", *informed)}
    for policy in informed:
        assert found[policy]["hit_rate"] > found["random"]["hit_rate"] + 0.05
        assert found[policy]["ttft"]["p95"] < found["random"]["ttft"]["p95"]


def alone(length: int, output: int) -> tuple[Replica, Job]:
    """Run one request on an idle replica to its end."""
    one = fleet()
    replica = new_replica(one.layout, one.limits, one.time, window=(0.0, 1e9))
    job = Job("a", request(length, output), 5.0, 0)
    submit(replica, job, 5.0)
    while replica.due is not None:
        tick(replica, replica.due)
    return replica, job


def test_a_lone_request_takes_the_time_of_its_steps() -> None:
    """Worked out by hand: two chunks of prompt, then a token per step; the host plans while the device runs."""
    _, job = alone(3000, 4)
    time = fleet().time

    def device(start: int, count: int, sampled: int) -> float:
        return float(time.seconds(time.work(np.array([start]), np.array([count]), sampled)))

    first = 5.0 + time.host[1] + device(0, 2048, 0) + device(2048, 952, 1)
    assert job.first == pytest.approx(first)
    assert job.end == pytest.approx(first + sum(device(at, 1, 1) for at in (3000, 3001, 3002)))
    assert job.tpot == pytest.approx((job.end - job.first) / 3)


def test_a_request_waits_for_the_step_that_is_already_planned() -> None:
    """A request that arrives during a long answer runs after the step on the device and the next one."""
    one = fleet()
    replica = new_replica(one.layout, one.limits, one.time, window=(0.0, 1e9))
    jobs = [Job("a", request(100, 500), 0.0, 0), Job("b", request(100, 5, 1), 3.0, 0)]
    submit(replica, jobs[0], 0.0)
    ends = []
    while replica.due is not None:
        if len(replica.jobs) == 1 and replica.due > 3.0 and jobs[1].first < 0:
            submit(replica, jobs[1], 3.0)
        assert replica.due is not None
        ends.append(replica.due)
        tick(replica, replica.due)
    assert all(before < after for before, after in pairwise(ends)), "time must advance"
    step = (jobs[0].end - jobs[0].first) / 499
    assert step < jobs[1].ttft < 4 * step + 0.05
    assert jobs[1].end < jobs[0].end


def test_a_trace_from_a_file_gives_what_its_sessions_give(tmp_path: Path) -> None:
    made = Case("own", "gemma-3-27b", "chat", "prefix-aware", 4, 1.0, 10.0, 2.0)
    coming = sessions(SHAPES["chat"], rate=made.rate, replicas=4, until=made.seconds, seed=made.seed)
    lines = [line for session in coming for line in session]
    traces.write(tmp_path / "trace.jsonl", lines)
    read = replace(made, trace=str(tmp_path / "trace.jsonl"))
    first, second = (
        {name: value for name, value in measure(one).items() if name not in ("trace", "host_seconds")}
        for one in (made, read)
    )
    assert first == second
