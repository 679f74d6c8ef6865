"""The default tuning of the Triton kernel. Imports no Triton."""

from pallas_kernels.attention.splits import splits
from pallas_kernels.attention.triton.tuning import LEAST, Shape, Tuning, power_of_two

_STAGE_BYTES = 24_576  # K and V of a block
SMS = 108  # multiprocessors of an A100, for callers that name no other number


def default_tuning(shape: Shape, sms: int = SMS) -> Tuning:
    """Choose a tuning by the compiler's reports (`python -m tools.aot.triton`), not by measurements.

    * As many rows as the tile has, but at most 64, 32 for wide heads, and 16 in float32, which has no matrix units.
    * Blocks of keys whose K and V take up to 24 KB: two of them and the queries fit into the shared memory of an L4.
    * Five stages: page ids, then keys and values two turns ahead. With three, Triton waits for all copies before it
      computes anything, so nothing is copied meanwhile.
    * As many warps as keep at most 64 numbers of the result in the registers of a thread.
    * Splits by `splits.splits`, for two thread blocks on each multiprocessor.

    Args:
        sms: multiprocessors of the GPU.
    """
    size = shape.dtype.itemsize
    most_rows = 16 if size == 4 else 32 if shape.v_dim > 256 else 64
    rows = min(power_of_two(shape.queries * shape.group), most_rows)
    keys = _STAGE_BYTES // ((shape.head_dim + shape.v_dim) * size)
    block = max(LEAST, min(64, 1 << (keys.bit_length() - 1 if keys else 0)))
    warps = max(4, rows * power_of_two(shape.v_dim) // (32 * 64))
    units = shape.tiles * shape.chunks(rows) * shape.kv_heads
    return Tuning(rows, block, warps, stages=5, splits=splits(shape.most_blocks(rows, block), units, 2 * sms))
