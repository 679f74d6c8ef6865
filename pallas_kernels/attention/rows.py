"""Ragged rows of a step, and query tiles: pieces of one row each."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class AttentionParams(NamedTuple):
    """The static parameters of one attention layer. At most one of `window` and `chunk` is given.

    Attributes:
        scale: factor of the products of queries and keys.
        window: keys that a query sees at most, its own included.
        chunk: a query sees the keys of its own chunk of that many positions, and of `lookback` chunks before it.
        softcap: scores become softcap · tanh(score / softcap).
        v_dim: size of V, which is the end of a token's E numbers; K is their beginning, and the two may overlap. None:
            E - D.
        parts: devices that share the keys of a text. With more than one, rows and result are those of a part; see
            `parts.part_of`. A part has neither window nor chunk.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    v_dim: int | None = None
    lookback: int = 0
    parts: int = 1

    @property
    def span(self) -> int | None:
        """Keys that a query sees at most, its own included; None: all."""
        return self.window or (self.chunk and self.chunk * (1 + self.lookback))

    @property
    def bounds(self) -> tuple[int, int]:
        """Window and chunk as kernels take them, 0 for none. With both, a query sees `window` keys before its chunk."""
        return self.window or (self.chunk or 0) * self.lookback, self.chunk or 0

    def value_size(self, row: int, head_dim: int) -> int:
        """Return the size of V in rows of `row` numbers with keys of `head_dim`."""
        return row - head_dim if self.v_dim is None else self.v_dim

    def keys_before(self, end: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return how many keys are before each position, counted as `PagedRows.starts` are."""
        return end if self.parts == 1 else lax.div(end, self.parts)

    def last_key(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the last key that a query at each position sees, so counted; -1: none."""
        return position if self.parts == 1 else self.keys_before(position + 1) - 1

    def first_visible(self, position: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the oldest position that the window or the chunk of a query at each position reaches."""
        if self.window is not None:
            return jnp.maximum(position - (self.window - 1), 0)
        if self.chunk is None:
            return jnp.zeros_like(position)
        if not self.lookback:
            return position // self.chunk * self.chunk
        return jnp.maximum(position // self.chunk - self.lookback, 0) * self.chunk


class PagedRows(NamedTuple):
    """R rows of a step over one page view. Padding rows have count 0.

    Attributes:
        starts: position of the row's first token in the step.
        counts: tokens of the row in the step.
        page_rows: page ids of N consecutive page positions. Entries past the row's pages may hold any valid id.
        first_page: page position of page_rows[:, 0].
        visible_from: the row's tokens see no earlier position.
    """

    starts: Int[Array, " R"]
    counts: Int[Array, " R"]
    page_rows: Int[Array, "R N"]
    first_page: Int[Array, " R"]
    visible_from: Int[Array, " R"]


class PackedQueries(NamedTuple):
    """Queries of a step with one token per tile, laid out as the kernel copies them; see `api.packed_form`.

    Attributes:
        values: the heads of each KV head's group side by side; rows beyond them may hold anything. For pages of 8 bits
            they have been multiplied by K's scales.
        group: query heads per KV head.
        dtype: of the result, of 16 bits.
    """

    values: Float[Array, "T K M D"]
    group: int
    dtype: jnp.dtype


class QueryTiles(NamedTuple):
    """B tiles of Q query tokens; each tile belongs to one row. Surplus tiles have offset ≥ the row's count.

    Attributes:
        row: the tile's row.
        offset: index within the row of the tile's first token.
        tokens: indices of the tile's tokens in the step, clipped to the row.
        flat_index: index of each token of the step in the flattened [B · Q] tiles. Padding tokens, which no tile holds,
            have any valid index.
    """

    row: Int[Array, " B"]
    offset: Int[Array, " B"]
    tokens: Int[Array, "B Q"]
    flat_index: Int[Array, " T"]


def tile_rows(
    counts: Int[Array, " R"],
    first_token: Int[Array, " R"],
    token_row: Int[Array, " T"],
    size: int,
    most: int | None = None,
) -> QueryTiles:
    """Cut rows into tiles of `size` tokens. B = T // size + R tiles always suffice.

    Args:
        counts: tokens of each row.
        first_token: index in the step of each row's first token.
        token_row: row of each token of the step.
        size: Q, tokens of a tile.
        most: tokens of a row at most, if that is known: then ⌈most / Q⌉ tiles a row suffice.
    """
    num_tokens, num_rows = len(token_row), len(counts)
    num_tiles = num_tokens // size + num_rows if most is None else num_rows * -(-most // size)
    if most is None and size == 1 and num_tokens == num_rows:
        num_tiles = num_rows  # rows may have several tokens, but there are no more tokens than tiles
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    if most is not None and most <= size:  # a tile of each row's own: nothing to search
        first_of_row, row, offset = tile, tile, jnp.zeros_like(tile)
    else:
        tiles_of_row = (counts + size - 1) // size
        ends = jnp.cumsum(tiles_of_row)
        # Compare with all ends at once: a binary search is a loop, and a loop cannot be part of a CUDA graph.
        found = jnp.searchsorted(ends, tile, side="right", method="compare_all")
        row, first_of_row = jnp.minimum(found.astype(jnp.int32), num_rows - 1), ends - tiles_of_row
        offset = (tile - first_of_row[row]) * size
    within = offset[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    last = jnp.maximum(counts[row] - 1, 0)
    tokens = jnp.clip(first_token[row][:, None] + jnp.minimum(within, last[:, None]), 0, num_tokens - 1)
    index = jnp.arange(num_tokens, dtype=jnp.int32) - first_token[token_row]
    flat_index = jnp.clip((first_of_row[token_row] + index // size) * size + index % size, 0, num_tiles * size - 1)
    return QueryTiles(row, offset, tokens, flat_index)


def in_tiles(rows: PagedRows, tiles: QueryTiles) -> Bool[Array, " T"]:
    """Return which tokens of the step are in a tile. Padding tokens are in none."""
    queries = tiles.tokens.shape[1]
    tile, query = tiles.flat_index // queries, tiles.flat_index % queries
    in_row = tiles.offset[tile] + query < rows.counts[tiles.row[tile]]
    return in_row & (tiles.tokens[tile, query] == jnp.arange(len(tiles.flat_index), dtype=jnp.int32))
