"""The oracle for tests: gather all keys of all rows, one plain softmax in float32. Memory grows as T · N · p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.parts import LOWEST, with_lse
from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles


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
    num_kv_heads, page_size = kv.shape[2], kv.shape[3]
    num_tokens, num_heads, head_dim = q.shape
    v_dim = attend.value_size(kv.shape[-1], head_dim)
    token_row = tiles.row[tiles.flat_index // tiles.tokens.shape[1]]
    # The tokens of a row are consecutive, so a token's index in its row is the number of earlier tokens of that row.
    order = jnp.arange(num_tokens)
    in_row = (order[:, None] > order[None]) & (token_row[:, None] == token_row[None])
    position = rows.starts[token_row] + in_row.sum(axis=1)
    gathered = kv[rows.page_rows, layer_index]  # [R, N, K, p, D+V]
    gathered = gathered.transpose(0, 2, 1, 3, 4).reshape(len(rows.starts), num_kv_heads, -1, kv.shape[-1])
    keys = jnp.repeat(gathered[token_row], num_heads // num_kv_heads, axis=1).astype(jnp.float32)
    key_position = rows.first_page[token_row][:, None] * page_size + jnp.arange(keys.shape[2])[None]
    begin = jnp.maximum(rows.visible_from[token_row], attend.first_visible(position))
    visible = (key_position <= attend.last_key(position)[:, None]) & (key_position >= begin[:, None])
    visible &= (position < (rows.starts + rows.counts)[token_row])[:, None]  # padding tokens see nothing
    scores = jnp.einsum("thd,thsd->ths", q.astype(jnp.float32), keys[..., :head_dim], precision="highest")
    scores *= attend.scale
    if attend.softcap is not None:
        scores = attend.softcap * jnp.tanh(scores / attend.softcap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (num_tokens, num_heads, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[2]]
    values = jnp.where(visible[:, None, :, None], keys[..., -v_dim:], 0.0)
    out = jnp.einsum("ths,thsv->thv", jnp.where(visible[:, None], weights, 0.0), values, precision="highest")
    if attend.parts > 1:
        return with_lse(out, jnp.maximum(jax.nn.logsumexp(scores, axis=-1) / jnp.log(2.0), LOWEST))
    return out.astype(q.dtype)
