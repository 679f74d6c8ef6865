"""Attention over a list of splits ("mosaic_splits"): a row's result and its cost are its own; see `worklist`.

In steps with prompts, whose tiles have more than 64 rows, the rows of one token run in a launch of their own, as if
they were a decode step. Tiles of several tokens have splits by their own keys too. So neither other rows nor the size
of a step change a bit of a row's result.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.hopper import call
from pallas_kernels.attention.hopper.heuristics import default_tuning, list_tuning
from pallas_kernels.attention.hopper.launch import Launch, Shape, launch
from pallas_kernels.attention.rows import AttentionParams, PackedQueries, PagedRows, QueryTiles
from pallas_kernels.hopper import SMS, WARPGROUP_ROWS


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
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`, and `call.paged_attention` for its errors."""
    run = partial(call.paged_attention, layer_index=layer_index, attend=attend, sinks=sinks)
    if isinstance(q, PackedQueries):
        return run(q, kv, rows, tiles, tuning=plan_of(call.shape_of(q, kv, rows, tiles, attend), sms).tuning)
    shape = Shape.of(q, kv, rows, tiles, attend)
    tuning = plan_of(shape, sms).tuning
    if shape.queries * shape.group <= WARPGROUP_ROWS:
        return run(q, kv, rows, tiles, tuning=tuning)
    several = rows._replace(counts=jnp.where(rows.counts == 1, 0, rows.counts))
    out = run(q, kv, several, tiles, tuning=tuning)
    tile_of, ones = _ones(rows, tiles)
    alone = q[tiles.tokens[tile_of, 0]]
    own = paged_attention(alone, kv, rows, ones, layer_index=layer_index, attend=attend, sinks=sinks, sms=sms)
    row = tiles.row[tiles.flat_index // shape.queries]
    return jnp.where((rows.counts[row] == 1)[:, None, None], own[row], out)


def plan_of(shape: Shape, sms: int | None = None) -> Launch:
    """Return the launch for a shape. Queries that see few keys are not split."""
    tuning = list_tuning(shape, sms or SMS)
    return launch(shape, tuning or default_tuning(shape, sms or SMS, split=1))


def _ones(rows: PagedRows, tiles: QueryTiles) -> tuple[Int[Array, " R"], QueryTiles]:
    """Return the tile of each row of one token (0 for other rows), and a tile of one token for each row.

    The latter is live if the row has one token.
    """
    index, tile = (jnp.arange(len(array), dtype=jnp.int32) for array in (rows.counts, tiles.row))
    is_alone = (rows.counts[tiles.row] == 1) & (tiles.offset == 0)
    at = jnp.where(is_alone, tiles.row, len(index) + tile)  # others are distinct too, and dropped
    tile_of = jnp.zeros_like(index).at[at].set(tile, mode="drop", unique_indices=True)
    ones = QueryTiles(index, jnp.where(rows.counts == 1, 0, rows.counts), index[:, None], index)
    return tile_of, ones
