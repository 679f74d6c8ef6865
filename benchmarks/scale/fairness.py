"""What three quiet tenants feel of a fourth one that floods the engine. Virtual time; scheduler and cache are real.

    python -m benchmarks.scale.fairness [--seconds 120] [--model gemma-3-27b] [--seed 0] [--quiet 500 50] [--json FILE]

The quiet tenants send requests at random, a tenth of what the device can do each. The fourth tenant keeps to its share
(the baseline), or always has 400 requests under way. `ratio` is the quiet tenants' 99th percentile of the time to the
first token, over that of the baseline. The rows "one queue" are the same traffic without tenants: arrival decides.
The time of a step is a model (`benchmarks.scale.step_time`).
"""

import argparse
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from benchmarks.cache.traces import TraceRequest
from benchmarks.scale.replica import Job, Replica, new_replica, submit, tick
from benchmarks.scale.simulate import Fleet, fleet_of
from jswa.bench.report import percentile

QUIET = ("quiet-1", "quiet-2", "quiet-3")
FOURTH = "fourth"
MOST = 400  # requests of a flood under way


@dataclass(frozen=True)
class Kind:
    """Requests of a tenant: tokens of prompt and output, and how many a second are within its share."""

    prompt: int
    output: int
    rate: float


# A quarter of the device is 2,300 tokens of prompts a second, or 64 rows that generate.
KINDS = {
    "many short requests": Kind(200, 20, 8.0),
    "few long generations": Kind(200, 3_000, 0.5),
    "long prompts": Kind(30_000, 50, 0.06),
}


def make_requests(tenant: str, kind: Kind, seed: int) -> Iterator[TraceRequest]:
    """Yield requests with different prompts, at random times."""
    chance, now = np.random.default_rng(seed), 0.0
    for number in itertools.count():
        now += float(chance.exponential(1 / kind.rate))
        length = int(kind.prompt * chance.uniform(0.5, 1.5))
        prompt = chance.integers(0, 100_000, length).astype(np.int32)
        yield TraceRequest(now, f"{tenant}-{number}", 0, prompt, np.zeros(kind.output, np.int32))


def run(
    fleet: Fleet, fourth: Kind, quiet: Kind, *, floods: bool, tenants: bool, seconds: float, warm: float, seed: int
) -> dict[str, Any]:
    """Serve all tenants; return the quiet ones' seconds to the first token, and what the fourth one got."""
    replica = new_replica(fleet.layout, fleet.limits, fleet.time, window=(warm, seconds), skip=False)
    kinds = {**dict.fromkeys(QUIET, quiet), FOURTH: fourth}
    sources = {name: make_requests(name, kind, 100 * seed + n) for n, (name, kind) in enumerate(kinds.items())}
    jobs: list[Job] = []
    arrivals = [(0.0, number, name) for number, name in enumerate(sources)]
    if floods:
        arrivals += [(0.0, len(arrivals) + i, FOURTH) for i in range(MOST - 1)]
    coming = {name: next(source) for name, source in sources.items()}
    heapq.heapify(arrivals)
    order = itertools.count(len(arrivals))
    while True:
        due = replica.due
        if arrivals and (due is None or arrivals[0][0] <= due):
            now, _, name = heapq.heappop(arrivals)
            request, coming[name] = coming[name], next(sources[name])
            jobs.append(Job(request.session, request, now, tenant=name if tenants else ""))
            submit(replica, jobs[-1], now)
            if not (floods and name == FOURTH):
                heapq.heappush(arrivals, (max(now, coming[name].time), next(order), name))
        elif due is None or due > seconds:
            return _report(replica, jobs, warm, seconds)
        else:
            ended = tick(replica, due)
            for job in ended if floods else ():
                if job.request.session.startswith(FOURTH):
                    heapq.heappush(arrivals, (due, next(order), FOURTH))


def _report(replica: Replica, jobs: list[Job], warm: float, seconds: float) -> dict[str, Any]:
    quiet = [job for job in jobs if not job.name.startswith(FOURTH) and warm <= job.arrival < seconds - 5]
    # A request without a first token at the end has waited at least so long.
    waits = [(job.first if job.first >= 0 else seconds) - job.arrival for job in quiet]
    tokens = sum(len(job.request.prompt) + job.produced for job in jobs if job.name.startswith(FOURTH) and job.produced)
    return {
        "requests": len(waits),
        "ttft_p50": percentile(waits, 50),
        "ttft_p99": percentile(waits, 99),
        "fourth_tokens_per_second": tokens / seconds,
        "preemptions": replica.scheduler.preemptions,
        "device_busy": replica.busy / (seconds - warm),
    }


def main() -> None:
    """Print a row for each kind of flood."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-27b")
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time, of which a sixth is warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--quiet", type=int, nargs=2, default=(500, 50), help="tokens of a quiet prompt and its output")
    parser.add_argument("--tenants-only", action="store_true", help="without the rows of one queue")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    fleet, rows = fleet_of(given.model, longest=50_000), []
    for name, kind in KINDS.items():
        base, quiet = 0.0, Kind(given.quiet[0], given.quiet[1], 1.0)
        for floods, tenants in ((False, True), (True, True), (True, False))[: 2 if given.tenants_only else 3]:
            found = run(
                fleet,
                kind,
                quiet,
                floods=floods,
                tenants=tenants,
                seconds=given.seconds,
                warm=given.seconds / 6,
                seed=given.seed,
            )
            base = base or found["ttft_p99"]
            what = {(False, True): "within its share", (True, True): "floods", (True, False): "floods, one queue"}
            rows.append({"kind": name, "fourth": what[floods, tenants], **found, "ratio": found["ttft_p99"] / base})
            print(result_file.rounded(rows[-1]), flush=True)
    if given.json is not None:
        result_file.write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
