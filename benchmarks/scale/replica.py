"""A replica of a simulated fleet: the engine's own scheduler and prefix cache, on a device that only takes time.

Steps overlap as in the engine (docs/design/scheduler.md): step k + 1 is planned when step k - 1 has ended, while step k
is on the device; a step begins when the previous one has ended and the host has planned it. The trace has the outputs.

Runs of decode steps in which no request arrives, ends or prefills are skipped: `_Run` has the ends of the next n steps,
and `_catch_up` updates lengths, pages and windows as soon as something else happens, in the order in which
`Scheduler.plan` would have done it. With `skip=False` every step is planned and applied; the results are equal.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from benchmarks.cache.traces import TraceRequest
from benchmarks.scale.step_time import StepTime
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.plan import Request, RequestOptions, StepPlan
from jswa.sched.batch import lease_of
from jswa.sched.scheduler import Scheduler
from jswa.sched.sequence import Sequence, Status
from jswa.types import PrefixHit, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_MOST_SKIPPED = 128
_LEAST_SKIPPED = 3


@dataclass(eq=False)
class Job:
    """A request of a tenant and its latencies, in seconds of virtual time. `produced` counts its generated tokens."""

    name: str
    request: TraceRequest
    arrival: float
    replica: int = -1
    tenant: str = ""
    first: float = -1.0
    end: float = -1.0
    produced: int = 0
    hit: PrefixHit | None = None

    @property
    def ttft(self) -> float:
        """Return seconds from arrival to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Return mean seconds between two tokens; 0 for an answer of one token."""
        return (self.end - self.first) / max(self.produced - 1, 1)


@dataclass(frozen=True, eq=False)
class _Run:
    """Decode steps that are skipped.

    Attributes:
        ends: [n + 1] when steps end; ends[0] is the step that is on the device, ends[i] the i-th skipped one.
        planned: [n] when the host has planned each skipped step.
        seconds: [n] device time of each skipped step.
    """

    ends: list[float]
    planned: list[float]
    seconds: Float[np.ndarray, " n"]


class _Step(NamedTuple):
    """A step on the device: its plan, the sequence of each of its rows, and when it ends."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    end: float


@dataclass(eq=False)
class Replica:
    """Owns a scheduler. `busy` counts device seconds inside `window`; `flight` has plans in flight and their ends."""

    scheduler: Scheduler
    time: StepTime
    window: tuple[float, float]
    skip: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    flight: deque[_Step] = field(default_factory=deque)
    run: _Run | None = None
    host_free: float = 0.0
    busy: float = 0.0
    steps: int = 0
    skipped: int = 0

    @property
    def outstanding(self) -> int:
        """Return the number of requests that have arrived and not ended."""
        return len(self.jobs)

    @property
    def due(self) -> float | None:
        """Return when the next `tick` must happen; None while the replica is idle."""
        if self.run is not None:
            return self.run.ends[-2]
        return self.flight[0].end if self.flight else None


def new_replica(
    layout: KVLayout, limits: Limits, time: StepTime, *, window: tuple[float, float], skip: bool = True
) -> Replica:
    """Return an idle replica with an empty cache."""
    return Replica(Scheduler(layout, limits), time, window, skip)


def submit(replica: Replica, job: Job, now: float) -> None:
    """Accept a request at time `now`. If the replica's tick is due at the same time, this comes first."""
    _interrupt(replica, now)
    request = job.request
    length = len(request.prompt) + len(request.output)
    options = RequestOptions(cache_salt=job.tenant, tenant=job.tenant)
    replica.scheduler.add(
        Request(job.name, request.prompt, _GREEDY, frozenset(), (0, 0), length, options, cache_salt=job.tenant)
    )
    replica.jobs[job.name] = job
    if not replica.flight:
        _launch(replica, now)
        assert replica.flight, "an idle replica has work and runs no step"


def tick(replica: Replica, now: float) -> list[Job]:
    """Apply the steps that have ended by now and plan the next ones. Return the jobs that have ended."""
    if replica.run is not None:
        _catch_up(replica, len(replica.run.ends) - 1)
    ended: list[Job] = []
    while replica.flight and replica.flight[0].end <= now:
        ended += _apply(replica, replica.flight.popleft())
    _launch(replica, now)
    assert replica.flight or not replica.jobs, "a replica has work and runs no step"
    return ended


def look(replica: Replica, now: float) -> None:
    """Bring scheduler and cache up to date, so that a router may query them."""
    _interrupt(replica, now)


def _apply(replica: Replica, step: _Step) -> list[Job]:
    plan = step.plan
    tokens = np.zeros(plan.num_rows, np.int32)
    for row, sequence in enumerate(step.sequences):
        if plan.samples[row] and sequence.status is not Status.FINISHED:
            output = replica.jobs[sequence.request.request_id].request.output
            tokens[row] = output[sequence.num_known - len(sequence.request.prompt)]
    ended = []
    for event in replica.scheduler.apply(plan, tokens):
        job = replica.jobs[event.request_id]
        assert event.token is not None
        job.produced += 1
        if event.prefix is not None:
            job.hit, job.first = event.prefix, step.end
        if event.finish_reason is not None:
            job.end = step.end
            ended.append(replica.jobs.pop(event.request_id))
    return ended


def _launch(replica: Replica, now: float) -> None:
    """Plan until two steps are under way, or skip decode steps."""
    while len(replica.flight) < 2:
        if replica.skip and len(replica.flight) == 1 and (steps := _steady(replica)) >= _LEAST_SKIPPED:
            replica.run = _run(replica, now, steps)
            return
        plan = replica.scheduler.plan()
        if plan is None:
            return
        work = replica.time.work(plan.starts.astype(np.int64), plan.counts, int(plan.samples.sum()))
        seconds = float(replica.time.seconds(work))
        replica.host_free = max(now, replica.host_free) + float(replica.time.host[plan.num_rows])
        begin = max(replica.flight[-1].end if replica.flight else now, replica.host_free)
        replica.flight.append(_Step(plan, _rows_of(replica, plan), begin + seconds))
        replica.busy += _overlap(begin, begin + seconds, replica.window)
        replica.steps += 1


def _rows_of(replica: Replica, plan: StepPlan) -> tuple[Sequence, ...]:
    """The sequences of a plan that has just been made, in the order of its rows."""
    by_row_id = {sequence.row_id: sequence for sequence in replica.scheduler.running}
    return tuple(by_row_id[row_id] for row_id in plan.row_ids.tolist())


def _overlap(begin: float, end: float, window: tuple[float, float]) -> float:
    return max(0.0, min(end, window[1]) - max(begin, window[0]))


def _steady(replica: Replica) -> int:
    """Return how many decode steps can be skipped: all rows are in the step in flight; none ends, arrives or waits."""
    scheduler, plan = replica.scheduler, replica.flight[0].plan
    rows = scheduler.running
    if scheduler.stats().waiting or len(rows) != plan.num_rows or plan.num_tokens != plan.num_rows:
        return 0
    if scheduler.cache.moves:
        return 0
    steps = _MOST_SKIPPED
    for sequence in rows:
        if sequence.in_flight != 1 or sequence.launched != sequence.num_known or lease_of(sequence).window_ends:
            return 0
        if len(lease_of(sequence).slid):  # pages that wait to be published
            return 0
        steps = min(steps, sequence.limit - 1 - sequence.num_known)
    layout = scheduler.layout
    pages = len(rows) * (steps // layout.page_size + 1)
    return steps if scheduler.cache.available_slots > pages * (1 + layout.pages_per_slab) else 0


def _run(replica: Replica, now: float, steps: int) -> _Run:
    """Return the next steps, with the arithmetic of `_launch`."""
    rows = replica.scheduler.running
    lengths = np.array([sequence.launched for sequence in rows], np.int64)
    seconds = replica.time.seconds(replica.time.decode_work(lengths, steps))
    host = float(replica.time.host[len(rows)])
    ends, planned, before, free = [replica.flight[0].end], [], now, replica.host_free
    for taken in seconds.tolist():
        free = max(before, free) + host
        before = ends[-1]
        planned.append(free)
        ends.append(max(before, free) + taken)
    return _Run(ends, planned, seconds)


def _interrupt(replica: Replica, now: float) -> None:
    """End a run: catch up with the steps that have ended, and plan the step that the host had planned before now."""
    run = replica.run
    if run is None:
        return
    done = sum(end < now for end in run.ends[:-2])  # the tick of the run is due at the last of them
    _catch_up(replica, done)
    plan = replica.scheduler.plan()
    assert plan is not None
    assert plan.num_rows == plan.num_tokens == len(replica.scheduler.running), "a run was not steady"
    end, taken = run.ends[done + 1], float(run.seconds[done])
    replica.flight.append(_Step(plan, _rows_of(replica, plan), end))
    replica.busy += _overlap(end - taken, end, replica.window)
    replica.host_free = run.planned[done]
    replica.steps += 1


def _catch_up(replica: Replica, steps: int) -> None:
    """Change scheduler and cache as the first `steps` skipped steps would have done, and end the run."""
    run, scheduler = replica.run, replica.scheduler
    assert run is not None
    replica.run = None
    if not steps:
        return
    replica.host_free = run.planned[steps - 1]
    for ends, taken in zip(run.ends[1 : steps + 1], run.seconds[:steps].tolist(), strict=True):
        replica.busy += _overlap(ends - taken, ends, replica.window)
    replica.steps += steps
    replica.skipped += steps
    _move_pages(scheduler, steps)
    for sequence in scheduler.running:
        job = replica.jobs[sequence.request.request_id]
        known = sequence.num_known - len(job.request.prompt)
        sequence.extend(np.array(job.request.output[known : known + steps], np.int32))
        scheduler.rows.launched[sequence.row_id] += steps
        scheduler.rows.finite_to[sequence.row_id] += steps
        job.produced += steps
    # The step on the device becomes the last skipped one.
    step = replica.flight.popleft()
    np.add(step.plan.starts, steps, out=step.plan.starts)
    replica.flight.append(step._replace(end=run.ends[steps]))


def _move_pages(scheduler: Scheduler, steps: int) -> None:
    """Grow and slide pages step by step: in each step all rows grow in their order, then windows slide."""
    cache, page, rows = scheduler.cache, scheduler.layout.page_size, scheduler.running
    events: list[tuple[int, int, int]] = []  # step, 0 to grow and 1 to slide, row
    for row, sequence in enumerate(rows):
        lease = lease_of(sequence)
        events.append((lease.covered - sequence.launched, 0, row))
        events.append((lease.next_slide - sequence.launched - 1, 1, row))
    heapq.heapify(events)
    settled = -1
    while events and events[0][0] < steps:
        step, slides, row = heapq.heappop(events)
        if step != settled:
            cache.compact()
            settled = step
        sequence = rows[row]
        lease, length = lease_of(sequence), sequence.launched + step + 1
        if slides:
            cache.slide(lease, length)
            heapq.heappush(events, (lease.next_slide - sequence.launched - 1, 1, row))
        else:
            assert cache.grow(lease, length), "a run was begun without room for its pages"
            heapq.heappush(events, (step + page, 0, row))
    cache.drain_moves()
