"""How evenly steps follow one another while programs are compiled for an H200 beside them, on a machine without a GPU.

    .venv-gpu/bin/python -m benchmarks.speed.beside_compiling [--model gpt-oss-20b] [--device 7] [--repeats 3]
        [--own-core] [--json FILE]

The host's part of a step is real: plan, pack and apply of 64 rows that decode, with one step in flight. The device is a
clock: a step ends so many ms (--device) after the one before it. A second thread compiles decode steps of the model as
an engine does beside its steps, with a rest after each. It traces, lowers and compiles each; it loads none, for want of
a GPU. With --own-core the steps' thread has real-time priority (Linux, root): as on a machine that has cores to spare,
only Python's lock can hold it up.

Prints the time between the ends of two steps: median, 90th and 99th percentile, and the longest, alone and beside, in
turns; then the ratio of the 99th percentiles. Each turn compiles the same programs anew.
"""

import argparse
import gc
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import result_file
from benchmarks.speed.host_overhead import PAGE, Steps
from jswa.config import Limits

_ROWS = 64
_CONTEXT = 2_000
_SIZES = (8, 16, 32, 64)  # rows of the programs that are compiled
_ALONE = 20.0  # seconds of a turn in which nothing is compiled
_SWITCH = 2e-4  # seconds: as the server's


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-oss-20b", help="a name in tools.cases.hub_configs")
    parser.add_argument("--layers", type=int, help="the first layers of the model; all if not given")
    parser.add_argument("--device", type=float, default=7.0, help="ms of a step on the device")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--own-core", action="store_true", help="give the steps' thread real-time priority")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    sys.setswitchinterval(_SWITCH)
    compile_all = compiler(args.model, args.layers)
    steps, device = decoding(), args.device / 1e3
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    if args.own_core:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    rows, ratios = [], []
    for repeat in range(args.repeats):
        thread = threading.Thread(target=compile_all)
        thread.start()
        beside = quantiles(intervals(steps, device, thread.is_alive))
        alone = quantiles(intervals(steps, device, for_seconds(_ALONE)))
        for name, found in (("alone", alone), ("beside", beside)):
            rows.append({"repeat": repeat, "case": name, **found})
            print(rows[-1], flush=True)
        ratios.append(beside["p99"] / alone["p99"])
    ratios.sort()
    print(f"ratio of p99 {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if args.json:
        about = {"model": args.model, "device_ms": args.device, "own_core": args.own_core}
        result_file.write(args.json, {**about, "rows": rows, "ratios": ratios})


def compiler(model: str, layers: int | None) -> Callable[[], None]:
    """Return a function that compiles the programs as an engine does; all that an engine has by then is made before."""
    from tools.aot import device  # sets up jax for it

    os.environ.pop("XLA_FLAGS", None)  # and asks for dumps, which an engine does not write
    for name in ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS"):
        os.environ.pop(name, None)
    import jax

    from jswa.exec.compile.program import jit_step
    from jswa.exec.compile.steps import REST
    from jswa.exec.compile.store import compiled
    from tools.aot import triton
    from tools.aot.graph import default_spec
    from tools.aot.steps import prepared
    from tools.aot.triton_facts import gpu

    del device
    given = [prepared(default_spec(model, layers, rows)) for rows in _SIZES]

    def compile_all() -> None:
        if hasattr(os, "sched_setscheduler"):  # threads take the priority of the one that begins them
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        jax.clear_caches()  # type: ignore[no-untyped-call]
        with triton.compiling_for(gpu("h200")):
            for one in given:
                begin = time.monotonic()
                compiled(None, "", jit_step(one.config, one.params, one.state), one.arguments)
                time.sleep(REST * (time.monotonic() - begin))

    return compile_all


def decoding() -> Steps:
    """Return a scheduler whose rows all decode, for longer than this runs."""
    slabs = _ROWS * 40_000 // PAGE
    steps = Steps(Limits(2**20, _ROWS, 8192, PAGE, num_slabs=slabs))
    for row in range(_ROWS):
        steps.add(np.full(_CONTEXT + row, row, np.int32), 1_000_000)
    while steps.scheduler.stats().waiting:
        steps.step()
    return steps


def intervals(steps: Steps, device: float, runs: Callable[[], bool]) -> list[float]:
    """Return the ms from the host's end of a step to that of the next one, while `runs`."""
    ends = time.perf_counter()
    times = []

    def wait() -> None:
        """Let the device begin the step that was just packed, and wait for the one before."""
        nonlocal ends
        before, ends = ends, max(ends, time.perf_counter()) + device
        time.sleep(max(0.0, before - time.perf_counter()))

    while runs():
        steps.step(wait)
        times.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Return a function that is true for so many seconds."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


def quantiles(found: list[float]) -> dict[str, float]:
    """Return the number of times, their median, 90th and 99th percentile, and the longest."""
    cuts = statistics.quantiles(found, n=100)
    return {"steps": len(found), "median": cuts[49], "p90": cuts[89], "p99": cuts[98], "longest": max(found)}


if __name__ == "__main__":
    main()
