"""Shapes of `paged_attention`'s arguments for a layer of `attention_layers`: to lower, compile, or fill."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles
from tools.cases.kernels.attention_layers import Layer


class Arguments(NamedTuple):
    """Shapes of the arrays in `paged_attention`'s order, then the static arguments."""

    q: jax.ShapeDtypeStruct
    kv: jax.ShapeDtypeStruct
    rows: PagedRows
    tiles: QueryTiles
    sinks: jax.ShapeDtypeStruct | None
    layer_index: int
    attend: AttentionParams


def arguments(layer: Layer, sharding: Sharding | None = None) -> Arguments:
    """Return the arguments of a call. Each row has its own pages, as many as the window or the context needs."""
    heads, kv_heads, head_dim, v_dim = layer.heads
    count = layer.count or layer.tile
    tokens, columns = layer.batch * count, page_columns(layer)
    tiles = layer.batch if count <= layer.tile else tokens // layer.tile + layer.batch

    def array(*shape: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    per_row = array(layer.batch)
    row = layer.row or head_dim + v_dim
    return Arguments(
        array(tokens, heads, head_dim, dtype=layer.dtype),
        array(
            1 + layer.batch * columns,
            layer.layers_per_page,
            kv_heads,
            layer.page_size,
            row,
            dtype=layer.kv_dtype or layer.dtype,
        ),
        PagedRows(per_row, per_row, array(layer.batch, columns), per_row, per_row),
        QueryTiles(array(tiles), array(tiles), array(tiles, layer.tile), array(tokens)),
        array(heads, dtype=layer.dtype) if layer.sinks else None,
        layer_index=layer.layers_per_page - 1,
        attend=AttentionParams(head_dim**-0.5, layer.window, layer.chunk, layer.softcap, v_dim),
    )


def page_columns(layer: Layer) -> int:
    """Return the columns of the page table: the pages of the whole context, or those that a local layer keeps."""
    if layer.window is None and layer.chunk is None:
        return -(-layer.context // layer.page_size)
    reach = layer.window or layer.chunk or 0
    return -(-(reach - 1 + (layer.count or layer.tile)) // layer.page_size) + 1
