"""Paged attention as a Triton kernel, for GPUs that Mosaic does not serve: prepare the operands, call, combine splits.

The call goes through jax-triton, an optional package.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.attention.parts import combined_lse, with_lse
from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles, in_tiles
from pallas_kernels.attention.splits import combine
from pallas_kernels.attention.triton.heuristics import SMS, default_tuning
from pallas_kernels.attention.triton.tuning import Shape, Tuning, check_tuning, column_parts


def paged_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    *,
    layer_index: int,
    attend: AttentionParams,
    sinks: Float[Array, " H"] | None,
    sms: int | None = None,
    tuning: Tuning | None = None,
    whole: bool = False,
) -> Float[Array, "T H V"]:
    """See `api.paged_attention`. `whole`: keys are not split.

    Raises ImportError if jax-triton is missing, NoAttentionKernel if the kernel cannot serve the shapes, and ValueError
    if the tuning cannot be compiled.
    """
    tokens, heads, _ = q.shape
    shape = Shape.of(q, kv, rows, tiles, attend)
    tuning = tuning or default_tuning(shape, sms or SMS)
    tuning = tuning._replace(splits=1) if whole else tuning
    check_tuning(tuning)
    splits = tuning.splits
    in_parts = splits > 1 or attend.parts > 1
    size = (tokens, heads, shape.v_dim)
    arrays = {"q": q, "kv": kv, "items": program_items(shape, rows, tiles, tokens), "tokens": tiles.tokens}
    outputs = [jax.ShapeDtypeStruct(size, shape.dtype)]  # type: ignore[no-untyped-call]
    if in_parts:
        parts, lse = (splits, *size), (splits, tokens, heads)
        outputs = [jax.ShapeDtypeStruct(part, jnp.float32) for part in (parts, lse)]  # type: ignore[no-untyped-call]
    triton.load()
    from pallas_kernels.attention.triton import kernel  # imports Triton

    found = triton.call(
        kernel.attend,
        {
            **arrays,
            "page_rows": rows.page_rows,
            "sinks": sinks,
            "layer_index": layer_index * shape.kv_heads * shape.page,
            **({} if in_parts else {"lse": None}),
        },
        outputs,
        (shape.tiles * shape.chunks(tuning.rows), shape.kv_heads, splits),
        {"TOKENS": tokens if in_parts else 0, **_constants(shape, tuning)},
        warps=tuning.warps,
        stages=tuning.stages,
    )
    if attend.parts > 1:
        out = with_lse(combine(*found), combined_lse(found[1]))
    else:
        out = found[0] if splits == 1 else combine(*found).astype(shape.dtype)
    # The kernel writes nothing for tokens that no tile holds.
    return out if shape.queries == 1 else jnp.where(in_tiles(rows, tiles)[:, None, None], out, jnp.zeros((), out.dtype))


def _constants(shape: Shape, tuning: Tuning) -> dict[str, Any]:
    attend = shape.attend
    window, chunk = attend.bounds
    d_main, d_rest = column_parts(shape.head_dim)
    v_main, v_rest = column_parts(shape.v_dim)
    return {
        "QUERIES": shape.queries,
        "GROUP": shape.group,
        "KV_HEADS": shape.kv_heads,
        "LAYERS_PER_PAGE": shape.layers_per_page,
        "PAGE": shape.page,
        "COLUMNS": shape.columns,
        "WIDTH": shape.row,
        "D": shape.head_dim,
        "D_MAIN": d_main,
        "D_REST": d_rest,
        "V": shape.v_dim,
        "V_MAIN": v_main,
        "V_REST": v_rest,
        "WINDOW": window,
        "CHUNK": chunk,
        "SCALE": float(attend.scale),
        "SOFTCAP": float(attend.softcap or 0.0),
        "CHUNKS": shape.chunks(tuning.rows),
        "ROWS": tuning.rows,
        "BLOCK": tuning.block,
        "SPLITS": tuning.splits,
        "PARTS": attend.parts,
        "PRECISION": "ieee",  # of products in float32; 16-bit types have only one
    }


def program_items(shape: Shape, rows: PagedRows, tiles: QueryTiles, tokens: int) -> Int[Array, "B 5"]:
    """Return of each tile: row, first query's position, live queries, first page, lowest position that may be seen.

    With one token per tile there is an item per token; padding tokens, which no tile holds, have no live query. The
    items of all layers of a kind are equal, so XLA computes them once per step.
    """
    row, offset = tiles.row, tiles.offset
    live = jnp.clip(rows.counts[row] - offset, 0, shape.queries)
    if shape.queries == 1:
        row, offset = row[tiles.flat_index], offset[tiles.flat_index]
        live = jnp.where(in_tiles(rows, tiles), live[tiles.flat_index], 0)
    lowest = jnp.maximum(rows.visible_from, rows.first_page * shape.page)
    return jnp.stack([row, rows.starts[row] + offset, live, rows.first_page[row], lowest[row]], axis=1)
