"""Paged attention for Hopper in Pallas Mosaic GPU: prepare the kernel's operands, run it, combine its splits."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.attention.hopper import kernel
from pallas_kernels.attention.hopper.heuristics import default_tuning
from pallas_kernels.attention.hopper.launch import Launch, Shape, Tuning, launch
from pallas_kernels.attention.hopper.refs import scratch
from pallas_kernels.attention.hopper.worklist import combine_entries, combined_entries_lse, work_list
from pallas_kernels.attention.parts import combined_lse, with_lse
from pallas_kernels.attention.rows import AttentionParams, PackedQueries, PagedRows, QueryTiles, in_tiles
from pallas_kernels.attention.splits import combine
from pallas_kernels.attention.tuned import tuning_for
from pallas_kernels.errors import NoAttentionKernel
from pallas_kernels.hopper import SMS
from pallas_kernels.quantized import cut


def paged_attention(
    q: Float[Array, "T H D"] | PackedQueries,
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    *,
    layer_index: int,
    attend: AttentionParams,
    sinks: Float[Array, " H"] | None,
    sms: int | None = None,
    tuning: Tuning | None = None,
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`. Tiles may have any size; those of `api.tile_tokens` waste the least.

    Over pages of 8 bits everything is float16, the output of queries that are not packed too. Queries beyond its range
    are cut to ±65,504; packed ones must be float16.

    Raises NoAttentionKernel if the kernel cannot serve the shapes or types, and ValueError if the tuning does not fit
    them.
    """
    if isinstance(q, PackedQueries):
        plan = plan_of(shape_of(q, kv, rows, tiles, attend), sms, tuning)
        if q.values.dtype != plan.dtype:
            raise NoAttentionKernel(
                f"packed queries are {q.values.dtype}: must be {plan.dtype} for pages of {kv.dtype}"
            )
        out = _run(plan, q.dtype, q.values, kv, rows, tiles, layer_index, sinks)
        return out.reshape(len(q.values), -1, plan.v_dim)
    tokens, heads, _ = q.shape
    if kv.dtype.itemsize == 1:
        q = cut(q.astype(jnp.float32), jnp.dtype(jnp.float16))
    plan = plan_of(Shape.of(q, kv, rows, tiles, attend), sms, tuning)
    out = _run(plan, plan.dtype, _pack(plan, q, tiles), kv, rows, tiles, layer_index, sinks)
    if plan.queries == 1:
        return out.reshape(tokens, heads, -1)
    return _unpack(plan, out, tiles, in_tiles(rows, tiles))


def shape_of(
    q: PackedQueries, kv: Float[Array, "P S K p E"], rows: PagedRows, tiles: QueryTiles, attend: AttentionParams
) -> Shape:
    """Return the sizes of a call with packed queries. Raises NoAttentionKernel if the kernel cannot serve them."""
    tokens, kv_heads, _, head_dim = q.values.shape
    size = tokens, kv_heads * q.group, head_dim
    return Shape.of(jax.ShapeDtypeStruct(size, q.values.dtype), kv, rows, tiles, attend)  # type: ignore[no-untyped-call]


def _run(
    plan: Launch,
    result: jnp.dtype,
    packed: Float[Array, "I K M D2"],
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    layer_index: int,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "I K rows V"]:
    items = _items(plan, rows, tiles, len(tiles.flat_index))
    out: Array = _attend(plan, result, packed, kv, items, rows.page_rows, jnp.full(1, layer_index, jnp.int32), sinks)
    return out[:, :, : plan.rows, plan.v_width - plan.v_dim :]  # and the sum's logarithm, if there is one


def plan_of(shape: Shape, sms: int | None = None, tuning: Tuning | None = None) -> Launch:
    """Return the launch for a shape: with the tuning given, else the one that was measured, else the default.

    Raises ValueError if the tuning does not fit the shape.
    """
    return launch(shape, tuning or tuning_for(shape) or default_tuning(shape, sms or SMS))


def _pack(plan: Launch, q: Float[Array, "T H D"], tiles: QueryTiles) -> Float[Array, "I K M D2"]:
    """Return queries by item and KV head, with rows padded to whole copies and columns with zeros to K's box."""
    chunks, queries = plan.chunks, plan.chunk_queries
    if plan.queries > 1:
        tokens = jnp.pad(tiles.tokens, ((0, 0), (0, chunks * queries - plan.queries)), mode="edge")
        q = q[tokens]
    packed = q.reshape(plan.items, queries, plan.kv_heads, plan.group, plan.head_dim).transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(plan.items, plan.kv_heads, plan.rows, plan.head_dim)
    padding = (0, 0), (0, 0), (0, plan.padded_rows - plan.rows), (0, plan.k_width - plan.head_dim)
    return jnp.pad(packed, padding)


def _unpack(
    plan: Launch, out: Float[Array, "I K rows V"], tiles: QueryTiles, held: Bool[Array, " T"]
) -> Float[Array, "T H V"]:
    """Return the output by token. Padding tokens, whose items have written nothing, get zeros."""
    chunks, queries = plan.chunks, plan.chunk_queries
    tile, in_tile = tiles.flat_index // plan.queries, tiles.flat_index % plan.queries
    item, query = tile * chunks + in_tile // queries, in_tile % queries
    out = out.reshape(plan.items, plan.kv_heads, queries, plan.group, out.shape[-1])
    taken = out[item, :, query].reshape(len(held), -1, out.shape[-1])
    return jnp.where(held[:, None, None], taken, jnp.zeros_like(taken))


@partial(jax.jit, static_argnames=("plan", "tokens"))
def _items(plan: Launch, rows: PagedRows, tiles: QueryTiles, tokens: int) -> Int[Array, "I 6"]:
    """Return the numbers of each item: see `refs.Item`. Dead items see no keys.

    Items are chunks of tiles. With one token per tile there is an item per token; padding tokens, which no tile holds,
    are dead. The items of all layers of a kind are equal, so XLA computes them once per step; jitted by itself, so that
    they are also traced once.
    """
    row, offset = tiles.row, tiles.offset
    if plan.queries == 1:
        own = tiles.tokens[tiles.flat_index, 0] == jnp.arange(tokens, dtype=jnp.int32)
        row, offset = row[tiles.flat_index], offset[tiles.flat_index]
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
    end = plan.attend.keys_before(rows.starts[row] + jnp.minimum(last, rows.counts[row]))
    end = jnp.minimum(end, (first_page + plan.columns) * plan.page)
    fields = (begin, end, first_query, first_page)
    index = jnp.arange(plan.items, dtype=jnp.int32)
    items = jnp.stack([index, row, *(jnp.where(live & (begin < end), field, 0) for field in fields)], axis=1)
    if plan.listed or (plan.queries > 1 and plan.attend.window is None):
        return _longest_first(items)
    return items


def _longest_first(items: Int[Array, "I 6"]) -> Int[Array, "I 6"]:
    """Sort items by length, so that no thread block starts a long one when the others have nothing left to do.

    Dead items come last. The rank of an item is found by counting: a sort would be many kernels, and items are few.
    """
    length = items[:, 3] - items[:, 2]
    index = items[:, 0]
    before = (length[None] > length[:, None]) | ((length[None] == length[:, None]) & (index[None] < index[:, None]))
    rank = before.sum(axis=1, dtype=jnp.int32)
    return jnp.zeros_like(items).at[rank].set(items, unique_indices=True)


@partial(jax.jit, static_argnames=("plan", "result"), inline=False)
def _attend(
    plan: Launch,
    result: jnp.dtype,
    q: Float[Array, "I K M D2"],
    kv: Float[Array, "P S K p E"],
    items: Int[Array, "I 6"],
    page_rows: Int[Array, "R N"],
    layer_index: Int[Array, " 1"],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "I K stored V2"]:
    """Run the kernel, and combine its splits. `result`: the type of what is returned, of 16 bits.

    Jitted by itself, so that the layers of a kind share one trace and hence one kernel: two traces differ in the scopes
    that they are called in, which for the compiler makes them two kernels.
    """
    whole = ((plan.items, plan.kv_heads, plan.stored_rows, plan.v_width), result)
    grid, count = _grid(plan)
    parts = ((*count, plan.stored_rows, plan.v_width), jnp.dtype(jnp.float32))
    lse = ((*count, plan.padded_rows), jnp.dtype(jnp.float32))
    run = mosaic.kernel(
        partial(kernel.body, plan, sinks is not None),
        name="paged_attention",
        outputs=[parts, lse] if plan.in_parts else [whole],
        grid=grid,
        num_threads=plan.consumers + plan.tuning.producer,
        scratch={"shared": scratch(plan, result)},
    )
    boxes = kv.reshape(plan.pages * plan.layers_per_page * plan.kv_heads, plan.page, plan.row)
    work = work_list(plan, items) if plan.listed else None
    listed = () if work is None else (work.used,)
    items = items if work is None else work.entries
    outputs = run(q, boxes, items, page_rows, layer_index, *listed, *(() if sinks is None else (sinks,)))
    if not plan.in_parts:
        return outputs[0]
    split_out, split_lse = outputs
    split_lse = split_lse[..., : plan.stored_rows]
    if work is not None:
        out = combine_entries(work, plan.most_splits, split_out, split_lse)
    else:
        out = combine(split_out, split_lse)
    if plan.attend.parts == 1:
        return out.astype(result)
    if work is not None:
        return with_lse(out, combined_entries_lse(work, plan.most_splits, split_lse))
    return with_lse(out, combined_lse(split_lse))


def _grid(plan: Launch) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the grid of thread blocks, and the sizes of the axes that count the parts of a result."""
    if plan.listed:
        workers = plan.tuning.workers or plan.entries * plan.kv_heads
        return {"worker": workers}, (plan.entries, plan.kv_heads)
    splits = plan.tuning.splits
    grid = {"split": splits, "head": plan.kv_heads, "item": plan.items}
    return grid, (splits, plan.items, plan.kv_heads)
