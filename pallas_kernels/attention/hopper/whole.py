"""Attention whose keys are never split ("mosaic_whole"): a query's bits depend on itself and on the keys that it sees.

One thread block reads all blocks of keys of its queries. Blocks lie at multiples of their size, which is the same for
tiles of one query and of several, so a query goes through the same blocks in the same order in decode, in a chunk of a
prompt of any size, and as one of several drafts. What the tile's other queries see besides adds zeros to its sums. For
"mosaic" and "mosaic_splits" that is not so: where a split of a tile begins depends on which queries are in it, and
tiles of several tokens have larger blocks.
"""

from jaxtyping import Array, Float

from pallas_kernels.attention.hopper import call
from pallas_kernels.attention.hopper.heuristics import whole_tuning
from pallas_kernels.attention.hopper.launch import Launch, Shape, launch
from pallas_kernels.attention.rows import AttentionParams, PackedQueries, PagedRows, QueryTiles


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
    given = kv, rows, tiles, attend
    tuning = plan_of(call.shape_of(q, *given) if isinstance(q, PackedQueries) else Shape.of(q, *given)).tuning
    return call.paged_attention(
        q, kv, rows, tiles, layer_index=layer_index, attend=attend, sinks=sinks, sms=sms, tuning=tuning
    )


def plan_of(shape: Shape, sms: int | None = None) -> Launch:
    """Return the launch for a shape. It is the same for any number of multiprocessors."""
    return launch(shape, whole_tuning(shape))
