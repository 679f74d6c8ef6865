"""Blockwise attention in plain XLA (the CPU default): online softmax over blocks of keys, all tiles side by side.

The pages of a block are gathered when the loop comes to it, so memory does not grow with the context. The loop of a
local layer starts at its window, so its cost does not depend on the context either. Where a block begins depends on
positions alone, never on how prompts were cut into steps: a program gives a token the same result in every step.
Softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles

BLOCK_TOKENS = 128  # of tiles with several tokens
_GROUP = 8  # tiles of several tokens that run side by side
_DECODE_TOKENS = 128, 512  # least and most of a block, if each tile is one token
_DECODE_BYTES = 2 * 2**20  # of the keys and values of a block: they stay in the caches of the cores
_TINY = 1e-30
_LOWEST = -1e30  # finite, so that a row without visible keys makes no NaN

Carry = tuple[Float[Array, "B K n V"], Float[Array, "B K n"], Float[Array, "B K n"]]


def paged_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    *,
    layer_index: int,
    attend: AttentionParams,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`."""
    num_tiles, tile_size = tiles.tokens.shape
    tile = _Tile(tiles.row, tiles.offset, tiles.tokens)
    some = partial(_attend, q, kv, rows, layer_index=layer_index, attend=attend, sinks=sinks)
    if tile_size == 1 or num_tiles <= _GROUP:
        out = some(tile)
    else:
        # There is room for a tile of every row that the step may have: run the tiles that there are, a group at a time.
        real = (tiles.offset < rows.counts[tiles.row]).sum()

        def group(index: Int[Array, ""], out: Float[Array, "B Q H V"]) -> Float[Array, "B Q H V"]:
            # If the tiles are no multiple, the last group overlaps the one before, and writes the same numbers again.
            start = jnp.minimum(index * _GROUP, num_tiles - _GROUP)
            chosen = _Tile(*(lax.dynamic_slice_in_dim(part, start, _GROUP) for part in tile))
            return lax.dynamic_update_slice_in_dim(out, some(chosen), start, axis=0)

        size = attend.value_size(kv.shape[-1], q.shape[2]) + (attend.parts > 1)
        empty = jnp.zeros((num_tiles, tile_size, q.shape[1], size), q.dtype if attend.parts == 1 else jnp.float32)
        out = lax.fori_loop(0, -(-real // _GROUP), group, empty)
    return out.reshape(-1, *out.shape[2:])[tiles.flat_index]


class _Tile(NamedTuple):
    """B tiles; see `QueryTiles`."""

    row: Int[Array, " B"]
    offset: Int[Array, " B"]
    tokens: Int[Array, "B Q"]


def _attend(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tile: _Tile,
    *,
    layer_index: int,
    attend: AttentionParams,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "B Q H V"]:
    """Return the attention of tiles, all of them block by block."""
    num_kv_heads, page_size = kv.shape[2], kv.shape[3]
    head_dim, group = q.shape[2], q.shape[1] // num_kv_heads
    v_dim = attend.value_size(kv.shape[-1], head_dim)
    num_tiles, tile_size = tile.tokens.shape
    decode = tile_size == 1
    dtype = q.dtype if kv.dtype.itemsize == 1 else kv.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None  # else a GPU multiplies float32 in TF32
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    width = rows.page_rows.shape[1]
    block_pages = min(width, _block_pages(kv, num_tiles, dtype)) if decode else max(1, BLOCK_TOKENS // page_size)
    block_tokens = block_pages * page_size

    first_query = rows.starts[tile.row] + tile.offset  # [B]
    end = attend.keys_before(rows.starts[tile.row] + jnp.minimum(tile.offset + tile_size, rows.counts[tile.row]))
    begin = jnp.maximum(rows.visible_from[tile.row], attend.first_visible(first_query))
    query_position = attend.last_key(first_query[:, None] + jnp.arange(tile_size, dtype=jnp.int32)[None])  # [B, Q]
    # One token's window is a function of its position; that of a tile is not, so its blocks begin at their multiples.
    align = page_size if decode else block_tokens
    first_page = (attend.first_visible(first_query) if decode else begin) // align * (align // page_size)
    num_slabs = jnp.where(end > begin, -(-(end - first_page * page_size) // block_tokens), 0)
    shape = (num_tiles, num_kv_heads, group * tile_size)
    # In decode the products take whole cells. Keys and values apart would be two more copies.
    queries = _queries(q[tile.tokens], shape, 0 if not decode else kv.shape[-1] - head_dim)

    def block(index: Int[Array, ""] | int, carry: Carry) -> Carry:
        page = first_page[:, None] + index * block_pages + jnp.arange(block_pages, dtype=jnp.int32)[None]  # [B, n]
        key_position = page[:, :1] * page_size + jnp.arange(block_tokens, dtype=jnp.int32)[None]  # [B, s]
        in_tile = (key_position >= begin[:, None]) & (key_position < end[:, None])
        visible = in_tile[:, None, :] & (key_position[:, None, :] <= query_position[:, :, None])  # [B, Q, s]
        if attend.window is not None or attend.chunk is not None:
            visible &= key_position[:, None, :] >= attend.first_visible(query_position)[:, :, None]
        visible = jnp.tile(visible, (1, group, 1))[:, None]
        read = partial(_cells, ids=_page_ids(rows, tile.row, page), layer_index=layer_index, dtype=dtype)
        # Values are masked too: a cell that was never written may hold NaN, and 0 · NaN is NaN.
        values = jnp.where(in_tile[:, None, :, None], read(kv if decode else kv[..., -v_dim:]), 0)
        keys = values if decode else read(kv[..., :head_dim])
        scores = product("bksd,bknd->bkns", keys, queries)
        scores *= attend.scale
        if attend.softcap is not None:
            scores = attend.softcap * jnp.tanh(scores / attend.softcap)
        return _with_block(carry, scores, visible, lambda p: product("bkns,bksv->bknv", p.astype(dtype), values))

    start = _without_keys(shape, kv.shape[-1] if decode else v_dim, sinks, tile_size)
    once = decode and width == block_pages
    total, weight, top = block(0, start) if once else lax.fori_loop(0, num_slabs.max(), block, start)
    out: Array = total[..., -v_dim:] / jnp.where(weight > 0, weight, 1.0)[..., None]
    out = out if attend.parts == 1 else _part(out, weight, top)
    out = out.reshape(num_tiles, num_kv_heads, group, tile_size, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_tiles, tile_size, q.shape[1], -1).astype(q.dtype if attend.parts == 1 else jnp.float32)


def _part(
    out: Float[Array, "B K n V"], weight: Float[Array, "B K n"], top: Float[Array, "B K n"]
) -> Float[Array, "B K n m"]:
    from pallas_kernels.attention.parts import with_lse

    return with_lse(out, top / math.log(2) + jnp.log2(jnp.maximum(weight, _TINY)))


def _queries(q: Float[Array, "B Q H D"], shape: tuple[int, int, int], zeros: int) -> Float[Array, "B K n E"]:
    """Return the queries by KV head, those of a head side by side, and `zeros` in the place of V. `shape`: B, K, n."""
    num_tiles, tile_size, _, head_dim = q.shape
    num_kv_heads, group = shape[1], shape[2] // tile_size
    queries = q.reshape(num_tiles, tile_size, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(*shape, head_dim)
    return jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, zeros))) if zeros else queries


def _without_keys(
    shape: tuple[int, int, int], value_size: int, sinks: Float[Array, " H"] | None, tile_size: int
) -> Carry:
    """Return the softmax before its first block of keys. `shape`: tiles B, KV heads K, queries times heads n."""
    total = jnp.zeros((*shape, value_size), jnp.float32)
    weight, top = jnp.zeros(shape, jnp.float32), jnp.full(shape, _LOWEST, jnp.float32)
    if sinks is not None:
        # A sink is a key that all queries see and whose value is zero: the softmax starts with it.
        group = shape[2] // tile_size
        heads = sinks.astype(jnp.float32).reshape(1, shape[1], group, 1)
        top = jnp.broadcast_to(heads, (*shape[:2], group, tile_size)).reshape(shape)
        weight = jnp.ones(shape, jnp.float32)
    return total, weight, top


def _with_block(
    carry: Carry,
    scores: Float[Array, "B K n s"],
    visible: Bool[Array, "B 1 n s"],
    values_of: Callable[[Float[Array, "B K n s"]], Float[Array, "B K n V"]],
) -> Carry:
    """Return the softmax with one more block of s keys. `values_of` multiplies probabilities by the keys' values."""
    total, weight, top = carry
    new_top = jnp.maximum(top, jnp.where(visible, scores, _LOWEST).max(axis=-1))
    shrink = jnp.exp(top - new_top)
    probability = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
    update = values_of(probability)
    return total * shrink[..., None] + update, weight * shrink + probability.sum(axis=-1), new_top


def _block_pages(kv: Float[Array, "P S K p E"], num_tiles: int, dtype: jnp.dtype) -> int:
    """Return the pages of a block for tiles of one token each: as many as the CPU's cache holds."""
    _, _, num_kv_heads, page_size, row = kv.shape
    least, most = _DECODE_TOKENS
    tokens = _DECODE_BYTES // (num_tiles * num_kv_heads * row * dtype.itemsize)
    return max(1, min(max(tokens, least), most) // page_size)


def _cells(
    kv: Float[Array, "P S K p n"], ids: Int[Array, "B N"], layer_index: int, dtype: jnp.dtype
) -> Float[Array, "B K s n"]:
    """Return numbers of the cells of the given pages: by KV head, all tokens of the pages in a row."""
    gathered = kv[ids, layer_index].astype(dtype).transpose(0, 2, 1, 3, 4)
    return gathered.reshape(*gathered.shape[:2], -1, gathered.shape[-1])


def _page_ids(rows: PagedRows, row: Int[Array, " B"], page: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Return the ids of the given page positions; beyond the row's table 0, the page of zeros."""
    column = page - rows.first_page[row][:, None]
    width = rows.page_rows.shape[1]
    ids = rows.page_rows[row[:, None], jnp.clip(column, 0, width - 1)]
    return jnp.where((column >= 0) & (column < width), ids, 0)
