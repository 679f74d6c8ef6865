"""Compile attention and whole steps for an H200 on any machine; check and print the compilers' reports.

    make gpu-compile              attention of released models (tools.cases.kernels.attention_layers), then whole steps
    make gpu-compile ONLY=gemma   only those whose name contains it
    make gpu-compile-sample       a few of them

`make gpu-compile` runs this module in parts, side by side.

Checked for each kernel: at most four spilled registers, no advice of ptxas that it serialises WGMMA or ignores
setmaxnreg, shared memory within limits, WGMMA and TMA in use, descriptors of TMA that the driver accepts. For a step
also: the state is updated in place, no copy is as large as a lane, a decode step is one command buffer (CUDA graph),
the number of kernels that compute indices does not grow with the model's depth, and a decode step of 64 rows or fewer
moves at most 1.15 times the bytes that must move. Nothing may be worse than in gates/attention.json and
gates/steps.json, which `--write` writes: registers by the thread blocks that fit, kernels in a layer, bytes, arrays as
large as the logits. The speed is not measured.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax

from pallas_kernels.attention.hopper import call, splits, whole
from pallas_kernels.attention.hopper.launch import Launch, Shape
from pallas_kernels.attention.rows import PagedRows, QueryTiles
from tools import gates
from tools.aot import device
from tools.aot.facts import KernelFacts
from tools.aot.step_specs import SAMPLE_STEPS, STEPS
from tools.aot.steps import compile_step, printed
from tools.cases.kernels.attention_layers import LAYERS, SPLIT_LAYERS, WHOLE_LAYERS, Layer
from tools.cases.kernels.attention_shapes import arguments

GATES, KERNEL_GATES = "steps.json", "attention.json"
SAMPLE = (
    *("gemma-3-27b local", "gpt-oss-20b full, one row", "gemma-4-31B full", "fp8, gemma-3-27b local"),
    *("splits, gpt-oss-20b full", "splits, prefill, gemma-3-27b full", "prefill, gemma-3-27b full"),
    *("prefill, gpt-oss-20b local", "prefill, MiMo-V2-Flash local"),
)


def main() -> None:
    """Print the tables. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layers and steps whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the facts to this file")
    parser.add_argument(
        "--sample", action="store_true", help="compile a few kernels and shallow steps, which takes about a minute"
    )
    parser.add_argument("--steps", action="store_true", help="compile steps alone")
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N", help="every N-th layer and step, from I on")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    named = [layer for layer in (*LAYERS, *SPLIT_LAYERS, *WHOLE_LAYERS) if options.only in layer.name]
    layers = [layer for layer in named if not options.steps and (not options.sample or layer.name in SAMPLE)]
    first, every = options.part
    kernels = [(layer, *compile_layer(layer)) for layer in layers[first::every]]
    print_kernels(kernels)
    specs = [spec for spec in (SAMPLE_STEPS if options.sample else STEPS) if options.only in spec.name]
    steps = list(printed(map(compile_step, specs[first::every])))
    if options.json:
        rows = [{"name": layer.name, "seconds": seconds, **asdict(facts)} for layer, facts, seconds in kernels]
        text = json.dumps({"jax": jax.__version__, "kernels": rows, "steps": [asdict(s) for s in steps]}, indent=1)
        options.json.write_text(text + "\n")
    figures = {facts.name: facts.figures for facts in steps}
    of_kernels = {layer.name: facts.figures for layer, facts, _ in kernels}
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
        gates.write(of_kernels, KERNEL_GATES, {"jax": jax.__version__})
    faults = [f"{layer.name}: {fault}" for layer, facts, _ in kernels for fault in facts.faults(workers_of(layer))]
    faults += [f"{facts.name}: {fault}" for facts in steps for fault in facts.faults]
    faults += gates.worse(figures, GATES) + gates.worse(of_kernels, KERNEL_GATES)
    sys.exit("\n".join(faults) or None)


def part(text: str) -> tuple[int, int]:
    """Return I and N of "I/N". Raises ValueError unless 0 <= I < N."""
    first, every = map(int, text.split("/"))
    if not 0 <= first < every:
        raise ValueError(text)
    return first, every


def compile_layer(layer: Layer) -> tuple[KernelFacts, float]:
    """Compile a layer's attention. Return its kernel, and the seconds to trace, lower and compile the call.

    Of prompts on "mosaic_splits" that is the kernel of tiles of several tokens; rows of one token have that of decode.
    """
    given, tuning = arguments(layer, device.h200()), plan_of(layer).tuning

    def attend(q: jax.Array, kv: jax.Array, rows: PagedRows, tiles: QueryTiles, sinks: jax.Array | None) -> jax.Array:
        out: jax.Array = call.paged_attention(
            q, kv, rows, tiles, layer_index=given.layer_index, attend=given.attend, sinks=sinks, tuning=tuning
        )
        return out

    begin = time.perf_counter()
    with device.captured() as found:
        jax.jit(attend).lower(*given[:5]).compile()
    (facts,) = found
    return facts, time.perf_counter() - begin


def plan_of(layer: Layer) -> Launch:
    """Return the launch of a layer."""
    given = arguments(layer)
    shape = Shape.of(given.q, given.kv, given.rows, given.tiles, given.attend)
    plans = {"mosaic": call.plan_of, "mosaic_splits": splits.plan_of, "mosaic_whole": whole.plan_of}
    return plans[layer.implementation](shape, device.SMS)


def workers_of(layer: Layer) -> int:
    """Return the thread blocks that must fit on a multiprocessor: those that share a work list, or one."""
    return max(1, plan_of(layer).tuning.workers // device.SMS)


def print_kernels(kernels: list[tuple[Layer, KernelFacts, float]]) -> None:
    """Print a line per kernel."""
    if kernels:
        print(f"{'layer':42}registers spills shared memory blocks/SM threads WGMMA TMA seconds")
    for layer, facts, seconds in kernels:
        print(
            f"{layer.name:42}{facts.registers:9}{facts.spills:7}{facts.smem:14}{facts.blocks_per_sm:10}"
            f"{facts.threads:8}{facts.wgmma:6}{facts.tma:4}{seconds:8.1f}"
        )


if __name__ == "__main__":
    main()
