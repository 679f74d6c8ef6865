"""`paged_attention` and `write_kv`: one signature, several implementations, none of which stands in for another.

Shape letters: T tokens of a step (ragged, padded), R rows, N pages per row, P pages of a view, S slots of a page,
p tokens per page, H query heads, K KV heads, D head size, V value head size, E numbers of a token (K first, V last;
D + V, or less where they overlap), Q tokens per query tile, B tiles.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic_launch, reference, triton_attention, xla
from pallas_kernels.rows import Attend, Rows, Tiles

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
    implementation: Implementation = "xla",
) -> Float[Array, "T H V"]:
    """Softmax attention of each row's tokens to the keys at and before them, read from the row's pages.

    Token t at position i sees keys j with rows.visible_from ≤ j ≤ i and, with a window W, j > i - W, or with chunks of
    C, j ≥ ⌊i / C⌋ · C. The keys of the step's own tokens are read from the pages too: `write_kv` comes first. Values
    that no token of a row sees are never used, so they may be NaN. Padding tokens give finite garbage.

    Args:
        kv: a page view of one lane, K and V of a token side by side (`Attend.v_dim`); `slot` is this layer's place in
            a page.
        implementation: "reference" (float32, for tests), "xla" (any device), "mosaic" (Hopper; 16-bit types, head
            sizes to 512), "triton" (NVIDIA GPUs from sm_80 on, with the package jax-triton; head sizes to 512).
        sinks: a logit per head, neither scaled nor masked, that joins the softmax and takes its share (gpt-oss).
        tiles: cut of the same rows into query tiles, made once per step by `tile_rows`.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation = {implementation!r}: must be one of {sorted(get_args(Implementation))}")
    if q.shape[1] % kv.shape[2]:
        raise ValueError(f"query heads ({q.shape[1]}) must be a multiple of KV heads ({kv.shape[2]})")
    return _function(implementation)(q, kv, rows, tiles, slot=slot, attend=attend, sinks=sinks)


def _function(implementation: Implementation) -> Callable[..., Array]:
    if implementation == "mosaic":
        from pallas_kernels import mosaic_attention  # loads Mosaic's compiler: a second that CPU users need not wait

        return mosaic_attention.paged_attention
    if implementation == "triton":
        return triton_attention.paged_attention
    return reference.paged_attention if implementation == "reference" else xla.paged_attention


def write_kv(
    kv: Float[Array, "P S K p E"],
    values: Float[Array, "T K E"],
    *,
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    slot: int,
) -> Float[Array, "P S K p E"]:
    """Write each token's K and V, side by side, to its page, in place where the caller donates the arena.

    A token whose page is ≥ P is dropped; pages past the end must be distinct, as (page, offset) pairs all are.
    """
    values = values.astype(kv.dtype)
    if len(values) == 1:
        # XLA turns a scatter of one index into a guarded update that copies the whole lane: add one that is dropped.
        values = jnp.concatenate([values, values])
        pages = jnp.concatenate([pages, jnp.full(1, 2**31 - 1, jnp.int32)])
        offsets = jnp.concatenate([offsets, offsets])
    return kv.at[pages, slot, :, offsets].set(values, mode="drop", unique_indices=True)
