"""Integers of 4 bits as the left operand of a WGMMA: tiles of `experts.int4_tiles` are dequantized in registers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, c
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.experts.hopper.mxfp4 import LINES, OPERAND, PER_ROW
from pallas_kernels.experts.int4_tiles import WIDE_LINES, tile_numbers
from pallas_kernels.experts.mxfp4 import TILE, WORD_LINES
from pallas_kernels.interpreter import interpreting
from pallas_kernels.mosaic import Ref, plgpu

# Dequantizes pair {index} of the word $1: four bits behind the exponent of 128 are 128 and the code; $2 is 128 and the
# zero point, and their difference is exact. $3 is the scale; $4 its rest, whose product with the difference is exact.
DEQUANTIZE = """{{
.reg .b32 codes;
shr.b32 codes, $1, 12 - 4 * {index};
lop3.b32 codes, codes, 0x000F000F, 0x43004300, 0xEA;
sub.rn.bf16x2 codes, codes, $2;
mul.rn.bf16x2 $0, codes, $3;
}}"""
DEQUANTIZE_WIDE = DEQUANTIZE.replace(
    "mul.rn.bf16x2 $0, codes, $3;",
    ".reg .b32 rest;\nmul.rn.bf16x2 rest, codes, $4;\nfma.rn.bf16x2 $0, codes, $3, rest;",
)


def tile_operand(tile: Ref) -> Float[Array, "64 64"]:
    """Return a tile's numbers, outputs by inputs."""
    if interpreting():
        return tile_numbers(tile[...])
    per_row = [
        plgpu.load(tile.at[line], layout=PER_ROW, optimized=False).astype(jnp.int32)
        for line in range(WORD_LINES, tile.shape[0])
    ]
    dequantized = _dequantized_wide if tile.shape[0] == WIDE_LINES else _dequantized
    out: Array = dequantized(plgpu.load(tile.at[:WORD_LINES], layout=LINES), *per_row)
    return out


_RESULT = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=OPERAND)


@plgpu.inline_mgpu(arg_types=(LINES, *[PER_ROW] * 3), return_type=_RESULT)  # type: ignore[untyped-decorator]
def _dequantized(_: Any, lines: Any, first: Any, second: Any, zeros: Any) -> Any:
    """Return `tile_numbers`, by PTX, of the scales of the first and the second half of the inputs."""
    return _operand(DEQUANTIZE, lines, zeros, [(first, second)])


@plgpu.inline_mgpu(arg_types=(LINES, *[PER_ROW] * 5), return_type=_RESULT)  # type: ignore[untyped-decorator]
def _dequantized_wide(
    _: Any, lines: Any, first: Any, second: Any, zeros: Any, first_rest: Any, second_rest: Any
) -> Any:
    """Return the same of scales that are sums of two."""
    return _operand(DEQUANTIZE_WIDE, lines, zeros, [(first, second), (first_rest, second_rest)])


def _operand(text: str, lines: Any, zeros: Any, scales: list[tuple[Any, Any]]) -> Any:
    """Return the operand of a thread's words, zero points, and parts of scales for both halves of the inputs."""
    word = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def constant(value: int) -> Any:
        return c(value, word)

    def twice(low: Any) -> Any:
        """Return the low 16 bits in both halves."""
        return arith.muli(arith.andi(low, constant(0xFFFF)), constant(0x0001_0001))

    (halves,) = lines.registers.flat
    words = llvm.bitcast(ir.VectorType.get((4,), word), halves)
    layout = OPERAND.to_mgpu()
    out = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
    pairs = out.reshape(8, 2)  # columns eight by eight, rows g and g + 8
    for row in range(2):
        both = vector.extract(zeros.registers.flat[row], [], [0])
        for half in range(2):
            numbers = vector.extract(words, [], [2 * row + half])
            factors = [twice(vector.extract(part[half].registers.flat[row], [], [0])) for part in scales]
            zero = arith.andi(arith.shrui(both, constant(8 * half)), constant(255))
            base = arith.addi(twice(zero), constant(0x4300_4300))
            for index in range(4):
                operands = [numbers, base, *factors]
                constraints = ",".join(["=r", *"r" * len(operands)])
                dequantized = llvm.inline_asm(word, operands, text.format(index=index), constraints)
                pairs[4 * half + index, row] = llvm.bitcast(pair, dequantized)
    return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
