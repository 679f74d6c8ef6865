"""A fleet in virtual time: sessions arrive, a router sends each request to a replica, and latencies are recorded."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.cache import traces
from benchmarks.cache.traces import Line, TraceRequest
from benchmarks.scale.replica import Job, Replica, look, new_replica, submit, tick
from benchmarks.scale.routers import Thresholds, make_router
from benchmarks.scale.step_time import H200, Assumed, Device, StepTime, step_time
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.model.hf.config import parse_config
from jswa.model.partition import shard_config
from tools.cases.hub_configs import CONFIGS

PAGE = 64


@dataclass(frozen=True)
class Served:
    """A model as a replica serves it: name in `CONFIGS`, devices, bits per weight and per weight of an expert."""

    config: str
    devices: int
    bits: float = 16
    expert_bits: float | None = None


SERVED = {
    "gemma-3-27b": Served("gemma-3-27b", 1),
    "gpt-oss-120b": Served("gpt-oss-120b", 2, expert_bits=4.25),
    "Llama-4-Scout": Served("Llama-4-Scout", 4),
    "MiMo-V2-Flash": Served("MiMo-V2-Flash/V2.5", 8, bits=8),
}


@dataclass(frozen=True, eq=False)
class Fleet:
    """The properties that all replicas share."""

    layout: KVLayout
    limits: Limits
    time: StepTime


def fleet_of(
    model: str | Served,
    *,
    longest: int,
    rows: int = 256,
    tokens: int = 2048,
    assumed: Assumed | None = None,
    device: Device = H200,
) -> Fleet:
    """Return a fleet that serves a model. Its arena takes the device memory that the weights leave free.

    Args:
        model: a name in `SERVED`, or any other model.
        longest: max_model_len.
        rows, tokens: max_num_seqs and max_num_batched_tokens; by default those of the engine on a GPU.
    """
    served, assumed = SERVED[model] if isinstance(model, str) else model, assumed or Assumed()
    part = shard_config(parse_config(CONFIGS[served.config], weights=False), served.devices)
    layout = KVLayout.of(part, PAGE)
    limits = Limits(longest, rows, tokens, PAGE)
    time = step_time(part, limits, bits=served.bits, expert_bits=served.expert_bits, device=device, assumed=assumed)
    memory = device.memory * assumed.memory - assumed.scratch - time.held
    limits = Limits(longest, rows, tokens, PAGE, num_slabs=int(memory // layout.slab_bytes(2)))
    return Fleet(layout, limits, time)


@dataclass(eq=False)
class Outcome:
    """The result of a simulation. All `jobs` have ended; figures count those that arrived inside `window` (seconds)."""

    window: tuple[float, float]
    replicas: list[Replica]
    jobs: list[Job] = field(default_factory=list)

    @property
    def counted(self) -> list[Job]:
        """Return the jobs that arrived inside the window."""
        return [job for job in self.jobs if self.window[0] <= job.arrival < self.window[1]]


@dataclass(eq=False)
class _Events:
    """A queue of events by time.

    Attributes:
        entries: (time, 0 for a request or 1 for a replica's tick, order, request or replica number). A replica's entry
            is void if the replica has been interrupted since.
        turns: turns still to come, by session.
    """

    replicas: list[Replica]
    entries: list[tuple[float, int, int, TraceRequest | int]] = field(default_factory=list)
    turns: dict[str, Iterator[TraceRequest]] = field(default_factory=dict)
    order: Iterator[int] = field(default_factory=itertools.count)

    def request(self, request: TraceRequest, time: float) -> None:
        """Add a request that arrives at that time."""
        heapq.heappush(self.entries, (time, 0, next(self.order), request))

    def session(self, lines: list[Line] | None) -> None:
        """Add the first request of a session; None if there are no more sessions."""
        if lines:
            requests = iter(traces.expand(lines))
            first = next(requests)
            self.turns[first.session] = requests
            self.request(first, first.time)

    def follow(self, job: Job) -> None:
        """A turn has ended: add the next turn of its session, after the user's pause."""
        after = next(self.turns[job.request.session], None)
        if after is None:
            del self.turns[job.request.session]
        else:
            self.request(after, max(after.time, job.end + after.think))

    def replica(self, number: int) -> None:
        """Add the next tick of a replica, which may have changed."""
        due = self.replicas[number].due
        if due is not None:
            heapq.heappush(self.entries, (due, 1, next(self.order), number))


def simulate(
    fleet: Fleet,
    sessions: Iterable[list[Line]],
    *,
    replicas: int,
    policy: str,
    until: float,
    warm: float = 0.0,
    seed: int = 0,
    thresholds: Thresholds | None = None,
    skip: bool = True,
) -> Outcome:
    """Simulate sessions, and run every request that has started to its end.

    Args:
        sessions: the lines of each session, in the order of arrival.
        until: seconds after which no turn starts.
        warm: seconds at the start that no figure counts.
        skip: skip steady decode steps; the outcome is the same.
    """
    window = (warm, until)
    outcome = Outcome(
        window,
        [new_replica(fleet.layout, fleet.limits, fleet.time, window=window, skip=skip) for _ in range(replicas)],
    )
    events, coming, now = _Events(outcome.replicas), iter(sessions), 0.0

    def up_to_date(number: int) -> None:
        look(outcome.replicas[number], now)
        events.replica(number)

    route = make_router(policy, outcome.replicas, seed, thresholds, look=up_to_date)
    events.session(next(coming, None))
    while events.entries:
        now, _, _, item = heapq.heappop(events.entries)
        if isinstance(item, TraceRequest):
            if item.turn == 0:
                events.session(next(coming, None))
            if now < until:
                number = route(item)
                outcome.jobs.append(Job(f"{item.session}/{item.turn}", item, now, number))
                submit(outcome.replicas[number], outcome.jobs[-1], now)
                events.replica(number)
        elif outcome.replicas[item].due == now:
            for job in tick(outcome.replicas[item], now):
                events.follow(job)
            events.replica(item)
    return outcome


def check(outcome: Outcome) -> None:
    """Assert the laws of a simulation that has ended."""
    for job in outcome.jobs:
        assert job.produced == len(job.request.output), f"{job.name}: a token was lost or came twice"
        assert job.hit is not None
        assert 0 <= job.hit.cached_tokens < job.hit.prompt_tokens == len(job.request.prompt)
        assert job.arrival < job.first <= job.end, f"{job.name}: time ran backwards"
    for replica in outcome.replicas:
        assert not replica.scheduler.has_work(), "a replica has unfinished work"
        assert replica.busy <= (outcome.window[1] - outcome.window[0]) * (1 + 1e-9), "a replica ran two steps at once"


def figures(outcomes: Sequence[Outcome], ttft: float, tpot: float) -> dict[str, Any]:
    """Return the figures of simulations that differ only in their seed. Rates are per replica.

    Args:
        ttft, tpot: limits of a good answer, in seconds.
    """
    jobs = [job for outcome in outcomes for job in outcome.counted]
    replicas = [replica for outcome in outcomes for replica in outcome.replicas]
    seconds = sum((outcome.window[1] - outcome.window[0]) * len(outcome.replicas) for outcome in outcomes)
    good = [job for job in jobs if job.ttft <= ttft and job.tpot <= tpot]
    hits = [job.hit for job in jobs if job.hit is not None]
    prompt = sum(hit.prompt_tokens for hit in hits)
    return {
        "requests": len(jobs),
        "hit_rate": sum(hit.cached_tokens for hit in hits) / max(prompt, 1),
        "window_lost": sum(hit.replayed_tokens for hit in hits) / max(prompt, 1),
        "requests_per_s": len(jobs) / seconds,
        "goodput_per_s": len(good) / seconds,
        "good_share": len(good) / max(len(jobs), 1),
        "good_tokens_per_s": sum(job.produced for job in good) / seconds,
        "output_tokens_per_s": sum(job.produced for job in jobs) / seconds,
        "ttft": _percentiles([job.ttft for job in jobs]),
        "tpot": _percentiles([job.tpot for job in jobs if job.produced > 1]),
        "busy": sum(replica.busy for replica in replicas) / seconds,
        "busy_max_over_mean": _mean([_imbalance([r.busy for r in outcome.replicas]) for outcome in outcomes]),
        "computed_max_over_mean": _mean([_imbalance(_computed(outcome)) for outcome in outcomes]),
        "evictions": sum(replica.scheduler.cache.stats().evictions for replica in replicas),
        "preemptions": sum(replica.scheduler.preemptions for replica in replicas),
        "steps": sum(replica.steps for replica in replicas),
    }


def _computed(outcome: Outcome) -> list[float]:
    """Return the tokens that each replica computed for the counted requests: uncached prompt tokens and answers."""
    computed = [0.0] * len(outcome.replicas)
    for job in outcome.counted:
        if job.hit is not None:
            computed[job.replica] += job.hit.prompt_tokens - job.hit.cached_tokens + job.produced
    return computed


def _imbalance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percentiles(values: list[float]) -> dict[str, float]:
    found = np.percentile(values, (50, 95, 99)) if values else np.zeros(3)
    return dict(zip(("p50", "p95", "p99"), (float(value) for value in found), strict=True))
