"""Copies from global to shared memory per stage of each kernel's ring, by its default tuning. Needs no compiler.

    python -m tools.aot.measures.copies          print them, and compare them with gates/copies.json
    python -m tools.aot.measures.copies --write  write that file

A copy costs its producer 60 to 100 cycles by estimate, so few large copies are better than many small ones.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.attention.hopper import call as attention
from pallas_kernels.attention.hopper.launch import Launch
from pallas_kernels.attention.hopper.launch import Shape as AttentionShape
from pallas_kernels.attention.rows import PagedRows, QueryTiles
from pallas_kernels.experts.hopper import call as experts
from pallas_kernels.experts.hopper import kernel
from pallas_kernels.experts.hopper.launch import TILES, UNIT
from pallas_kernels.experts.hopper.launch import Launch as ExpertsLaunch
from pallas_kernels.experts.hopper.launch import Shape as ExpertsShape
from tools import gates
from tools.cases.kernels.attention_layers import LAYERS as ATTENTION
from tools.cases.kernels.attention_layers import Layer as AttentionLayer
from tools.cases.kernels.attention_shapes import arguments as of_attention
from tools.cases.kernels.experts import DECODE_TOKENS, MIDDLE_TOKENS, PREFILL_TOKENS
from tools.cases.kernels.experts import LAYERS as EXPERTS
from tools.cases.kernels.experts import Layer as ExpertsLayer
from tools.cases.kernels.experts_shapes import MATRICES, Matrix
from tools.cases.kernels.experts_shapes import arguments as of_experts

GATES = "copies.json"
SCALES = 2 * UNIT  # bytes of a tile's scales, which have copies of their own


def main() -> None:
    """Print the figures. Exit with 1 if one is worse than committed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    found = figures()
    for name, figure in found.items():
        print(f"{name:48}{figure['copies_per_stage']:4} copies a stage of at least {figure['smallest_copy']:6} bytes")
    if parser.parse_args().write:
        gates.write(found, GATES, {"jax": jax.__version__})
    sys.exit("\n".join(gates.worse(found, GATES)) or None)


def figures() -> dict[str, dict[str, int]]:
    """Return the figures of all compiled layers of attention and of all matrices of experts, by name."""
    found = {f"attention, {layer.name}": attention_copies(layer) for layer in ATTENTION}
    for layer in EXPERTS:
        for tokens in sorted({*DECODE_TOKENS, *PREFILL_TOKENS, *(MIDDLE_TOKENS if layer.overlap else ())}):
            for matrix in MATRICES:
                found[f"experts, {layer.name} {matrix}, {tokens} tokens"] = experts_copies(layer, matrix, tokens)
    return found


def attention_copies(layer: AttentionLayer) -> dict[str, int]:
    """Return the figures of a layer's attention: a copy for each page of a block of keys, with K and V."""
    given = of_attention(layer)

    def plan_of(q: Any, kv: Any, rows: PagedRows, tiles: QueryTiles) -> Launch:
        return attention.plan_of(AttentionShape.of(q, kv, rows, tiles, given.attend))

    plan = _traced(plan_of, *given[:4])
    keys = min(plan.tuning.block, plan.page)
    return {"copies_per_stage": plan.page_boxes, "smallest_copy": keys * plan.row * plan.stored.itemsize}


def experts_copies(layer: ExpertsLayer, matrix: Matrix, tokens: int) -> dict[str, int]:
    """Return the figures of a matrix of experts: copies of rows of x, and of weights."""
    given: Any = of_experts(layer, matrix, tokens)  # shapes

    def plan_of(x: Any, weights: Any, bias: Any) -> ExpertsLaunch:
        return experts.plan_of(ExpertsShape.of(x, weights, bias, given.gated))

    plan = _traced(plan_of, given.x, given.weights, given.bias)
    rows = plan.tuning.rows * UNIT * plan.tuning.depth * plan.dtype.itemsize
    weights = UNIT * plan.width * plan.dtype.itemsize
    if plan.overlaps:
        lines, line, kind = TILES[plan.held]
        weights = lines * line * kind.itemsize * plan.tuning.depth * plan.tuning.consumers
    elif plan.held == "mxfp4":
        weights = SCALES * plan.tuning.depth
    return {"copies_per_stage": kernel.scratch(plan).ring.arrivals, "smallest_copy": min(rows, weights)}


def _traced[Plan](plan: Callable[..., Plan], *shapes: Any) -> Plan:
    """Return the plan for arrays of these shapes, which exist only while it is made."""
    found: list[Plan] = []
    jax.eval_shape(lambda *arrays: found.append(plan(*arrays)), *shapes)
    return found[0]


if __name__ == "__main__":
    main()
