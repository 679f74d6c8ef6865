"""Tests of the tiles that rows are cut into, by a plain count of the tokens."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Int

from pallas_kernels.attention.parts import part_of
from pallas_kernels.attention.rows import PagedRows, QueryTiles, in_tiles, tile_rows


def held(counts: Sequence[int], first: Sequence[int], tiles: QueryTiles) -> list[tuple[int, int]]:
    """Return row and token of each place of a tile that holds one."""
    found = []
    for row, offset, tokens in zip(tiles.row.tolist(), tiles.offset.tolist(), tiles.tokens.tolist(), strict=True):
        inside = range(offset, min(offset + len(tokens), counts[row]))
        assert [tokens[place - offset] for place in inside] == [first[row] + place for place in inside]
        found += [(row, first[row] + place) for place in inside]
    return found


def token_rows(first: Int[np.ndarray, " R"], tokens: int) -> Int[np.ndarray, " T"]:
    """Return the last row that begins at each token or before it."""
    rows: Int[np.ndarray, " T"] = np.searchsorted(first, np.arange(tokens), side="right").astype(np.int32) - 1
    return rows


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(("most", "in_places"), [(None, False), (1, False), (1, True), (3, False), (3, True)])
def test_each_token_is_in_one_tile_of_its_row(size: int, most: int | None, in_places: bool) -> None:
    """Rows of places of their own, as in decode steps, or one behind the other; some without tokens."""
    random, rows = np.random.default_rng(7), 5
    for _ in range(10):
        counts = random.integers(0, (most or 6) + 1, rows).astype(np.int32)
        first = (np.arange(rows) * (most or 6) if in_places else np.cumsum(counts) - counts).astype(np.int32)
        tokens = rows * (most or 6)
        row_of = token_rows(first, tokens)
        tiles = tile_rows(jnp.asarray(counts), jnp.asarray(first), jnp.asarray(row_of), size, most)
        expected = [(row, first[row] + place) for row in range(rows) for place in range(counts[row])]
        assert sorted(held(counts.tolist(), first.tolist(), tiles)) == expected
        zero = jnp.zeros(rows, jnp.int32)
        live = in_tiles(PagedRows(zero, jnp.asarray(counts), zero[:, None], zero, zero), tiles)
        assert np.flatnonzero(live).tolist() == [token for _, token in expected]


def test_a_row_may_have_all_tokens_of_a_step_with_as_many_rows() -> None:
    """If nobody says how many tokens a row has, a tile for each row is not a tile of each row."""
    counts = jnp.array([2, 0, 1], jnp.int32)
    tiles = tile_rows(counts, jnp.array([0, 2, 2], jnp.int32), jnp.array([0, 0, 2], jnp.int32), 1)
    assert held([2, 0, 1], [0, 2, 2], tiles) == [(0, 0), (0, 1), (2, 2)]


@given(parts=st.integers(1, 5), part=st.integers(0, 4), start=st.integers(0, 40), first=st.integers(0, 40))
def test_a_part_has_every_nth_key_in_order(parts: int, part: int, start: int, first: int) -> None:
    """A query sees the keys of a part that it sees of the text, by the rule that kernels have."""
    part %= parts
    none, page_rows = jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32)
    rows = PagedRows(jnp.array([start]), jnp.ones(1, jnp.int32), page_rows, none, jnp.array([first]))
    moved = part_of(rows, part, parts)
    query, begin = moved.starts.item(), moved.visible_from.item()
    seen = [key for key in range(begin, 50) if key * parts + parts - 1 <= query]
    assert [key * parts + part for key in seen] == [p for p in range(first, start + 1) if p % parts == part]
    assert len(seen) == max(0, (query + 1) // parts - begin)
