"""The default tuning of the Hopper attention kernel for shapes that were not measured."""

from dataclasses import replace

from pallas_kernels.attention.hopper.launch import Launch, Shape, Tuning
from pallas_kernels.attention.splits import splits
from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_SMEM_BYTES, SMEM_BYTES, SMS, WARPGROUP_ROWS

_MOST_STAGES = 4
_MOST_PART_BYTES = 131_072  # for a token: 256 MB in steps of 2,048 tokens, beside tiles that rows leave partly empty
_FEW_BLOCKS = 6  # of keys: fewer do not make up for a thread block's start and end


def list_tuning(shape: Shape, sms: int = SMS) -> Tuning | None:
    """Return the tuning of a work list, or None if the shape's queries see too few keys to be split.

    Block and stages are those of `default_tuning`.

    * A split has 1,024 keys: a thread block reads them in some 16 µs if all run, in 5 if few do. If a tile has more
      than 64 rows its splits have 4,096, since its many products make up for a thread block's start and end, and there
      are 4 at most, or 2, since its parts in float32 take memory.
    * As many thread blocks as run at once share the list, if they have one consumer each. With two consumers an entry
      has a thread block of its own: the loop over the list makes the compiler spill registers, with values of more than
      256 columns or scores ahead, and the GPU gives a long entry's place to the next one anyway.
    """
    several = shape.queries * shape.group > WARPGROUP_ROWS
    keys, few = (4_096, 16_384) if several else (1_024, 2_048)
    if shape.most_blocks(1, shape.queries) <= few:
        return None
    part_bytes = shape.kv_heads * shape.group * shape.v_dim * 4  # of a token
    most = max(2, min(4, _MOST_PART_BYTES // part_bytes)) if several else 16
    base = default_tuning(shape, sms, split=2)._replace(splits=1, split_keys=keys, most_splits=most)
    plan = Launch.of_shape(shape, base)
    if plan.consumers > 1:
        return base._replace(ahead=_has_room_ahead(plan, base.stages))
    two = not base.producer and 2 * (plan.smem_bytes + BLOCK_SMEM_BYTES) <= SM_SMEM_BYTES
    return base._replace(workers=(2 if two else 1) * sms)


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
    * A producer for several consumers, and to cast 8-bit pages for a consumer that has the multiprocessor to itself.
      Where two thread blocks share it, one casts while the other computes: with a producer each, two of 256 threads
      would have 128 registers a thread.
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
    alone = row_parts * shape.column_parts > 1 or shape.head_dim + shape.v_dim > 384
    producer = row_parts * shape.column_parts > 1 or (shape.upcast and alone)
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
    return out._replace(stages=stages, ahead=split == 1 and _has_room_ahead(fit, stages))


def _has_room_ahead(plan: Launch, stages: int) -> bool:
    """Return whether scores may be formed ahead.

    Two blocks of scores, output and page ids must fit into the registers, beside another thread block's if small.
    """
    row_parts = plan.tuning.row_parts
    room = plan.v_dim <= 128 and plan.page_boxes <= 4 and not (plan.upcast and row_parts == 1)
    return room and stages > row_parts and plan.queries > 1


def _splits(plan: Launch, sms: int) -> int:
    """Return the thread blocks per item and KV head. Two fit on a multiprocessor if they have one consumer each."""
    blocks, units = plan.most_blocks(plan.tuning.block, plan.chunk_queries), plan.items * plan.kv_heads
    return splits(blocks, units, sms if plan.consumers > 1 else 2 * sms)
