"""What a thread block of `mosaic_kernel` is given, and how it brings queries and pages to shared memory."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper.plan import WARPGROUP_ROWS, Launch
from pallas_kernels.mosaic import Ref, plgpu

Scalar = Int[Array, ""]
FIELDS = 6  # numbers of an item: see `Item`


def scratch(plan: Launch) -> dict[str, Any]:
    """Shared memory and barriers of a thread block, by their names in `Refs`. Output is staged where the keys were."""
    block, stages, splits, loader, row_parts, _ = plan.tuning
    swizzle, consumers = plan.tile_columns * plan.dtype.itemsize, plan.consumers
    out_type = plan.dtype if splits == 1 else jnp.float32
    staged = [plgpu.SMEM((consumers, WARPGROUP_ROWS, plan.v_width // plan.column_parts), out_type)]
    if splits > 1:
        staged.append(plgpu.SMEM((consumers, WARPGROUP_ROWS), jnp.float32))
    out = {
        "shared": plgpu.RefUnion(mosaic.tiled((stages, block, plan.row), plan.dtype, swizzle), staged),
        "queries": mosaic.tiled((row_parts, WARPGROUP_ROWS, plan.k_width), plan.dtype, swizzle),
        "queries_in": plgpu.Barrier(num_arrivals=row_parts),
        "filled": plgpu.Barrier(num_arrivals=1 if plan.upcast else plan.page_boxes, num_barriers=stages),
    }
    if plan.upcast:
        out["stored"] = mosaic.tiled((stages, block, plan.row), plan.stored, plan.stored_columns)
        out["arrived"] = plgpu.Barrier(num_arrivals=plan.page_boxes, num_barriers=stages)
    if loader and not plan.upcast:
        out["landed"] = plgpu.Barrier(num_arrivals=plan.page_boxes, num_barriers=2)
    if loader:
        out["free"] = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    if consumers > 1:
        out["together"] = plgpu.Barrier(num_arrivals=consumers)
    if row_parts > 1:
        out["turn"] = plgpu.Barrier(num_arrivals=row_parts)
    return out


@dataclass(frozen=True)
class Refs:
    """Global memory, shared memory and barriers of a thread block.

    Attributes:
        q: queries [item, KV head, row, column].
        kv: a page of one layer and head per index.
        items: see `Item`.
        sinks, logs, staged_logs: where there are sinks, or splits.
        queries_in: the queries have arrived.
        stored, arrived: a stage's K and V as they are in pages of 8 bits, and that they have come.
        filled: a stage's K and V are there.
        landed: K and V of the first, or of the last, block have come, and some V must be cleared (with a loader).
        free: a stage's K and V have been used (with a loader).
        together: the computing warpgroups have come to the same point (where there are two).
        turn: a warpgroup has issued its products (where rows are shared).
    """

    q: Ref
    kv: Ref
    items: Ref
    page_rows: Ref
    slot: Ref
    sinks: Ref | None
    out: Ref
    logs: Ref | None
    keys: Ref
    staged_out: Ref
    staged_logs: Ref | None
    queries: Ref
    queries_in: Ref
    filled: Ref
    stored: Ref | None
    arrived: Ref | None
    landed: Ref | None
    free: Ref | None
    together: Ref | None
    turn: Ref | None

    @classmethod
    def of(cls, plan: Launch, has_sinks: bool, arrays: tuple[Ref, ...], shared: dict[str, Ref]) -> "Refs":
        """Names for the kernel's arguments."""
        q, kv, items, page_rows, slot, *left = arrays
        sinks = left.pop(0) if has_sinks else None
        out, *logs = left
        keys, (staged_out, *staged_logs) = shared["shared"]
        return cls(
            q,
            kv,
            items,
            page_rows,
            slot,
            sinks,
            out,
            logs[0] if logs else None,
            keys,
            staged_out,
            staged_logs[0] if staged_logs else None,
            shared["queries"],
            shared["queries_in"],
            shared["filled"],
            *(shared.get(name) for name in ("stored", "arrived", "landed", "free", "together", "turn")),
        )


@dataclass(frozen=True)
class Item:
    """What a thread block works on: `count` blocks of keys from position `first` on, of which [begin, end) is seen.

    Of these, `FIELDS` numbers come with the item: place, row, begin, end, first_query and first_page.
    """

    place: Scalar
    head: Scalar
    split: Scalar
    slot: Scalar
    row: Scalar
    begin: Scalar
    end: Scalar
    first_query: Scalar
    first_page: Scalar
    first: Scalar
    count: Scalar

    @classmethod
    def of(cls, plan: Launch, refs: Refs) -> "Item":
        """Read the item and cut the split's share out of its blocks, which lie at multiples of their size."""
        item, head, split = (lax.axis_index(name) for name in ("item", "head", "split"))
        place, row, begin, end, first_query, first_page = (refs.items[item, field] for field in range(FIELDS))
        block, splits = plan.tuning.block, plan.tuning.splits
        first = lax.div(begin, block)
        count = lax.div(end + (block - 1), block) - first
        if splits > 1:
            share = lax.div(count + (splits - 1), splits)
            first, count = first + split * share, jnp.clip(count - split * share, 0, share)
        return cls(place, head, split, refs.slot[0], row, begin, end, first_query, first_page, first * block, count)


def load(plan: Launch, refs: Refs, item: Item) -> None:
    """The loader: fill stages as they become free, and clear V that nobody sees, before anyone knows it is there.

    Only the first and the last block can hold such V. Its copies tell `landed`, and the loader tells `filled`.
    """
    stages = plan.tuning.stages
    copy_queries(plan, refs, item)

    def issue(index: Scalar, ids: tuple[Scalar, ...]) -> None:
        edge, landed = is_edge(plan, item, index), refs.landed.at[jnp.minimum(index, 1)]  # type: ignore[union-attr]
        pl.when(edge)(lambda: copy(plan, refs, item, index, ids, landed))
        pl.when(jnp.logical_not(edge))(lambda: copy(plan, refs, item, index, ids))

    def step(index: Scalar, ids: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        following = page_ids(plan, refs, item, index + 1)  # under way while the stage is waited for
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(refs.free.at[lax.rem(index, stages)]))  # type: ignore[union-attr]
        issue(index, ids)
        first_ring = jnp.minimum(item.count, stages)
        pl.when(index == first_ring - 1)(lambda: _clear_landed(plan, refs, item, jnp.int32(0)))
        return following

    lax.fori_loop(0, item.count, step, page_ids(plan, refs, item, jnp.int32(0)))
    pl.when(item.count > 1)(lambda: _clear_landed(plan, refs, item, item.count - 1))


def is_edge(plan: Launch, item: Item, index: Scalar) -> Bool[Array, ""]:
    """Whether a block holds keys that no query of the chunk sees."""
    start = item.first + index * plan.tuning.block
    return (start < item.begin) | (start + plan.tuning.block > item.end)


def _clear_landed(plan: Launch, refs: Refs, item: Item, index: Scalar) -> None:
    @pl.when(is_edge(plan, item, index))
    def _clear() -> None:
        plgpu.barrier_wait(refs.landed.at[jnp.minimum(index, 1)])  # type: ignore[union-attr]
        clear_unseen(plan, refs, item, index)
        for _ in range(plan.page_boxes):  # as many as copies would have made
            plgpu.barrier_arrive(refs.filled.at[lax.rem(index, plan.tuning.stages)])


def clear_unseen(plan: Launch, refs: Refs, item: Item, index: Scalar) -> None:
    """Put zeros for V of a block where no query of the chunk looks, some columns at a time to spare registers."""
    block, stage = plan.tuning.block, lax.rem(index, plan.tuning.stages)
    start = item.first + index * block
    # Registers take 64 rows at a time. A block of 32 is seen as its transpose.
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


def load_and_upcast(plan: Launch, refs: Refs, item: Item) -> None:
    """The loader of 8-bit pages: copies into a ring of its own, from which it fills stages with 16-bit numbers.

    Keys that no query of the chunk sees become zeros. A warpgroup of its own does it because WGMMA takes no 8-bit V:
    it cannot transpose it.
    """
    stages = plan.tuning.stages
    copy_queries(plan, refs, item)
    first_ids = [page_ids(plan, refs, item, jnp.int32(index)) for index in range(stages)]
    for index, ids in enumerate(first_ids):
        pl.when(index < item.count)(partial(copy, plan, refs, item, jnp.int32(index), ids))

    @pl.loop(0, item.count)
    def _step(index: Scalar) -> None:
        stage = lax.rem(index, stages)
        ids = page_ids(plan, refs, item, index + stages)
        plgpu.barrier_wait(refs.arrived.at[stage])  # type: ignore[union-attr]
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(refs.free.at[stage]))  # type: ignore[union-attr]
        _upcast(plan, refs, item, index, stage)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.filled.at[stage])
        pl.when(index + stages < item.count)(partial(copy, plan, refs, item, index + stages, ids))


def _upcast(plan: Launch, refs: Refs, item: Item, index: Scalar, stage: Scalar) -> None:
    block, columns = plan.tuning.block, plan.stored_columns
    start = item.first + index * block

    @pl.loop(0, block // WARPGROUP_ROWS)
    def _rows(rows: Scalar) -> None:
        row = pl.multiple_of(rows * WARPGROUP_ROWS, WARPGROUP_ROWS)

        @pl.loop(0, plan.row // columns)
        def _columns(part: Scalar) -> None:
            at = stage, pl.ds(row, WARPGROUP_ROWS), pl.ds(pl.multiple_of(part * columns, columns), columns)
            values = mosaic.load_upcast(refs.stored.at[at], plan.dtype)  # type: ignore[union-attr]
            position = mosaic.iota(values.shape, 0, upcast=True) + (start + row)
            seen = (position >= item.begin) & (position < item.end)
            refs.keys.at[at][...] = jnp.where(seen, values, jnp.zeros_like(values))


def copy_queries(plan: Launch, refs: Refs, item: Item) -> None:
    """Issue the copies of the queries, one for each warpgroup's rows."""
    source = refs.q.at[item.place, item.head]
    if plan.tuning.row_parts == 1:
        plgpu.copy_gmem_to_smem(source, refs.queries.at[0, pl.ds(0, plan.padded_rows)], refs.queries_in)
        return
    for part in range(plan.tuning.row_parts):
        rows = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(source.at[rows], refs.queries.at[part], refs.queries_in)


def page_ids(plan: Launch, refs: Refs, item: Item, index: Scalar) -> tuple[Scalar, ...]:
    """Page ids of a block. Those of pages without visible keys are a neighbour's: loaded again, and masked."""
    page = lax.div(item.first + index * plan.tuning.block, plan.page)
    lowest = lax.div(item.begin, plan.page)
    highest = lax.div(jnp.maximum(item.end - 1, 0), plan.page)
    columns = (jnp.clip(page + part, lowest, highest) - item.first_page for part in range(plan.page_boxes))
    return tuple(refs.page_rows[item.row, column] for column in columns)


def copy(
    plan: Launch, refs: Refs, item: Item, index: Scalar, ids: tuple[Scalar, ...], barrier: Ref | None = None
) -> None:
    """Issue the copies of a block: K and V of each page in one box. They tell `barrier`, or else the stage's own."""
    block, page = plan.tuning.block, plan.page
    stage = lax.rem(index, plan.tuning.stages)
    for part, page_id in enumerate(ids):
        source = refs.kv.at[(page_id * plan.slots + item.slot) * plan.kv_heads + item.head]
        if page > block:
            start = lax.rem(item.first + index * block, page)
            source = source.at[pl.ds(pl.multiple_of(start, block), block)]
        ring, barriers = (refs.stored, refs.arrived) if plan.upcast else (refs.keys, refs.filled)
        target = ring.at[stage]  # type: ignore[union-attr]
        if page < block:
            target = target.at[pl.ds(part * page, page)]
        plgpu.copy_gmem_to_smem(source, target, barriers.at[stage] if barrier is None else barrier)  # type: ignore[union-attr]
