"""Paged attention for Hopper in Pallas Mosaic GPU: decode, prefill and extension, keys and values in pages.

This module prepares what the kernel reads (`mosaic_kernel`) and combines what its splits write.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper import kernel as kernel
from pallas_kernels.attention.hopper.block import scratch
from pallas_kernels.attention.hopper.plan import Launch, Shape, Tuning, default_tuning, launch
from pallas_kernels.attention.rows import Attend, Rows, Tiles
from pallas_kernels.attention.tuned import tuning_for

_MOST = 65_504.0  # greatest float16


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
    """See `api.paged_attention`. Tiles of any size; those of `mosaic_launch.tile_tokens` waste the least.

    Over pages of 8 bits all is float16, the output too: queries beyond its range (65,504; 6e-8 is the least) are cut.

    Raises ValueError where the kernel cannot serve the shapes.
    """
    tokens, heads, _ = q.shape
    if kv.dtype.itemsize == 1:
        q = jnp.clip(q.astype(jnp.float32), -_MOST, _MOST).astype(jnp.float16)
    shape = Shape.of(q, kv, rows, tiles, attend)
    plan = launch(shape, tuning or tuning_for(shape) or default_tuning(shape))
    items = _items(plan, rows, tiles, tokens)
    out: Array = _attend(plan, _pack(plan, q, tiles), kv, items, rows.page_rows, jnp.full(1, slot, jnp.int32), sinks)
    out = out[:, :, : plan.rows, plan.v_width - plan.v_dim :]
    if plan.queries == 1:
        return out.reshape(tokens, heads, plan.v_dim)
    return _unpack(plan, out, tiles, _seen(plan, rows, tiles))


def _pack(plan: Launch, q: Float[Array, "T H D"], tiles: Tiles) -> Float[Array, "I K M D2"]:
    """Queries by item and KV head, rows padded to what is copied and columns with zeros to K's box."""
    chunks, queries = plan.chunks, plan.chunk_queries
    if plan.queries > 1:
        tokens = jnp.pad(tiles.tokens, ((0, 0), (0, chunks * queries - plan.queries)), mode="edge")
        q = q[tokens]
    packed = q.reshape(plan.items, queries, plan.kv_heads, plan.group, plan.head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(plan.items, plan.kv_heads, plan.rows, plan.head_dim)
    padding = (0, 0), (0, 0), (0, plan.padded_rows - plan.rows), (0, plan.k_width - plan.head_dim)
    return jnp.pad(packed, padding)


def _unpack(
    plan: Launch, out: Float[Array, "I K rows V"], tiles: Tiles, seen: Bool[Array, " T"]
) -> Float[Array, "T H V"]:
    """The output by token. Padding tokens, whose items have written nothing, get zeros."""
    chunks, queries = plan.chunks, plan.chunk_queries
    tile, lane = tiles.place // plan.queries, tiles.place % plan.queries
    item, query = tile * chunks + lane // queries, lane % queries
    out = out.reshape(plan.items, plan.kv_heads, queries, plan.group, plan.v_dim)
    taken = out[item, :, query].reshape(len(seen), -1, plan.v_dim)
    return jnp.where(seen[:, None, None], taken, jnp.zeros_like(taken))


def _seen(plan: Launch, rows: Rows, tiles: Tiles) -> Bool[Array, " T"]:
    """Which tokens of the step belong to a row."""
    tile, lane = tiles.place // plan.queries, tiles.place % plan.queries
    in_row = tiles.offset[tile] + lane < rows.counts[tiles.row[tile]]
    return in_row & (tiles.tokens[tile, lane] == jnp.arange(len(tiles.place), dtype=jnp.int32))


def _items(plan: Launch, rows: Rows, tiles: Tiles, tokens: int) -> Int[Array, "I 6"]:
    """Of each item where its queries lie, its row, first and last + 1 visible position, first query and first page.

    Items are chunks of tiles. Dead ones see nothing. The same for all layers of a kind, so XLA computes it once per
    step. With one token per tile there is an item per token; padding tokens, which no tile holds, are dead.
    """
    row, offset = tiles.row, tiles.offset
    if plan.queries == 1:
        own = tiles.tokens[tiles.place, 0] == jnp.arange(tokens, dtype=jnp.int32)
        row, offset = row[tiles.place], offset[tiles.place]
        live, last = own & (offset < rows.counts[row]), offset + 1
    else:
        chunk = jnp.arange(plan.chunks, dtype=jnp.int32) * plan.chunk_queries
        last = jnp.repeat(offset + plan.queries, plan.chunks)
        row, offset = jnp.repeat(row, plan.chunks), (offset[:, None] + chunk[None]).reshape(-1)
        last = jnp.minimum(offset + plan.chunk_queries, last)
        live = offset < jnp.minimum(rows.counts[row], last)
    first_query = rows.starts[row] + offset
    first_page = rows.first_page[row]
    begin = jnp.maximum(rows.visible_from[row], plan.attend.first_visible(first_query))
    begin = jnp.maximum(begin, first_page * plan.page)
    end = rows.starts[row] + jnp.minimum(last, rows.counts[row])
    end = jnp.minimum(end, (first_page + plan.columns) * plan.page)
    fields = (begin, end, first_query, first_page)
    place = jnp.arange(plan.items, dtype=jnp.int32)
    items = jnp.stack([place, row, *(jnp.where(live & (begin < end), field, 0) for field in fields)], axis=1)
    return items if plan.queries == 1 or plan.attend.window is not None else _longest_first(items)


def _longest_first(items: Int[Array, "I 6"]) -> Int[Array, "I 6"]:
    """So that no thread block starts a long item when the others have nothing left to do. Dead ones come last.

    By counting: a sort would be many kernels, here there are few items.
    """
    length = items[:, 3] - items[:, 2]
    place = items[:, 0]
    before = (length[None] > length[:, None]) | ((length[None] == length[:, None]) & (place[None] < place[:, None]))
    rank = before.sum(axis=1, dtype=jnp.int32)
    return jnp.zeros_like(items).at[rank].set(items, unique_indices=True)


@partial(jax.jit, static_argnames="plan", inline=False)
def _attend(
    plan: Launch,
    q: Float[Array, "I K M D2"],
    kv: Float[Array, "P S K p E"],
    items: Int[Array, "I 6"],
    page_rows: Int[Array, "R N"],
    slot: Int[Array, " 1"],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "I K stored V2"]:
    """Run the kernel, and combine its splits.

    Jitted by itself, so that the layers of a kind share one trace, hence one kernel: what differs between traces of
    the same kernel, the scopes it is called in, is part of its identity for the compiler.
    """
    splits, size = plan.tuning.splits, (plan.items, plan.kv_heads)
    whole = ((*size, plan.stored_rows, plan.v_width), plan.dtype)
    parts = ((splits, *whole[0]), jnp.dtype(jnp.float32))
    logs = ((splits, *size, plan.padded_rows), jnp.dtype(jnp.float32))
    run = mosaic.kernel(
        partial(kernel.body, plan, sinks is not None),
        name="paged_attention",
        outputs=[whole] if splits == 1 else [parts, logs],
        grid={"split": splits, "head": plan.kv_heads, "item": plan.items},
        num_threads=plan.consumers + plan.tuning.loader,
        scratch=scratch(plan),
    )
    boxes = kv.reshape(plan.pages * plan.slots * plan.kv_heads, plan.page, plan.row)
    outputs = run(q, boxes, items, page_rows, slot, *(() if sinks is None else (sinks,)))
    return outputs[0] if splits == 1 else _combine(plan, *outputs)


def _combine(
    plan: Launch, parts: Float[Array, "S I K stored V2"], logs: Float[Array, "S I K M"]
) -> Float[Array, "I K stored V2"]:
    """The softmax over all splits, from the softmax over each and the base-2 logarithm of its sum."""
    logs = logs[..., : plan.stored_rows]
    weights = jnp.exp2(logs - logs.max(axis=0, keepdims=True))
    out = (parts * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[..., None]
    return out.astype(plan.dtype)
