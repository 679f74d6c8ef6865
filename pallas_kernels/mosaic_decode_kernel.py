"""The decode kernel of `mosaic_decode`, as one thread block runs it.

One thread block works on one tile of queries, one KV head and one split of the keys:

    queries     the tile's tokens times the heads of the group, as rows of one 64-row WGMMA (rows beyond are garbage
                that no other row sees)
    loop        over blocks of keys, from the first that the tile sees: a local layer's cost does not depend on the
                context. Splits share those blocks, never the whole sequence.
    per block   page ids are read one ring of stages ahead; one TMA box per page brings K and V together; scores by
                WGMMA from shared memory, online softmax in base 2 (Milakov and Gimelshein 2018, arXiv 1805.02867),
                probabilities stay in registers as the left operand of the second WGMMA (FlashAttention 3,
                arXiv 2407.08608)
    edges       only blocks that hold keys which some query of the tile does not see are masked; their V is cleared
                in shared memory, since 0 · NaN is NaN and nobody wrote those cells

With a loader (`Tuning.loader`) a warpgroup of its own keeps the ring full and waits for `free` barriers; without one
the computing warpgroup refills a stage as soon as it has used it. A V of more than 256 columns is shared by two
computing warpgroups: each forms all scores, and its half of the output.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.mosaic import Ref, plgpu
from pallas_kernels.mosaic_launch import WARPGROUP_ROWS, Launch
from pallas_kernels.rows import Attend

_LOG2E = 1.4426950408889634
_UNSEEN = -1e30  # score of a key that a query does not see: finite, so that differences are numbers
_LOWEST = -1e25  # least "greatest score": far above the former, so a row that sees nothing in a block adds nothing
_TINY = 1e-30

Scalar = Int[Array, ""]
Carry = tuple[Float[Array, "64 V"], Float[Array, " 64"], Float[Array, " 64"]]  # output, greatest score, sum


def scratch(plan: Launch) -> list[Any]:
    """Shared memory and barriers, in the order of `_Refs`. The output is staged where the keys were."""
    block, stages, splits, loader = plan.tuning
    columns = plan.tile_columns * plan.dtype.itemsize
    out_type = plan.dtype if splits == 1 else jnp.float32
    staged = [plgpu.SMEM((plan.consumers, WARPGROUP_ROWS, plan.v_width // plan.consumers), out_type)]
    if splits > 1:
        staged.append(plgpu.SMEM((plan.consumers, WARPGROUP_ROWS), jnp.float32))
    return [
        plgpu.RefUnion(mosaic.tiled((stages, block, plan.row), plan.dtype, columns), staged),
        mosaic.tiled((WARPGROUP_ROWS, plan.k_width), plan.dtype, columns),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=plan.page_boxes, num_barriers=stages),
        *([plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=stages)] if loader else []),
        *([plgpu.Barrier(num_arrivals=plan.consumers)] if plan.consumers > 1 else []),
    ]


class _Refs(NamedTuple):
    """Global memory, shared memory and barriers of a thread block. Those after `filled` may be absent.

    Attributes:
        queries_in: the queries have arrived.
        filled: a stage's K and V have arrived.
        free: a stage's K and V have been used (with a loader).
        together: the computing warpgroups have come to the same point (where there are two).
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
    free: Ref | None
    together: Ref | None


def _name(plan: Launch, has_sinks: bool, refs: tuple[Ref, ...]) -> _Refs:
    left = list(refs)
    q, kv, items, page_rows, slot = left[:5]
    del left[:5]
    sinks = left.pop(0) if has_sinks else None
    out = left.pop(0)
    logs = left.pop(0) if plan.tuning.splits > 1 else None
    (keys, (staged_out, *staged_logs)), queries, queries_in, filled = left[:4]
    del left[:4]
    free = left.pop(0) if plan.tuning.loader else None
    together = left.pop(0) if plan.consumers > 1 else None
    staged = staged_logs[0] if staged_logs else None
    return _Refs(
        q,
        kv,
        items,
        page_rows,
        slot,
        sinks,
        out,
        logs,
        keys,
        staged_out,
        staged,
        queries,
        queries_in,
        filled,
        free,
        together,
    )


@dataclass(frozen=True)
class _Item:
    """What a thread block works on: `count` blocks of keys from position `first` on, of which [begin, end) is seen."""

    tile: Scalar
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


def _item(plan: Launch, refs: _Refs) -> _Item:
    """Read the tile's item and cut the split's share out of its blocks, which lie at multiples of their size."""
    tile, head, split = (lax.axis_index(name) for name in ("tile", "head", "split"))
    row, begin, end, first_query, first_page = (refs.items[tile, field] for field in range(5))
    block, splits = plan.tuning.block, plan.tuning.splits
    first = lax.div(begin, block)
    count = lax.div(end + (block - 1), block) - first
    if splits > 1:
        share = lax.div(count + (splits - 1), splits)
        first, count = first + split * share, jnp.clip(count - split * share, 0, share)
    return _Item(tile, head, split, refs.slot[0], row, begin, end, first_query, first_page, first * block, count)


def body(plan: Launch, has_sinks: bool, *all_refs: Ref) -> None:
    refs = _name(plan, has_sinks, all_refs)
    item = _item(plan, refs)
    if not plan.tuning.loader:
        _compute(plan, refs, item, 0)
        return
    thread = lax.axis_index("thread")

    @pl.when(thread < plan.consumers)
    def _computer() -> None:
        if plan.consumers > 1:  # three warpgroups share the registers: 168 each, unless one gives some away
            plgpu.set_max_registers(232, action="increase")
        _compute(plan, refs, item, thread if plan.consumers > 1 else 0)

    @pl.when(thread == plan.consumers)
    def _loader() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(40, action="decrease")
        _load(plan, refs, item)


def _load(plan: Launch, refs: _Refs, item: _Item) -> None:
    """The loader: fill stages as they become free."""
    stages = plan.tuning.stages
    _copy_queries(plan, refs, item)

    def step(index: Scalar, ids: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        following = _page_ids(plan, refs, item, index + 1)  # under way while the stage is waited for
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(refs.free.at[lax.rem(index, stages)]))  # type: ignore[union-attr]
        _copy(plan, refs, item, index, ids)
        return following

    lax.fori_loop(0, item.count, step, _page_ids(plan, refs, item, jnp.int32(0)))


def _copy_queries(plan: Launch, refs: _Refs, item: _Item) -> None:
    source, target = refs.q.at[item.tile, item.head], refs.queries.at[pl.ds(0, plan.padded_rows)]
    plgpu.copy_gmem_to_smem(source, target, refs.queries_in)


def _page_ids(plan: Launch, refs: _Refs, item: _Item, index: Scalar) -> tuple[Scalar, ...]:
    """Page ids of a block. Those of pages without visible keys are a neighbour's: loaded again, and masked."""
    page = lax.div(item.first + index * plan.tuning.block, plan.page)
    lowest = lax.div(item.begin, plan.page)
    highest = lax.div(jnp.maximum(item.end - 1, 0), plan.page)
    columns = (jnp.clip(page + part, lowest, highest) - item.first_page for part in range(plan.page_boxes))
    return tuple(refs.page_rows[item.row, column] for column in columns)


def _copy(plan: Launch, refs: _Refs, item: _Item, index: Scalar, ids: tuple[Scalar, ...]) -> None:
    """Issue the copies of a block: K and V of each page in one box."""
    block, page = plan.tuning.block, plan.page
    stage = lax.rem(index, plan.tuning.stages)
    for part, page_id in enumerate(ids):
        source = refs.kv.at[(page_id * plan.slots + item.slot) * plan.kv_heads + item.head]
        if page > block:
            start = lax.rem(item.first + index * block, page)
            source = source.at[pl.ds(pl.multiple_of(start, block), block)]
        target = refs.keys.at[stage]
        if page < block:
            target = target.at[pl.ds(part * page, page)]
        plgpu.copy_gmem_to_smem(source, target, refs.filled.at[stage])


def _compute(plan: Launch, refs: _Refs, item: _Item, part: Scalar | int) -> None:
    """One computing warpgroup: the loop over blocks, and the output's columns of its part of V."""
    block, stages, _, loader = plan.tuning
    width = plan.v_width // plan.consumers
    if not loader:
        _copy_queries(plan, refs, item)
        first_ids = [_page_ids(plan, refs, item, jnp.int32(index)) for index in range(stages)]
        for index, ids in enumerate(first_ids):
            pl.when(index < item.count)(partial(_copy, plan, refs, item, jnp.int32(index), ids))
    plgpu.barrier_wait(refs.queries_in)

    def step(index: Scalar, carry: Carry) -> Carry:
        total, top, weight = carry
        stage, start = lax.rem(index, stages), item.first + index * block
        refill = () if loader else _page_ids(plan, refs, item, index + stages)
        plgpu.barrier_wait(refs.filled.at[stage])
        _clear_unseen(plan, refs, item, start, stage, part)
        scores = mosaic.product(refs.queries, refs.keys.at[stage, :, pl.ds(0, plan.k_width)])
        scores, factor = _capped(plan.attend, scores)
        scores = lax.cond(
            _has_unseen(plan, item, start), partial(_mask, plan, item, start), lambda scores: scores, scores
        )
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        shrink = jnp.exp2(top - new_top)
        probability = jnp.exp2(scores * factor - mosaic.rows_to_columns(new_top, block))
        weight = weight * shrink + probability.sum(axis=1)
        total = total * mosaic.rows_to_columns(shrink, width)
        values = refs.keys.at[stage, :, _columns(plan, part)]
        total = mosaic.accumulate(total, probability.astype(plan.dtype), values)
        if loader:
            plgpu.barrier_arrive(refs.free.at[stage], predicate=index + stages < item.count)  # type: ignore[union-attr]
        else:
            pl.when(index + stages < item.count)(partial(_copy, plan, refs, item, index + stages, refill))
        return total, new_top, weight

    top, weight = _first(plan, refs, item)
    carry = mosaic.full((WARPGROUP_ROWS, width), 0.0), top, weight
    _store(plan, refs, item, part, lax.fori_loop(0, item.count, step, carry))


def _columns(plan: Launch, part: Scalar | int) -> Any:
    """Columns of V that a computing warpgroup works on."""
    width = plan.v_width // plan.consumers
    if isinstance(part, int):
        return pl.ds(plan.v_start + part * width, width)
    return pl.ds(pl.multiple_of(plan.v_start + part * width, plan.tile_columns), width)


def _first(plan: Launch, refs: _Refs, item: _Item) -> tuple[Float[Array, " 64"], Float[Array, " 64"]]:
    """Greatest score and sum before the first block.

    A sink is a key that all see and whose value is zero: the softmax of the first split starts with it.
    """
    top, weight = (mosaic.full((WARPGROUP_ROWS,), value) for value in (_LOWEST, 0.0))
    if refs.sinks is None:
        return top, weight
    row = mosaic.iota((WARPGROUP_ROWS,), 0)
    for index in range(plan.rows):
        sink = refs.sinks[item.head * plan.group + index % plan.group].astype(jnp.float32) * _LOG2E
        top = jnp.where((row == index) & (item.split == 0), sink, top)
    return top, jnp.where((row < plan.rows) & (item.split == 0), 1.0, weight)


def _capped(attend: Attend, scores: Float[Array, "64 N"]) -> tuple[Float[Array, "64 N"], float]:
    """Scores, and the factor that makes them exponents of two."""
    if attend.softcap is None:
        return scores, attend.scale * _LOG2E
    return jnp.tanh(scores * (attend.scale / attend.softcap)), attend.softcap * _LOG2E


def _has_unseen(plan: Launch, item: _Item, start: Scalar) -> Bool[Array, ""]:
    """Whether some query of the tile does not see some key of the block."""
    last_query = item.first_query + (plan.queries - 1)
    begin = item.begin if plan.queries == 1 else jnp.maximum(item.begin, plan.attend.first_visible(last_query))
    end = item.end if plan.queries == 1 else item.first_query + 1
    return (start < begin) | (start + plan.tuning.block > end)


def _mask(plan: Launch, item: _Item, start: Scalar, scores: Float[Array, "64 N"]) -> Float[Array, "64 N"]:
    """The scores, `_UNSEEN` where a row's query does not see the key."""
    position = mosaic.iota(scores.shape, 1) + start
    visible = (position >= item.begin) & (position < item.end)
    if plan.queries > 1:
        query = item.first_query + lax.div(mosaic.iota((WARPGROUP_ROWS,), 0), plan.group)
        visible &= position <= mosaic.rows_to_columns(query, plan.tuning.block)
        if plan.attend.window is not None or plan.attend.chunk is not None:
            visible &= position >= mosaic.rows_to_columns(plan.attend.first_visible(query), plan.tuning.block)
    return jnp.where(visible, scores, _UNSEEN)


def _clear_unseen(plan: Launch, refs: _Refs, item: _Item, start: Scalar, stage: Scalar, part: Scalar | int) -> None:
    """Put zeros for V where no query of the tile looks, some columns at a time to spare registers."""
    block = plan.tuning.block
    width = plan.v_width // plan.consumers
    # Registers take 64 rows at a time. A block of 32 is seen as its transpose.
    columns, key_axis = (plan.tile_columns, 0) if block % 64 == 0 else (64, 1)

    @pl.when((start < item.begin) | (start + block > item.end))
    def _clear() -> None:
        @pl.loop(0, width // columns)
        def _part(index: Scalar) -> None:
            column = pl.multiple_of(plan.v_start + part * width + index * columns, plan.tile_columns)
            values = refs.keys.at[stage, :, pl.ds(column, columns)]
            values = values if key_axis == 0 else values.T
            position = mosaic.iota(values.shape, key_axis) + start
            loaded = mosaic.load(values)
            values[...] = jnp.where((position >= item.begin) & (position < item.end), loaded, jnp.zeros_like(loaded))

        plgpu.commit_smem()
        if refs.together is not None:  # K and V may overlap: the other warpgroup's K holds what was cleared here
            plgpu.barrier_arrive(refs.together)
            plgpu.barrier_wait(refs.together)


def _store(plan: Launch, refs: _Refs, item: _Item, part: Scalar | int, carry: Carry) -> None:
    """Normalise and write the rows that hold queries."""
    total, top, weight = carry
    if refs.together is not None:  # the output is staged where the other warpgroup may still read keys
        plgpu.barrier_arrive(refs.together)
        plgpu.barrier_wait(refs.together)
    width = total.shape[1]
    weight = jnp.maximum(weight, _TINY)
    staged = refs.staged_out.at[part]
    staged[...] = (total * mosaic.rows_to_columns(1 / weight, width)).astype(staged.dtype)
    if refs.logs is not None:  # each warpgroup has all of them: the first writes its own
        refs.staged_logs.at[part][...] = top + jnp.log(weight) * _LOG2E  # type: ignore[union-attr]
    plgpu.commit_smem()
    at = (item.tile, item.head) if refs.logs is None else (item.split, item.tile, item.head)
    columns = pl.ds(part * width, width) if isinstance(part, int) else pl.ds(pl.multiple_of(part * width, width), width)
    plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, plan.rows)], refs.out.at[*at, :, columns])
    if refs.logs is not None:

        @pl.when(jnp.asarray(part) == 0)
        def _write_logs() -> None:
            source = refs.staged_logs.at[part, pl.ds(0, plan.padded_rows)]  # type: ignore[union-attr]
            plgpu.copy_smem_to_gmem(source, refs.logs.at[*at])  # type: ignore[union-attr]

    plgpu.wait_smem_to_gmem(0)
