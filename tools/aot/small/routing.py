"""Compile routing for an H200 on any machine; check and print the compilers' reports.

    .venv-gpu/bin/python -m tools.aot.small.routing [--only NAME] [--write]

Checked: no spilled registers, and that nothing is worse than in gates/routing.json, which `--write` writes: spills,
shared memory, thread blocks on a multiprocessor, and kernels. The speed is not measured.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jswa.model.fused_products import FEW_TOKENS
from pallas_kernels.experts.groups import ALIGN, Tiling, row_count
from pallas_kernels.experts.routing import api
from pallas_kernels.experts.routing.arguments import RouterWeights
from tools import gates
from tools.aot import triton
from tools.aot.small.sampling import name_of
from tools.aot.triton_facts import TritonFacts, gpu
from tools.cases.kernels.small.routing import LAYERS, TOKENS, Case

GATES = "routing.json"
KERNELS = ("route", "choose", "place")


def main() -> None:
    """Print the table. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    card, faults, figures = gpu("h200"), [], dict[str, dict[str, float]]()
    print(f"{'router':28}{'kernel':10}registers spills shared memory blocks/SM")
    for layer in (layer for layer in LAYERS if options.only in layer.name):
        for tokens in TOKENS:
            name = f"{layer.name}, {tokens} tokens"
            few = tokens <= FEW_TOKENS
            found = compile_call(
                replace(layer, tokens=tokens, parts=layer.parts if few else 1, width=layer.width if few else 0)
            )
            for kernel, facts in found.items():
                blocks = facts.blocks_per_sm(card)
                print(f"{name:28}{kernel:10}{facts.registers:9}{facts.spills:7}{facts.smem:14}{blocks:10}", flush=True)
                figures[f"{kernel}, {name}"] = {"spills": facts.spills, "smem": facts.smem, "blocks_per_sm": blocks}
                faults += [f"{kernel}, {name}: {facts.spills} bytes spilled"] if facts.spills else []
            figures[name] = {"kernels": len(found)}
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
    sys.exit("\n".join([*faults, *gates.worse(figures, GATES)]) or None)


def compile_call(case: Case) -> dict[str, TritonFacts]:
    """Compile a call with two lists of tiles, of 16 rows and of 32. Return its kernels by name."""
    card = gpu("h200")
    rows = row_count(case.tokens * case.router.top_k, case.experts)
    most = min(case.experts, rows // ALIGN)
    tilings = tuple(Tiling(size, rows // size + most) for size in (16, 32) if size <= rows)

    with triton.compiling_for(card) as sharding:

        def of(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]

        def call(parts: Any, weights: RouterWeights, x: Any) -> Any:
            return api.route(parts, case.router, weights, tilings, x, scaled=case.scaled)

        held = (of(case.experts) if has else None for has in (case.bias, case.selection, case.scale))
        weights, parts = RouterWeights(*held), of(case.parts, case.tokens, case.experts)
        x = of(case.tokens, case.width, dtype=jnp.bfloat16) if case.width else None
        triton.forget_kernels()
        jax.jit(call).lower(parts, weights, x).compile()
    return {name_of(dump, KERNELS): triton.read_facts(dump, card) for dump in sorted(triton.dumped())}


if __name__ == "__main__":
    main()
