"""One layer's attention over the pages of a lane."""

from typing import NamedTuple

from jax import named_scope
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig
from jswa.cache.layout import KindLayout
from jswa.exec.backends import Backends
from pallas_kernels.attention.api import paged_attention, write_kv
from pallas_kernels.attention.rows import Attend, Rows, Tiles


class Cells(NamedTuple):
    """Where tokens are written, and what their queries read."""

    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]
    rows: Rows
    tiles: Tiles


def attend_pages(
    lane: Float[Array, "1 blocks elems"],
    q: Float[Array, "T H D"],
    kv: Float[Array, "T K E"] | None,
    sinks: Float[Array, " H"] | None,
    kv_scales: Float[Array, "2 K"] | None,
    *,
    shape: KindLayout,
    page_size: int,
    index: int,
    cells: Cells,
    attend: Attend,
    backends: Backends,
) -> tuple[Float[Array, "1 blocks elems"], Float[Array, "T H V"]]:
    """Write the layer's KV to the lane, if there is any, and attend.

    The reshapes are bitcasts; the lane is not copied.

    Args:
        kv_scales: for 8-bit lanes, see `write_kv`.
        shape, index: the view of the lane's pages, and the layer's place in a page.
    """
    pages = lane.shape[1] * shape.pages_per_block
    view = lane.reshape(pages, shape.layers_per_page, shape.num_kv_heads, page_size, shape.row)
    with named_scope("attention"):
        if kv is not None:
            view = write_kv(
                view,
                kv,
                pages=cells.pages,
                offsets=cells.offsets,
                layer_index=index,
                kv_scales=kv_scales,
                v_dim=shape.v_head_dim,
            )
        out = paged_attention(
            q,
            view,
            cells.rows,
            cells.tiles,
            layer_index=index,
            attend=attend,
            sinks=sinks,
            kv_scales=kv_scales,
            implementation=backends.attention,
            sms=backends.sms,
        )
    return view.reshape(lane.shape), out


def static(attention: AttentionConfig) -> Attend:
    """Return the static parameters of a layer's attention."""
    reach = attention.reach
    return Attend(
        attention.scale,
        window=reach.size if reach is not None and not reach.chunked else None,
        chunk=reach.size if reach is not None and reach.chunked else None,
        softcap=attention.softcap,
        v_dim=attention.v_head_dim,
    )
