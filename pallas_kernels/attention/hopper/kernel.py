"""The Hopper attention kernel, as one thread block runs it: decode, prefill, and all between.

A thread block works on one chunk of queries, one KV head and one split of the keys:

    queries     the chunk's tokens times the heads of the group, as rows of one or two 64-row WGMMAs (the rows beyond
                them are garbage that no other row sees)
    main loop   over blocks of keys, from the first that the chunk sees: the cost of a local layer does not depend on
                the context. Splits share those blocks, never the whole sequence.
    per block   one TMA box per page brings K and V together, page ids are read one ring of stages ahead. Scores come
                from a WGMMA on shared memory, the softmax is online and in base 2 (Milakov and Gimelshein 2018, arXiv
                1805.02867), probabilities stay in registers as the left operand of the second WGMMA (FlashAttention 3,
                arXiv 2407.08608).
    edges       only blocks with keys that some query of the warpgroup does not see are masked. V that no query of the
                chunk sees is cleared in shared memory: its cells were never written, and 0 * NaN is NaN.
    epilogue    the output is normalised, staged in the memory of the keys, and copied to global memory

With a producer warpgroup (`Tuning.producer`) the ring follows the protocol of `pallas_kernels.ring`. Without it the
only consumer refills a stage as soon as it has used it. K and V of 8 bits are cast from their stages into 16-bit ones:
by the producer, or by the only consumer into a single one; then several thread blocks on a multiprocessor overlap.

Two consumers share the rows (`Tuning.row_parts`) and take turns: one issues its products to the tensor cores while the
other computes its softmax (FlashAttention 3's ping-pong). Each bar is the schedule barrier; S is Q * K, O is P * V:

    producer  copy 0   copy 1   (clear edge of 0)   wait consumed 0, copy 2   wait consumed 1, copy 3   ...
    WG0       wait ready 0, S0 | softmax 0    | O0, release 0, S1 | softmax 1         | O1, release 1, S2 | ...
    WG1                        | wait ..., S0 | softmax 0         | O0, release 0, S1 | softmax 1         | ...

With `Tuning.ahead` the scores of the next block are issued one step earlier, so the tensor cores also have work while
the only warpgroup computes its softmax:

    WG0       wait ready 0, S0, wait ready 1, S1 | softmax 0 | O0, release 0, wait ready 2, S2 | softmax 1 | O1, ...

Or two consumers share a V of more than 256 columns: each computes all scores, and its half of the output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper.launch import Launch
from pallas_kernels.attention.hopper.producer import (
    clear_unseen,
    copy_queries,
    fill_first,
    is_edge,
    page_ids,
    produce,
    refill,
    upcast,
)
from pallas_kernels.attention.hopper.refs import Lse, Refs, Shared, WorkItem
from pallas_kernels.attention.rows import AttentionParams
from pallas_kernels.hopper import WARPGROUP_ROWS
from pallas_kernels.mosaic import Ref, Scalar, plgpu

_LOG2E = 1.4426950408889634
_UNSEEN = -1e30  # score of a key that a query does not see: finite, so that differences are numbers
_LOWEST = -1e25  # initial running maximum: far above `_UNSEEN`, so a row that sees no key of a block adds nothing
_TINY = 1e-30

Part = Scalar | int  # number of a consumer

# The state of the online softmax: output, running maximum of the scores, and sum of their exponentials.
Carry = tuple[Float[Array, "64 V"], Float[Array, " 64"], Float[Array, " 64"]]


def body(plan: Launch, has_sinks: bool, *arrays: Ref, shared: Shared) -> None:
    """Run a thread block. Dead chunks of several queries write nothing, dead single queries (decode) write zeros."""
    refs = Refs.of(plan, has_sinks, arrays, shared)
    if plan.tuning.workers:
        _run(plan, refs, partial(each_item, plan, refs))
        return
    if plan.listed:
        assert refs.entries is not None
        number = lax.axis_index("worker")
        item, live = WorkItem.of_list(plan, refs, number), number < refs.entries[0] * plan.kv_heads
    else:
        item = WorkItem.of(plan, refs)
        live = plan.queries == 1 or item.end > 0
    pl.when(live)(partial(_run, plan, refs, lambda role, **_: role(item)))


def _run(plan: Launch, refs: Refs, each: Callable[..., None]) -> None:
    """Give each warpgroup its role for all items of the thread block, and its registers."""
    if not plan.tuning.producer:
        each(lambda item: _consume(plan, refs, item, 0), consumes=True)
        return
    thread, registers = lax.axis_index("thread"), _registers(plan)

    @pl.when(thread < plan.consumers)
    def _consumer() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(registers[0], action="increase")
        part = thread if plan.consumers > 1 else 0
        each(lambda item: _consume(plan, refs, item, part), consumes=True)

    @pl.when(thread == plan.consumers)
    def _producer() -> None:
        if plan.consumers > 1:
            plgpu.set_max_registers(registers[1], action="decrease")
        each(lambda item: produce(plan, refs, item), consumes=False)


def each_item(plan: Launch, refs: Refs, role: Callable[[WorkItem], None], *, consumes: bool) -> None:
    """Run a role for the thread block's share of the work list, the longest entries first.

    Worker w of W takes pairs of an entry and a KV head w, 2W - 1 - w, 2W + w, ...: every second round in reverse, since
    the pairs become shorter. A producer waits until the consumers have finished an entry before it begins the next: the
    output is staged in the memory of the keys.
    """
    assert refs.entries is not None
    workers, worker = plan.tuning.workers, lax.axis_index("worker")
    pairs = refs.entries[0] * plan.kv_heads
    whole = lax.div(pairs, workers)

    def place(turn: Scalar) -> Scalar:
        out: Scalar = jnp.where(lax.rem(turn, 2) == 0, worker, workers - 1 - worker)
        return out

    count = whole + (whole * workers + place(whole) < pairs).astype(jnp.int32)

    @pl.loop(0, count)
    def _entry(turn: Scalar) -> None:
        if refs.drained is not None and not consumes:
            pl.when(turn > 0)(partial(plgpu.barrier_wait, refs.drained))
        role(WorkItem.of_list(plan, refs, turn * workers + place(turn)))
        if refs.drained is not None and consumes:
            plgpu.barrier_arrive(refs.drained, predicate=turn + 1 < count)


def _registers(plan: Launch) -> tuple[int, int]:
    """Return the registers per thread of a consumer and of the producer. Three warpgroups have 168 each to share.

    The producer needs some for page ids, and for the V that it clears or casts. With these numbers nothing is spilled.
    """
    if plan.upcast:
        return 224, 56
    return (232, 40) if plan.tuning.ahead else (216, 72)


def _consume(plan: Launch, refs: Refs, item: WorkItem, part: Part) -> None:
    """Run one consumer, for its rows and its columns of V."""
    row_part = part if plan.tuning.row_parts > 1 else 0
    width = plan.v_width // plan.column_parts
    if not plan.tuning.producer:
        copy_queries(plan, refs, item)
        fill_first(plan, refs, item)
    plgpu.barrier_wait(refs.queries_ready)

    top, weight = _initial_softmax(plan, refs, item, row_part)
    carry = mosaic.full((WARPGROUP_ROWS, width), 0.0), top, weight
    if refs.schedule is not None:
        pl.when(part == 1)(partial(schedule_barrier, refs))  # half a turn behind the other
    carry = (_mainloop_ahead if plan.tuning.ahead else _mainloop)(plan, refs, item, part, carry)
    if refs.schedule is not None:
        pl.when(part == 0)(partial(schedule_barrier, refs))
    _epilogue(plan, refs, item, part, carry)


def _mainloop(plan: Launch, refs: Refs, item: WorkItem, part: Part, carry: Carry) -> Carry:
    """Visit all blocks: scores, then softmax and output."""

    def step(turn: Scalar, carry: Carry) -> Carry:
        refill_ids = _refill_ids(plan, refs, item, turn)
        _await_keys(plan, refs, item, turn, refill_ids)
        scores, _ = _scores(plan, refs, turn, part, lambda: schedule_barrier(refs))
        return _softmax_and_output(plan, refs, item, turn, part, carry, scores, refill_ids)

    out: Carry = lax.fori_loop(0, item.count, step, carry)
    return out


def _mainloop_ahead(plan: Launch, refs: Refs, item: WorkItem, part: Part, carry: Carry) -> Carry:
    """Visit all blocks, of which there must be one at least: the next block's scores are formed during this softmax.

    FlashAttention 3's overlap within a warpgroup. Two blocks of scores are in registers at a time.
    """

    def step(turn: Scalar, state: tuple[Carry, Float[Array, "64 N"]]) -> tuple[Carry, Float[Array, "64 N"]]:
        carry, scores = state
        refill_ids = _refill_ids(plan, refs, item, turn)

        def meanwhile() -> Carry:
            schedule_barrier(refs)
            return _softmax_and_output(plan, refs, item, turn, part, carry, scores, refill_ids)

        _await_keys(plan, refs, item, turn + 1, ())
        following, carry = _scores(plan, refs, turn + 1, part, meanwhile)
        return carry, following

    _await_keys(plan, refs, item, jnp.int32(0), ())
    first, _ = _scores(plan, refs, jnp.int32(0), part, lambda: None)
    carry, scores = lax.fori_loop(0, item.count - 1, step, (carry, first))
    schedule_barrier(refs)
    return _softmax_and_output(plan, refs, item, item.count - 1, part, carry, scores, ())


def _refill_ids(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar) -> tuple[Scalar, ...]:
    """Read the page ids of the block that is next in the turn's stage, if the consumer is to refill it."""
    return () if plan.tuning.producer else page_ids(plan, refs, item, turn + plan.tuning.stages)


def _await_keys(plan: Launch, refs: Refs, item: WorkItem, turn: Scalar, refill_ids: tuple[Scalar, ...]) -> None:
    """Wait for a block of keys. Without a producer the consumer casts and clears it, and refills an 8-bit stage."""
    if plan.tuning.producer:
        refs.ring.consumer_wait(turn)
        return
    if refs.stored is None:
        refs.ring.consumer_wait(turn)
    else:
        refs.stored.ring.consumer_wait(turn)
        upcast(plan, refs, item, turn, refs.stored, clears=False)
        refill(plan, refs, item, turn, refill_ids)
    pl.when(is_edge(plan, item, turn))(partial(clear_unseen, plan, refs, item, turn))


def _scores[T](
    plan: Launch, refs: Refs, turn: Scalar, part: Part, meanwhile: Callable[[], T]
) -> tuple[Float[Array, "64 N"], T]:
    """Return the products of the warpgroup's queries with a block of keys, and the result of `meanwhile`."""
    row_part = part if plan.tuning.row_parts > 1 else 0
    keys = refs.keys.at[refs.ring.stage(turn), :, pl.ds(0, plan.k_width)]
    return mosaic.product_and(refs.queries.at[row_part], keys, meanwhile)


def _softmax_and_output(
    plan: Launch,
    refs: Refs,
    item: WorkItem,
    turn: Scalar,
    part: Part,
    carry: Carry,
    scores: Float[Array, "64 N"],
    refill_ids: tuple[Scalar, ...],
) -> Carry:
    """Add a block to the output: softmax of its scores, product with its values. Then its stage is released."""
    stage = refs.ring.stage(turn)
    (total, top, weight), probability = softmax_step(plan, item, turn, part, carry, scores)
    if refs.schedule is not None:  # the softmax must end before the tensor cores are asked for again
        total, weight, top, probability = mosaic.settled(total, weight, top, probability)
        schedule_barrier(refs)
    total = mosaic.accumulate(total, probability, refs.keys.at[stage, :, _v_columns(plan, part)])
    if plan.tuning.producer:
        refs.ring.consumer_release(turn, item.count)
    elif refs.stored is None:
        refill(plan, refs, item, turn, refill_ids)
    return total, top, weight


def softmax_step(
    plan: Launch, item: WorkItem, turn: Scalar, part: Part, carry: Carry, scores: Float[Array, "64 N"]
) -> tuple[Carry, Float[Array, "64 N"]]:
    """Return the state of the online softmax after a block's scores, without its values, and their exponentials."""
    block = plan.tuning.block
    start = item.first + turn * block
    row_part = part if plan.tuning.row_parts > 1 else 0
    total, top, weight = carry
    scores, factor = _softcapped(plan.attend, scores)
    mask = partial(_mask, plan, item, row_part, start)
    scores = lax.cond(_has_unseen(plan, item, row_part, start), mask, lambda scores: scores, scores)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    shrink = jnp.exp2(top - new_top)
    probability = jnp.exp2(scores * factor - mosaic.rows_to_columns(new_top, block))
    weight = weight * shrink + probability.sum(axis=1)
    total = total * mosaic.rows_to_columns(shrink, total.shape[1])
    return (total, new_top, weight), probability.astype(plan.dtype)


def schedule_barrier(refs: Refs) -> None:
    """Let the other consumer of rows issue its products, and wait until it has (if there is one)."""
    if refs.schedule is not None:
        plgpu.barrier_arrive(refs.schedule)
        plgpu.barrier_wait(refs.schedule)


def sync_consumers(refs: Refs) -> None:
    """Wait until the other consumer comes here too (if there is one)."""
    if refs.met is not None:
        plgpu.barrier_arrive(refs.met)
        plgpu.barrier_wait(refs.met)


def _v_columns(plan: Launch, part: Part) -> Any:
    """Return the columns of V that a consumer works on."""
    if plan.column_parts == 1:
        return pl.ds(plan.v_start, plan.v_width)
    width = plan.v_width // plan.column_parts
    return pl.ds(pl.multiple_of(jnp.asarray(plan.v_start + part * width), plan.tile_columns), width)


def _initial_softmax(
    plan: Launch, refs: Refs, item: WorkItem, row_part: Part
) -> tuple[Float[Array, " 64"], Float[Array, " 64"]]:
    """Return maximum and sum before the first block.

    A sink is a key that all queries see and whose value is zero: the softmax of the first split starts with it.
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


def _softcapped(attend: AttentionParams, scores: Float[Array, "64 N"]) -> tuple[Float[Array, "64 N"], float]:
    """Return the scores after the softcap, if any, and the factor that makes them exponents of 2."""
    if attend.softcap is None:
        return scores, attend.scale * _LOG2E
    return jnp.tanh(scores * (attend.scale / attend.softcap)), attend.softcap * _LOG2E


def _has_unseen(plan: Launch, item: WorkItem, row_part: Part, start: Scalar) -> Bool[Array, ""]:
    """Return whether some query of the warpgroup does not see some key of the block that begins at `start`."""
    if plan.queries == 1:
        return (start < item.begin) | (start + plan.tuning.block > item.end)
    first_row = row_part * WARPGROUP_ROWS
    first = item.first_query + first_row // plan.group
    last = item.first_query + jnp.minimum((first_row + WARPGROUP_ROWS - 1) // plan.group, plan.chunk_queries - 1)
    begin = jnp.maximum(item.begin, plan.attend.first_visible(last))
    return (start < begin) | (start + plan.tuning.block > jnp.minimum(item.end, plan.attend.keys_before(first + 1)))


def _mask(
    plan: Launch, item: WorkItem, row_part: Part, start: Scalar, scores: Float[Array, "64 N"]
) -> Float[Array, "64 N"]:
    """Return the scores, with `_UNSEEN` for keys that the row's query does not see."""
    position = mosaic.iota(scores.shape, 1) + start
    visible = (position >= item.begin) & (position < item.end)
    if plan.queries > 1:
        row = mosaic.iota((WARPGROUP_ROWS,), 0) + row_part * WARPGROUP_ROWS
        query = plan.attend.last_key(item.first_query + lax.div(row, plan.group))
        visible &= position <= mosaic.rows_to_columns(query, plan.tuning.block)
        if plan.attend.window is not None or plan.attend.chunk is not None:
            visible &= position >= mosaic.rows_to_columns(plan.attend.first_visible(query), plan.tuning.block)
    return jnp.where(visible, scores, _UNSEEN)


def _epilogue(plan: Launch, refs: Refs, item: WorkItem, part: Part, carry: Carry) -> None:
    """Normalise the output, and write the rows that hold queries."""
    total, top, weight = carry
    sync_consumers(refs)  # the other consumer may still read keys in the memory that the output is staged in
    width = total.shape[1]
    weight = jnp.maximum(weight, _TINY)
    staged = refs.staged_out.at[part]
    staged[...] = (total * mosaic.rows_to_columns(1 / weight, width)).astype(staged.dtype)
    if refs.lse is not None:
        refs.lse.staged.at[part][...] = top + jnp.log(weight) * _LOG2E
    plgpu.commit_smem()
    out = refs.out.at[item.out]
    if plan.column_parts > 1:
        out = out.at[:, _nth(part, width)]
    if plan.tuning.row_parts == 1:
        staged = staged.at[pl.ds(0, plan.rows)]
    else:
        out = out.at[_nth(part, WARPGROUP_ROWS)]
    plgpu.copy_smem_to_gmem(staged, out)
    if refs.lse is not None:
        _write_lse(plan, refs.lse, item.out, part)
    plgpu.wait_smem_to_gmem(0)


def _write_lse(plan: Launch, lse: Lse, at: tuple[Scalar, ...], part: Part) -> None:
    """Write the log-sum-exp of a consumer's rows. Consumers that share V have the same, which the first writes."""
    staged, out = lse.staged.at[part], lse.out.at[at]
    if plan.tuning.row_parts > 1:
        plgpu.copy_smem_to_gmem(staged, out.at[_nth(part, WARPGROUP_ROWS)])
        return

    @pl.when(jnp.asarray(part) == 0)
    def _write() -> None:
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, plan.padded_rows)], out)


def _nth(part: Part, size: int) -> Any:
    """Return the part's share of an axis."""
    return pl.ds(pl.multiple_of(jnp.asarray(part * size), size), size)
