"""Keys that several devices share: each has every n-th key of a text, and gives a part of the result.

    position        0    1    2    3    4    5    6    7         parts = 2
    part 0        [ 0         1         2         3      ]       a page of p tokens has p / 2 cells in each part
    part 1        [      0         1         2         3 ]

A part is the softmax over its keys with the base-2 logarithm of its sum beside it, [T, H, V + 1] in float32. Of all
parts `combine_parts` makes the result (the merge of Flash-Decoding).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles
from pallas_kernels.attention.splits import combine
from pallas_kernels.errors import NoAttentionKernel

LOWEST = -1e30  # logarithm of the sum of no key: finite, so that differences are numbers
_LOG2E = 1.4426950408889634


def part_of(rows: PagedRows, part: Int[Array, ""] | int, parts: int) -> PagedRows:
    """Return rows whose pages hold every `parts`-th key of the text, the first of them at position `part`.

    Key j of the part is at position j · parts + part of the text. Starts are moved, so that a kernel needs no `part`:
    a query sees key j if j · parts + parts - 1 is not beyond its position.
    """
    moved = parts - 1 - part
    return rows._replace(starts=rows.starts + moved, visible_from=(rows.visible_from + moved) // parts)


def check_part(implementation: str, attend: AttentionParams, *, plain: bool) -> None:
    """Raise ValueError or NoAttentionKernel if a call cannot give a part. `plain`: no sinks and no packed queries."""
    if attend.span is not None or not plain:
        raise ValueError(f"parts = {attend.parts}: takes no window, chunk, sinks or packed queries")
    if implementation == "cpu":
        raise NoAttentionKernel(f"implementation = 'cpu' takes no keys in {attend.parts} parts")


def with_lse(out: Float[Array, "... V"], lse: Float[Array, "..."]) -> Float[Array, "... n"]:
    """Return a part, from a softmax and the base-2 logarithm of its sum."""
    return jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)


def combined_lse(lse: Float[Array, "splits ..."]) -> Float[Array, "..."]:
    """Return the base-2 logarithm of the sum over all splits."""
    top = lse.max(axis=0, keepdims=True)
    out: Array = top[0] + jnp.log2(jnp.exp2(lse - top).sum(axis=0))
    return out


def without_unseen(out: Float[Array, "T H n"], rows: PagedRows, tiles: QueryTiles, parts: int) -> Float[Array, "T H n"]:
    """Return a part without the results of tokens that see none of its keys: kernels may write none."""
    size = tiles.tokens.shape[1]
    tile, query = tiles.flat_index // size, tiles.flat_index % size
    row = tiles.row[tile]
    keys = (rows.starts[row] + tiles.offset[tile] + query + 1) // parts
    none = jnp.where(jnp.arange(out.shape[2]) < out.shape[2] - 1, 0.0, LOWEST)
    return jnp.where((keys > rows.visible_from[row])[:, None, None], out, none)


def combine_parts(parts: Float[Array, "parts T H n"], sinks: Float[Array, " H"] | None) -> Float[Array, "T H V"]:
    """Return the softmax over all parts, in float32. A sink joins it, as a key whose value is zero."""
    lse = parts[..., -1]
    if sinks is None:
        return combine(parts[..., :-1], lse)
    lse = jnp.concatenate([lse, jnp.broadcast_to(sinks.astype(jnp.float32) * _LOG2E, (1, *lse.shape[1:]))])
    return combine(jnp.pad(parts[..., :-1], ((0, 1), (0, 0), (0, 0), (0, 0))), lse)
