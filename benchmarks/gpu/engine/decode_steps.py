"""Time of whole decode steps and prefill chunks by rows and context, against the bytes and FLOP that they cannot avoid.

    python -m benchmarks.gpu.engine.decode_steps --hub gemma-3-27b [--rows 1 16 64 256] [--contexts 1024 8192 32768]
                                                 [--quantization mxfp4] [--engine kernels=elementwise=mosaic ...]
                                                 [--trace FILE]

Runs on random weights, without a scheduler and without prefill: rows get entries in the page tables as if their
contexts had been computed, each with pages of its own, and run `--steps` steps one after another without waiting for
tokens. So the time of a step is that of the device, or the host's time to launch it if that is longer, which is printed
beside it: that of the first steps, because PJRT lets 32 programs wait for a GPU and has the host wait with the next.
Only programs of the measured sizes are compiled. A prefill chunk belongs to one row, at the end of each context. A size
that does not fit the arena is listed as such.

Local layers see a window, so a longer context should add the bytes of the full layers only. `bytes` counts weights and
all visible keys and values (`benchmarks.scale.step_time`). `share` is the shortest possible time (bytes at the
bandwidth of `ceilings`, or FLOP at the rate of a large matrix product, both of the same run) over the measured one.
--trace writes each kernel of a few decode steps of all sizes, in the order in which they ran.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from benchmarks.engine_options import add_engine_options, engine_options
from benchmarks.gpu.engine.step_trace import traced
from benchmarks.gpu.kernels.attention import ceilings
from benchmarks.scale.step_time import StepTime, step_time
from jswa.config import EngineConfig
from jswa.exec.runner import Runner
from jswa.exec.sizing import claim_memory
from jswa.llm import LLM
from jswa.plan import COLUMNS, FROM_DEVICE, StepPlan, TableRow
from tools.cases.hub_configs import CONFIGS
from tools.cases.small_models import SMALL_MODELS

Row = dict[str, Any]
BITS = {"fp8": 8, "int8": 8}  # of a weight, where it is not that of the run
MXFP4_BITS = 4.25  # with a scale of 8 bits for 32 weights
NO_LOGITS_STATE = 2**30  # past the end of the logits state
MEMORY = ("bytes_limit", "bytes_in_use", "peak_bytes_in_use", "largest_free_block_bytes")
_TRACED = 4  # steps
IN_FLIGHT = 24  # launches that are timed: fewer than the 32 that PJRT's GPU client lets wait


class CachedRow(NamedTuple):
    """A row whose context counts as computed: row id, tokens of context, and pages for these and the next tokens."""

    row_id: int
    length: int
    pages: TableRow


def lay_out_rows(runner: Runner, rows: int, length: int, more: int) -> list[CachedRow] | None:
    """Return rows of `length` tokens on pages of their own, with room for `more` tokens; None if they do not fit."""
    layout, p = runner.layout, runner.limits.page_size
    m, end = layout.pages_per_slab, length + more
    oldest = 0 if layout.reach is None else layout.reach.first_visible(max(length - 1, 0)) // p
    full = -(-end // p) if layout.full else 0
    local = -(-end // p) - oldest if layout.local else 0
    slabs = 1 + rows * local  # the first slab is never used
    if slabs * m + rows * full > runner.limits.num_slabs * m or end > runner.limits.max_model_len:
        return None
    return [
        CachedRow(
            row,
            length,
            TableRow(
                row,
                slabs * m + row * full + np.arange(full, dtype=np.int32),
                oldest,
                1 + row * local + np.arange(local, dtype=np.int32),
            ),
        )
        for row in range(rows)
    ]


def plan_of(cached: Sequence[CachedRow], at: int, count: int, *, begin: bool) -> StepPlan:
    """Return the step in which each row runs `count` tokens, `at` tokens past its context. `begin`: the first step."""
    rows, none = len(cached), np.zeros((0, 3), np.int32)
    known = begin or count > 1
    return StepPlan(
        rows=greedy_records(cached, at, count),
        tokens=np.arange(rows * count, dtype=np.int32) % 97 + 3 if known else np.full(rows, FROM_DEVICE, np.int32),
        full_pages=none,
        local_pages=none,
        moves=none,
        table_rows=tuple(row.pages for row in cached) if begin else (),
    )


def greedy_records(cached: Sequence[CachedRow], at: int, count: int) -> Int[np.ndarray, "R C"]:
    """Return the records of greedy rows without penalties or constraints, for a step as in `plan_of`."""
    records: Int[np.ndarray, "R C"] = np.zeros((len(cached), len(COLUMNS)), np.int32)
    one = int(np.float32(1).view(np.int32))
    columns = {"count": count, "samples": 1, "top_p": one, "repetition": one, "logits_state": NO_LOGITS_STATE}
    for name, value in columns.items():
        records[:, COLUMNS.index(name)] = value
    records[:, COLUMNS.index("row_id")] = [row.row_id for row in cached]
    records[:, COLUMNS.index("start")] = [row.length + at for row in cached]
    return records


def time_steps(runner: Runner, cached: list[CachedRow], steps: int, count: int) -> tuple[float, float]:
    """Return seconds per step, and seconds of the host to launch one. A prefill chunk repeats the same positions.

    Time begins with the tokens of the first step: before them the device waits for the host's first launch.
    """
    move = 1 if count == 1 else 0
    runner.launch(plan_of(cached, 0, count, begin=True)).tokens()
    plans = [plan_of(cached, move * n, count, begin=False) for n in range(1, steps + 1)]
    timed = min(IN_FLIGHT, steps)
    before = time.perf_counter()
    pending = [runner.launch(plan) for plan in plans[:timed]]
    launched = time.perf_counter() - before
    pending[0].tokens()
    begin = time.perf_counter()
    pending += [runner.launch(plan) for plan in plans[timed:]]
    pending[-1].tokens()
    return (time.perf_counter() - begin) / (steps - 1), launched / timed


def figures(
    runner: Runner, model: StepTime, roof: dict[str, float], shape: tuple[int, int, int], steps: int, repeats: int
) -> Row:
    """Measure one row of the table; `shape` is (rows, context, tokens per row)."""
    rows, context, count = shape
    found: Row = {"rows": rows, "context": context, "tokens": count}
    cached = lay_out_rows(runner, rows, context - count, steps + count + 1)
    if cached is None or rows > runner.limits.max_rows or rows * count > runner.limits.max_tokens:
        return {**found, "why": "does not fit"}
    runs = [time_steps(runner, cached, steps, count) for _ in range(repeats + 1)][1:]
    work = model.work(np.full(rows, context - count), np.full(rows, count), rows)
    keys = work.full_keys * model.full_bytes + work.local_keys * model.local_bytes
    pairs = work.full_pairs * model.full_flops + work.local_pairs * model.local_flops
    size = float(model.dense + model.experts[work.tokens] + keys)
    flops = float(rows * count * model.token_flops + rows * model.head_flops + pairs)
    least = max(size / roof["copy_bytes_per_s"], flops / roof["flops"])
    seconds = [step for step, _ in runs]
    return {
        **found,
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "launch_seconds": statistics.median(launch for _, launch in runs),
        "bytes": size,
        "flops": flops,
        "share": least / statistics.median(seconds),
    }


def line(row: Row) -> str:
    """Return the row as a line of the table."""
    head = f"| {row['rows']} | {row['context']:,} | {row['tokens']} "
    if "why" in row:
        return f"{head}| {row['why']} | | | |"
    s = row["seconds"]
    spread = f"{1e6 * s['median']:,.0f} ({1e6 * s['min']:,.0f} to {1e6 * s['max']:,.0f})"
    return (
        f"{head}| {spread} | {1e6 * row['launch_seconds']:,.0f} | {row['bytes'] / 1e9:.2f} GB, "
        f"{row['flops'] / 1e12:.2f} TFLOP | {row['share']:.0%} |"
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table as lines of Markdown."""
    names = ["rows", "context", "tokens per row", "step, µs", "launch, µs", "bytes and FLOP", "share of the roof"]
    return [f"| {' | '.join(names)} |", "|" + " --- |" * len(names), *map(line, rows)]


def roof_of(square: int) -> dict[str, float]:
    """Measure bandwidth and FLOP rate of the device. Must run before an engine claims the memory."""
    claim_memory(EngineConfig.gpu_memory_utilization)
    on_gpu = jax.devices()[0].platform == "gpu"
    roof = ceilings(jnp.dtype("bfloat16" if on_gpu else "float32"), square)
    # Bytes are counted for 16 bits, but a CPU runs in 32.
    return roof if on_gpu else {**roof, "copy_bytes_per_s": roof["copy_bytes_per_s"] / 2}


def memory() -> dict[str, int]:
    """Return the bytes that the device counts, if it does."""
    stats = jax.devices()[0].memory_stats() or {}
    return {name: int(stats[name]) for name in MEMORY if name in stats}


def measure(llm: LLM, roof: dict[str, float], args: argparse.Namespace) -> Iterator[Row]:
    """Measure decode steps of all sizes, then prefill chunks."""
    runner, engine = llm.engine.runner, llm.engine
    assert isinstance(runner, Runner)
    expert_bits = MXFP4_BITS if args.quantization == "mxfp4" else None
    model = step_time(engine.model, engine.limits, bits=BITS.get(args.quantization, 16), expert_bits=expert_bits)
    for context in args.contexts:
        for rows in args.rows:
            yield figures(runner, model, roof, (rows, context, 1), args.steps, args.repeats)
    chunk = engine.limits.max_tokens
    for context in args.contexts:
        if context >= chunk:
            yield figures(runner, model, roof, (1, context, chunk), max(2, args.steps // 8), args.repeats)


def trace(llm: LLM, args: argparse.Namespace) -> Iterator[Row]:
    """Trace decode steps of all sizes: names of kernels, and for each kernel its name, its begin and its duration."""
    runner = llm.engine.runner
    assert isinstance(runner, Runner)
    for context in args.contexts:
        for rows in args.rows:
            cached = lay_out_rows(runner, rows, context - 1, _TRACED + 2)
            if cached is None or rows > runner.limits.max_rows:
                continue
            time_steps(runner, cached, _TRACED, 1)
            kernels = traced(lambda cached=cached: time_steps(runner, cached, _TRACED, 1))  # type: ignore[misc]
            names = list(dict.fromkeys(kernel.name for kernel in kernels))
            events = [(names.index(kernel.name), kernel.begin, kernel.duration) for kernel in kernels]
            yield {"rows": rows, "context": context, "steps": 1 + _TRACED, "names": names, "kernels": events}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--hub", choices=sorted(CONFIGS), help="a released model")
    shape.add_argument("--config", type=Path, help="a config.json, instead of --hub")
    shape.add_argument("--small", choices=sorted(SMALL_MODELS), help="a small model, for any machine")
    parser.add_argument("--quantization", default="auto", help="storage of the random weights, as of an engine")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="rows of a decode step")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 130_000], help="tokens of context"
    )
    parser.add_argument("--steps", type=int, default=48, help="decode steps per run, two or more")
    parser.add_argument("--repeats", type=int, default=3, help="runs that are counted")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens of a chunk")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="default: all memory that is left")
    add_engine_options(parser)
    parser.add_argument("--trace", type=Path, help="file to write the kernels of a few steps to")
    parser.add_argument("--square", type=int, default=8192, help="size of the matrices that give the roof")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args(words)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: must be at least 2, as time begins when the first step has ended")
    return args


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config that the arguments name."""
    if args.small:
        return SMALL_MODELS[args.small]
    found: dict[str, Any] = CONFIGS[args.hub] if args.hub else json.loads(args.config.read_text())
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print; write JSON if it is asked for."""
    args = parsed(words)
    raw = config_of(args)
    most_tokens = max(args.max_num_batched_tokens, *args.rows)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "quantization": args.quantization,
        "cudagraph_capture_sizes": tuple(sorted({*args.rows, most_tokens})),
        "max_num_seqs": max(args.rows),
        "max_num_batched_tokens": most_tokens,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        **engine_options(args.engine),
    }
    roof = roof_of(args.square)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw))
        llm = LLM(folder, **options)
    with llm:
        ready = time.perf_counter() - started
        about = {"device": jax.devices()[0].device_kind, "start_seconds": ready, "roof": roof, "memory": memory()}
        rows: list[Row] = []
        for row in measure(llm, roof, args):
            rows.append(row)
            if args.json:  # after each measure, because a run may be cut off
                result_file.write(args.json, {**about, "steps": rows})
        print("\n".join(table(rows)), flush=True)
        if args.trace:
            result_file.write(args.trace, {**about, "options": args.engine, "traces": list(trace(llm, args))})


if __name__ == "__main__":
    main()
