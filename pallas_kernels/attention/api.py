"""`paged_attention` and `write_kv`: one signature, several implementations, none of which stands in for another.

Shape letters: T tokens of a step (ragged, padded), R rows, N pages per row, P pages of a view, S slots of a page,
p tokens per page, H query heads, K KV heads, D head size, V value head size, E numbers of a token (K first, V last;
D + V, or less where they overlap), Q tokens per query tile, B tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import reference, xla
from pallas_kernels.attention.hopper import plan as mosaic_launch
from pallas_kernels.attention.rows import Attend, Rows, Tiles
from pallas_kernels.attention.triton import call as triton

Implementation = Literal["reference", "xla", "mosaic", "triton"]

TILE_TOKENS = 32  # query tokens per tile, of implementations that need no other


def tile_tokens(implementation: Implementation, group: int) -> int:
    """Query tokens per tile of steps with prompts: what an implementation is quickest with. It takes any other.

    Args:
        group: query heads per KV head.
    """
    return mosaic_launch.tile_tokens(group) if implementation == "mosaic" else TILE_TOKENS


def paged_attention(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: Rows,
    tiles: Tiles,
    *,
    slot: int,
    attend: Attend,
    sinks: Float[Array, " H"] | None = None,
    kv_scales: Float[Array, "2 K"] | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "T H V"]:
    """Softmax attention of each row's tokens to the keys at and before them, read from the row's pages.

    Token t at position i sees keys j with rows.visible_from ≤ j ≤ i and, with a window W, j > i - W, or with chunks of
    C, j ≥ ⌊i / C⌋ · C. The keys of the step's own tokens are read from the pages too: `write_kv` comes first. Values
    that no token of a row sees are never used, so they may be NaN. Padding tokens give finite garbage.

    Args:
        kv: a page view of one lane, K and V of a token side by side (`Attend.v_dim`); `slot` is this layer's place in
            a page.
        implementation: "reference" (float32, for tests), "xla" (any device), "mosaic" (Hopper; 16-bit types, 8-bit
            pages, head sizes to 512), "triton" (NVIDIA GPUs from sm_80 on, with the package jax-triton; head sizes to
            512).
        sinks: a logit per head, neither scaled nor masked, that joins the softmax and takes its share (gpt-oss).
        kv_scales: of 8-bit pages, what a number of K and of V is worth, by KV head; None: one. See `write_kv`.
        tiles: cut of the same rows into query tiles, made once per step by `tile_rows`.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation = {implementation!r}: must be one of {sorted(get_args(Implementation))}")
    if q.shape[1] % kv.shape[2]:
        raise ValueError(f"query heads ({q.shape[1]}) must be a multiple of KV heads ({kv.shape[2]})")
    function = partial(_function(implementation), rows=rows, tiles=tiles, slot=slot, attend=attend, sinks=sinks)
    if kv.dtype.itemsize > 1:
        if kv_scales is not None:
            raise ValueError(f"kv_scales are for 8-bit pages, and these are {kv.dtype}")
        return function(q, kv)
    # Scales are exact where they are multiplied in float32: K's into the queries, V's into the output.
    group, v_dim = q.shape[1] // kv.shape[2], attend.value_size(kv.shape[-1], q.shape[2])
    wide = q.astype(jnp.float32)
    if kv_scales is None:
        return function(wide, kv).astype(q.dtype)
    scales = _column_scales(kv_scales, kv.shape[-1], v_dim).repeat(group, axis=0)
    out = function(wide * scales[None, :, : q.shape[2]], kv).astype(jnp.float32)
    return (out * scales[None, :, -v_dim:]).astype(q.dtype)


def _column_scales(kv_scales: Float[Array, "2 K"], row: int, v_dim: int) -> Float[Array, "K E"]:
    """The scale of each of a row's numbers: V's of the last `v_dim`, K's of those before. They may overlap."""
    is_value = jnp.arange(row) >= row - v_dim
    return jnp.where(is_value[None], kv_scales[1][:, None], kv_scales[0][:, None]).astype(jnp.float32)


def _function(implementation: Implementation) -> Callable[..., Array]:
    if implementation == "mosaic":
        # It loads Mosaic's compiler: a second that CPU users need not wait.
        from pallas_kernels.attention.hopper import call as mosaic

        return mosaic.paged_attention
    if implementation == "triton":
        return triton.paged_attention
    return reference.paged_attention if implementation == "reference" else xla.paged_attention


def write_kv(
    kv: Float[Array, "P S K p E"],
    values: Float[Array, "T K E"],
    *,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    slot: int,
    kv_scales: Float[Array, "2 K"] | None = None,
    v_dim: int | None = None,
) -> Float[Array, "P S K p E"]:
    """Write each token's K and V, side by side, to its page, in place where the caller donates the arena.

    A token whose page is ≥ P is dropped; pages past the end must be distinct, as (page, offset) pairs all are. To
    8-bit pages a number is written as what it is of its scale, cut to the type's range of ±448.

    Args:
        kv_scales: what a number of K and of V is worth in 8-bit pages, by KV head; None: one.
        v_dim: V is the last so many of a row's numbers; needed with scales.
    """
    if kv.dtype.itemsize > 1 and kv_scales is not None:
        raise ValueError(f"kv_scales are for 8-bit pages, and these are {kv.dtype}")
    if kv.dtype.itemsize == 1:
        values = values.astype(jnp.float32)
        if kv_scales is not None:
            if v_dim is None:
                raise ValueError("v_dim = None: must be the number of V's columns where there are kv_scales")
            values = values / _column_scales(kv_scales, kv.shape[-1], v_dim)[None]
        most = jnp.finfo(kv.dtype).max.astype(jnp.float32)  # type: ignore[no-untyped-call]
        values = jnp.clip(values, -most, most)
    values = values.astype(kv.dtype)
    if len(values) == 1:
        # XLA turns a scatter of one index into a guarded update that copies the whole lane: add one that is dropped.
        values = jnp.concatenate([values, values])
        pages = jnp.concatenate([pages, jnp.full(1, 2**31 - 1, jnp.int32)])
        offsets = jnp.concatenate([offsets, offsets])
    return kv.at[pages, slot, :, offsets].set(values, mode="drop", unique_indices=True)
