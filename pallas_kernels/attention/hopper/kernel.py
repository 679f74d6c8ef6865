"""The kernel of `mosaic`, as one thread block runs it: decode, prefill, and all between.

One thread block works on one chunk of queries, one KV head and one split of the keys:

    queries     the chunk's tokens times the heads of the group, as rows of one or two 64-row WGMMAs (rows beyond are
                garbage that no other row sees)
    loop        over blocks of keys, from the first that the chunk sees: a local layer's cost does not depend on the
                context. Splits share those blocks, never the whole sequence.
    per block   page ids are read one ring of stages ahead; one TMA box per page brings K and V together; scores by
                WGMMA from shared memory, online softmax in base 2 (Milakov and Gimelshein 2018, arXiv 1805.02867),
                probabilities stay in registers as the left operand of the second WGMMA (FlashAttention 3,
                arXiv 2407.08608)
    edges       only blocks that hold keys which some query of the warpgroup does not see are masked; V that no query
                of the chunk sees is cleared in shared memory, since 0 · NaN is NaN and nobody wrote those cells

With a loader (`Tuning.loader`) a warpgroup of its own keeps the ring full and waits for `free` barriers; without one
the computing warpgroup refills a stage as soon as it has used it.

Two computing warpgroups share the rows (`Tuning.row_parts`), and take turns: the one issues its products for the
tensor cores while the other works on its softmax (FlashAttention 3's ping-pong). Or they share a V of more than 256
columns: each forms all scores, and its half of the output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper.block import (
    Item,
    Refs,
    Scalar,
    clear_unseen,
    copy,
    copy_queries,
    is_edge,
    load,
    load_and_upcast,
    page_ids,
)
from pallas_kernels.attention.hopper.plan import WARPGROUP_ROWS, Launch
from pallas_kernels.attention.rows import Attend
from pallas_kernels.mosaic import Ref, plgpu

_LOG2E = 1.4426950408889634
_UNSEEN = -1e30  # score of a key that a query does not see: finite, so that differences are numbers
_LOWEST = -1e25  # least "greatest score": far above the former, so a row that sees nothing in a block adds nothing
_TINY = 1e-30

Carry = tuple[Float[Array, "64 V"], Float[Array, " 64"], Float[Array, " 64"]]  # output, greatest score, sum


def body(plan: Launch, has_sinks: bool, *arrays: Ref, **shared: Ref) -> None:
    """The kernel. Chunks of several queries that are dead write nothing; dead single ones (decode) write zeros."""
    refs = Refs.of(plan, has_sinks, arrays, shared)
    item = Item.of(plan, refs)
    if plan.queries == 1:
        _work(plan, refs, item)
    else:
        pl.when(item.end > 0)(lambda: _work(plan, refs, item))


def _work(plan: Launch, refs: Refs, item: Item) -> None:
    if not plan.tuning.loader:
        _compute(plan, refs, item, 0)
        return
    thread, registers = lax.axis_index("thread"), _registers(plan)

    @pl.when(thread < plan.consumers)
    def _computer() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(registers[0], action="increase")
        _compute(plan, refs, item, thread if plan.consumers > 1 else 0)

    @pl.when(thread == plan.consumers)
    def _loader() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(registers[1], action="decrease")
        (load_and_upcast if plan.upcast else load)(plan, refs, item)


def _registers(plan: Launch) -> tuple[int, int]:
    """Of a computing warpgroup's thread and of the loader's: three warpgroups share 168 each.

    The loader needs some for page ids and for V that it clears or casts. Found by what the compiler spills.
    """
    if plan.upcast:
        return 224, 56
    return (232, 40) if plan.tuning.ahead else (216, 72)


def _compute(plan: Launch, refs: Refs, item: Item, part: Scalar | int) -> None:
    """One computing warpgroup: the loop over blocks, for its rows and its columns of V."""
    _, stages, _, loader, row_parts, ahead = plan.tuning
    row_part = part if row_parts > 1 else 0
    width = plan.v_width // plan.column_parts
    if not loader:
        copy_queries(plan, refs, item)
        first_ids = [page_ids(plan, refs, item, jnp.int32(index)) for index in range(stages)]
        for index, ids in enumerate(first_ids):
            pl.when(index < item.count)(partial(copy, plan, refs, item, jnp.int32(index), ids))
    plgpu.barrier_wait(refs.queries_in)

    top, weight = _first(plan, refs, item, row_part)
    carry = mosaic.full((WARPGROUP_ROWS, width), 0.0), top, weight
    if refs.turn is not None:
        pl.when(part == 1)(partial(_end_turn, refs))  # half a turn behind the other
    carry = (_loop_ahead if ahead else _loop)(plan, refs, item, part, carry)
    if refs.turn is not None:
        pl.when(part == 0)(partial(_end_turn, refs))
    _store(plan, refs, item, part, carry)


def _loop(plan: Launch, refs: Refs, item: Item, part: Scalar | int, carry: Carry) -> Carry:
    """All blocks: scores, then softmax and output."""

    def step(index: Scalar, carry: Carry) -> Carry:
        refill = () if plan.tuning.loader else page_ids(plan, refs, item, index + plan.tuning.stages)
        scores, _ = _scores(plan, refs, item, index, part, lambda: _end_turn(refs))
        return _absorb(plan, refs, item, index, part, carry, scores, refill)

    out: Carry = lax.fori_loop(0, item.count, step, carry)
    return out


def _loop_ahead(plan: Launch, refs: Refs, item: Item, part: Scalar | int, carry: Carry) -> Carry:
    """All blocks, of which there is one at least: the next block's scores are formed during this one's softmax.

    FlashAttention 3's overlap within a warpgroup. Two blocks of scores are in registers at a time.
    """

    def step(index: Scalar, state: tuple[Carry, Float[Array, "64 N"]]) -> tuple[Carry, Float[Array, "64 N"]]:
        carry, scores = state
        refill = () if plan.tuning.loader else page_ids(plan, refs, item, index + plan.tuning.stages)

        def meanwhile() -> Carry:
            _end_turn(refs)
            return _absorb(plan, refs, item, index, part, carry, scores, refill)

        following, carry = _scores(plan, refs, item, index + 1, part, meanwhile)
        return carry, following

    first, _ = _scores(plan, refs, item, jnp.int32(0), part, lambda: None)
    carry, scores = lax.fori_loop(0, item.count - 1, step, (carry, first))
    _end_turn(refs)
    return _absorb(plan, refs, item, item.count - 1, part, carry, scores, ())


def _scores[T](
    plan: Launch, refs: Refs, item: Item, index: Scalar, part: Scalar | int, meanwhile: Callable[[], T]
) -> tuple[Float[Array, "64 N"], T]:
    """Products of the warpgroup's queries with a block of keys, once that has come; see `mosaic.product_and`."""
    stage = lax.rem(index, plan.tuning.stages)
    plgpu.barrier_wait(refs.filled.at[stage])
    if not plan.tuning.loader:
        pl.when(is_edge(plan, item, index))(partial(clear_unseen, plan, refs, item, index))
    row_part = part if plan.tuning.row_parts > 1 else 0
    keys = refs.keys.at[stage, :, pl.ds(0, plan.k_width)]
    return mosaic.product_and(refs.queries.at[row_part], keys, meanwhile)


def _absorb(
    plan: Launch,
    refs: Refs,
    item: Item,
    index: Scalar,
    part: Scalar | int,
    carry: Carry,
    scores: Float[Array, "64 N"],
    refill: tuple[Scalar, ...],
) -> Carry:
    """Softmax of a block's scores, and the output with its values; then the stage is free."""
    block, stages = plan.tuning.block, plan.tuning.stages
    stage, start = lax.rem(index, stages), item.first + index * block
    row_part = part if plan.tuning.row_parts > 1 else 0
    total, top, weight = carry
    scores, factor = _capped(plan.attend, scores)
    mask = partial(_mask, plan, item, row_part, start)
    scores = lax.cond(_has_unseen(plan, item, row_part, start), mask, lambda scores: scores, scores)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    shrink = jnp.exp2(top - new_top)
    probability = jnp.exp2(scores * factor - mosaic.rows_to_columns(new_top, block))
    weight = weight * shrink + probability.sum(axis=1)
    total = total * mosaic.rows_to_columns(shrink, total.shape[1])
    probability = probability.astype(plan.dtype)
    if refs.turn is not None:  # the softmax ends before the tensor cores are asked for again
        total, weight, new_top, probability = mosaic.settled(total, weight, new_top, probability)
        _end_turn(refs)
    total = mosaic.accumulate(total, probability, refs.keys.at[stage, :, _columns(plan, part)])
    if plan.tuning.loader:
        plgpu.barrier_arrive(refs.free.at[stage], predicate=index + stages < item.count)  # type: ignore[union-attr]
    else:
        pl.when(index + stages < item.count)(partial(copy, plan, refs, item, index + stages, refill))
    return total, new_top, weight


def _end_turn(refs: Refs) -> None:
    """Let the other warpgroup of rows issue its products, and wait until it has (if there is one)."""
    if refs.turn is not None:
        plgpu.barrier_arrive(refs.turn)
        plgpu.barrier_wait(refs.turn)


def _columns(plan: Launch, part: Scalar | int) -> Any:
    """Columns of V that a computing warpgroup works on."""
    if plan.column_parts == 1:
        return pl.ds(plan.v_start, plan.v_width)
    width = plan.v_width // plan.column_parts
    return pl.ds(pl.multiple_of(jnp.asarray(plan.v_start + part * width), plan.tile_columns), width)


def _first(
    plan: Launch, refs: Refs, item: Item, row_part: Scalar | int
) -> tuple[Float[Array, " 64"], Float[Array, " 64"]]:
    """Greatest score and sum before the first block.

    A sink is a key that all see and whose value is zero: the softmax of the first split starts with it.
    """
    top, weight = (mosaic.full((WARPGROUP_ROWS,), value) for value in (_LOWEST, 0.0))
    if refs.sinks is None:
        return top, weight
    row = mosaic.iota((WARPGROUP_ROWS,), 0) + row_part * WARPGROUP_ROWS  # 64 rows need not be whole groups
    head = lax.rem(row, plan.group)
    for index in range(plan.group):
        sink = refs.sinks[item.head * plan.group + index].astype(jnp.float32) * _LOG2E
        top = jnp.where((head == index) & (item.split == 0), sink, top)
    return top, weight + jnp.where(item.split == 0, 1.0, 0.0)


def _capped(attend: Attend, scores: Float[Array, "64 N"]) -> tuple[Float[Array, "64 N"], float]:
    """Scores, and the factor that makes them exponents of two."""
    if attend.softcap is None:
        return scores, attend.scale * _LOG2E
    return jnp.tanh(scores * (attend.scale / attend.softcap)), attend.softcap * _LOG2E


def _has_unseen(plan: Launch, item: Item, row_part: Scalar | int, start: Scalar) -> Bool[Array, ""]:
    """Whether some query of the warpgroup does not see some key of the block."""
    if plan.queries == 1:
        return (start < item.begin) | (start + plan.tuning.block > item.end)
    first_row = row_part * WARPGROUP_ROWS
    first = item.first_query + first_row // plan.group
    last = item.first_query + jnp.minimum((first_row + WARPGROUP_ROWS - 1) // plan.group, plan.chunk_queries - 1)
    begin = jnp.maximum(item.begin, plan.attend.first_visible(last))
    return (start < begin) | (start + plan.tuning.block > jnp.minimum(item.end, first + 1))


def _mask(
    plan: Launch, item: Item, row_part: Scalar | int, start: Scalar, scores: Float[Array, "64 N"]
) -> Float[Array, "64 N"]:
    """The scores, `_UNSEEN` where a row's query does not see the key."""
    position = mosaic.iota(scores.shape, 1) + start
    visible = (position >= item.begin) & (position < item.end)
    if plan.queries > 1:
        row = mosaic.iota((WARPGROUP_ROWS,), 0) + row_part * WARPGROUP_ROWS
        query = item.first_query + lax.div(row, plan.group)
        visible &= position <= mosaic.rows_to_columns(query, plan.tuning.block)
        if plan.attend.window is not None or plan.attend.chunk is not None:
            visible &= position >= mosaic.rows_to_columns(plan.attend.first_visible(query), plan.tuning.block)
    return jnp.where(visible, scores, _UNSEEN)


def _meet(refs: Refs) -> None:
    """Wait until the other computing warpgroup has come here too (if there is one)."""
    if refs.together is not None:
        plgpu.barrier_arrive(refs.together)
        plgpu.barrier_wait(refs.together)


def _store(plan: Launch, refs: Refs, item: Item, part: Scalar | int, carry: Carry) -> None:
    """Normalise and write the rows that hold queries."""
    total, top, weight = carry
    _meet(refs)  # the output is staged where the other warpgroup may still read keys
    width = total.shape[1]
    weight = jnp.maximum(weight, _TINY)
    staged = refs.staged_out.at[part]
    staged[...] = (total * mosaic.rows_to_columns(1 / weight, width)).astype(staged.dtype)
    if refs.logs is not None:  # warpgroups that share V have all of them: the first writes its own
        refs.staged_logs.at[part][...] = top + jnp.log(weight) * _LOG2E  # type: ignore[union-attr]
    plgpu.commit_smem()
    at = (item.place, item.head) if refs.logs is None else (item.split, item.place, item.head)
    out = refs.out.at[at]
    if plan.column_parts > 1:
        out = out.at[:, _nth(part, width)]
    if plan.tuning.row_parts == 1:
        staged = staged.at[pl.ds(0, plan.rows)]
    else:
        out = out.at[_nth(part, WARPGROUP_ROWS)]
    plgpu.copy_smem_to_gmem(staged, out)
    if refs.logs is not None:
        _store_logs(plan, refs, refs.logs.at[at], part)
    plgpu.wait_smem_to_gmem(0)


def _nth(part: Scalar | int, size: int) -> Any:
    """The part's share of a dimension."""
    return pl.ds(pl.multiple_of(jnp.asarray(part * size), size), size)


def _store_logs(plan: Launch, refs: Refs, logs: Ref, part: Scalar | int) -> None:
    staged = refs.staged_logs.at[part]  # type: ignore[union-attr]
    if plan.tuning.row_parts > 1:
        plgpu.copy_smem_to_gmem(staged, logs.at[_nth(part, WARPGROUP_ROWS)])
        return

    @pl.when(jnp.asarray(part) == 0)
    def _write() -> None:
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, plan.padded_rows)], logs)
