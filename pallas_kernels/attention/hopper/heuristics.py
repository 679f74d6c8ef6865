"""The tile size of the Hopper attention kernel, and the default tuning of shapes that were not measured."""

from dataclasses import replace

from pallas_kernels.attention.hopper.plan import Launch, Shape, Tuning
from pallas_kernels.attention.splits import splits
from pallas_kernels.errors import NoKernel
from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_SMEM_BYTES, SMEM_BYTES, SMS, WARPGROUP_ROWS

_MOST_STAGES = 4
SPLIT_KEYS = 1_024  # of a work list: a thread block reads them in some 16 µs if all run, in 5 if few do
_FEW_KEYS = 2_048  # queries that see no more are not split, where a row's splits are its own
_FEW_BLOCKS = 6  # of keys: fewer do not make up for a thread block's start and end


def tile_tokens(group: int) -> int:
    """Return the query tokens per tile that fill a thread block of two consumers with 128 rows."""
    return max(1, 2 * WARPGROUP_ROWS // group)


def list_tuning(shape: Shape, sms: int = SMS) -> Tuning | None:
    """Return the tuning of a work list, or None if the shape's queries see few keys.

    Block and stages are those of `default_tuning`. As many thread blocks as run at once share the list.

    Raises NoKernel for values of more than 256 columns, whose two consumers spill registers around the loop over the
    list, and if parts of a result in float32 do not fit into shared memory.
    """
    if shape.most_blocks(1, shape.queries) <= _FEW_KEYS:
        return None
    base = default_tuning(shape, sms, split=2)  # whose output is staged in float32 too
    plan = Launch.of_shape(shape, base)
    if shape.column_parts > 1 or plan.smem_bytes > SMEM_BYTES:
        raise NoKernel(
            f"head sizes {shape.head_dim} and {shape.v_dim} over pages of {shape.stored}: implementation = "
            f"'mosaic_splits' has no room for them where queries see more than {_FEW_KEYS} keys"
        )
    two = not base.producer and 2 * (plan.smem_bytes + BLOCK_SMEM_BYTES) <= SM_SMEM_BYTES
    return base._replace(splits=1, workers=(2 if two else 1) * sms, split_keys=SPLIT_KEYS)


def whole_tuning(shape: Shape) -> Tuning:
    """Return the tuning without splits, whose blocks have as many keys as those of a tile of one query."""
    of_one = default_tuning(replace(shape, queries=1), split=1)
    return default_tuning(shape, split=1, block=of_one.block)


def default_tuning(shape: Shape, sms: int = SMS, split: int | None = None, block: int | None = None) -> Tuning:
    """Choose a tuning by rules of thumb and the compiler's reports (`make gpu-compile`), not by measurements.

    * Two consumers of 64 rows each if a tile has more than 64 rows, its queries see many keys, and V does not need two
      consumers anyway. Over few keys (a window of 128) a thread block's start and end take longer than its products:
      there several small thread blocks on a multiprocessor hide each other's.
    * Blocks of 64 keys. Blocks of 128 for two consumers of rows if registers and shared memory allow it (the tiles of
      FlashAttention 3). Blocks of 32 if V takes two consumers and two stages of 64 keys do not fit beside 64 queries
      of 512.
    * As many stages as let two thread blocks share a multiprocessor, but no more than there are blocks of keys. With
      several consumers, or long rows, a thread block has the multiprocessor to itself.
    * Splits by `splits.splits`.
    * Scores ahead (a tenth faster in FlashAttention 3) if the compiler spills no registers.

    Args:
        sms: multiprocessors of the GPU.
        split, block: the number of splits, and the keys of a block, if they are not to be chosen.
    """
    given, block, row_parts = block, block or 64, 1
    if shape.column_parts == 1 and shape.queries * shape.group > WARPGROUP_ROWS:
        row_parts = 2 if shape.most_blocks(64, shape.queries) > _FEW_BLOCKS else 1
    if row_parts == 2 and shape.head_dim + shape.v_dim <= 320 and 128 % shape.page == 0:
        block = given or 128
    if row_parts == 2 and Launch.of_shape(shape, Tuning(block, 2, 1, True, 2)).smem_bytes > SMEM_BYTES:
        row_parts = 1
    producer = row_parts * shape.column_parts > 1 or shape.upcast
    alone = row_parts * shape.column_parts > 1 or shape.head_dim + shape.v_dim > 384
    if shape.upcast and shape.head_dim > 64:  # too many registers for two thread blocks with a producer each
        alone = True
        if shape.head_dim + shape.v_dim <= 256 and 128 % shape.page == 0 and shape.most_blocks(128, 1) > _FEW_BLOCKS:
            block = given or 128
    budget = SMEM_BYTES if alone else SM_SMEM_BYTES // 2 - BLOCK_SMEM_BYTES
    if shape.column_parts > 1 and Launch.of_shape(shape, Tuning(block, 2, 2, producer)).smem_bytes > budget:
        block = given or (64 if shape.upcast else 32)
    if split is None:
        split = _splits(Launch.of_shape(shape, Tuning(block, 1, 1, producer, row_parts)), sms)
    out = Tuning(block, _MOST_STAGES, split, producer, row_parts)
    fit = Launch.of_shape(shape, out)
    stages = min(out.stages, max(1, -(-fit.most_blocks(block, fit.chunk_queries) // split)))
    while stages > 1 and Launch.of_shape(shape, out._replace(stages=stages)).smem_bytes > budget:
        stages -= 1
    # Two blocks of scores, output and page ids must fit into the registers, beside another thread block's if small.
    room = shape.v_dim <= 128 and fit.page_boxes <= 4 and not (shape.upcast and row_parts == 1)
    ahead = room and split == 1 and stages > row_parts and shape.queries > 1
    return out._replace(stages=stages, ahead=ahead)


def _splits(plan: Launch, sms: int) -> int:
    """Return the thread blocks per item and KV head. Two fit on a multiprocessor if they have one consumer each."""
    blocks, units = plan.most_blocks(plan.tuning.block, plan.chunk_queries), plan.items * plan.kv_heads
    return splits(blocks, units, sms if plan.consumers > 1 else 2 * sms)
