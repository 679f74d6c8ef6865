"""What `deterministic=True` costs, where rows are computed alone, and where every step has the largest shape.

    python -m benchmarks.speed.deterministic [--max-num-batched-tokens 64 512] [--kernels xla] [--json FILE]

For each size of steps, two engines in one process take turns with the same prompts: a usual one (the baseline) and a
deterministic one. With `--kernels xla` both add up on XLA, so that the second has one batch shape. Loads are one
request, and as many as there are rows. The prefix cache is off. Printed are medians and ranges of the tokens per
second, and of the ratios of the paired runs. CPU time is measured, too: it says more than the clock if the machine has
other work.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import result_file
from benchmarks.speed.offline import TimedRunner, run
from benchmarks.speed.speculation import run_until_compiled
from jswa.engine import Engine
from jswa.llm import LLM

ROWS = 16
LOADS = {"one request": 1, "full batch": ROWS}


def timed_run(engine: Engine, timed: TimedRunner, prompts: list[list[int]], output: int) -> dict[str, float]:
    """Run prompts once; return tokens per second, and milliseconds of CPU time per token."""
    before = time.process_time()
    found = run(engine, timed, prompts, output)
    cpu = time.process_time() - before
    tokens = sum(map(len, prompts)) + output * len(prompts)
    return {"tokens_per_s": found["tokens_per_s"], "cpu_ms_per_token": 1e3 * cpu / tokens}


def compare(model: str, step_tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each load: the paired runs of both engines, the usual one first."""
    options: dict[str, Any] = {
        "max_num_seqs": ROWS, "max_num_batched_tokens": step_tokens, "max_model_len": args.input + args.output,
        "prefix_cache": False, "kernels": args.kernels,
    }  # fmt: skip
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    with LLM(model, **options) as usual, LLM(model, **options, deterministic=True) as same:
        engines = []
        for llm in (usual, same):
            engine = llm.engine
            engine.stepping.runner = timed = TimedRunner(engine.runner)
            engines.append((engine, timed))
        for load, count in LOADS.items():
            prompts = [random.integers(3, usual.engine.model.vocab_size, args.input).tolist() for _ in range(count)]
            run_until_compiled([(one[0], partial(timed_run, *one, prompts, args.output)) for one in engines])
            runs = [[timed_run(*one, prompts, args.output) for one in engines] for _ in range(args.repeats)]
            first, second = zip(*runs, strict=True)
            rows.append({"load": load, "step_tokens": step_tokens, "usual": first, "deterministic": second})
    return rows


def spread(numbers: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def ratios(row: dict[str, Any], figure: str) -> list[float]:
    """Return how many times as slow each deterministic run was as the run before it."""
    pairs = zip(row["usual"], row["deterministic"], strict=True)
    return [b[figure] / a[figure] if figure.startswith("cpu") else a[figure] / b[figure] for a, b in pairs]


def main() -> None:
    """Measure and print; write JSON if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder of a checkpoint, or tiny")
    parser.add_argument("--max-num-batched-tokens", type=int, nargs="+", default=[64, 512], help="tokens of a step")
    parser.add_argument("--kernels", default="auto", help="of both engines")
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--repeats", type=int, default=5, help="paired runs that are counted")
    parser.add_argument("--json", type=Path, help="result file to write")
    args = parser.parse_args()
    rows = [row for size in args.max_num_batched_tokens for row in compare(args.model, size, args)]
    for row in rows:
        row["times_as_slow"] = spread(ratios(row, "tokens_per_s"))
        row["times_the_cpu"] = spread(ratios(row, "cpu_ms_per_token"))
        speeds = [spread([one["tokens_per_s"] for one in row[name]]) for name in ("usual", "deterministic")]
        texts = [f"{one['median']:.0f} ({one['min']:.0f} to {one['max']:.0f})" for one in speeds]
        slow, cpu = row["times_as_slow"], row["times_the_cpu"]
        print(f"steps of {row['step_tokens']}, {row['load']}: {texts[0]} tokens/s, deterministic {texts[1]}, ", end="")
        print(f"{slow['median']:.2f} times as slow ({slow['min']:.2f} to {slow['max']:.2f}), ", end="")
        print(f"{cpu['median']:.2f} times the CPU time ({cpu['min']:.2f} to {cpu['max']:.2f})")
    if args.json:
        result_file.write(args.json, {"device": jax.devices()[0].device_kind, "rows": rows})


if __name__ == "__main__":
    main()
