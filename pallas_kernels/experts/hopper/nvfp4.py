"""NVFP4 as the left operand of a WGMMA: tiles of `experts.nvfp4_tiles` are unpacked in registers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.experts.hopper.mxfp4 import LINES, OPERAND, PER_ROW, SHIFTS, UNPACK
from pallas_kernels.experts.mxfp4 import TILE, WORD_LINES
from pallas_kernels.experts.nvfp4_tiles import BIAS, tile_numbers
from pallas_kernels.interpreter import interpreting
from pallas_kernels.mosaic import Ref, plgpu

# Brings a byte of $1, a scale in e5m3, to both halves of a word, as the first bits of a bfloat16 behind its sign;
# the sum makes it 2^(126 - SHIFT) times the scale.
SCALE = """{{
.reg .b32 held;
prmt.b32 held, $1, 0, {select};
mad.lo.u32 $0, held, 16, {bias};
}}"""
SELECT = 0x4040, 0x4141  # byte 0 or 1, and zeros between


def tile_operand(tile: Ref) -> Float[Array, "64 64"]:
    """Return a tile's code · scale times 2^-SHIFT, outputs by inputs."""
    if interpreting():
        return tile_numbers(tile[...])
    first, second = (
        plgpu.load(tile.at[line], layout=PER_ROW, optimized=False).astype(jnp.int32)
        for line in (WORD_LINES, WORD_LINES + 1)
    )
    out: Array = _unpacked(plgpu.load(tile.at[:WORD_LINES], layout=LINES), first, second)
    return out


@plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
    arg_types=(LINES, PER_ROW, PER_ROW),
    return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=OPERAND),
)
def _unpacked(_: Any, lines: Any, first: Any, second: Any) -> Any:
    """Return `tile_numbers`, by PTX, of the scales of the first and the second half of the inputs.

    A word has 32 inputs of a row, and its pairs 0 and 1 the first 16 of them. The GPU computes exactly with the
    subnormal numbers that come up on the way.
    """
    word = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    (halves,) = lines.registers.flat
    words = llvm.bitcast(ir.VectorType.get((4,), word), halves)
    layout = OPERAND.to_mgpu()
    out = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
    pairs = out.reshape(8, 2)  # columns eight by eight, rows g and g + 8
    for row in range(2):
        for half, scales in enumerate((first, second)):
            numbers = vector.extract(words, [], [2 * row + half])
            both = vector.extract(scales.registers.flat[row], [], [0])
            for group in range(2):
                scale = llvm.inline_asm(
                    word, [both], SCALE.format(select=SELECT[group], bias=BIAS * 0x0001_0001), "=r,r"
                )
                for index in (2 * group, 2 * group + 1):
                    instructions = UNPACK.format(shift=SHIFTS[index], index=index)
                    unpacked = llvm.inline_asm(word, [numbers, scale], instructions, "=r,r,r")
                    pairs[4 * half + index, row] = llvm.bitcast(pair, unpacked)
    return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
