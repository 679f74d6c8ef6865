"""Attention over a list of splits ("mosaic_splits"): a row's result and its cost are its own; see `worklist`.

Queries that see many keys run over a list if a thread block of 64 rows holds their tile, as it does in decode and for
drafts. In other steps tiles have 128 rows: there the rows of one token run over a list too, as if they were a decode
step, and tiles of several tokens as "mosaic" runs them. Their splits follow from the shapes of the step.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper import call
from pallas_kernels.attention.hopper.heuristics import default_tuning, list_tuning
from pallas_kernels.attention.hopper.plan import Launch, Shape, launch
from pallas_kernels.attention.rows import Attend, Packed, Rows, Tiles
from pallas_kernels.hopper import SMS, WARPGROUP_ROWS


def paged_attention(
    q: Float[Array, "T H D"] | Packed,
    kv: Float[Array, "P S K p E"],
    rows: Rows,
    tiles: Tiles,
    *,
    layer_index: int,
    attend: Attend,
    sinks: Float[Array, " H"] | None,
    sms: int | None = None,
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`, and `call.paged_attention` for its errors."""
    run = partial(call.paged_attention, layer_index=layer_index, attend=attend, sinks=sinks)
    if isinstance(q, Packed):
        return run(q, kv, rows, tiles, tuning=plan_of(call.shape_of(q, kv, rows, tiles, attend), sms).tuning)
    shape = Shape.of(q, kv, rows, tiles, attend)
    if shape.queries * shape.group <= WARPGROUP_ROWS:
        return run(q, kv, rows, tiles, tuning=plan_of(shape, sms).tuning)
    tuning, ones, alone = default_tuning(shape, sms or SMS), _ones(rows, tiles), q[tiles.tokens[:, 0]]
    if list_tuning(Shape.of(alone, kv, rows, ones, attend), sms or SMS) is None:
        return run(q, kv, rows, tiles, tuning=tuning)
    several = rows._replace(counts=jnp.where(rows.counts == 1, 0, rows.counts))
    out = run(q, kv, several, tiles, tuning=tuning)
    own = paged_attention(alone, kv, rows, ones, layer_index=layer_index, attend=attend, sinks=sinks, sms=sms)
    tile = tiles.flat_index // shape.queries
    is_alone = rows.counts[tiles.row[tile]] == 1
    return jnp.where(is_alone[:, None, None], own[tile], out)


def plan_of(shape: Shape, sms: int | None = None) -> Launch:
    """Return the launch for a shape whose tiles a thread block of 64 rows holds.

    Queries that see few keys are not split.
    """
    tuning = list_tuning(shape, sms or SMS)
    return launch(shape, tuning or default_tuning(shape, sms or SMS, split=1))


def _ones(rows: Rows, tiles: Tiles) -> Tiles:
    """Return a tile of one token for each tile: live if it is the only token of its row."""
    index = jnp.arange(len(tiles.row), dtype=jnp.int32)
    counts = rows.counts[tiles.row]
    return Tiles(tiles.row, jnp.where(counts == 1, tiles.offset, counts), index[:, None], index)
