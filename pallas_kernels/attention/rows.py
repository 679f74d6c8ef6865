"""Ragged rows of a step, and their cut into query tiles of one row each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Attend(NamedTuple):
    """What one attention layer needs besides arrays; static. At most one of `window` and `chunk` is given.

    Attributes:
        scale: of the products of queries and keys.
        window: keys seen at most, the query's own included.
        chunk: keys of the query's own chunk of that many positions are seen.
        softcap: scores become softcap · tanh(score / softcap).
        v_dim: V is the last so many of a token's E numbers, K the first D; they may overlap. None: E - D.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    v_dim: int | None = None

    def value_size(self, row: int, head_dim: int) -> int:
        """V, of rows of `row` numbers and keys of `head_dim`."""
        return row - head_dim if self.v_dim is None else self.v_dim

    def first_visible(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """Oldest key that a query at each position sees, as far as this layer is concerned."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        return jnp.zeros_like(position) if self.chunk is None else position // self.chunk * self.chunk


class Rows(NamedTuple):
    """R rows of a step over one page view. Padding rows have count 0.

    Attributes:
        starts: position of the row's first token in the step.
        counts: tokens of the row in the step.
        page_rows: page ids of N consecutive page positions; entries past the row's pages may hold any valid id.
        first_page: page position of page_rows[:, 0].
        visible_from: first position that may be seen.
    """

    starts: Int[Array, " R"]
    counts: Int[Array, " R"]
    page_rows: Int[Array, "R N"]
    first_page: Int[Array, " R"]
    visible_from: Int[Array, " R"]


class Tiles(NamedTuple):
    """B tiles of Q query tokens; each tile belongs to one row. Surplus tiles have offset ≥ the row's count.

    Attributes:
        row: the tile's row.
        offset: its first token's index within the row.
        tokens: its tokens' indices in the step, clipped to the row.
        place: for each token of the step, its index in the flattened [B · Q] tiles.
    """

    row: Int[Array, " B"]
    offset: Int[Array, " B"]
    tokens: Int[Array, "B Q"]
    place: Int[Array, " T"]


def tile_rows(counts: Int[Array, " R"], first_token: Int[Array, " R"], token_row: Int[Array, " T"], size: int) -> Tiles:
    """Cut rows into tiles of `size` tokens. B = T // size + R tiles always suffice.

    Args:
        first_token: index in the step of each row's first token.
        token_row: row of each token of the step.
    """
    num_tokens, num_rows = len(token_row), len(counts)
    num_tiles = num_rows if size == 1 and num_tokens == num_rows else num_tokens // size + num_rows
    tiles_of_row = (counts + size - 1) // size
    ends = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # All at once: a search in steps is a loop, and a loop cannot be part of a CUDA graph.
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32), num_rows - 1)
    offset = (tile - (ends - tiles_of_row)[row]) * size
    within = offset[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    last = jnp.maximum(counts[row] - 1, 0)
    tokens = jnp.clip(first_token[row][:, None] + jnp.minimum(within, last[:, None]), 0, num_tokens - 1)
    index = jnp.arange(num_tokens, dtype=jnp.int32) - first_token[token_row]
    first_tile = (ends - tiles_of_row)[token_row]
    place = jnp.clip((first_tile + index // size) * size + index % size, 0, num_tiles * size - 1)
    return Tiles(row, offset, tokens, place)
