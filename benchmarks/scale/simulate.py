"""A fleet in virtual time: sessions come, a router sends each request to a replica, and what users saw is counted."""

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
    """A model as a replica serves it: its name in `CONFIGS`, devices, bits of a weight and of an expert's."""

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
    """What all replicas have in common."""

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
    """A model on devices of a kind, with an arena of what its weights leave of their memory.

    Args:
        model: by its name in `SERVED`, or any other.
        longest: max_model_len.
        rows, tokens: max_num_seqs and max_num_batched_tokens; the engine's defaults on a GPU.
    """
    served, assumed = SERVED[model] if isinstance(model, str) else model, assumed or Assumed()
    part = shard_config(parse_config(CONFIGS[served.config], weights=False), served.devices)
    layout = KVLayout.of(part, PAGE)
    limits = Limits(longest, rows, tokens, PAGE)
    time = step_time(part, limits, bits=served.bits, expert_bits=served.expert_bits, device=device, assumed=assumed)
    memory = device.memory * assumed.memory - assumed.scratch - time.held
    limits = Limits(longest, rows, tokens, PAGE, num_blocks=int(memory // layout.block_bytes(2)))
    return Fleet(layout, limits, time)


@dataclass(eq=False)
class Outcome:
    """What a simulation saw. `jobs`: all of them, ended; figures count those that arrived inside `window`."""

    window: tuple[float, float]
    replicas: list[Replica]
    jobs: list[Job] = field(default_factory=list)

    @property
    def counted(self) -> list[Job]:
        """Jobs that arrived inside the window."""
        return [job for job in self.jobs if self.window[0] <= job.arrival < self.window[1]]


@dataclass(eq=False)
class _Agenda:
    """The events to come, by time.

    An entry is (time, 0 for a request or 1 for a replica's tick, order, which request or replica). A replica's tick is
    void if the replica has been interrupted since.
    """

    replicas: list[Replica]
    entries: list[tuple[float, int, int, TraceRequest | int]] = field(default_factory=list)
    turns: dict[str, Iterator[TraceRequest]] = field(default_factory=dict)  # that are still to come, by session
    order: Iterator[int] = field(default_factory=itertools.count)

    def request(self, request: TraceRequest, time: float) -> None:
        """A request comes at that time."""
        heapq.heappush(self.entries, (time, 0, next(self.order), request))

    def session(self, lines: list[Line] | None) -> None:
        """A session begins; None: there are no more."""
        if lines:
            requests = iter(traces.expand(lines))
            first = next(requests)
            self.turns[first.session] = requests
            self.request(first, first.time)

    def follow(self, job: Job) -> None:
        """A turn has ended: the next one comes when its user has thought."""
        after = next(self.turns[job.request.session], None)
        if after is None:
            del self.turns[job.request.session]
        else:
            self.request(after, max(after.time, job.end + after.think))

    def replica(self, number: int) -> None:
        """The replica's next tick may have changed."""
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
    """Run sessions until the time is over, and what is then running to its end.

    Args:
        sessions: lines of one session each, by time of arrival.
        until: no turn starts from then on, seconds.
        warm: seconds at the start that count in no figure.
        skip: whether steady decode steps are skipped; the outcome is the same.
    """
    window = (warm, until)
    outcome = Outcome(
        window,
        [new_replica(fleet.layout, fleet.limits, fleet.time, window=window, skip=skip) for _ in range(replicas)],
    )
    agenda, coming, now = _Agenda(outcome.replicas), iter(sessions), 0.0

    def up_to_date(number: int) -> None:
        look(outcome.replicas[number], now)
        agenda.replica(number)

    route = make_router(policy, outcome.replicas, seed, thresholds, look=up_to_date)
    agenda.session(next(coming, None))
    while agenda.entries:
        now, _, _, item = heapq.heappop(agenda.entries)
        if isinstance(item, TraceRequest):
            if item.turn == 0:
                agenda.session(next(coming, None))
            if now < until:
                number = route(item)
                outcome.jobs.append(Job(f"{item.session}/{item.turn}", item, now, number))
                submit(outcome.replicas[number], outcome.jobs[-1], now)
                agenda.replica(number)
        elif outcome.replicas[item].due == now:
            for job in tick(outcome.replicas[item], now):
                agenda.follow(job)
            agenda.replica(item)
    return outcome


def check(outcome: Outcome) -> None:
    """Assert what must hold of any simulation that has come to its end."""
    for job in outcome.jobs:
        assert job.produced == len(job.request.output), f"{job.name}: a token was lost or came twice"
        assert job.hit is not None
        assert 0 <= job.hit.cached_tokens < job.hit.prompt_tokens == len(job.request.prompt)
        assert job.arrival < job.first <= job.end, f"{job.name}: time ran backwards"
    for replica in outcome.replicas:
        assert not replica.scheduler.has_work(), "a replica has left work undone"
        assert replica.busy <= (outcome.window[1] - outcome.window[0]) * (1 + 1e-9), "a replica ran two steps at once"


def figures(outcomes: Sequence[Outcome], ttft: float, tpot: float) -> dict[str, Any]:
    """The report's numbers over simulations of one setting that differ by their seed. Rates are per replica.

    Args:
        ttft, tpot: what a good answer keeps, seconds.
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
    """Tokens that each replica computed for the requests that count: prompts without what was cached, and answers."""
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
