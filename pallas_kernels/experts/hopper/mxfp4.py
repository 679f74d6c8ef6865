"""Weights of 4 bits as the left operand of a WGMMA: tiles of `experts.mxfp4` are unpacked in registers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, c
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.experts.mxfp4 import TILE, WORD_LINES, Mxfp4Joined, parted, tile_numbers
from pallas_kernels.interpreter import interpreting
from pallas_kernels.mosaic import Ref, plgpu

_WORDS = plgpu.Layout.WG_STRIDED((4, 128), vec_size=4)  # four consecutive words for each thread
LINES = plgpu.Layout.WG_STRIDED((WORD_LINES, TILE), vec_size=8)  # the same words as numbers of 16 bits
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
OPERAND = plgpu.Layout.WGMMA

# Unpacks pair {index} of the word $1 into two bfloat16. Exponent and fraction go to the lowest bits of bfloat16's
# exponent and the first bit of its fraction, which makes the numbers too small by 2^126; $2 is their scale. Shifts to
# the left run on another pipe of the GPU than shifts to the right.
UNPACK = """{{
.reg .b32 bits, sign;
{shift};
and.b32 bits, bits, 0x01C001C0;
shl.b32 sign, $1, 4 * {index};
lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
mul.rn.bf16x2 $0, bits, $2;
}}"""
SHIFTS = "shr.b32 bits, $1, 6", "shr.b32 bits, $1, 2", "shl.b32 bits, $1, 2", "shl.b32 bits, $1, 6"


def tile_operand(words: Ref, scales: Ref) -> Float[Array, "64 64"]:
    """Return a tile's numbers times 2^-SHIFT, outputs by inputs."""
    loaded = plgpu.load(words, layout=_WORDS)
    per_row = plgpu.load(scales, layout=PER_ROW, optimized=False).astype(jnp.int32)
    out: Array = (tile_numbers if interpreting() else _unpacked)(loaded, per_row)
    return out


def joined_operand(tile: Ref) -> Float[Array, "64 64"]:
    """Return the numbers times 2^-SHIFT of a tile whose scales lie behind its words, outputs by inputs."""
    words, scales = tile.at[:WORD_LINES], tile.at[WORD_LINES]
    out: Array
    if interpreting():
        lines = jnp.concatenate([words[...], scales[...][None]])
        out = tile_numbers(*parted(Mxfp4Joined(lines)))
    else:
        per_row = plgpu.load(scales, layout=PER_ROW, optimized=False).astype(jnp.int32)
        out = _unpacked_lines(plgpu.load(words, layout=LINES), per_row)
    return out


@plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
    arg_types=(_WORDS, PER_ROW),
    return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=OPERAND),
)
def _unpacked(_: Any, words: Any, scales: Any) -> Any:
    """Return `tile_numbers`, by PTX. The GPU computes exactly with the subnormal numbers that come up on the way."""
    (vector_of_words,) = words.registers.flat
    return _operand(vector_of_words, scales)


@plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
    arg_types=(LINES, PER_ROW),
    return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=OPERAND),
)
def _unpacked_lines(_: Any, lines: Any, scales: Any) -> Any:
    """Return the same of words that are loaded as numbers of 16 bits."""
    (halves,) = lines.registers.flat
    return _operand(llvm.bitcast(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)), halves), scales)


def _operand(vector_of_words: Any, scales: Any) -> Any:
    """Return the operand of a thread's four words and the scales of its rows."""
    word = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def constant(value: int) -> Any:
        return c(value, word)

    layout = OPERAND.to_mgpu()
    out = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
    pairs = out.reshape(8, 2)  # columns eight by eight, rows g and g + 8
    for row, both_scales in enumerate(scales.registers.flat):
        exponents = vector.extract(both_scales, [], [0])
        for half in range(2):
            numbers = vector.extract(vector_of_words, [], [2 * row + half])
            exponent = arith.andi(arith.shrui(exponents, constant(8 * half)), constant(255))
            scale = arith.muli(exponent, constant(0x0080_0080))  # as the exponents of two bfloat16
            for index, shift in enumerate(SHIFTS):
                instructions = UNPACK.format(shift=shift, index=index)
                unpacked = llvm.inline_asm(word, [numbers, scale], instructions, "=r,r,r")
                pairs[4 * half + index, row] = llvm.bitcast(pair, unpacked)
    return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
