"""Host time of a decode step (plan, pack and apply; not launch) with a device that does nothing.

    python -m benchmarks.speed.host_overhead [--rows 1 64 256 1400] [--context 2000] [--json FILE]

The KV geometry is that of gemma-3-27b, with pages of 64. Prints the median of each part and the 10th and 90th
percentile of the total, in µs. The baseline of the same run is a loop that appends each row to a list: it shows how
fast the machine is at the time.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import result_file
from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm, Reach
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import bucket_table, pick_bucket
from jswa.exec.pack import PackSpec, pack
from jswa.plan import Request, StepPlan
from jswa.sched.scheduler import Scheduler
from jswa.types import SamplingParams

STEPS = 300


def gemma3_27b() -> ModelConfig:
    """Return a model of 10 full layers and 52 with window 1024, each with 16 KV heads of 128."""
    full = AttentionConfig(32, 16, 128, 128, 1.0, None)
    norm, mlp = Norm(1e-6), MlpConfig(1, "silu")
    layers = [
        LayerConfig(full if (i + 1) % 6 == 0 else replace(full, reach=Reach(1024)), mlp, norm, None, norm, None)
        for i in range(62)
    ]
    return ModelConfig("gemma3_text", 262144, 5376, 131072, tuple(layers), norm, True)


def measure(rows: int, context: int) -> dict[str, float]:
    """Return median µs of each part over decode steps of `rows` rows at about `context` tokens."""
    limits = Limits(2**18, rows, max(rows, 8192), 64, num_blocks=rows * (context // 64 // 6 + 90) + 1000)
    scheduler = Scheduler(KVLayout.of(gemma3_27b(), 64), limits)
    buckets = bucket_table(limits, on_gpu=True)
    specs = {bucket: PackSpec.of(bucket, page_size=64, max_rows=rows) for bucket in buckets}
    for i in range(rows):
        prompt = np.full(context, i, np.int32)  # no two rows share a prefix
        scheduler.add(Request(str(i), prompt, SamplingParams(), frozenset([7]), (0, i), context + 20_000))
    pending: StepPlan | None = None
    samples: list[tuple[float, ...]] = []
    while len(samples) < STEPS:
        start = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        planned = time.perf_counter()
        pack(plan, specs[pick_bucket(buckets, plan)])
        packed = time.perf_counter()
        if pending is not None:
            scheduler.apply(pending, np.ones(pending.num_rows, np.int32))
        done = time.perf_counter()
        pending = plan
        if plan.num_tokens == rows:
            samples.append((planned - start, packed - planned, done - packed, done - start))
    columns = [sorted(1e6 * value for value in column) for column in zip(*samples, strict=True)]
    names = ("plan", "pack", "apply", "total")
    out = {name: statistics.median(column) for name, column in zip(names, columns, strict=True)}
    return {**out, "p10": columns[3][STEPS // 10], "p90": columns[3][-STEPS // 10], "baseline": baseline(rows)}


def baseline(rows: int) -> float:
    """Return median µs of one append per row."""
    times = []
    for _ in range(STEPS):
        start, out = time.perf_counter(), []
        for row in range(rows):
            out.append(row)  # noqa: PERF402 - the append is what is measured
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """Print a line per number of rows; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1400], help="rows of a step")
    parser.add_argument("--context", type=int, default=2000, help="tokens of each row")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    print("  rows    plan    pack   apply   total (p10 to p90)   baseline   µs")
    results = []
    for rows in args.rows:
        r = measure(rows, args.context)
        results.append({"rows": rows, "context": args.context, **r})
        spread = f"({r['p10']:.0f} to {r['p90']:.0f})"
        parts = " ".join(f"{r[name]:7.0f}" for name in ("plan", "pack", "apply", "total"))
        print(f"{rows:6} {parts} {spread:>13} {r['baseline']:10.1f}")
    if args.json:
        result_file.write(args.json, {"rows": results})


if __name__ == "__main__":
    main()
