"""Paged decode attention for Hopper in Pallas Mosaic GPU: few query tokens per row, keys and values in pages.

This module prepares what the kernel reads (`mosaic_decode_kernel`) and combines what its splits write.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic
from pallas_kernels import mosaic_decode_kernel as kernel
from pallas_kernels.mosaic_launch import Launch, Shape, Tuning, default_tuning, launch
from pallas_kernels.rows import Attend, Rows, Tiles


def paged_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: Rows,
    tiles: Tiles,
    *,
    slot: int,
    attend: Attend,
    sinks: Float[Array, " H"] | None,
    tuning: Tuning | None = None,
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`. Tiles of one token each, or of as many as make 64 rows with the group's heads.

    Raises ValueError where the kernel cannot serve the shapes.
    """
    tokens, heads, _ = q.shape
    shape = Shape.of(q, kv, rows, tiles, attend)
    plan = launch(shape, tuning or default_tuning(shape))
    items = _items(plan, rows, tiles, tokens)
    out: Array = _attend(plan, _pack(plan, q, tiles), kv, items, rows.page_rows, jnp.full(1, slot, jnp.int32), sinks)
    out = out[..., plan.v_width - plan.v_dim :]
    if plan.queries == 1:
        return out.reshape(tokens, heads, plan.v_dim)
    out = out.reshape(-1, plan.kv_heads, plan.queries, plan.group, plan.v_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(-1, heads, plan.v_dim)[tiles.place]


def _pack(plan: Launch, q: Float[Array, "T H D"], tiles: Tiles) -> Float[Array, "B K M D2"]:
    """Queries by tile and KV head, rows padded to eights and columns with zeros to K's box."""
    if plan.queries == 1:
        packed = q.reshape(plan.tiles, plan.kv_heads, plan.group, plan.head_dim)
    else:
        packed = q[tiles.tokens].reshape(plan.tiles, plan.queries, plan.kv_heads, plan.group, plan.head_dim)
        packed = packed.transpose(0, 2, 1, 3, 4).reshape(plan.tiles, plan.kv_heads, plan.rows, plan.head_dim)
    padding = (0, 0), (0, 0), (0, plan.padded_rows - plan.rows), (0, plan.k_width - plan.head_dim)
    return jnp.pad(packed, padding)


def _items(plan: Launch, rows: Rows, tiles: Tiles, tokens: int) -> Int[Array, "B 5"]:
    """Of each tile its row, first and last + 1 visible position, first query and first page. Dead tiles see nothing.

    The same for all layers of a kind, so XLA computes it once per step. With one token per tile there is an item per
    token; padding tokens, which no tile holds, are dead.
    """
    row, offset = tiles.row, tiles.offset
    live = offset < rows.counts[row]
    if plan.queries == 1:
        own = tiles.tokens[tiles.place, 0] == jnp.arange(tokens, dtype=jnp.int32)
        row, offset, live = row[tiles.place], offset[tiles.place], live[tiles.place] & own
    first_query = rows.starts[row] + offset
    first_page = rows.first_page[row]
    begin = jnp.maximum(rows.visible_from[row], plan.attend.first_visible(first_query))
    begin = jnp.maximum(begin, first_page * plan.page)
    end = rows.starts[row] + jnp.minimum(offset + plan.queries, rows.counts[row])
    end = jnp.minimum(end, (first_page + plan.columns) * plan.page)
    fields = (begin, end, first_query, first_page)
    return jnp.stack([row, *(jnp.where(live & (begin < end), field, 0) for field in fields)], axis=1)


@partial(jax.jit, static_argnames="plan", inline=False)
def _attend(
    plan: Launch,
    q: Float[Array, "B K M D2"],
    kv: Float[Array, "P S K p E"],
    items: Int[Array, "B 5"],
    page_rows: Int[Array, "R N"],
    slot: Int[Array, " 1"],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "B K rows V2"]:
    """Run the kernel, and combine its splits.

    Jitted by itself, so that the layers of a kind share one trace, hence one kernel: what differs between traces of
    the same kernel, the scopes it is called in, is part of its identity for the compiler.
    """
    splits, size = plan.tuning.splits, (plan.tiles, plan.kv_heads)
    whole = ((*size, plan.rows, plan.v_width), plan.dtype)
    parts = ((splits, *whole[0]), jnp.dtype(jnp.float32))
    logs = ((splits, *size, plan.padded_rows), jnp.dtype(jnp.float32))
    run = mosaic.kernel(
        partial(kernel.body, plan, sinks is not None),
        name="paged_decode",
        outputs=[whole] if splits == 1 else [parts, logs],
        grid={"split": splits, "head": plan.kv_heads, "tile": plan.tiles},
        num_threads=plan.consumers + plan.tuning.loader,
        scratch=kernel.scratch(plan),
    )
    boxes = kv.reshape(plan.pages * plan.slots * plan.kv_heads, plan.page, plan.row)
    outputs = run(q, boxes, items, page_rows, slot, *(() if sinks is None else (sinks,)))
    return outputs[0] if splits == 1 else _combine(plan, *outputs)


def _combine(
    plan: Launch, parts: Float[Array, "S B K rows V2"], logs: Float[Array, "S B K M"]
) -> Float[Array, "B K rows V2"]:
    """The softmax over all splits, from the softmax over each and the base-2 logarithm of its sum."""
    logs = logs[..., : plan.rows]
    weights = jnp.exp2(logs - logs.max(axis=0, keepdims=True))
    out = (parts * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[..., None]
    return out.astype(plan.dtype)
