"""`paged_attention` and `write_kv`: one signature, several implementations. None of them stands in for another.

An implementation is imported where it is chosen: Mosaic's compiler takes a second that CPU users need not wait.

Shape letters: T tokens of a step (ragged, padded), R rows, N pages per row, P pages of a view, S layers that share a
page, p tokens per page, H query heads, K KV heads, D head size, V value head size, E numbers of a token (K first, V
last; D + V, or less if they overlap), Q tokens per query tile, B tiles.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import Attention
from pallas_kernels.attention import xla
from pallas_kernels.attention.rows import AttentionParams, PackedQueries, PagedRows, QueryTiles
from pallas_kernels.errors import NoAttentionKernel
from pallas_kernels.quantized import cut

Implementation = Attention
_HOPPER = ("mosaic", "mosaic_splits", "mosaic_whole")

TILE_TOKENS = 32  # query tokens per tile of all implementations but those for Hopper
_BLOCK_ROWS = 128  # heads of queries that fill a thread block of two consumers on Hopper


def tile_tokens(implementation: Implementation, group: int) -> int:
    """Return the query tokens per tile with which an implementation prefills fastest. It takes tiles of any size.

    Args:
        implementation: see `paged_attention`.
        group: query heads per KV head.
    """
    return max(1, _BLOCK_ROWS // group) if implementation in _HOPPER else TILE_TOKENS


def paged_attention(
    q: Float[Array, "T H D"] | PackedQueries,
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    *,
    layer_index: int,
    attend: AttentionParams,
    sinks: Float[Array, " H"] | None = None,
    kv_scales: Float[Array, "2 K"] | None = None,
    implementation: Implementation = "xla",
    sms: int | None = None,
) -> Float[Array, "T H V"]:
    """Return softmax attention of each row's tokens to the keys at and before them, read from the row's pages.

    A token at position i sees the keys at positions j with rows.visible_from ≤ j ≤ i and, with a window W, j > i - W,
    or, with chunks of C and a look-back of L chunks, j ≥ (⌊i / C⌋ - L) · C. The keys of the step's own tokens are read
    from the pages too, so `write_kv` must come first. Values that no token of a row sees are never used: they may be
    NaN. Padding tokens get finite numbers without meaning.

    With attend.parts > 1 the pages hold every `parts`-th key, and `rows` come from `parts.part_of`. The result is that
    of these keys, [T, H, V + 1] in float32: the last number of a head is the base-2 logarithm of its softmax's sum.
    `parts.combine_parts` makes one result of those of all parts.

    Args:
        q: queries of the step's tokens; or, on Hopper, as `packed_form` says.
        kv: a page view of one lane: K and V of a token side by side (see `AttentionParams.v_dim`).
        rows: the step's rows.
        tiles: the same rows, cut into query tiles once per step by `tile_rows`.
        layer_index: index of this layer within a page, 0 to S - 1: the S layers of a kind that share a lane share its
            pages (docs/design/kv-memory.md).
        attend: static parameters of the layer.
        sinks: a logit per head, neither scaled nor masked, that joins the softmax and takes its share (gpt-oss).
        kv_scales: factors of the numbers in 8-bit pages, of K and of V by KV head; None: 1. See `write_kv`.
        implementation: "reference" (float32, for tests), "xla" (any device), "cpu" (the library of
            `pallas_kernels.cpu`), "mosaic" (Hopper; 16-bit types, 8-bit pages, head sizes to 512), "mosaic_splits" (the
            same, where a row's splits depend on its own length alone: see `hopper.splits`), "mosaic_whole" (the same
            without splits: a query's bits depend on itself and the keys that it sees alone), "triton" (NVIDIA GPUs
            from sm_80 on, with the package jax-triton; head sizes to 512), "triton_whole" (the same without splits: a
            query's bits depend on these and the size of its tile).
        sms: multiprocessors of the device, for Hopper and Triton. None: as many as an H200 or an A100 has.

    Raises:
        NoAttentionKernel: the implementation cannot serve these shapes or types.
        ValueError: an argument is wrong.
        ImportError: the implementation is on Triton, and jax-triton is not installed.
        NoLibrary: implementation = "cpu", and its library is not there.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation = {implementation!r}: must be one of {sorted(get_args(Implementation))}")
    if isinstance(q, PackedQueries) and implementation not in _HOPPER:
        raise NoAttentionKernel(f"packed queries: implementation = {implementation!r} takes none")
    if not isinstance(q, PackedQueries) and q.shape[1] % kv.shape[2]:
        raise ValueError(f"query heads ({q.shape[1]}) must be a multiple of KV heads ({kv.shape[2]})")
    if attend.parts > 1:
        from pallas_kernels.attention.parts import check_part, without_unseen

        check_part(implementation, attend, plain=sinks is None and not isinstance(q, PackedQueries))
    function = partial(
        _function(implementation, sms), rows=rows, tiles=tiles, layer_index=layer_index, attend=attend, sinks=sinks
    )
    if kv.dtype.itemsize == 1:
        out = _from_8_bits(function, q, kv, kv_scales, attend)
    elif kv_scales is not None:
        raise ValueError(f"kv_scales are for 8-bit pages, and these are {kv.dtype}")
    else:
        out = function(q, kv)
    return out if attend.parts == 1 else without_unseen(out, rows, tiles, attend.parts)


def _from_8_bits(
    function: Callable[..., Array],
    q: Float[Array, "T H D"] | PackedQueries,
    kv: Float[Array, "P S K p E"],
    kv_scales: Float[Array, "2 K"] | None,
    attend: AttentionParams,
) -> Float[Array, "T H V"]:
    """Return attention over pages of 8 bits. In float32 scales are exact: K's are applied to q, V's to the output."""
    wide = q if isinstance(q, PackedQueries) else q.astype(jnp.float32)
    dtype = q.dtype if attend.parts == 1 else jnp.dtype(jnp.float32)
    if kv_scales is None:
        return function(wide, kv).astype(dtype)
    if isinstance(wide, PackedQueries):  # in the type of the values, as V's scales come before the last rounding
        out, group = function(wide._replace(dtype=wide.values.dtype), kv), wide.group
    else:
        group, v_dim = wide.shape[1] // kv.shape[2], attend.value_size(kv.shape[-1], wide.shape[2])
        scales = _column_scales(kv_scales, kv.shape[-1], v_dim).repeat(group, axis=0)
        out = function(wide * scales[None, :, : wide.shape[2]], kv)
    of_heads = kv_scales[1].astype(jnp.float32).repeat(group)[None, :, None]
    if attend.parts > 1:  # the last number is of K alone
        return jnp.concatenate([out[..., :-1] * of_heads, out[..., -1:]], axis=-1)
    return (out.astype(jnp.float32) * of_heads).astype(dtype)


def packed_form(
    q: Float[Array | jax.ShapeDtypeStruct, "T H D"],
    kv: Float[Array | jax.ShapeDtypeStruct, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    attend: AttentionParams,
    implementation: Implementation,
    sms: int | None = None,
) -> tuple[int, jnp.dtype] | None:
    """Return M and the values' type if `paged_attention` takes this call's queries as `PackedQueries` [T, K, M, D].

    None: it does not. Only shapes and types are read. Raises NoAttentionKernel if the implementation cannot serve them.
    """
    if implementation not in _HOPPER or tiles.tokens.shape[1] > 1 or attend.parts > 1:
        return None
    from pallas_kernels.attention.hopper.launch import Shape

    plan = _on_hopper(implementation).plan_of(Shape.of(q, kv, rows, tiles, attend), sms)
    return (plan.padded_rows, plan.dtype) if plan.k_width == plan.head_dim else None


def _column_scales(kv_scales: Float[Array, "2 K"], row: int, v_dim: int) -> Float[Array, "K E"]:
    """Return the scale of each of a row's numbers: V's for the last `v_dim` of them, K's for those before."""
    is_value = jnp.arange(row) >= row - v_dim
    return jnp.where(is_value[None], kv_scales[1][:, None], kv_scales[0][:, None]).astype(jnp.float32)


def _function(implementation: Implementation, sms: int | None) -> Callable[..., Array]:
    if implementation in _HOPPER:
        return partial(_on_hopper(implementation).paged_attention, sms=sms)
    if implementation in ("triton", "triton_whole"):
        from pallas_kernels.attention.triton import call as triton

        return partial(triton.paged_attention, sms=sms, whole=implementation == "triton_whole")
    if implementation == "cpu":
        from pallas_kernels.cpu import attention as cpu

        return cpu.paged_attention
    if implementation == "reference":
        from pallas_kernels.attention import reference

        return reference.paged_attention
    return xla.paged_attention


def _on_hopper(implementation: Implementation) -> ModuleType:
    from pallas_kernels.attention.hopper import call, splits, whole

    return {"mosaic": call, "mosaic_splits": splits, "mosaic_whole": whole}[implementation]


def write_kv(
    kv: Float[Array, "P S K p E"],
    values: Float[Array, "T K E"],
    *,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    layer_index: int,
    kv_scales: Float[Array, "2 K"] | None = None,
    v_dim: int | None = None,
) -> Float[Array, "P S K p E"]:
    """Return the pages with each token's K and V written to its cell: in place, if the caller donates the arena.

    A token whose page is ≥ P is dropped. (page, offset) pairs must be distinct, those of dropped tokens too. In 8-bit
    pages a number is stored divided by its scale, and cut to the type's range of ±448.

    Args:
        kv: a page view of one lane.
        values: K and V of each token, side by side.
        pages: page id of each token.
        offsets: index of each token within its page.
        layer_index: as in `paged_attention`.
        kv_scales: factors of the numbers in 8-bit pages, of K and of V by KV head; None: 1.
        v_dim: size of V, which is the end of a token's numbers. Needed with scales.

    Raises ValueError if scales are given for pages of another type, or without `v_dim`.
    """
    if kv.dtype.itemsize > 1 and kv_scales is not None:
        raise ValueError(f"kv_scales are for 8-bit pages, and these are {kv.dtype}")
    if kv.dtype.itemsize == 1:
        values = values.astype(jnp.float32)
        if kv_scales is not None:
            if v_dim is None:
                raise ValueError("v_dim = None: must be the size of V if kv_scales are given")
            values = values / _column_scales(kv_scales, kv.shape[-1], v_dim)[None]
        values = cut(values, kv.dtype)
    values = values.astype(kv.dtype)
    if len(values) == 1:
        # XLA turns a scatter of one index into a guarded update that copies the whole lane: add one that is dropped.
        values = jnp.concatenate([values, values])
        pages = jnp.concatenate([pages, jnp.full(1, 2**31 - 1, jnp.int32)])
        offsets = jnp.concatenate([offsets, offsets])
    return kv.at[pages, layer_index, :, offsets].set(values, mode="drop", unique_indices=True)
