"""`paged_attention`, `write_kv` and `tile_rows` against plain NumPy: ragged rows, pages, windows, chunks and sinks."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float, Int, TypeCheckError

from pallas_kernels.api import Implementation, paged_attention, write_kv
from pallas_kernels.rows import Attend, Rows, Tiles, tile_rows
from tests import oracles
from tests.oracles import Row

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


@dataclass(frozen=True)
class Case:
    """Static shapes of one kernel call, and several sets of rows for it, so that each shape compiles once.

    page_columns: width of the page rows. pages_cut: page rows begin at the page of the first visible position, as the
    step's local page rows do.
    """

    name: str
    rows: tuple[tuple[Row, ...], ...]
    tokens: int
    page_size: int
    window: int | None = None
    chunk: int | None = None
    sinks: tuple[float, ...] | None = None  # one per query head
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)  # query heads, KV heads, D, D_v
    softcap: float | None = None
    slots: int = 1
    slot: int = 0
    tile: int = 32
    page_columns: int = 0
    pages_cut: bool = False
    dtype: str = "float32"

    @property
    def width(self) -> int:
        """Columns of the page rows."""
        return self.page_columns or max(-(-row.end // self.page_size) for rows in self.rows for row in rows) + 1


PREFILL = (Row(0, 37), Row(0, 1), Row(0, 10))
CHUNKS = (Row(130, 20), Row(5, 7), Row(31, 1), Row(64, 16))
DECODE = (Row(200, 1), Row(0, 1), Row(127, 1), Row(128, 1))
MIXED = (Row(299, 1), Row(3, 33), Row(0, 1), Row(255, 13))
PADDED = (Row(17, 1), Row(40, 9), Row(0, 0), Row(0, 0))
LONG = (Row(460, 40), Row(383, 1), Row(0, 1), Row(511, 2))
FROM = (Row(130, 20, 0, 125), Row(40, 6, 0, 3), Row(64, 1, 0, 64), Row(0, 3))
# Chunks of 4 and 8: rows that end or begin at a boundary, lie in one chunk, cross many, or see one key alone.
EDGES = (Row(124, 8), Row(3, 2), Row(8, 1), Row(16, 16))
LATE = (Row(259, 3), Row(120, 23), Row(390, 2), Row(129, 1))  # about 130, 260 and 390
SINKS = (0.5, -1.0, 3.0, 0.0)
FAR_SINKS = (90.0, -90.0, 1e4, -1e4)
RAGGED = (PREFILL, CHUNKS, MIXED, PADDED)

CASES = (
    Case("full p4", (*RAGGED, DECODE), 48, 4),
    Case("full p1, groups of 4, one KV head, tiles of one", RAGGED, 48, 1, heads=(4, 1, 8, 8), tile=1),
    Case("full p16, no groups, many blocks, tiles of 7", (*RAGGED, LONG), 48, 16, heads=(2, 2, 8, 8), tile=7),
    Case("full p128, softcap, value size 4 of 12", (*RAGGED, LONG), 48, 128, heads=(4, 2, 12, 4), softcap=3.0),
    Case("full p48, blocks of 96 tokens, first visible", (FROM, *RAGGED, LONG), 48, 48),
    Case("full p200, pages longer than a block", (*RAGGED, LONG), 48, 200),
    Case("window 1, p4", RAGGED, 48, 4, window=1),
    Case("window 3, p1", RAGGED, 48, 1, window=3),
    Case("window 4 = p, slot 2 of 3", RAGGED, 48, 4, window=4, slots=3, slot=2),
    Case("window 5 = p + 1, value size 16 of 8", RAGGED, 48, 4, window=5, heads=(4, 4, 8, 16)),
    Case("window 47 = 3p - 1, softcap", (*RAGGED, LONG), 48, 16, window=47, softcap=2.0, heads=(8, 2, 8, 8)),
    Case("window 130, p64, over three blocks", (LONG, MIXED), 48, 64, window=130),
    Case("window 1000, longer than the context, bfloat16", RAGGED, 48, 16, window=1000, dtype="bfloat16"),
    Case("window 8, cut page rows, p16", (*RAGGED, LONG), 48, 16, window=8, pages_cut=True, page_columns=5),
    Case("window 20, cut page rows, p3, first visible", (FROM, MIXED), 48, 3, window=20, pages_cut=True),
    Case("chunk 4 = p", (*RAGGED, EDGES), 48, 4, chunk=4),
    Case("chunk 4, p16, softcap, tiles of 7", (*RAGGED, EDGES, LONG), 48, 16, chunk=4, softcap=2.0, tile=7),
    Case("chunk 8, cut page rows, p4", (*RAGGED, EDGES, LONG), 48, 4, chunk=8, pages_cut=True),
    Case("chunk 8, cut page rows, p1, first visible", (FROM, MIXED, EDGES), 48, 1, chunk=8, pages_cut=True),
    Case("chunk 130, p10, over blocks", (LONG, MIXED, LATE), 48, 10, chunk=130),
    Case("chunk 130, cut page rows, p65", (LONG, MIXED, LATE), 48, 65, chunk=130, pages_cut=True),
    Case("chunk 1000, longer than the context, bfloat16", RAGGED, 48, 16, chunk=1000, dtype="bfloat16"),
    Case("sinks, full, p16", (*RAGGED, LONG), 48, 16, sinks=SINKS),
    Case("sinks, full, p4, far, softcap, bfloat16", RAGGED, 48, 4, sinks=FAR_SINKS, softcap=3.0, dtype="bfloat16"),
    Case("sinks, far, window 1: a row with one key", RAGGED, 48, 4, window=1, sinks=FAR_SINKS),
    Case("sinks, window 130, p64, no groups", (LONG, MIXED), 48, 64, window=130, sinks=FAR_SINKS, heads=(4, 4, 8, 6)),
    Case(
        "sinks, window 8, cut page rows, one KV head",
        RAGGED,
        48,
        4,
        window=8,
        pages_cut=True,
        sinks=SINKS,
        heads=(4, 1, 8, 8),
    ),
    Case("sinks, chunk 8, cut page rows, p8", (*RAGGED, EDGES), 48, 8, chunk=8, pages_cut=True, sinks=FAR_SINKS),
    Case(
        "decode, chunk 4, sinks, cut page rows",
        (DECODE,),
        4,
        4,
        chunk=4,
        sinks=SINKS,
        tile=1,
        pages_cut=True,
        page_columns=2,
    ),
    Case("decode, window 5, cut page rows", (DECODE,), 4, 4, window=5, tile=1, pages_cut=True, page_columns=2),
    Case("decode, full, two of four rows", (DECODE, (Row(77, 1), Row(1, 1), Row(0, 0), Row(0, 0))), 4, 4, tile=1),
)


@dataclass(frozen=True)
class Call:
    """Arrays of one call. Cells that no query of a row may see hold NaN: stale, unwritten, or somebody else's."""

    q: Float[np.ndarray, "T H D"]
    kv: Float[np.ndarray, "P S K p E"]
    page_rows: Int[np.ndarray, "R N"]
    rows: list[Row]


def make_call(case: Case, rows: tuple[Row, ...], seed: int = 0) -> Call:
    """Random queries and keys; each row owns random pages, and its page row ends in a page full of NaN."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, head_dim, v_head_dim = case.heads
    placed = [
        Row(row.start, row.count, _first_page(case, row), row.visible_from) if row.count else Row(0, 0) for row in rows
    ]
    used = [-(-row.end // case.page_size) - row.first_page if row.count else 0 for row in placed]
    assert max(used) <= case.width
    num_pages = 2 + len(rows) * case.width
    ids = rng.permutation(np.arange(2, num_pages))
    page_rows = np.ones((len(rows), case.width), np.int32)
    kv = np.full((num_pages, case.slots, kv_heads, case.page_size, head_dim + v_head_dim), np.nan, np.float32)
    kv[0] = 0.0
    for index, row in enumerate(placed):
        page_rows[index, : used[index]], ids = ids[: used[index]], ids[used[index] :]
        seen = {key for position in range(row.start, row.end) for key in row.keys(position, case.window, case.chunk)}
        for key in seen:
            cell = page_rows[index, key // case.page_size - row.first_page], case.slot, slice(None)
            kv[(*cell, key % case.page_size)] = rng.standard_normal(kv.shape[2::2])
    q = rng.standard_normal((case.tokens, heads, head_dim)).astype(np.float32)
    return Call(q, kv, page_rows, placed)


def _first_page(case: Case, row: Row) -> int:
    return row.keys(row.start, case.window, case.chunk).start // case.page_size if case.pages_cut else 0


def run(call: Call, case: Case, implementation: Implementation) -> Float[np.ndarray, "T H V"]:
    """The call through an implementation, in one program per case."""
    counts = np.array([row.count for row in call.rows], np.int32)
    out = _program(
        *(jnp.asarray(array, case.dtype) for array in (call.q, call.kv)),
        Rows(
            jnp.array([row.start for row in call.rows], jnp.int32),
            jnp.asarray(counts),
            jnp.asarray(call.page_rows),
            jnp.array([row.first_page for row in call.rows], jnp.int32),
            jnp.array([row.visible_from for row in call.rows], jnp.int32),
        ),
        tiles_of(counts, case.tokens, case.tile),
        case=case,
        implementation=implementation,
    )
    return np.asarray(out.astype(jnp.float32))


@partial(
    jax.jit,
    static_argnames=("case", "implementation"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def _program(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: Rows,
    tiles: Tiles,
    *,
    case: Case,
    implementation: Implementation,
) -> Float[Array, "T H V"]:
    attend = Attend(scale=0.4, window=case.window, chunk=case.chunk, softcap=case.softcap)
    sinks = None if case.sinks is None else jnp.array(case.sinks, case.dtype)
    return paged_attention(
        q, kv, rows, tiles, slot=case.slot, attend=attend, sinks=sinks, implementation=implementation
    )


def token_rows(counts: Int[np.ndarray, " R"], tokens: int) -> Int[np.ndarray, " T"]:
    """The row of each token; padding tokens belong to the last row."""
    padding = np.full(tokens - counts.sum(), len(counts) - 1)
    return np.concatenate([np.repeat(np.arange(len(counts)), counts), padding]).astype(np.int32)


@partial(jax.jit, static_argnames="size")
def _tiles(counts: Array, first_token: Array, token_row: Array, size: int) -> Tiles:
    return tile_rows(counts, first_token, token_row, size)


def tiles_of(counts: Int[np.ndarray, " R"], tokens: int, size: int) -> Tiles:
    """`tile_rows` of rows that follow each other."""
    first_token = (np.cumsum(counts) - counts).astype(np.int32)
    tiles: Tiles = _tiles(counts, first_token, token_rows(counts, tokens), size)
    return tiles


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestPagedAttention:
    """Every implementation, every case."""

    def test_a_token_attends_to_exactly_the_keys_it_may_see(self, case: Case, implementation: Implementation) -> None:
        """The result is the softmax over visible keys; NaN everywhere else never shows; two calls give equal bits."""
        for rows in case.rows:
            padded = rows + (Row(0, 0),) * (max(map(len, case.rows)) - len(rows))
            call = make_call(case, padded)
            out = run(call, case, implementation)
            kv = np.asarray(jnp.asarray(call.kv, case.dtype).astype(jnp.float32))
            q = np.asarray(jnp.asarray(call.q, case.dtype).astype(jnp.float32))
            expected = oracles.paged_attention(
                q,
                kv,
                call.rows,
                call.page_rows,
                slot=case.slot,
                scale=0.4,
                window=case.window,
                softcap=case.softcap,
                chunk=case.chunk,
                sinks=None if case.sinks is None else np.array(case.sinks),
            )
            tolerance = 1e-5 if case.dtype == "float32" else 2e-2
            np.testing.assert_allclose(out[: len(expected)], expected, rtol=0, atol=tolerance)
            assert np.isfinite(out[len(expected) :]).all(), "padding tokens must give finite garbage"
            np.testing.assert_array_equal(run(call, case, implementation), out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_does_not_see_how_its_neighbours_are_cut(implementation: Implementation) -> None:
    """A row's result does not depend, within rounding, on the other rows of the step."""
    case = next(case for case in CASES if case.name == "window 47 = 3p - 1, softcap")
    call = make_call(case, MIXED)
    together = run(call, case, implementation)
    alone = [row if index == 1 else Row(0, 0) for index, row in enumerate(call.rows)]
    q = np.roll(call.q, -call.rows[0].count, axis=0)
    separate = run(Call(q, call.kv, call.page_rows, alone), case, implementation)
    np.testing.assert_allclose(separate[:33], together[1:34], rtol=0, atol=1e-6)


def test_an_unknown_implementation_is_an_error() -> None:
    """A name never stands for another implementation."""
    case = CASES[0]
    call = make_call(case, CHUNKS)
    with pytest.raises(TypeCheckError, match="cuda"):  # the hook sees it first: see below
        run(call, case, "cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"implementation = 'cuda': must be one of \['reference', 'xla'\]"):
        inspect.unwrap(paged_attention)(call.q, call.kv, None, None, slot=0, attend=Attend(1.0), implementation="cuda")


def test_query_heads_that_are_no_multiple_of_kv_heads_are_an_error() -> None:
    """5 query heads over 2 KV heads have no groups."""
    case = CASES[0]
    call = make_call(case, CHUNKS)
    wrong = Call(np.concatenate([call.q, call.q[:, :1]], axis=1), call.kv, call.page_rows, call.rows)
    with pytest.raises(ValueError, match=r"query heads \(5\) must be a multiple of KV heads \(2\)"):
        run(wrong, case, "xla")


@pytest.mark.parametrize("tokens", [1, 2, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_of_a_token_lands_in_its_cell_and_nowhere_else(tokens: int, dtype: str) -> None:
    """K and V lie side by side at (page, slot, head, offset), cast to the arena's type; tokens past the end vanish."""
    rng = np.random.default_rng(tokens)
    num_pages, slots, heads, page_size, head_dim, v_head_dim = 5, 3, 2, 4, 8, 6
    before = rng.standard_normal((num_pages, slots, heads, page_size, head_dim + v_head_dim)).astype(np.float32)
    before = np.asarray(jnp.asarray(before, dtype).astype(jnp.float32))
    k = rng.standard_normal((tokens, heads, head_dim)).astype(np.float32)
    v = rng.standard_normal((tokens, heads, v_head_dim)).astype(np.float32)
    cells = rng.permutation(num_pages * page_size)[:tokens]
    pages, offsets = (cells // page_size).astype(np.int32), (cells % page_size).astype(np.int32)
    for dropped in (False, True):
        expected = before.copy()
        if dropped:
            pages[-1] = num_pages + tokens
        for token in range(tokens - dropped):
            cell = np.concatenate([k[token], v[token]], axis=-1)
            expected[pages[token], 1, :, offsets[token]] = np.asarray(jnp.asarray(cell, dtype).astype(jnp.float32))
        arena = jnp.asarray(before, dtype)
        out = jax.jit(partial(write_kv, slot=1))(arena, np.concatenate([k, v], axis=-1), pages=pages, offsets=offsets)
        assert out.dtype == dtype
        np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), expected)


@given(st.data())
def test_every_token_has_one_place_in_a_tile_of_its_own_row(data: st.DataObject) -> None:
    """Tiles cut each row from its first token, in order, without mixing rows; `place` inverts `tokens`."""
    num_rows, tokens, size = data.draw(st.sampled_from([(1, 1, 1), (1, 9, 4), (4, 4, 1), (5, 40, 8), (3, 33, 32)]))
    counts = np.zeros(num_rows, np.int32)
    for index in range(num_rows):
        most = tokens - int(counts.sum()) if size > 1 else 1
        counts[index] = data.draw(st.integers(0, most))
    tiles: Any = jax.tree.map(np.asarray, tiles_of(counts, tokens, size))
    owner, first = token_rows(counts, tokens), np.cumsum(counts) - counts

    places = []
    for token in range(int(counts.sum())):
        tile, lane = divmod(int(tiles.place[token]), size)
        places.append((tile, lane))
        assert tiles.tokens[tile, lane] == token
        assert tiles.row[tile] == owner[token]
        assert first[owner[token]] + tiles.offset[tile] + lane == token
    assert len(set(places)) == len(places)

    live = [tile for tile in range(len(tiles.row)) if tiles.offset[tile] < counts[tiles.row[tile]]]
    assert sorted({tile for tile, _ in places}) == live, "a tile is live exactly when it holds a token"
    expected = [(row, offset) for row in range(num_rows) for offset in range(0, int(counts[row]), size)]
    assert [(tiles.row[tile], tiles.offset[tile]) for tile in live] == expected
    for tile in live:
        row = tiles.row[tile]
        assert set(owner[tiles.tokens[tile]]) == {row}, "a tile reaches into another row"
    assert ((tiles.tokens >= 0) & (tiles.tokens < tokens)).all()
    assert ((tiles.place >= 0) & (tiles.place < tiles.tokens.size)).all()
