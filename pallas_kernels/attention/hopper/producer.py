"""The producer of the Hopper attention kernel: it copies queries and pages to shared memory, and clears unseen V.

A launch without a producer warpgroup calls the same functions from its only consumer.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper.launch import Launch
from pallas_kernels.attention.hopper.refs import Refs, Stored, WorkItem
from pallas_kernels.hopper import WARPGROUP_ROWS
from pallas_kernels.mosaic import Ref, Scalar, plgpu


def produce(plan: Launch, refs: Refs, item: WorkItem) -> None:
    """Copy the queries, then fill the ring with K and V of all of the item's blocks."""
    copy_queries(plan, refs, item)
    if refs.stored is None:
        _fill(plan, refs, item)
    else:
        _fill_upcast(plan, refs, item, refs.stored)


def _fill(plan: Launch, refs: Refs, item: WorkItem) -> None:
    """Fill stages as they become free. Only the first and the last block can hold V that no query of the chunk sees.

    Such V is cleared before the stage becomes ready: in the first block once the ring is full, in the last block at the
    end, so that no copy is delayed.
    """
    ring = refs.ring

    def copy_block(turn: Scalar, ids: tuple[Scalar, ...]) -> None:
        edge, edge_barrier = is_edge(plan, item, turn), ring.producer_edge_barrier(turn)
        pl.when(edge)(lambda: copy(plan, refs, item, turn, ids, edge_barrier))
        pl.when(jnp.logical_not(edge))(lambda: copy(plan, refs, item, turn, ids))

    def step(turn: Scalar, ids: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        following = page_ids(plan, refs, item, turn + 1)  # read while the producer waits for the stage
        ring.producer_acquire(turn)
        copy_block(turn, ids)
        first_ring = jnp.minimum(item.count, ring.stages)
        pl.when(turn == first_ring - 1)(lambda: _finish_edge(plan, refs, item, jnp.int32(0)))
        return following

    lax.fori_loop(0, item.count, step, page_ids(plan, refs, item, jnp.int32(0)))
    pl.when(item.count > 1)(lambda: _finish_edge(plan, refs, item, item.count - 1))


def _finish_edge(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar) -> None:
    """Clear unseen V of a block at the edge once its copies have arrived, and make the stage ready."""

    @pl.when(is_edge(plan, item, turn))
    def _clear() -> None:
        plgpu.barrier_wait(refs.ring.producer_edge_barrier(turn))
        clear_unseen(plan, refs, item, turn)
        refs.ring.producer_commit(turn)


def _fill_upcast(plan: Launch, refs: Refs, item: WorkItem, stored: Stored) -> None:
    """Copy 8-bit pages into a ring of their own, and fill stages from it with 16-bit numbers.

    The cast is needed since WGMMA cannot take 8-bit V, which it would have to transpose.
    """
    ring = refs.ring
    fill_first(plan, refs, item)

    @pl.loop(0, item.count)
    def _step(turn: Scalar) -> None:
        ids = page_ids(plan, refs, item, turn + stored.ring.stages)
        stored.ring.consumer_wait(turn)
        ring.producer_acquire(turn)
        upcast(plan, refs, item, turn, stored, clears=True)
        ring.producer_commit(turn)
        refill(plan, refs, item, turn, ids)


def upcast(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar, stored: Stored, *, clears: bool) -> None:
    """Cast a block from its 8-bit stage into its 16-bit stage. The former may be refilled behind this.

    `clears`: numbers of keys that no query of the chunk sees become zeros. The code for two consumers spills registers
    if the producer clears the blocks at the edges alone.
    """
    block, columns = plan.tuning.block, plan.stored_columns
    tiles = plan.row // columns
    start, source, target = item.first + turn * block, stored.ring.stage(turn), refs.ring.stage(turn)

    @pl.loop(0, block // WARPGROUP_ROWS)
    def _rows(rows: Scalar) -> None:
        row = pl.multiple_of(rows * WARPGROUP_ROWS, WARPGROUP_ROWS)

        @pl.loop(0, tiles, unroll=1 if clears else tiles)  # a producer of two consumers spills
        def _columns(part: Scalar) -> None:
            at = pl.ds(row, WARPGROUP_ROWS), pl.ds(pl.multiple_of(part * columns, columns), columns)
            values = mosaic.load_upcast(stored.memory.at[(source, *at)], plan.dtype)
            if clears:
                position = mosaic.iota(values.shape, 0, upcast=True) + (start + row)
                seen = (position >= item.begin) & (position < item.end)
                values = jnp.where(seen, values, jnp.zeros_like(values))
            refs.keys.at[(target, *at)][...] = values

    plgpu.commit_smem()


def is_edge(plan: Launch, item: WorkItem, turn: Scalar) -> Bool[Array, ""]:
    """Return whether a block holds keys that no query of the chunk sees."""
    start = item.first + turn * plan.tuning.block
    return (start < item.begin) | (start + plan.tuning.block > item.end)


def clear_unseen(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar) -> None:
    """Overwrite V with zeros where no query of the chunk sees it; a few columns at a time, to spare registers."""
    block, stage = plan.tuning.block, refs.ring.stage(turn)
    start = item.first + turn * block
    # A register layout holds multiples of 64 rows. A block of 32 keys is cleared as its transpose.
    columns, rows = (plan.tile_columns, WARPGROUP_ROWS) if block % WARPGROUP_ROWS == 0 else (WARPGROUP_ROWS, block)

    @pl.loop(0, block // rows)
    def _rows(row_part: Scalar) -> None:
        row = pl.multiple_of(row_part * rows, rows)

        @pl.loop(0, plan.v_width // columns)
        def _columns(part: Scalar) -> None:
            column = pl.multiple_of(plan.v_start + part * columns, plan.tile_columns)
            values = refs.keys.at[stage, pl.ds(row, rows), pl.ds(column, columns)]
            values = values if rows == WARPGROUP_ROWS else values.T
            position = mosaic.iota(values.shape, 0 if rows == WARPGROUP_ROWS else 1) + (start + row)
            loaded = mosaic.load(values)
            values[...] = jnp.where((position >= item.begin) & (position < item.end), loaded, jnp.zeros_like(loaded))

    plgpu.commit_smem()


def copy_queries(plan: Launch, refs: Refs, item: WorkItem) -> None:
    """Start the copies of the queries, one for the rows of each consumer."""
    source = refs.q.at[item.index, item.head]
    if plan.tuning.row_parts == 1:
        plgpu.copy_gmem_to_smem(source, refs.queries.at[0, pl.ds(0, plan.padded_rows)], refs.queries_ready)
        return
    for part in range(plan.tuning.row_parts):
        rows = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(source.at[rows], refs.queries.at[part], refs.queries_ready)


def fill_first(plan: Launch, refs: Refs, item: WorkItem) -> None:
    """Start the copies of the first block of each stage."""
    first_ids = [page_ids(plan, refs, item, jnp.int32(turn)) for turn in range(plan.tuning.stages)]
    for turn, ids in enumerate(first_ids):
        pl.when(turn < item.count)(partial(copy, plan, refs, item, jnp.int32(turn), ids))


def refill(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar, ids: tuple[Scalar, ...]) -> None:
    """Start the copies of the block that is next in a turn's stage, if there is one."""
    following = turn + plan.tuning.stages
    pl.when(following < item.count)(partial(copy, plan, refs, item, following, ids))


def page_ids(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar) -> tuple[Scalar, ...]:
    """Read the page ids of a block. In place of a page without visible keys its nearest visible neighbour is read.

    The neighbour's keys are loaded again, and masked.
    """
    page = lax.div(item.first + turn * plan.tuning.block, plan.page)
    lowest = lax.div(item.begin, plan.page)
    highest = lax.div(jnp.maximum(item.end - 1, 0), plan.page)
    columns = (jnp.clip(page + part, lowest, highest) - item.first_page for part in range(plan.page_boxes))
    return tuple(refs.page_rows[item.row, column] for column in columns)


def copy(
    plan: Launch, refs: Refs, item: WorkItem, turn: Scalar, ids: tuple[Scalar, ...], barrier: Ref | None = None
) -> None:
    """Start the copies of a block: K and V of each page in one box. They arrive at `barrier`, or else at the ring's."""
    block, page = plan.tuning.block, plan.page
    memory, ring = (refs.keys, refs.ring) if refs.stored is None else refs.stored
    stage = ring.stage(turn)
    barrier = ring.producer_barrier(turn) if barrier is None else barrier
    for part, page_id in enumerate(ids):
        source = refs.kv.at[(page_id * plan.layers_per_page + item.layer_index) * plan.kv_heads + item.head]
        if page > block:
            start = lax.rem(item.first + turn * block, page)
            source = source.at[pl.ds(pl.multiple_of(start, block), block)]
        target = memory.at[stage]
        if page < block:
            target = target.at[pl.ds(part * page, page)]
        plgpu.copy_gmem_to_smem(source, target, barrier)
