"""Compile for an H200, on any machine, what would run on one; check and print what the compilers made of it.

    make gpu-compile              all decode layers of pallas_kernels.specs, then decode steps of released models
    make gpu-compile ONLY=gemma   those whose name contains it

Checked: no spilled registers, shared memory within limits, WGMMA and TMA in use. Of a step also: the state is updated
in place, nothing copies as much as a lane, and every attention kernel is part of a command buffer (CUDA graph), the
same one for all layers. Says nothing about speed.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec
from jswa.exec.state import DeviceState, state_bytes, state_shapes
from jswa.exec.step import StepConfig, step
from jswa.model.hf.config import parse_config
from jswa.model.transformer import param_shapes
from pallas_kernels.abstract import arguments
from pallas_kernels.api import paged_attention
from pallas_kernels.rows import Rows, Tiles
from pallas_kernels.specs import DECODE_LAYERS, Layer
from tests.unit.hub_configs import CONFIGS
from tools import gpu_aot
from tools.compile_facts import KernelFacts, attention_by_command_buffer, copies

BFLOAT16 = jnp.dtype("bfloat16")
KV_BYTES = 40 * 10**9  # of the steps' arenas: lanes beyond 2^31 elements
# Model, layers (cut where compiling all would take minutes), rows.
STEPS = (("gemma-3-27b", 12, 64), ("gemma-3-27b", 12, 1), ("Mistral-7B-v0.1", 32, 64))


@dataclass(frozen=True)
class StepFacts:
    """A compiled step: launches of all of it by layer, bytes of temporaries, seconds to trace, lower and compile."""

    name: str
    launches_per_layer: float
    temporaries: int
    seconds: float
    faults: list[str]


def main() -> None:
    """Print the tables; exit with 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases and steps whose name contains this")
    parser.add_argument("--json", type=Path, help="write the facts here too")
    options = parser.parse_args()
    kernels = [(layer, *compile_layer(layer)) for layer in DECODE_LAYERS if options.only in layer.name]
    print_kernels(kernels)
    steps = [compile_step(*case) for case in STEPS if options.only in step_name(*case)]
    print_steps(steps)
    if options.json:
        rows = [{"name": layer.name, "seconds": seconds, **asdict(facts)} for layer, facts, seconds in kernels]
        text = json.dumps({"jax": jax.__version__, "kernels": rows, "steps": [asdict(s) for s in steps]}, indent=1)
        options.json.write_text(text + "\n")
    faults = [f"{layer.name}: {fault}" for layer, facts, _ in kernels for fault in facts.faults()]
    faults += [f"{facts.name}: {fault}" for facts in steps for fault in facts.faults]
    sys.exit("\n".join(faults) or None)


def compile_layer(layer: Layer) -> tuple[KernelFacts, float]:
    """The layer's attention kernel, and seconds to trace, lower and compile the call."""
    given = arguments(layer, gpu_aot.h200())

    def attend(q: jax.Array, kv: jax.Array, rows: Rows, tiles: Tiles, sinks: jax.Array | None) -> jax.Array:
        out: jax.Array = paged_attention(
            q, kv, rows, tiles, slot=given.slot, attend=given.attend, sinks=sinks, implementation="mosaic"
        )
        return out

    begin = time.perf_counter()
    with gpu_aot.captured() as found:
        jax.jit(attend).lower(*given[:5]).compile()
    (facts,) = found
    return facts, time.perf_counter() - begin


def step_name(model: str, layers: int, rows: int) -> str:
    """As the table shows it."""
    return f"{model}, {layers} layers, {rows} rows"


def compile_step(name: str, layers: int, rows: int) -> StepFacts:
    """The decode step of a model of the hub."""
    model = parse_config(CONFIGS[name])
    model = replace(model, layers=model.layers[:layers])
    layout = KVLayout.of(model, 64)
    limits = Limits(model.max_position, rows, rows, page_size=64, num_blocks=KV_BYTES // layout.block_bytes(2))
    bucket = Bucket(rows, rows, decode=True)
    spec = PackSpec.of(bucket, page_size=64, max_rows=rows, targets=False)
    config = StepConfig(model, layout, bucket, spec, implementation="mosaic")
    state = gpu_aot.on_h200(state_shapes(layout, limits, model.vocab_size, BFLOAT16))
    params = gpu_aot.on_h200(param_shapes(model, BFLOAT16))
    packed = gpu_aot.on_h200(jax.eval_shape(lambda: jnp.zeros(spec.size, jnp.int32)))
    begin = time.perf_counter()
    with gpu_aot.captured() as kernels:
        compiled = jax.jit(partial(step, config=config), donate_argnums=1).lower(params, state, packed).compile()
    seconds = time.perf_counter() - begin
    launches, text, memory = gpu_aot.thunks("jit_step").splitlines(), compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    faults = [fault for facts in kernels for fault in facts.faults()]
    if memory.alias_size_in_bytes != state_bytes(state):
        faults.append(f"{memory.alias_size_in_bytes} of {state_bytes(state)} bytes of state are updated in place")
    faults += [f"copies {size} bytes" for size in copies(text) if size >= _lane_bytes(state)]
    inside = attention_by_command_buffer(launches)
    if inside != [layers]:
        faults.append(f"attention kernels by command buffer: {inside}, of {layers}")
    run = sum("kCustomKernel" in line or "kCustomCall" in line for line in launches)
    return StepFacts(step_name(name, layers, rows), run / layers, memory.temp_size_in_bytes, seconds, faults)


def _lane_bytes(state: DeviceState) -> int:
    return min(lane.size * lane.dtype.itemsize for lane in state["lanes"])


def print_kernels(kernels: list[tuple[Layer, KernelFacts, float]]) -> None:
    """One line per kernel."""
    if kernels:
        print(f"{'decode layer':34}registers spills shared memory blocks/SM threads WGMMA TMA seconds")
    for layer, facts, seconds in kernels:
        print(
            f"{layer.name:34}{facts.registers:9}{facts.spills:7}{facts.smem:14}{facts.blocks_per_sm:10}"
            f"{facts.threads:8}{facts.wgmma:6}{facts.tma:4}{seconds:8.1f}"
        )


def print_steps(steps: list[StepFacts]) -> None:
    """One line per step."""
    if steps:
        print(f"\n{'decode step':42}launches/layer temporaries, MB seconds")
    for facts in steps:
        print(f"{facts.name:42}{facts.launches_per_layer:14.1f}{facts.temporaries / 1e6:16.1f}{facts.seconds:8.1f}")


if __name__ == "__main__":
    main()
