"""Throughput of the whole engine on a batch of prompts: tokens per second, and the host's share of the time.

    python -m benchmarks.speed.offline [--model tiny] [--prompts 32] [--input 256] [--output 128] [--json FILE]
    python -m benchmarks.speed.offline --hub gemma-3-27b [--quantization fp8]    random weights in a released shape

Prompt lengths are uniform in [shortest, input], where --shortest is half of --input unless it is given. The prefix
cache is off, and each repeat has prompts of its own, so that nothing is found anywhere. With several --output, the load
runs with each; the first one is that of the tables. A first run warms up and is not counted; the median and the range
of the next `--repeats` runs are printed. The baseline of the same run sends prompts one after another.

prefill_tokens_per_s comes from a pass of its own in which each prompt generates one token, so no step decodes.
decode_tokens_per_s counts from the step in which the last prompt got its first token. tokens_per_s is the whole load,
prompts and output.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from benchmarks import result_file
from benchmarks.engine_options import add_engine_options, engine_options
from jswa.engine import Engine
from jswa.llm import LLM
from jswa.plan import RowMask, StepPlan, StepResults
from jswa.running.stepping import PendingStep, StepRunner
from jswa.types import SamplingParams
from tools.cases.hub_configs import CONFIGS

MEMORY = ("bytes_limit", "bytes_in_use", "peak_bytes_in_use", "largest_free_block_bytes")
FIGURES = ("prefill_tokens_per_s", "decode_tokens_per_s", "tokens_per_s")


class TimedRunner:
    """A runner that adds up the seconds which the host spends launching steps and waiting for their tokens."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.launching = self.waiting = 0.0

    def launch(self, plan: StepPlan) -> "TimedStep":
        """Launch a step and count the time."""
        start = time.perf_counter()
        pending = self._runner.launch(plan)
        self.launching += time.perf_counter() - start
        return TimedStep(pending, self)


@dataclass
class TimedStep:
    """A launched step that counts the time spent waiting for its tokens."""

    pending: PendingStep
    runner: TimedRunner

    @property
    def plan(self) -> StepPlan:
        """The plan that was launched."""
        return self.pending.plan

    def finish(self, masks: tuple[RowMask, ...]) -> None:
        """Launch the second half of the step."""
        self.pending.finish(masks)

    def tokens(self) -> Int[np.ndarray, " R"]:
        """Wait for the tokens and count the time."""
        start = time.perf_counter()
        tokens = self.pending.tokens()
        self.runner.waiting += time.perf_counter() - start
        return tokens

    def results(self) -> StepResults | None:
        """Return what the step gives besides tokens."""
        return self.pending.results()


def run(engine: Engine, timed: TimedRunner, prompts: list[list[int]], output: int) -> dict[str, float]:
    """Run all prompts once, `output` tokens each. Return seconds, tokens per second, shares of the time, peak pages.

    host_share is the time in which the host did not wait for tokens; launch_share, a part of it, is the time inside
    `Runner.launch`, where a CPU also runs small programs.
    """
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(engine.request(f"{time.monotonic_ns()}-{index}", np.array(prompt, np.int32), params))
    timed.launching = timed.waiting = 0.0
    begun: set[str] = set()
    all_begun, decode_tokens, peak_full, peak_local = 0.0, 0, 0, 0
    start = time.perf_counter()
    while engine.has_work():
        events = engine.step()
        stats = engine.stats()
        peak_full, peak_local = max(peak_full, stats.full_pages), max(peak_local, stats.local_pages)
        if len(begun) == len(prompts):
            decode_tokens += len(events)
            continue
        begun |= {event.request_id for event in events}
        all_begun = time.perf_counter() - start
    total = time.perf_counter() - start
    prompt_tokens, output_tokens = sum(map(len, prompts)), output * len(prompts)
    return {
        "seconds": total,
        "decode_tokens_per_s": decode_tokens / max(total - all_begun, 1e-9),
        "tokens_per_s": (prompt_tokens + output_tokens) / total,
        "host_share": 1 - timed.waiting / total,
        "launch_share": timed.launching / total,
        "peak_full_pages": peak_full,
        "peak_local_pages": peak_local,
    }


def prefill_and_run(engine: Engine, timed: TimedRunner, prompts: list[list[int]], output: int) -> dict[str, float]:
    """Run the prompts twice, with one output token for the prefill rate and then as `run` does."""
    prefill = run(engine, timed, prompts, 1)["seconds"]
    return {"prefill_tokens_per_s": sum(map(len, prompts)) / prefill, **run(engine, timed, prompts, output)}


def median_of(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each figure."""
    return {
        name: {
            "median": statistics.median(r[name] for r in runs),
            "min": min(r[name] for r in runs),
            "max": max(r[name] for r in runs),
        }
        for name in runs[0]
    }


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder of a checkpoint, or tiny")
    parser.add_argument("--hub", choices=sorted(CONFIGS), help="random weights in this model's shape, not --model")
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts")
    parser.add_argument("--input", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest prompt")
    parser.add_argument("--output", type=int, nargs="+", default=[128], help="tokens generated for each prompt")
    parser.add_argument("--quantization", default="auto", help="storage of the weights, as of an engine")
    parser.add_argument("--repeats", type=int, default=5, help="runs that are counted")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="rows of a step")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens of a step")
    parser.add_argument(
        "--cudagraph-capture-sizes", type=int, nargs="+", default=[], help="compile these batch sizes only"
    )
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, help="result file to write")
    parser.add_argument("--plot", type=Path, help="picture to write (needs matplotlib)")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, warm it up and measure it; return the figures."""
    random = np.random.default_rng(0)
    started = time.perf_counter()
    options: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.input + max(args.output),
        "quantization": args.quantization,
        "cudagraph_capture_sizes": tuple(args.cudagraph_capture_sizes),
        "prefix_cache": False,
        **engine_options(args.engine),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.hub:
            Path(folder, "config.json").write_text(json.dumps(CONFIGS[args.hub]))
            model, options["load_format"] = folder, "dummy"
        llm = LLM(model, **options)
    with llm:
        ready = time.perf_counter() - started
        shortest = args.input // 2 if args.shortest is None else args.shortest
        lengths = random.integers(shortest, args.input + 1, args.prompts)

        def fresh() -> list[list[int]]:
            """Return prompts that have not been sent yet. Their lengths are always the same."""
            return [random.integers(3, llm.engine.model.vocab_size, n).tolist() for n in lengths]

        engine = llm.engine
        if jax.default_backend() == "gpu":
            engine.prepare(SamplingParams())  # no size is compiled while it is measured
        engine.stepping.runner = timed = TimedRunner(engine.runner)
        run(engine, timed, fresh()[:2], 4)
        by_output = {
            output: median_of([prefill_and_run(engine, timed, fresh(), output) for _ in range(args.repeats)])
            for output in args.output
        }
        batched = by_output[args.output[0]]
        alone = median_of([prefill_and_run(engine, timed, [p], args.output[0]) for p in fresh()[: args.repeats]])
        memory = jax.devices()[0].memory_stats() or {}
    return {
        "device": jax.devices()[0].device_kind,
        "start_seconds": ready,
        "memory": {name: memory[name] for name in MEMORY if name in memory},
        "batched": batched,
        "alone": alone,
        "by_output": by_output,
    }


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    batched, alone = results["batched"], results["alone"]
    for name in FIGURES:
        b, a = batched[name], alone[name]
        spread = f"({b['min']:.0f} to {b['max']:.0f})"
        print(f"{name:22} {b['median']:9.0f} {spread:18} one at a time {a['median']:9.0f}, ", end="")
        print(f"ratio {b['median'] / a['median']:.2f}")
    share = batched["host_share"]["median"]
    print(f"host {share:.0%} of the time, waiting for the device {1 - share:.0%}")
    full, local = (batched[name]["median"] for name in ("peak_full_pages", "peak_local_pages"))
    print(f"start {results['start_seconds']:.1f} s; peak pages {full:.0f} full, {local:.0f} local")


def main() -> None:
    """Measure and print; write JSON and a plot if they are asked for."""
    args = parsed()
    results = measure(args)
    show(results)
    if args.json:
        result_file.write(args.json, results)
    if args.plot:
        plot(results, args.plot)


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw bars of the throughput, batched and one at a time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3))
    for offset, kind in ((-0.2, "batched"), (0.2, "alone")):
        axes.bar([i + offset for i in range(3)], [results[kind][n]["median"] for n in FIGURES], 0.4, label=kind)
    axes.set_xticks(range(3), [n.replace("_per_s", "/s").replace("_", " ") for n in FIGURES])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
