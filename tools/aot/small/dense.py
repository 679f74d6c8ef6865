"""Compile linear layers with weights of 4, 8 and 16 bits for an H200 on any machine; check what the compilers report.

    .venv-gpu/bin/python -m tools.aot.small.dense [--only NAME] [--write] [--sample]

Checked for each matrix: at most four spilled registers, no advice of ptxas that it serialises WGMMA or ignores
setmaxnreg, shared memory within limits, WGMMA and TMA in use, as many thread blocks on a multiprocessor as the tuning
counts with, and that nothing is worse than in gates/dense.json, which `--write` writes. The speed is not measured: the
column of times is arithmetic, the weights at the bandwidth of a copy.
"""

import argparse
import math
import sys
import time
from typing import Any

import jax

from pallas_kernels.experts import eight_bits, int4_tiles, nvfp4_tiles
from pallas_kernels.experts.dense import DensePlain, DenseTiles, matmul, plain_launch
from pallas_kernels.experts.eight_bits import DEEP, BlockTiles8
from pallas_kernels.experts.groups import ALIGN
from pallas_kernels.experts.hopper.call import plan_of
from pallas_kernels.experts.hopper.launch import Launch, Shape
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.mxfp4 import TILE
from pallas_kernels.experts.nvfp4_tiles import Nvfp4Tiles
from tools import gates
from tools.aot import device
from tools.aot.experts import BYTES_PER_SECOND
from tools.aot.facts import KernelFacts
from tools.cases.kernels.dense import (
    BLOCK_MATRICES,
    MATRICES,
    NVFP4_MATRICES,
    PLAIN_MATRICES,
    PLAIN_TOKENS,
    TOKENS,
    Matrix,
)

GATES = "dense.json"


def main() -> None:
    """Print the table. Exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only matrices whose name contains this")
    parser.add_argument("--sample", action="store_true", help="compile a decode step of 64 tokens alone")
    parser.add_argument("--write", action="store_true", help="write the gates anew")
    options = parser.parse_args()
    faults, figures = [], dict[str, dict[str, float]]()
    print(f"{'matrix':40}tile outputs blocks registers spills shared memory blocks/SM  µs of weights  seconds")
    for matrix in (*MATRICES, *NVFP4_MATRICES, *BLOCK_MATRICES, *PLAIN_MATRICES):
        for tokens in (64,) if options.sample else PLAIN_TOKENS if matrix in PLAIN_MATRICES else TOKENS:
            name, begin = f"{matrix.name}, {tokens} tokens", time.perf_counter()
            if options.only not in name:
                continue
            facts, plan = compile_matrix(matrix, tokens)
            size = matrix.inputs * matrix.outputs * 2
            if matrix not in PLAIN_MATRICES:
                size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in _tiles(matrix))
            print(
                f"{name:40}{plan.tuning.rows:4}{plan.step:8}{_blocks(plan):7}{facts.registers:10}{facts.spills:7}"
                f"{facts.smem:14}{facts.blocks_per_sm:10}{size / BYTES_PER_SECOND * 1e6:15.1f}"
                f"{time.perf_counter() - begin:9.1f}",
                flush=True,
            )
            figures[name] = dict(facts.figures)
            faults += [f"{name}: {fault}" for fault in facts.faults(plan.blocks // device.SMS)]
    if options.write:
        gates.write(figures, GATES, {"jax": jax.__version__})
    sys.exit("\n".join(faults + gates.worse(figures, GATES)) or None)


def compile_matrix(matrix: Matrix, tokens: int) -> tuple[KernelFacts, Launch]:
    """Compile one product; return its kernel and its launch."""
    if matrix in PLAIN_MATRICES:
        return _compile_plain(matrix, tokens)
    x: Any = jax.ShapeDtypeStruct((tokens, matrix.inputs), "bfloat16")  # type: ignore[no-untyped-call]
    held = DenseTiles(_tiles(matrix), device.SMS)
    with device.captured() as found:
        jax.jit(matmul, static_argnames="gated").lower(*device.on_h200((x, held)), gated=matrix.gated).compile()
    (facts,) = found
    rows: Any = jax.ShapeDtypeStruct((-(-tokens // ALIGN) * ALIGN, matrix.inputs), "bfloat16")  # type: ignore[no-untyped-call]
    return facts, plan_of(Shape.of(rows, _tiles(matrix, 1), None, matrix.gated), device.SMS)


def _tiles(matrix: Matrix, *experts: int) -> Int4Tiles | Nvfp4Tiles | BlockTiles8:
    """Return the shapes of a matrix in tiles."""

    def array(deep: int, *tile: int, kind: str) -> Any:
        return jax.ShapeDtypeStruct((*experts, matrix.outputs // TILE, matrix.inputs // deep, *tile), kind)  # type: ignore[no-untyped-call]

    if matrix in BLOCK_MATRICES:
        codes = array(TILE, eight_bits.LINES, eight_bits.LINE, kind="uint8")
        return BlockTiles8(codes, array(DEEP, kind="float32"))
    if matrix in NVFP4_MATRICES:
        factors: Any = jax.ShapeDtypeStruct((*experts, matrix.outputs), "float32")  # type: ignore[no-untyped-call]
        return Nvfp4Tiles(array(TILE, nvfp4_tiles.LINES, TILE, kind="int16"), factors)
    return Int4Tiles(array(TILE, int4_tiles.LINES, TILE, kind="int16"))


def _compile_plain(matrix: Matrix, tokens: int) -> tuple[KernelFacts, Launch]:
    first, wide = matrix.form == "head", matrix.form != "plain"
    x: Any = jax.ShapeDtypeStruct((tokens, matrix.inputs), "bfloat16")  # type: ignore[no-untyped-call]
    sides = (matrix.outputs, matrix.inputs) if first else (matrix.inputs, matrix.outputs)
    held = DensePlain(jax.ShapeDtypeStruct(sides, "bfloat16"), device.SMS, first)  # type: ignore[no-untyped-call, arg-type]
    with device.captured() as found:
        run = jax.jit(matmul, static_argnames=("gated", "wide"))
        run.lower(*device.on_h200((x, held)), gated=matrix.gated, wide=wide).compile()
    (facts,) = found
    return facts, plain_launch(tokens, held, matrix.gated, wide=wide)


def _blocks(plan: Launch) -> int:
    """Return the thread blocks of a launch."""
    return min(plan.blocks, -(-plan.rows // plan.tuning.rows) * plan.columns)


if __name__ == "__main__":
    main()
