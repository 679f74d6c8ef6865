"""Sort (token, expert) pairs by expert, by counting: no sort, no loop, no synchronisation with the host.

The rows of each expert are cut into tiles, of which a grouped product reads a list.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

ALIGN = 8  # the rows of each expert begin at a multiple: copies into swizzled tiles take eight rows at a time
_BLOCK = 512  # pairs that are compared with each other; P pairs take P · _BLOCK comparisons


class Groups(NamedTuple):
    """The rows of each expert, which are contiguous. Between two groups fewer than `ALIGN` rows belong to no expert.

    Attributes:
        starts: first row of each expert, a multiple of `ALIGN`; ascending.
        sizes: rows of each expert; may be 0.
    """

    starts: Int[Array, " E"]
    sizes: Int[Array, " E"]


class Tiling(NamedTuple):
    """The tiles of rows of a grouped product: rows per tile, and how many there are at most."""

    rows: int
    most: int


def row_count(pairs: int, experts: int) -> int:
    """Return how many rows `pairs` need at most, however they are shared out: a multiple of `ALIGN`."""
    return -(-(pairs + (ALIGN - 1) * min(pairs, experts)) // ALIGN) * ALIGN


@partial(jax.jit, static_argnames="experts", inline=True)
def group_rows(chosen: Int[Array, "T k"], experts: int) -> tuple[Groups, Int[Array, "T k"], Int[Array, " R"]]:
    """Sort pairs by expert. The pairs of one expert stay in order.

    A pair's index in its group is the number of earlier pairs with the same expert: in earlier blocks of pairs, which
    are counted by expert, and in its own block, whose pairs are compared with each other.

    Args:
        chosen: the k experts of each token.
        experts: E.

    Returns:
        The groups; the row of each pair; and of each row the pair, t · k + j for token t and its choice j. Rows that
        belong to no expert have any pair.
    """
    pairs = chosen.reshape(-1)
    count = len(pairs)
    block = min(_BLOCK, count)
    blocks = jnp.pad(pairs, (0, -count % block), constant_values=experts).reshape(-1, block)
    by_expert = (blocks[:, :, None] == jnp.arange(experts)[None, None]).sum(axis=1, dtype=jnp.int32)  # [blocks, E]
    earlier = jnp.tri(block, k=-1, dtype=jnp.bool_)
    same = blocks[:, :, None] == blocks[:, None, :]
    within = (same & earlier[None]).sum(axis=2, dtype=jnp.int32).reshape(-1)[:count]
    sizes = by_expert.sum(axis=0)
    starts = _before(-(-sizes // ALIGN) * ALIGN)
    first = starts[None] + jnp.cumsum(by_expert, axis=0) - by_expert  # row of each block's first pair of an expert
    row = first[jnp.arange(count) // block, pairs] + within
    return Groups(starts, sizes), row.reshape(chosen.shape), _inverse(row, row_count(count, experts))


def list_tiles(groups: Groups, tiling: Tiling, rows: int) -> Int[Array, "B 4"]:
    """Return of each tile: expert, first row, index within the tile of its own first row, number of own rows.

    The first entry holds the number of tiles; what lies behind the last tile means nothing. A tile never reaches past
    the last of all `rows`: it begins earlier instead, and its first rows are another tile's. Own rows are multiples of
    8; those behind the group's last row belong to no expert.
    """
    starts, sizes = groups
    per_expert = -(-sizes // tiling.rows)
    ends = jnp.cumsum(per_expert)
    index = jnp.arange(tiling.most)
    expert = jnp.minimum((ends[None] <= index[:, None]).sum(axis=1, dtype=jnp.int32), len(sizes) - 1)
    done = (index - (ends - per_expert)[expert]) * tiling.rows
    own_start = starts[expert] + done
    start = jnp.minimum(own_start, rows - tiling.rows)
    own = jnp.minimum(tiling.rows, -(-(sizes[expert] - done) // ALIGN) * ALIGN)
    tiles = jnp.stack([expert, start, own_start - start, own], axis=1)
    count = jnp.zeros((1, 4), jnp.int32).at[0, 0].set(ends[-1])
    return jnp.concatenate([count, tiles]).astype(jnp.int32)


def list_one_group(tiling: Tiling, rows: int) -> Int[np.ndarray, "B 4"]:
    """Return what `list_tiles` does for one group that has all rows: a constant, which no kernel has to compute."""
    own_starts = np.arange(0, rows, tiling.rows)
    tiles = np.zeros((1 + tiling.most, 4), np.int32)
    tiles[0, 0] = len(own_starts)
    listed = tiles[1 : 1 + len(own_starts)]
    listed[:, 1] = np.minimum(own_starts, rows - tiling.rows)
    listed[:, 2] = own_starts - listed[:, 1]
    listed[:, 3] = np.minimum(tiling.rows, rows - own_starts)
    return tiles


def _inverse(row: Int[Array, " P"], rows: int) -> Int[Array, " R"]:
    """Return the pair of each row, or 0. Few pairs are compared with all rows: one kernel instead of two."""
    index = jnp.arange(len(row), dtype=jnp.int32)
    if len(row) <= _BLOCK:
        return jnp.where(row[None] == jnp.arange(rows)[:, None], index[None], 0).sum(axis=1, dtype=jnp.int32)
    out = jnp.zeros(rows, jnp.int32)
    return out.at[row].set(index, mode="promise_in_bounds", unique_indices=True)


def _before(sizes: Int[Array, " E"]) -> Int[Array, " E"]:
    """Return the sum of all earlier sizes."""
    return jnp.cumsum(sizes) - sizes
