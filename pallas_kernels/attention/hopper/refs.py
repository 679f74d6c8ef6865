"""The arguments of the Hopper attention kernel: memory and barriers of a thread block, and its item of work."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper.launch import Launch
from pallas_kernels.hopper import WARPGROUP_ROWS
from pallas_kernels.mosaic import Ref, Scalar, plgpu
from pallas_kernels.ring import Ring

FIELDS = 6  # numbers of an item in memory: see `WorkItem`


class Stored(NamedTuple):
    """Stages of 8-bit numbers, as they come from the pages, to be cast into those of `Shared.ring`."""

    memory: Ref
    ring: Ring


class Shared(NamedTuple):
    """Shared memory and barriers: their types in the kernel's scratch, and references to them in its body.

    Attributes:
        inputs_or_out: queries [consumer of rows, row, column] and stages of K and V [stage, key, column]; or, after the
            main loop, the staged output [consumer, row, column], with splits also its log-sum-exp [consumer, row].
        ring: of the stages of K and V. If the only consumer casts into a single stage, nobody waits for it.
        queries_ready: the queries have arrived.
        met: a barrier of two consumers; see `kernel.sync_consumers`.
        schedule: a barrier of two consumers of rows; see `kernel.schedule_barrier`.
        drained: all consumers have finished an entry of a work list; see `kernel.each_item`.
    """

    inputs_or_out: Ref
    stored: Stored | None
    ring: Ring
    queries_ready: Ref
    met: Ref | None
    schedule: Ref | None
    drained: Ref | None


def scratch(plan: Launch, result: jnp.dtype) -> Shared:
    """Return the types of a thread block's shared memory and barriers. `result`: the type of whole results."""
    block, stages, _, producer, row_parts, *_ = plan.tuning
    swizzle, consumers = plan.tile_columns * plan.dtype.itemsize, plan.consumers
    out_type = jnp.float32 if plan.in_parts else result
    staged = [plgpu.SMEM((consumers, WARPGROUP_ROWS, plan.v_width // plan.column_parts), out_type)]
    if plan.in_parts:
        staged.append(plgpu.SMEM((consumers, WARPGROUP_ROWS), jnp.float32))
    stored = None
    if plan.upcast:
        memory = mosaic.tiled((stages, block, plan.row), plan.stored, plan.stored_columns)
        stored = Stored(memory, Ring.scratch(stages, plan.page_boxes))
    inputs = [
        mosaic.tiled((row_parts, WARPGROUP_ROWS, plan.k_width), plan.dtype, swizzle),
        mosaic.tiled((plan.key_stages, block, plan.row), plan.dtype, swizzle),
    ]
    return Shared(
        inputs_or_out=plgpu.RefUnion(inputs, staged),
        stored=stored,
        ring=Ring.scratch(
            plan.key_stages,
            1 if plan.upcast else plan.page_boxes,
            consumers=consumers if producer else 0,
            edges=producer and not plan.upcast,
        ),
        queries_ready=plgpu.Barrier(num_arrivals=row_parts),
        met=plgpu.Barrier(num_arrivals=consumers) if consumers > 1 else None,
        schedule=plgpu.Barrier(num_arrivals=row_parts) if row_parts > 1 else None,
        drained=plgpu.Barrier(num_arrivals=consumers) if plan.tuning.workers and producer else None,
    )


@dataclass(frozen=True)
class Lse:
    """Log-sum-exp in base 2 of each row's scores, an output of launches in parts: in global and shared memory."""

    out: Ref
    staged: Ref


@dataclass(frozen=True)
class Refs:
    """Global memory, shared memory and barriers of a thread block; see `Shared`.

    Attributes:
        q: queries [item, KV head, row, column].
        kv: K and V [box, token of the page, column]; a box is a page of one layer and KV head.
        items: numbers of each item [item, field], or of each entry of a work list; see `WorkItem`.
        page_rows: page ids [row, column].
        layer_index: the layer's index within a page, one number.
        entries: of the work list, one number.
        out: [item, KV head, row, column], with splits [split, ...]; with a work list [entry, KV head, row, column].
    """

    q: Ref
    kv: Ref
    items: Ref
    page_rows: Ref
    layer_index: Ref
    entries: Ref | None
    sinks: Ref | None
    out: Ref
    staged_out: Ref
    lse: Lse | None
    queries: Ref
    queries_ready: Ref
    keys: Ref
    ring: Ring
    stored: Stored | None
    met: Ref | None
    schedule: Ref | None
    drained: Ref | None

    @classmethod
    def of(cls, plan: Launch, has_sinks: bool, arrays: tuple[Ref, ...], shared: Shared) -> "Refs":
        """Name the kernel's operands and outputs."""
        q, kv, items, page_rows, layer_index, *left = arrays
        entries = left.pop(0) if plan.listed else None
        sinks = left.pop(0) if has_sinks else None
        out, *lse = left
        (queries, keys), (staged_out, *staged_lse) = shared.inputs_or_out
        return cls(
            q=q,
            kv=kv,
            items=items,
            page_rows=page_rows,
            layer_index=layer_index,
            entries=entries,
            sinks=sinks,
            out=out,
            staged_out=staged_out,
            lse=Lse(lse[0], staged_lse[0]) if lse else None,
            queries=queries,
            queries_ready=shared.queries_ready,
            keys=keys,
            ring=shared.ring,
            stored=shared.stored,
            met=shared.met,
            schedule=shared.schedule,
            drained=shared.drained,
        )


@dataclass(frozen=True)
class WorkItem:
    """The work of a thread block: a chunk of queries, a KV head, and a split of the keys that the queries see.

    `FIELDS` numbers of it are read from memory: index, row, begin, end, first_query and first_page. An entry of a work
    list has three more: split, first block and blocks.

    Attributes:
        index: of the chunk's queries in q, and of its output.
        row: of the step.
        begin, end: positions [begin, end) of the keys that some query sees.
        first_query: position of the first query.
        first_page: page position of the first column of the row's page table.
        first: position of the first key of the first block.
        count: blocks of keys.
        out: index of its output.
    """

    index: Scalar
    head: Scalar
    split: Scalar
    layer_index: Scalar
    row: Scalar
    begin: Scalar
    end: Scalar
    first_query: Scalar
    first_page: Scalar
    first: Scalar
    count: Scalar
    out: tuple[Scalar, ...]

    @classmethod
    def of(cls, plan: Launch, refs: Refs) -> "WorkItem":
        """Read the item, and take the split's share of its blocks. Blocks lie at multiples of their size."""
        item, head, split = (lax.axis_index(name) for name in ("item", "head", "split"))
        index, row, begin, end, first_query, first_page = (refs.items[item, field] for field in range(FIELDS))
        block, splits = plan.tuning.block, plan.tuning.splits
        first = lax.div(begin, block)
        count = lax.div(end + (block - 1), block) - first
        if splits > 1:
            share = lax.div(count + (splits - 1), splits)
            first, count = first + split * share, jnp.clip(count - split * share, 0, share)
        layer, out = refs.layer_index[0], (split, index, head) if plan.in_parts else (index, head)
        return cls(index, head, split, layer, row, begin, end, first_query, first_page, first * block, count, out)

    @classmethod
    def of_list(cls, plan: Launch, refs: Refs, number: Scalar) -> "WorkItem":
        """Read an entry of the work list, for one KV head. All heads of an entry follow each other."""
        entry, head = lax.div(number, plan.kv_heads), lax.rem(number, plan.kv_heads)
        index, row, begin, end, first_query, first_page, split, first, count = (
            refs.items[entry, field] for field in range(FIELDS + 3)
        )
        layer, start = refs.layer_index[0], first * plan.tuning.block
        return cls(index, head, split, layer, row, begin, end, first_query, first_page, start, count, (entry, head))
