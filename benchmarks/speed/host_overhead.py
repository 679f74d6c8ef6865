"""Host time of the engine's steps (plan, pack and apply; not launch) with a device that does nothing.

    python -m benchmarks.speed.host_overhead [--rows 1 64 256 1400] [--context 2000] [--json FILE]
    python -m benchmarks.speed.host_overhead --kv-events

The KV geometry is that of gemma-3-27b, with pages of 64. All times are in µs of the thread's processor time, so what
else runs on the machine matters little.

* decode: the median of each part, and the 10th and 90th percentile of the total; rows cross pages at different steps.
* blocked: the same with a request in the queue that finds no memory.
* burst: one plan that admits so many requests of 30 tokens.
* arrivals: `plan` while requests come and end and the prefix cache is full, and `tidy`, which runs while the device
  works: median and 99th percentile of each.

With `--kv-events` only arrivals of 256 rows, with and without events that are published, step by step in turns: the
mean of a step. The thread sleeps 5 ms after each, as it waits for a device: then the publisher's thread runs.

The baseline of the same run is a loop that appends each row to a list: it shows how fast the machine is at the time.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm, Reach
from jswa.building.kv_events import publish_kv_events
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.pack import PackSpec, pack
from jswa.plan import Request, StepPlan
from jswa.sched.scheduler import Scheduler
from jswa.types import SamplingParams

STEPS = 300
PAGE = 64
_DEVICE = 0.005  # seconds
_CROWDS = 20  # crowds of requests that are admitted in one plan


def gemma3_27b() -> ModelConfig:
    """Return a model of 10 full layers and 52 with window 1024, each with 16 KV heads of 128."""
    full = AttentionConfig(32, 16, 128, 128, 1.0, None)
    norm, mlp = Norm(1e-6), MlpConfig(1, "silu")
    layers = [
        LayerConfig(full if (i + 1) % 6 == 0 else replace(full, reach=Reach(1024)), mlp, norm, None, norm, None)
        for i in range(62)
    ]
    return ModelConfig("gemma3_text", 262144, 5376, 131072, tuple(layers), norm, True)


class Steps:
    """A scheduler with one step in flight, whose device samples token 1 for each row."""

    def __init__(self, limits: Limits) -> None:
        self.scheduler = Scheduler(KVLayout.of(gemma3_27b(), PAGE), limits)
        self.ended = 0
        self._added = 0
        self._buckets = bucket_table(limits, on_gpu=True)
        self._specs = {b: PackSpec.of(b, page_size=PAGE, max_rows=limits.max_rows) for b in self._buckets}
        self._pending: StepPlan | None = None

    def add(self, prompt: Int[np.ndarray, " P"], tokens: int) -> None:
        """Queue a request for so many tokens."""
        name, params = str(self._added), SamplingParams()
        self.scheduler.add(Request(name, prompt, params, frozenset([7]), (0, self._added), len(prompt) + tokens))
        self._added += 1

    def step(self, wait: Callable[[], None] = lambda: None) -> tuple[StepPlan | None, list[float]]:
        """Run a step; return its plan, and the µs of plan, pack, the work beside the device, and apply.

        `wait` is called once the step is packed and the work beside the device is done.
        """
        times = [time.thread_time()]
        plan = self.scheduler.plan()
        times.append(time.thread_time())
        if plan is not None:
            pack(plan, self._specs[pick_bucket(self._buckets, plan)])
        times.append(time.thread_time())
        self.scheduler.tidy()
        wait()
        times.append(time.thread_time())
        if self._pending is not None:
            events = self.scheduler.apply(self._pending, np.ones(self._pending.num_rows, np.int32))
            times.append(time.thread_time())
            self.ended += sum(event.finish_reason is not None for event in events.others)
        else:
            times.append(time.thread_time())
        self._pending = plan
        return plan, [1e6 * (end - begin) for begin, end in itertools.pairwise(times)]


def decode(rows: int, context: int, *, blocked: bool) -> dict[str, float]:
    """Return median µs of each part over decode steps of `rows` rows at about `context` tokens.

    `blocked`: one more row id is free, but the request that waits for it finds no memory.
    """
    layout = KVLayout.of(gemma3_27b(), PAGE)
    row = -(-layout.resident_slots(context + PAGE + STEPS) // layout.pages_per_slab)
    slabs = rows * row + 400
    steps = Steps(Limits(2**20, rows + blocked, max(rows, 8192), PAGE, num_slabs=slabs))
    for i in range(rows):
        steps.add(np.full(context + i % PAGE, i, np.int32), 20_000)  # no two rows share a prefix
    while steps.scheduler.stats().waiting or any(lease.window_ends for lease in steps.scheduler.cache.leases):
        steps.step()
    if blocked:
        steps.add(np.full(steps.scheduler.capacity - 1, rows, np.int32), 1)
    samples = [steps.step()[1] for _ in range(STEPS)]
    columns = [sorted(column) for column in zip(*samples, strict=True)]
    total = sorted(plan + packing + apply for plan, packing, _, apply in samples)
    out = dict(zip(("plan", "pack", "beside", "apply"), map(statistics.median, columns), strict=True))
    assert steps.scheduler.stats().waiting == blocked
    return {**out, "total": statistics.median(total), "p10": total[STEPS // 10], "p90": total[-STEPS // 10]}


def burst(requests: int) -> float:
    """Return median µs of a plan that admits so many requests of 30 tokens at once."""
    found, rng = [], np.random.default_rng(0)
    steps = Steps(Limits(2**18, requests, max(8192, 32 * requests), PAGE, num_slabs=60 * requests))
    for _ in range(_CROWDS):
        for _ in range(requests):
            steps.add(rng.integers(0, 200_000, 30).astype(np.int32), 2)
        plan, times = steps.step()
        assert plan is not None
        assert plan.num_rows == requests
        found.append(times[0])
        while steps.scheduler.has_work():
            steps.step()
    return statistics.median(found)


def arrivals(rows: int) -> dict[str, float]:
    """Return µs of `plan` and of the work beside the device while requests come and end and the cache is full."""
    samples = list(itertools.islice(arriving(rows), 10 * STEPS))
    plan, beside = (sorted(sample[part] for sample in samples) for part in (0, 2))
    return {
        "mean": statistics.fmean(map(sum, samples)),
        "plan": statistics.median(plan),
        "plan p99": plan[-len(plan) // 100],
        "beside": statistics.median(beside),
        "beside p99": beside[-len(beside) // 100],
    }


def arriving(rows: int, events: str | None = None) -> Generator[list[float]]:
    """Yield the µs of the parts of each step once the cache is full, without end; each time the same requests come.

    `events`: the option `kv_events_config`.
    """
    rng = np.random.default_rng(0)
    steps = Steps(Limits(2**18, rows, 2048, PAGE, num_slabs=rows * 130))
    close = publish_kv_events(steps.scheduler.cache, dict, events)
    try:
        while True:
            while steps.scheduler.stats().waiting < 2:
                prompt = rng.integers(0, 200_000, rng.integers(300, 2500)).astype(np.int32)
                steps.add(prompt, int(rng.integers(100, 400)))
            times = steps.step()[1]
            if steps.scheduler.cache.prefix.retention.evictions:
                yield times
    finally:
        if close is not None:
            close()


def cost_of_events(turns: int = 20) -> None:
    """Print the mean µs of a step without and with events, and the median of the ratios of so many turns.

    Two schedulers run the same steps, one after the other and each first in turn: the speed of the machine, which
    varies from minute to minute, is the same for both.
    """
    with tempfile.TemporaryDirectory() as folder:
        option = json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/events"})
        both = arriving(256), arriving(256, option)
        for steps in both:
            next(steps)
        times = []
        for number in range(turns * STEPS):
            pair = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                pair[place] = sum(next(both[place]))
                time.sleep(_DEVICE)
            times.append(pair)
        for steps in both:
            steps.close()
    sums = [[sum(column) for column in zip(*turn, strict=True)] for turn in itertools.batched(times, STEPS)]
    ratios = sorted(with_events / without for without, with_events in sums)
    without, with_events = (sum(column) / len(times) for column in zip(*sums, strict=True))
    print(f"without {without:.1f}, with {with_events:.1f} µs a step, ratio {with_events / without:.3f}")
    print(f"in turns of {STEPS} steps: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def baseline(rows: int) -> float:
    """Return median µs of one append per row."""
    times = []
    for _ in range(STEPS):
        start, out = time.thread_time(), []
        for row in range(rows):
            out.append(row)  # noqa: PERF402 - the append is what is measured
        times.append(1e6 * (time.thread_time() - start))
    return statistics.median(times)


def main() -> None:
    """Print a line per number of rows; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1400], help="rows of a step")
    parser.add_argument("--context", type=int, default=2000, help="tokens of each row")
    parser.add_argument("--json", type=Path, help="result file to write")
    parser.add_argument("--kv-events", action="store_true", help="measure what publishing events costs")
    args = parser.parse_args()
    if args.kv_events:
        cost_of_events()
        return
    print("          rows    plan    pack   apply   total (p10 to p90)   baseline   µs")
    results: list[dict[str, float | str]] = []
    for rows in args.rows:
        for blocked in (False, True):
            r = decode(rows, args.context, blocked=blocked)
            name, base = "blocked" if blocked else "decode", baseline(rows)
            results.append({"case": name, "rows": rows, "context": args.context, **r, "baseline": base})
            spread = f"({r['p10']:.0f} to {r['p90']:.0f})"
            parts = " ".join(f"{r[part]:7.0f}" for part in ("plan", "pack", "apply", "total"))
            print(f"{name:8} {rows:5} {parts} {spread:>13} {base:10.1f}")
    for requests in (64, 256):
        results.append({"case": "burst", "rows": requests, "plan": burst(requests)})
        print(f"burst    {requests:5} {results[-1]['plan']:7.0f}")
    found = arrivals(64)
    results.append({"case": "arrivals", "rows": 64, **found})
    print("arrivals    64 " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()))
    if args.json:
        result_file.write(args.json, {"rows": results})


if __name__ == "__main__":
    main()
