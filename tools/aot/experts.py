"""Compile mixtures of experts for an H200 on any machine; check and print the compilers' reports.

    .venv-gpu/bin/python -m tools.aot.experts [--only NAME] [--json FILE] [--write] [--sample]

Checked for each matrix: at most four spilled registers, no advice of ptxas that it serialises WGMMA or ignores
setmaxnreg, shared memory within limits, WGMMA and TMA in use, and as many thread blocks fit on a multiprocessor as the
tuning counts with. For a whole mixture, from its router to its sum: one command buffer (CUDA graph), and no copy of a
matrix. Nothing may be worse than in gates/experts.json, which `--write` writes. The speed is not measured: bytes and
times are arithmetic.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jswa.architecture import ModelConfig, MoeConfig
from jswa.model.hf.config import parse_config
from jswa.model.moe import Experts, Moe
from pallas_kernels.experts.groups import Groups
from pallas_kernels.experts.hopper.call import grouped_matmul as hopper
from pallas_kernels.experts.hopper.call import plan_of
from pallas_kernels.experts.hopper.heuristics import clustered_tuning, shared_tuning
from pallas_kernels.experts.hopper.launch import Shape
from tools import gates
from tools.aot import device
from tools.aot.facts import KernelFacts, copies, top_level
from tools.cases.hub_configs import CONFIGS
from tools.cases.kernels.experts import (
    CLUSTER_TOKENS,
    CLUSTERED,
    DECODE_TOKENS,
    LAYERS,
    MIDDLE_TOKENS,
    PREFILL_TOKENS,
    SHARED,
    SHARED_TOKENS,
    Layer,
)
from tools.cases.kernels.experts_shapes import MATRICES, Matrix, arguments

GATES = "experts.json"
BYTES_PER_SECOND = 4.3e12  # of a copy on an H200, measured
FLOPS = 600e12  # per second, of a good grouped matmul
_BFLOAT16 = jnp.dtype("bfloat16")
# Names in CONFIGS of the layers' models.
_MODELS = {
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-20b, 4 bits": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gpt-oss-120b, 4 bits": "gpt-oss-120b",
    "gpt-oss-20b, 4 bits, overlap": "gpt-oss-20b",
    "gpt-oss-120b, 4 bits, overlap": "gpt-oss-120b",
    "MiMo-V2-Flash": "MiMo-V2-Flash/V2.5",
    "Llama-4-Scout": "Llama-4-Scout",
    "MiMo-V2-Flash, fp8": "MiMo-V2-Flash/V2.5",
    "MiMo-V2-Flash, fp8 in blocks": "MiMo-V2-Flash/V2.5",
    "Llama-4-Scout, int8": "Llama-4-Scout",
    "Llama-4-Scout, int4": "Llama-4-Scout",
    "Llama-4-Scout, int4 of float16": "Llama-4-Scout",
    "gemma-4-26B-A4B, int4": "gemma-4-26B-A4B",
    "Llama-4-Scout, nvfp4": "Llama-4-Scout",
    "gemma-4-26B-A4B, nvfp4": "gemma-4-26B-A4B",
}


@dataclass(frozen=True)
class BlockFacts:
    """A compiled mixture of experts.

    Attributes:
        experts: experts that have tokens, on average, if all are equally likely.
        megabytes: size of their weights.
        memory_us, compute_us: microseconds to read those weights, and to compute the products of all tokens, by
            arithmetic.
        launches: kernels.
        graphs: thunks that the host launches: 1 if the mixture is one command buffer.
        temporaries: bytes.
        seconds: to trace, lower and compile.
    """

    name: str
    tokens: int
    experts: float
    megabytes: float
    memory_us: float
    compute_us: float
    launches: int
    graphs: int
    temporaries: int
    seconds: float
    faults: list[str]


def main() -> None:
    """Print the tables. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layers whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the facts to this file")
    parser.add_argument("--sample", action="store_true", help="compile decode steps of 256 tokens, no whole mixtures")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    layers = [layer for layer in LAYERS if options.only in layer.name]
    tokens = (256,) if options.sample else (*DECODE_TOKENS, *PREFILL_TOKENS)
    compiled = [
        (f"{layer.name} {matrix}, {count} tokens", *compile_matrix(layer, matrix, count))
        for layer in layers
        for count in sorted({*tokens, *(MIDDLE_TOKENS if layer.overlap and not options.sample else ())})
        for matrix in MATRICES
    ]
    compiled += [
        (f"{layer.name} {matrix}, {count} tokens", *compile_matrix(layer, matrix, count))
        for variants, counts in ((CLUSTERED, CLUSTER_TOKENS), (SHARED, SHARED_TOKENS))
        for layer in variants
        for count in (() if options.sample or options.only not in layer.name else counts)
        for matrix in MATRICES
    ]
    kernels = [(name, facts, seconds) for name, facts, _, seconds in compiled]
    print_kernels(kernels)
    named = [layer for layer in layers if layer.name in _MODELS and not options.sample]
    blocks = [compile_block(layer, count) for layer in named for count in tokens]
    print_blocks(blocks)
    if options.json:
        rows = [{"name": name, "seconds": seconds, **asdict(facts)} for name, facts, seconds in kernels]
        text = json.dumps({"jax": jax.__version__, "kernels": rows, "blocks": [asdict(b) for b in blocks]}, indent=1)
        options.json.write_text(text + "\n")
    figures = {name: facts.figures for name, facts, _ in kernels}
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
    faults = [f"{name}: {fault}" for name, facts, blocks, _ in compiled for fault in facts.faults(blocks)]
    faults += gates.worse(figures, GATES)
    faults += [f"{block.name}, {block.tokens} tokens: {fault}" for block in blocks for fault in block.faults]
    sys.exit("\n".join(faults) or None)


def compile_matrix(layer: Layer, matrix: Matrix, tokens: int) -> tuple[KernelFacts, int, float]:
    """Compile one of a layer's matrices.

    Returns its kernel, the thread blocks per multiprocessor that its tuning counts with, and the seconds to trace,
    lower and compile the call.
    """
    given: Any = arguments(layer, matrix, tokens, device.h200())  # shapes
    shape = Shape.of(given.x, given.weights, given.bias, given.gated)
    special = clustered_tuning if layer.cluster > 1 else shared_tuning if layer.shared else None
    plan = plan_of(shape, device.SMS, None if special is None else special(shape, device.SMS))

    def multiply(x: jax.Array, weights: Any, groups: Groups, bias: jax.Array | None) -> jax.Array:
        out: jax.Array = hopper(x, weights, groups, bias, given.gated, plan.tuning, device.SMS)
        return out

    begin = time.perf_counter()
    with device.captured() as found:
        jax.jit(multiply).lower(*given[:4]).compile()
    (facts,) = found
    return facts, plan.blocks // device.SMS, time.perf_counter() - begin


def compile_block(layer: Layer, tokens: int) -> BlockFacts:
    """Compile the whole mixture of the layer's model, with router and shared expert."""
    model = parse_config(CONFIGS[_MODELS[layer.name]], weights=False)
    config = next(_mixtures(model))
    experts = Experts(layer.implementation, device.SMS)
    graph, held = nnx.split(nnx.eval_shape(lambda: Moe(config, model.d_model, _BFLOAT16, experts)))
    if layer.form != "plain":  # held as the values of plain parameters
        for name, matrix in zip(("gate_up", "down"), MATRICES, strict=True):
            param: Any = held[name]
            held[name] = param.replace(arguments(layer, matrix, tokens).weights)

    def step(state: nnx.State[Any, Any], x: jax.Array) -> jax.Array:
        moe: Moe = nnx.merge(graph, state)
        return moe(x)

    x = jax.ShapeDtypeStruct((tokens, model.d_model), _BFLOAT16)  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    with device.captured():
        compiled = jax.jit(step).lower(*device.on_h200((held, x))).compile()
    seconds = time.perf_counter() - begin
    text, memory, thunks = compiled.as_text(), compiled.memory_analysis(), device.thunks("jit_step")
    assert text is not None
    assert memory is not None
    outermost = top_level(thunks)
    faults = [f"copies {size} bytes" for size in copies(text) if size >= layer.d_model * layer.hidden * 2]
    if outermost != ["kCommandBuffer"]:
        faults.append(f"not one command buffer but {', '.join(outermost)}")
    busy = layer.experts * (1 - (1 - layer.top_k / layer.experts) ** tokens)
    size = layer.weight_bytes(busy)
    launches = sum(
        "kCustomKernel" in line or "kKernel" in line or "kCustomCall" in line for line in thunks.splitlines()
    )
    return BlockFacts(
        layer.name,
        tokens,
        busy,
        size / 1e6,
        size / BYTES_PER_SECOND * 1e6,
        6 * layer.d_model * layer.hidden * layer.top_k * tokens / FLOPS * 1e6,
        launches,
        len(outermost),
        memory.temp_size_in_bytes,
        seconds,
        faults,
    )


def _mixtures(model: ModelConfig) -> Iterator[MoeConfig]:
    found = (layer.side.moe if layer.side is not None else layer.mlp for layer in model.layers)
    return (mixture for mixture in found if isinstance(mixture, MoeConfig))


def print_kernels(kernels: list[tuple[str, KernelFacts, float]]) -> None:
    """Print a line per kernel."""
    if kernels:
        print(f"{'matrix':48}registers spills shared memory blocks/SM threads WGMMA TMA seconds")
    for name, facts, seconds in kernels:
        print(
            f"{name:48}{facts.registers:9}{facts.spills:7}{facts.smem:14}{facts.blocks_per_sm:10}"
            f"{facts.threads:8}{facts.wgmma:6}{facts.tma:4}{seconds:8.1f}"
        )


def print_blocks(blocks: list[BlockFacts]) -> None:
    """Print a line per mixture and number of tokens."""
    if blocks:
        print(f"\n{'':38}{'experts,':>8}{'weights,':>9}{'µs at':>9}{'µs at':>12}{'temporaries,':>28}")
        print(
            f"{'mixture':32}{'tokens':>6}{'mean':>8}{'MB':>9}{'4.3 TB/s':>9}{'600 TFLOP/s':>12}{'launches':>9}"
            f"{'graphs':>7}{'MB':>12}{'seconds':>8}"
        )
    for facts in blocks:
        print(
            f"{facts.name:32}{facts.tokens:6}{facts.experts:8.1f}{facts.megabytes:9.0f}{facts.memory_us:9.0f}"
            f"{facts.compute_us:12.0f}{facts.launches:9}{facts.graphs:7}{facts.temporaries / 1e6:12.1f}"
            f"{facts.seconds:8.1f}"
        )


if __name__ == "__main__":
    main()
