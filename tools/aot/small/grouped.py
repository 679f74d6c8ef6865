"""Compile the Triton grouped product for NVIDIA GPUs on any machine; check and print the compilers' reports.

    .venv-gpu/bin/python -m tools.aot.small.grouped [--only NAME] [--gpu l4] [--write]

Checked: no spilled registers, shared memory within limits, matrix units in use, asynchronous copies that run while the
kernel computes, and that nothing is worse than in gates/grouped.json, which `--write` writes. Numbers of tokens that
lead to one tuning share a kernel, which is compiled once. A whole mixture, with routing by plain JAX, is one command
buffer (CUDA graph) that copies no matrix. The speed is not measured.
"""

import argparse
import sys
import time
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jswa.architecture import MoeConfig, RouterConfig
from jswa.model.moe import Experts, Moe
from pallas_kernels.experts.api import grouped_matmul, variant
from pallas_kernels.experts.groups import Groups
from tools import gates
from tools.aot import device, triton
from tools.aot.facts import copies, top_level
from tools.aot.triton_facts import Gpu, TritonFacts, gpu
from tools.cases.kernels.experts import TRITON_GPUS, TRITON_LAYERS, TRITON_TOKENS, Layer
from tools.cases.kernels.experts_shapes import MATRICES, Matrix, arguments

GATES = "grouped.json"
_ROWS = 64  # of the decode step


def main() -> None:
    """Print the table. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--gpu", default=TRITON_GPUS, nargs="+", help="names of files in pallas_kernels/tuning")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    faults, figures = [], dict[str, dict[str, float]]()
    layers = [layer for layer in TRITON_LAYERS if options.only in layer.name]
    for card in map(gpu, options.gpu):
        print(f"{card.name + ', ' + card.arch:38}registers spills shared memory blocks/SM threads mma copies seconds")
        seen: set[Hashable] = set()
        for layer in layers:
            for matrix in MATRICES:
                for tokens in TRITON_TOKENS:
                    given: Any = arguments(layer, matrix, tokens)
                    kernel = variant(given.x, given.weights, given.bias, given.gated, "triton")
                    if kernel in seen:
                        continue
                    seen.add(kernel)
                    begin = time.perf_counter()
                    facts = compile_matrix(layer, matrix, tokens, card)
                    name = f"{layer.name} {matrix}, {tokens} tokens, {card.name}"
                    blocks, seconds = facts.blocks_per_sm(card), time.perf_counter() - begin
                    print(
                        f"{name:38}{facts.registers:9}{facts.spills:7}{facts.smem:14}{blocks:10}{facts.threads:8}"
                        f"{facts.products:4}{facts.under_way:7}{seconds:8.1f}",
                        flush=True,
                    )
                    faults += [f"{name}: {fault}" for fault in facts.faults(card)]
                    figures[name] = {"spills": facts.spills, "smem": facts.smem, "blocks_per_sm": blocks}
        faults += [fault for layer in layers for fault in mixture_faults(layer, card)]
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
    sys.exit("\n".join([*faults, *gates.worse(figures, GATES)]) or None)


def compile_matrix(layer: Layer, matrix: Matrix, tokens: int, card: Gpu) -> TritonFacts:
    """Compile one of a layer's matrices, and return its kernel."""
    with triton.compiling_for(card) as sharding:
        given: Any = arguments(layer, matrix, tokens, sharding)

        def multiply(x: jax.Array, weights: jax.Array, groups: Groups, bias: jax.Array | None) -> jax.Array:
            out: jax.Array = grouped_matmul(
                x, weights, groups, bias=bias, gated=given.gated, implementation="triton", sms=card.sms
            )
            return out

        triton.forget_kernels()
        jax.jit(multiply).lower(*given[:4]).compile()
    (dump,) = triton.dumped()
    return triton.read_facts(dump, card)


def mixture_faults(layer: Layer, card: Gpu) -> list[str]:
    """Compile the layer's mixture for a decode step, from its router to its sum. Return what is wrong with it."""
    moe = MoeConfig(layer.experts, layer.top_k, layer.hidden, "silu", RouterConfig("softmax"), bias=layer.bias)
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Moe(moe, layer.d_model, jnp.dtype("bfloat16"), Experts("triton", sms=card.sms)))
    )

    def step(state: nnx.State[Any, Any], x: jax.Array) -> jax.Array:
        made: Moe = nnx.merge(graph, state)
        return made(x)

    with triton.compiling_for(card) as sharding:
        x = jax.ShapeDtypeStruct((_ROWS, layer.d_model), jnp.bfloat16)  # type: ignore[no-untyped-call]
        triton.forget_kernels()
        compiled = jax.jit(step).lower(*triton.placed((state, x), sharding)).compile()
    text, thunks = compiled.as_text(), device.thunks("jit_step")
    assert text is not None
    launched, products = top_level(thunks), len(triton.dumped())
    name, smallest = f"{layer.name}, {_ROWS} tokens, {card.name}", 2 * layer.d_model * layer.hidden
    print(f"{name:38}{', '.join(launched)} with {products} grouped products", flush=True)
    return [
        *(f"{name}: copies {size} bytes" for size in copies(text) if size >= smallest),
        *([f"{name}: not one command buffer but {', '.join(launched)}"] if launched != ["kCommandBuffer"] else []),
        *([f"{name}: {products} grouped products, not two"] if products != 2 else []),
    ]


if __name__ == "__main__":
    main()
