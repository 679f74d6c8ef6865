"""Time of whole decode steps and prefill chunks by rows and context, against the bytes and FLOP that they cannot avoid.

    python -m benchmarks.gpu.decode_steps --hub gemma-3-27b [--rows 1 16 64 256] [--contexts 1024 8192 32768 131072]

Random weights, no scheduler and no prefill: rows are entered in the page tables as if they had been there, each with
pages of its own, and run `--steps` steps one after the other, without waiting for tokens in between. So a step's time
is the device's, or the host's time to launch where that is longer, which is printed beside it. A prefill chunk is
one row's, at the end of each context. What does not fit the arena says so.

Local layers see a window, so what a longer context adds should be the full layers' bytes alone: `bytes` are those of
weights and of all keys and values that are seen (benchmarks.scale.step_time), `share` their time at the bandwidth of a
copy in the same run, over the time measured; for prefill, FLOP at that of a large product, where that is longer.
"""

import argparse
import json
import platform
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

from benchmarks.gpu.kernels import ceilings
from benchmarks.scale.step_time import StepTime, step_time
from jswa.config import EngineConfig
from jswa.exec.runner import Runner
from jswa.exec.sizing import claim_memory
from jswa.llm import LLM
from jswa.plan import FROM_DEVICE, SAMPLING, StepPlan, TableRow
from tools.cases.hub_configs import CONFIGS

Row = dict[str, Any]
NO_EXTRAS = 2**30  # past the end of the extras tables


class Text(NamedTuple):
    """A row that is there already: its slot, positions it has run, and the pages of those and of some to come."""

    slot: int
    length: int
    pages: TableRow


def place(runner: Runner, rows: int, length: int, more: int) -> list[Text] | None:
    """Rows of so many tokens, with room for `more`, each on pages of its own; None where they do not fit."""
    layout, p = runner.layout, runner.limits.page_size
    m, end = layout.pages_per_block, length + more
    oldest = 0 if layout.reach is None else layout.reach.first_visible(max(length - 1, 0)) // p
    full = -(-end // p) if layout.full else 0
    local = -(-end // p) - oldest if layout.local else 0
    blocks = 1 + rows * local  # the first block is never used
    if blocks * m + rows * full > runner.limits.num_blocks * m or end > runner.limits.max_model_len:
        return None
    return [
        Text(
            row,
            length,
            TableRow(
                row,
                blocks * m + row * full + np.arange(full, dtype=np.int32),
                oldest,
                1 + row * local + np.arange(local, dtype=np.int32),
            ),
        )
        for row in range(rows)
    ]


def plan_of(texts: Sequence[Text], at: int, count: int, *, begin: bool) -> StepPlan:
    """The step in which each row runs `count` tokens behind its text and `at` more. `begin`: it is their first."""
    rows, none = len(texts), np.zeros((0, 3), np.int32)
    known = begin or count > 1
    return StepPlan(
        row_ids=np.array([text.slot for text in texts], np.int32),
        starts=np.array([text.length + at for text in texts], np.int32),
        counts=np.full(rows, count, np.int32),
        full_write_from=np.zeros(rows, np.int32),
        local_visible_from=np.zeros(rows, np.int32),
        samples=np.ones(rows, np.int32),
        tokens=np.arange(rows * count, dtype=np.int32) % 97 + 3 if known else np.full(rows, FROM_DEVICE, np.int32),
        sampling=greedy_columns(rows),
        full_pages=none,
        local_pages=none,
        moves=none,
        table_rows=tuple(text.pages for text in texts) if begin else (),
    )


def greedy_columns(rows: int) -> Int[np.ndarray, "R C"]:
    """Packed sampling parameters of greedy rows without penalties or constraints."""
    columns: Int[np.ndarray, "R C"] = np.zeros((rows, len(SAMPLING)), np.int32)
    for name in ("top_p", "repetition"):
        columns[:, SAMPLING.index(name)] = np.float32(1).view(np.int32)
    columns[:, SAMPLING.index("extras")] = NO_EXTRAS
    return columns


def time_steps(runner: Runner, texts: list[Text], steps: int, count: int) -> tuple[float, float]:
    """Seconds of a step, and of those the host's to launch one; a chunk is run at the same place again and again."""
    move = 1 if count == 1 else 0
    runner.launch(plan_of(texts, 0, count, begin=True)).tokens()
    plans = [plan_of(texts, move * n, count, begin=False) for n in range(1, steps + 1)]
    begin = time.perf_counter()
    pending = [runner.launch(plan) for plan in plans]
    launched = time.perf_counter() - begin
    pending[-1].tokens()
    return (time.perf_counter() - begin) / steps, launched / steps


def figures(
    runner: Runner, model: StepTime, roof: dict[str, float], shape: tuple[int, int, int], steps: int, repeats: int
) -> Row:
    """One row of the table: so many rows, at a context, which run so many tokens each."""
    rows, context, count = shape
    found: Row = {"rows": rows, "context": context, "tokens": count}
    texts = place(runner, rows, context - count, steps + count + 1)
    if texts is None or rows > runner.limits.max_rows or rows * count > runner.limits.max_tokens:
        return {**found, "why": "does not fit"}
    runs = [time_steps(runner, texts, steps, count) for _ in range(repeats + 1)][1:]
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
    """As a line of the table."""
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
    """Lines of Markdown."""
    names = ["rows", "context", "tokens a row", "step, µs", "of it to launch, µs", "at least", "of the roof"]
    return [f"| {' | '.join(names)} |", "|" + " --- |" * len(names), *map(line, rows)]


def roof_of(square: int) -> dict[str, float]:
    """What the device does at best. Before an engine takes its memory."""
    claim_memory(EngineConfig.gpu_memory_utilization)
    on_gpu = jax.devices()[0].platform == "gpu"
    roof = ceilings(jnp.dtype("bfloat16" if on_gpu else "float32"), square)
    # Bytes are counted for 16 bits; a CPU runs 32.
    return roof if on_gpu else {**roof, "copy_bytes_per_s": roof["copy_bytes_per_s"] / 2}


def measure(llm: LLM, roof: dict[str, float], args: argparse.Namespace) -> Iterator[Row]:
    """Decode steps of all sizes, then chunks."""
    runner, engine = llm.engine.runner, llm.engine
    assert isinstance(runner, Runner)
    model = step_time(engine.model, engine.limits)  # random weights are held in the run's type
    for context in args.contexts:
        for rows in args.rows:
            yield figures(runner, model, roof, (rows, context, 1), args.steps, args.repeats)
    chunk = engine.limits.max_tokens
    for context in args.contexts:
        if context >= chunk:
            yield figures(runner, model, roof, (1, context, chunk), max(2, args.steps // 8), args.repeats)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--hub", choices=sorted(CONFIGS), help="a released model's shape")
    shape.add_argument("--config", type=Path, help="a config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 130_000])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--square", type=int, default=8192, help="of the matrices and copies that give the roof")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Print, and write what was asked for."""
    args = parsed(words)
    raw = CONFIGS[args.hub] if args.hub else json.loads(args.config.read_text())
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": max(args.rows),
        "max_num_batched_tokens": max(args.max_num_batched_tokens, *args.rows),
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
    }
    roof = roof_of(args.square)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw))
        llm = LLM(folder, **options)
    with llm:
        ready = time.perf_counter() - started
        rows = list(measure(llm, roof, args))
    print("\n".join(table(rows)))
    if args.json:
        head = {"command": {name: str(value) for name, value in vars(args).items()}, "jax": jax.__version__}
        about = {
            "device": jax.devices()[0].device_kind,
            "python": platform.python_version(),
            "start_seconds": ready,
            "roof": roof,
        }
        args.json.write_text(json.dumps({**head, **about, "steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
