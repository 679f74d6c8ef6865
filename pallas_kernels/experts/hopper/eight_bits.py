"""Weights of 8 bits as the left operand of a WGMMA: tiles of `experts.eight_bits` are widened in registers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, c
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.experts.eight_bits import LINE, LINES, TILE, tile_numbers
from pallas_kernels.experts.hopper.mxfp4 import OPERAND
from pallas_kernels.interpreter import interpreting
from pallas_kernels.mosaic import Ref, plgpu
from pallas_kernels.quantized import Kind

_CODES = plgpu.Layout.WG_STRIDED((LINES, LINE), vec_size=16)  # 16 bytes for each thread, twice

# Each text widens one pair of the word $1, in order: the bytes 0 and 2 (first), or 1 and 3.
#
# int8: seven bits behind the exponent of 128 are 128 and their number. 128 is taken away, or 256, if the sign is set:
# then the sign, in the lowest bit of the exponent, makes 256 of 128.
_INT8 = """{{
.reg .b32 word, number, base;
shr.b32 word, $1, {shift};
lop3.b32 number, word, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 base, word, 0x00800080, 0x43004300, 0xEA;
sub.rn.bf16x2 $0, number, base;
}}"""
# e4m3: exponent and fraction go to the lowest bits of bfloat16's exponent and the first bits of its fraction, which
# makes the numbers too small by 2^120; $2 is that. Below the normal range the GPU computes exactly too.
_FP8 = """{{
.reg .b32 bits, sign;
{shift};
and.b32 bits, bits, 0x07F007F0;
shl.b32 sign, $1, {sign};
lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
mul.rn.bf16x2 $0, bits, $2;
}}"""
WIDEN: dict[Kind, tuple[str, str]] = {
    "int8": (_INT8.format(shift=0), _INT8.format(shift=8)),
    "fp8": (_FP8.format(shift="shl.b32 bits, $1, 4", sign=8), _FP8.format(shift="shr.b32 bits, $1, 4", sign=0)),
}
FACTOR = 0x7B80_7B80  # 2^120 twice


def tile_operand(tile: Ref, kind: Kind) -> Float[Array, "64 64"]:
    """Return a tile's numbers without their scales, outputs by inputs."""
    if interpreting():
        return tile_numbers(tile[...])
    widened = _widened_int8 if kind == "int8" else _widened_fp8
    out: Array = widened(plgpu.load(tile, layout=_CODES))
    return out


def _widened(kind: Kind) -> Any:
    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(_CODES,),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=OPERAND),
    )
    def widen(_: Any, codes: Any) -> Any:
        """Return `tile_numbers`, by PTX."""
        word = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        layout = OPERAND.to_mgpu()
        out = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
        pairs = out.reshape(8, 2)  # columns eight by eight, rows g and g + 8
        for row, held in enumerate(codes.registers.flat):
            words = llvm.bitcast(ir.VectorType.get((4,), word), held)
            for column in range(8):
                own = vector.extract(words, [], [column // 2])
                text = WIDEN[kind][column % 2]
                widened = llvm.inline_asm(word, [own, c(FACTOR, word)], text, "=r,r,r")
                pairs[column, row] = llvm.bitcast(pair, widened)
        return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return widen


_widened_int8, _widened_fp8 = _widened("int8"), _widened("fp8")
