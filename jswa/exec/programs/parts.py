"""Attention of devices that share the tokens of a page: each gathers the others' queries, and exchanges results.

device 0   heads 0 1  ─ gather ─▶ heads 0 1 2 3 to keys 0 2 4 …  ─ exchange ─▶ heads 0 1 to all keys
device 1   heads 2 3  ─ gather ─▶ heads 0 1 2 3 to keys 1 3 5 …  ─ exchange ─▶ heads 2 3 to all keys
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jswa.cache.layout import KindLayout
from jswa.model.collectives import context_part, exchange_heads, gather_heads
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.attention.parts import combine_parts, part_of
from pallas_kernels.attention.rows import PagedRows


def own_cells(
    pages: Int[Array, " T"], offsets: Int[Array, " T"], rows: PagedRows, shape: KindLayout, end: int
) -> tuple[Int[Array, " T"], Int[Array, " T"], PagedRows]:
    """Return where this device writes tokens, and its rows. It drops the tokens that others store.

    Args:
        pages, offsets: where tokens are written in whole pages.
        end: number of pages.
    """
    token, part = jnp.arange(len(pages), dtype=jnp.int32), context_part(shape.parts, shape.devices)
    # Past the end, and past the tokens that were to be dropped anyway: dropped cells must be distinct too.
    own = jnp.where(offsets % shape.parts == part, pages, end + len(token) + token)
    return own, offsets // shape.parts, part_of(rows, part, shape.parts)


def attend_in_parts(
    q: Float[Array, "T H D"], *given: Any, shape: KindLayout, sinks: Float[Array, " H"] | None, **more: Any
) -> Float[Array, "T H V"]:
    """Return attention to the keys of all devices. Takes what `paged_attention` takes, for this device's part."""
    part = paged_attention(gather_heads(q, shape.parts, shape.devices), *given, **more)
    return combine_parts(exchange_heads(part, shape.parts, shape.devices), sinks).astype(q.dtype)
