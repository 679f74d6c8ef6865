"""One layer's attention over the pages of a lane."""

from functools import partial
from typing import NamedTuple

import jax
from jax import named_scope
from jaxtyping import Array, Float, Int, Shaped

from jswa.architecture import AttentionConfig
from jswa.cache.layout import KindLayout
from jswa.kernels import Kernels
from jswa.model.fused_projection import Projection
from pallas_kernels.attention.api import packed_form, paged_attention, write_kv
from pallas_kernels.attention.rows import AttentionParams, PackedQueries, PagedRows, QueryTiles
from pallas_kernels.elementwise import arguments as elementwise
from pallas_kernels.elementwise.api import rotate_and_write


class Cells(NamedTuple):
    """Where tokens are written, and what their queries read."""

    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]
    rows: PagedRows
    tiles: QueryTiles


def store_pages(
    lane: Float[Array, "1 slabs elems"],
    kv: Float[Array, "T K E"],
    *,
    shape: KindLayout,
    page_size: int,
    index: int,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> Float[Array, "1 slabs elems"]:
    """Return the lane with a layer's KV of tokens, for which nothing is attended; see `attend_pages`."""
    count = lane.shape[1] * shape.pages_per_slab
    view = lane.reshape(count, shape.layers_per_page, shape.num_kv_heads, page_size, shape.row)
    view = write_kv(view, kv, pages=pages, offsets=offsets, layer_index=index, v_dim=shape.v_head_dim)
    return view.reshape(lane.shape)


def attend_pages(
    lane: Float[Array, "1 slabs elems"],
    q: Float[Array, "T H D"] | Projection,
    kv: Float[Array, "T K E"] | None,
    sinks: Float[Array, " H"] | None,
    kv_scales: Float[Array, "2 K"] | None,
    *,
    shape: KindLayout,
    page_size: int,
    index: int,
    cells: Cells,
    attend: AttentionParams,
    kernels: Kernels,
) -> tuple[Float[Array, "1 slabs elems"], Float[Array, "T H V"]]:
    """Write the layer's KV to the lane, if there is any, and attend.

    The reshapes are bitcasts; the lane is not copied.

    Args:
        q: queries; or what one kernel makes them of, with the KV that it writes: then `kv` is None.
        kv_scales: for 8-bit lanes, see `write_kv`.
        shape, index: the view of the lane's pages, and the layer's place in a page.
        cells: of whole pages, also if devices share their tokens.
    """
    pages = lane.shape[1] * shape.pages_per_slab
    view_shape = pages, shape.layers_per_page, shape.num_kv_heads, page_size // shape.parts, shape.row
    attend_to = paged_attention
    if shape.parts > 1:  # imported where devices share tokens
        from jswa.exec.programs.parts import attend_in_parts, own_cells

        cells = Cells(*own_cells(*cells[:3], shape, pages), cells.tiles)
        attend, attend_to = attend._replace(parts=shape.parts), partial(attend_in_parts, shape=shape)
    with named_scope("attention"):
        queries: Float[Array, "T H D"] | PackedQueries
        if isinstance(q, Projection):
            at = elementwise.KVCells(cells.pages, cells.offsets, index, view_shape, kv_scales)
            lane, queries = _write_projection(kernels, q, lane, at, cells, attend)
        else:
            queries = q
        view = lane.reshape(view_shape)
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
        out = attend_to(
            queries,
            view,
            cells.rows,
            cells.tiles,
            layer_index=index,
            attend=attend,
            sinks=sinks,
            kv_scales=kv_scales,
            implementation=kernels.attention,
            sms=kernels.sms,
        )
    return lane if kv is None else view.reshape(lane.shape), out


def _write_projection(
    kernels: Kernels,
    own: Projection,
    lane: Shaped[Array, "1 slabs elems"],
    at: elementwise.KVCells,
    cells: Cells,
    attend: AttentionParams,
) -> tuple[Shaped[Array, "1 slabs elems"], Float[Array, "T H D"] | PackedQueries]:
    """Write a layer's K and V to its pages; return the lane and the queries, as the attention kernel reads them."""
    heads, tokens = own.heads, own.qkv.values.shape[1]
    queries = jax.ShapeDtypeStruct((tokens, heads.heads, heads.head_dim), own.dtype)  # type: ignore[no-untyped-call]
    view = jax.ShapeDtypeStruct(at.shape, lane.dtype)  # type: ignore[no-untyped-call]
    packed = packed_form(queries, view, cells.rows, cells.tiles, attend, kernels.attention, kernels.sms)
    if packed is not None:
        rows, dtype = packed
        heads = heads._replace(rows=rows, query_dtype=dtype if lane.dtype.itemsize == 1 else None)
    q, lane = rotate_and_write(
        own.qkv,
        lane,
        heads,
        own.weights,
        own.rope,
        at,
        own.dtype,
        temperature=own.temperature,
        implementation=own.implementation,
    )
    return lane, PackedQueries(q, heads.group, own.dtype) if packed else q.reshape(tokens, heads.heads, heads.head_dim)


def static(attention: AttentionConfig) -> AttentionParams:
    """Return the static parameters of a layer's attention."""
    reach = attention.reach
    return AttentionParams(
        attention.scale,
        window=reach.size if reach is not None and not reach.chunked else None,
        chunk=reach.size if reach is not None and reach.chunked else None,
        softcap=attention.softcap,
        v_dim=attention.v_head_dim,
        lookback=reach.lookback if reach is not None else 0,
    )
