"""Blockwise attention in plain XLA (the CPU default): online softmax over blocks of keys, all tiles side by side.

The pages of a block are gathered when the loop comes to it, so memory does not grow with the context. Blocks start at
absolute multiples of their size, however the step is cut into tiles. The loop of a local layer starts at its window, so
its cost does not depend on the context either. Softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.rows import Attend, Rows, Tiles

BLOCK_TOKENS = 128
_LOWEST = -1e30  # finite, so that a row without visible keys makes no NaN


def paged_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: Rows,
    tiles: Tiles,
    *,
    layer_index: int,
    attend: Attend,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`."""
    num_kv_heads, page_size = kv.shape[2], kv.shape[3]
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    v_dim = attend.value_size(kv.shape[-1], head_dim)
    num_tiles, tile_size = tiles.tokens.shape
    dtype = q.dtype if kv.dtype.itemsize == 1 else kv.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None  # else a GPU multiplies float32 in TF32
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    block_pages = max(1, BLOCK_TOKENS // page_size)
    block_tokens = block_pages * page_size

    first_query = rows.starts[tiles.row] + tiles.offset  # [B]
    end = rows.starts[tiles.row] + jnp.minimum(tiles.offset + tile_size, rows.counts[tiles.row])
    begin = jnp.maximum(rows.visible_from[tiles.row], attend.first_visible(first_query))
    query_position = first_query[:, None] + jnp.arange(tile_size, dtype=jnp.int32)[None]  # [B, Q]
    first_block = begin // block_tokens
    num_blocks = jnp.where(end > begin, -(-end // block_tokens) - first_block, 0)
    queries = q[tiles.tokens].reshape(num_tiles, tile_size, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)

    def block(
        index: Int[Array, ""], carry: tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
    ) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
        total, weight, top = carry
        page = (first_block + index)[:, None] * block_pages + jnp.arange(block_pages, dtype=jnp.int32)[None]  # [B, n]
        gathered = kv[_page_ids(rows, tiles.row, page), layer_index].astype(dtype)  # [B, n, K, p, D+V]
        gathered = gathered.transpose(0, 2, 1, 3, 4).reshape(num_tiles, num_kv_heads, block_tokens, -1)
        key_position = page[:, :1] * page_size + jnp.arange(block_tokens, dtype=jnp.int32)[None]  # [B, s]
        in_tile = (key_position >= begin[:, None]) & (key_position < end[:, None])
        visible = in_tile[:, None, :] & (key_position[:, None, :] <= query_position[:, :, None])  # [B, Q, s]
        if attend.window is not None or attend.chunk is not None:
            visible &= key_position[:, None, :] >= attend.first_visible(query_position)[:, :, None]
        visible = visible[:, None, None]
        keys = gathered[..., :head_dim]
        scores = product("bkgqd,bksd->bkgqs", queries, keys)
        scores *= attend.scale
        if attend.softcap is not None:
            scores = attend.softcap * jnp.tanh(scores / attend.softcap)
        new_top = jnp.maximum(top, jnp.where(visible, scores, _LOWEST).max(axis=-1))
        shrink = jnp.exp(top - new_top)
        probability = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        # Values are masked too: a cell that was never written may hold NaN, and 0 · NaN is NaN.
        values = jnp.where(in_tile[:, None, :, None], gathered[..., -v_dim:], 0)
        update = product("bkgqs,bksv->bkgqv", probability.astype(dtype), values)
        return total * shrink[..., None] + update, weight * shrink + probability.sum(axis=-1), new_top

    shape = (num_tiles, num_kv_heads, group, tile_size)
    total = jnp.zeros((*shape, v_dim), jnp.float32)
    weight, top = jnp.zeros(shape, jnp.float32), jnp.full(shape, _LOWEST, jnp.float32)
    if sinks is not None:
        # A sink is a key that all queries see and whose value is zero: the softmax starts with it.
        top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1), shape)
        weight = jnp.ones(shape, jnp.float32)
    total, weight, _ = lax.fori_loop(0, num_blocks.max(), block, (total, weight, top))
    out: Array = total / jnp.where(weight > 0, weight, 1.0)[..., None]
    out = out.transpose(0, 3, 1, 2, 4).reshape(num_tiles * tile_size, q.shape[1], -1)
    return out[tiles.flat_index].astype(q.dtype)


def _page_ids(rows: Rows, row: Int[Array, " B"], page: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Return the ids of the given page positions; beyond the row's table 0, the page of zeros."""
    column = page - rows.first_page[row][:, None]
    width = rows.page_rows.shape[1]
    ids = rows.page_rows[row[:, None], jnp.clip(column, 0, width - 1)]
    return jnp.where((column >= 0) & (column < width), ids, 0)
