"""Tests of `paged_attention`, `write_kv` and `tile_rows` against plain NumPy, for all implementations but Triton."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from pallas_kernels.attention.api import Implementation, paged_attention, write_kv
from pallas_kernels.attention.rows import AttentionParams, PagedRows
from pallas_kernels.errors import NoAttentionKernel
from tests.support.kernels.calls import Call, check, make_call, run, tiles_of, token_rows
from tests.support.oracles import Row
from tools.cases.kernels.attention import CASES, CHUNKS, MIXED, PADDED, RAGGED_DECODE, Case, RowSpec
from tools.cases.kernels.attention_fp8 import FP8, FP8_CASES
from tools.cases.kernels.attention_lookback import LOOKBACK_CASES
from tools.cases.kernels.attention_parts import PARTS_CASES


def served() -> list[ParameterSet]:
    """Return each case with each implementation that serves it. To interpret a Hopper kernel takes seconds."""
    out = []
    for index, case in enumerate((*CASES, *FP8_CASES, *LOOKBACK_CASES, *PARTS_CASES)):
        for implementation in get_args(Implementation):
            if implementation.startswith("triton"):
                continue  # see test_triton
            if implementation == "cpu" and case.parts > 1:
                continue
            if not implementation.startswith("mosaic") or case.for_mosaic:
                quick = case.quick if implementation == "mosaic" else case.name == RAGGED_DECODE
                slow = implementation.startswith("mosaic") and not (quick and index % 6 == 0)
                marks = [pytest.mark.nightly] if slow else []
                out.append(pytest.param(case, implementation, id=f"{implementation}: {case.name}", marks=marks))
    return out


@pytest.mark.parametrize(("case", "implementation"), served())
def test_a_token_attends_to_exactly_the_keys_it_may_see(case: Case, implementation: Implementation) -> None:
    """The result is the softmax over visible keys. All other cells hold NaN. Two calls give equal bits."""
    for rows in case.rows:
        padded = rows + (RowSpec(0, 0),) * (max(map(len, case.rows)) - len(rows))
        call = make_call(case, padded)
        out = run(call, case, implementation)
        tokens = check(out, call, case)
        assert np.isfinite(out[tokens:]).all(), "padding tokens must give finite garbage"
        np.testing.assert_array_equal(run(call, case, implementation), out)


FIVE_HUNDRED = Case(
    "a window of 500",
    ((RowSpec(700, 1), RowSpec(499, 1)),),
    2,
    16,
    window=500,
    sinks=(0.5, -1.0, 3.0, 2.0),
    heads=(4, 1, 64, 64),
    tile=1,
    dtype="bfloat16",
)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=pytest.mark.nightly)])
def test_one_missing_key_of_500_is_found(implementation: Implementation, subtests: pytest.Subtests) -> None:
    """So are dropped sinks, a window one short and a stale page, in bfloat16: `check` fails for each of them.

    A key is missing if its score is -100, which makes its weight 0.
    """
    call = make_call(FIVE_HUNDRED, FIVE_HUNDRED.rows[0])
    check(run(call, FIVE_HUNDRED, implementation), call, FIVE_HUNDRED)
    faults = {f"key {key} is missing": (without_key(call, key), FIVE_HUNDRED) for key in range(201, 701, 40)}
    stale = call.page_rows.copy()
    stale[0, 30] = stale[1, 30]  # the page of the other row
    faults["a stale page"] = replace(call, page_rows=stale), FIVE_HUNDRED
    faults["window one short"] = call, replace(FIVE_HUNDRED, window=499)
    faults["sinks dropped"] = call, replace(FIVE_HUNDRED, sinks=None)
    for name, (wrong, case) in faults.items():
        out = run(wrong, case, implementation)
        with subtests.test(name), pytest.raises(AssertionError, match="times what rounding may do"):
            check(out, call, FIVE_HUNDRED)


def without_key(call: Call, key: int) -> Call:
    """Return the call with a key of its first row that no query head of one KV head takes notice of."""
    kv, page = call.kv.copy(), call.page_rows[0, key // FIVE_HUNDRED.page_size]
    head_dim = call.q.shape[-1]
    (hidden, *_) = np.linalg.lstsq(call.q[0] * head_dim**-0.5, np.full(call.q.shape[1], -100.0))
    kv[page, 0, 0, key % FIVE_HUNDRED.page_size, :head_dim] = hidden
    return replace(call, kv=kv)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float32_is_multiplied_in_float32(implementation: Implementation) -> None:
    """Also on a GPU, which would otherwise take ten bits of fraction of each factor (TF32)."""
    case = CASES[0]

    def program(q: jax.Array, kv: jax.Array) -> jax.Array:
        counts = np.array([row.count for row in PADDED], np.int32)
        zeros = jnp.zeros(4, jnp.int32)
        rows = PagedRows(zeros, jnp.asarray(counts), jnp.zeros((4, 3), jnp.int32), zeros, zeros)
        tiles = tiles_of(counts, case.tokens, case.tile)
        out: jax.Array = paged_attention(
            q, kv, rows, tiles, layer_index=0, attend=AttentionParams(1.0), implementation=implementation
        )
        return out

    for dtype, kv_dtype in (("float32", "float32"), ("bfloat16", FP8)):
        q, kv = jnp.zeros((case.tokens, 4, 8), dtype), jnp.zeros((9, 1, 2, 4, 16), kv_dtype)
        text = jax.jit(program).lower(q, kv).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) == 2
        assert all(line.count("HIGHEST") == 2 for line in products)


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu"])
def test_a_row_does_not_see_how_its_neighbours_are_cut(implementation: Implementation) -> None:
    """A row's result does not depend, within rounding, on the other rows of the step."""
    case = next(case for case in CASES if case.name == "window 47 = 3p - 1, softcap")
    call = make_call(case, MIXED)
    together = run(call, case, implementation)
    alone = [row if index == 1 else Row(0, 0) for index, row in enumerate(call.rows)]
    q = np.roll(call.q, -call.rows[0].count, axis=0)
    separate = run(Call(q, call.kv, call.page_rows, alone), case, implementation)
    np.testing.assert_allclose(separate[:33], together[1:34], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "attend"),
    [
        ({}, AttentionParams(1.0, window=4, parts=2)),
        ({}, AttentionParams(1.0, chunk=4, parts=2)),
        ({"sinks": jnp.zeros(4)}, AttentionParams(1.0, parts=2)),
    ],
)
def test_a_part_of_the_keys_has_no_window_and_no_sinks(more: dict[str, Any], attend: AttentionParams) -> None:
    call = make_call(CASES[0], CHUNKS)
    with pytest.raises(ValueError, match="parts = 2: takes no window, chunk, sinks or packed queries"):
        inspect.unwrap(paged_attention)(call.q, call.kv, None, None, layer_index=0, attend=attend, **more)


def test_the_library_for_cpus_takes_whole_keys() -> None:
    call, case = make_call(CASES[0], CHUNKS), replace(CASES[0], parts=2)
    with pytest.raises(NoAttentionKernel, match="takes no keys in 2 parts"):
        run(call, case, "cpu")


def test_an_unknown_implementation_is_an_error() -> None:
    """No other implementation takes over."""
    case = CASES[0]
    call = make_call(case, CHUNKS)
    with pytest.raises((TypeCheckError, ValueError), match="cuda"):  # the type-check hook, if it is on, raises first
        run(call, case, "cuda")  # type: ignore[arg-type]
    hopper, triton = "'mosaic', 'mosaic_splits', 'mosaic_whole'", "'triton', 'triton_whole'"
    known = rf"must be one of \['cpu', {hopper}, 'reference', {triton}, 'xla'\]"
    with pytest.raises(ValueError, match=f"implementation = 'cuda': {known}"):
        inspect.unwrap(paged_attention)(
            call.q, call.kv, None, None, layer_index=0, attend=AttentionParams(1.0), implementation="cuda"
        )


def test_query_heads_that_are_no_multiple_of_kv_heads_are_an_error() -> None:
    """5 query heads over 2 KV heads have no groups."""
    case = CASES[0]
    call = make_call(case, CHUNKS)
    wrong = Call(np.concatenate([call.q, call.q[:, :1]], axis=1), call.kv, call.page_rows, call.rows)
    with pytest.raises(ValueError, match=r"query heads \(5\) must be a multiple of KV heads \(2\)"):
        run(wrong, case, "xla")


@pytest.mark.parametrize("tokens", [1, 2, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_of_a_token_is_written_to_its_cell_and_nowhere_else(tokens: int, dtype: str) -> None:
    """K and V lie side by side at (page, layer, head, offset), in the arena's type. Tokens past the end are dropped."""
    rng = np.random.default_rng(tokens)
    num_pages, layers_per_page, heads, page_size, head_dim, v_head_dim = 5, 3, 2, 4, 8, 6
    before = rng.standard_normal((num_pages, layers_per_page, heads, page_size, head_dim + v_head_dim)).astype(
        np.float32
    )
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
        out = jax.jit(partial(write_kv, layer_index=1))(
            arena, np.concatenate([k, v], axis=-1), pages=pages, offsets=offsets
        )
        assert out.dtype == dtype
        np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), expected)


@pytest.mark.parametrize("v_dim", [6, 10])
def test_8_bit_pages_hold_numbers_divided_by_their_scale(v_dim: int) -> None:
    """Rounded to three bits, and cut to ±448. If K and V overlap (V is 10 of 14), V's scale applies."""
    rng = np.random.default_rng(v_dim)
    scales = np.array([[0.5, 2.0], [0.01, 8.0]], np.float32)
    values = (rng.standard_normal((5, 2, 14)) * [[[1]], [[10]], [[1e4]], [[1e-3]], [[0]]]).astype(np.float32)
    columns = np.where(np.arange(14) >= 14 - v_dim, scales[1][:, None], scales[0][:, None])
    pages, offsets = np.array([0, 2, 1, 2, 9], np.int32), np.array([3, 0, 1, 2, 0], np.int32)
    arena = jnp.zeros((3, 1, 2, 4, 14), FP8)
    cells = {"pages": jnp.asarray(pages), "offsets": jnp.asarray(offsets)}
    out = write_kv(arena, jnp.asarray(values), **cells, layer_index=0, kv_scales=jnp.asarray(scales), v_dim=v_dim)
    assert out.dtype == FP8
    stored = np.asarray(out.astype(jnp.float32))[pages[:4], 0, :, offsets[:4]]
    wanted = np.clip(values[:4] / columns, -448, 448)
    np.testing.assert_allclose(stored, wanted, rtol=2**-4, atol=2**-10)
    assert np.abs(wanted).max() == np.abs(stored).max() == 448


def test_scales_are_for_8_bit_pages() -> None:
    """16-bit pages have no scales, and without V's size it is not known which numbers are V."""
    case = CASES[0]
    with pytest.raises(ValueError, match="kv_scales are for 8-bit pages, and these are float32"):
        run(make_call(case, CHUNKS), replace(case, kv_scales=((1.0, 1.0), (1.0, 1.0))), "xla")
    ones, token = jnp.ones((2, 2), jnp.float32), jnp.zeros(3, jnp.int32)
    values = jnp.zeros((3, 2, 14), jnp.float32)
    for dtype, message in (
        ("bfloat16", "kv_scales are for 8-bit pages, and these are bfloat16"),
        (FP8, "v_dim = None"),
    ):
        with pytest.raises(ValueError, match=message):
            write_kv(
                jnp.zeros((3, 1, 2, 4, 14), dtype), values, pages=token, offsets=token, layer_index=0, kv_scales=ones
            )


@given(st.data())
def test_every_token_has_one_index_in_a_tile_of_its_own_row(data: st.DataObject) -> None:
    """Tiles cut each row from its first token, in order, without mixing rows; `flat_index` inverts `tokens`."""
    num_rows, tokens, size = data.draw(st.sampled_from([(1, 1, 1), (1, 9, 4), (4, 4, 1), (5, 40, 8), (3, 33, 32)]))
    counts = np.zeros(num_rows, np.int32)
    for index in range(num_rows):
        most = tokens - int(counts.sum()) if size > 1 else 1
        counts[index] = data.draw(st.integers(0, most))
    tiles: Any = jax.tree.map(np.asarray, tiles_of(counts, tokens, size))
    owner, first = token_rows(counts, tokens), np.cumsum(counts) - counts

    found = []
    for token in range(int(counts.sum())):
        tile, query = divmod(int(tiles.flat_index[token]), size)
        found.append((tile, query))
        assert tiles.tokens[tile, query] == token
        assert tiles.row[tile] == owner[token]
        assert first[owner[token]] + tiles.offset[tile] + query == token
    assert len(set(found)) == len(found)

    live = [tile for tile in range(len(tiles.row)) if tiles.offset[tile] < counts[tiles.row[tile]]]
    assert sorted({tile for tile, _ in found}) == live, "a tile is live exactly when it holds a token"
    expected = [(row, offset) for row in range(num_rows) for offset in range(0, int(counts[row]), size)]
    assert [(tiles.row[tile], tiles.offset[tile]) for tile in live] == expected
    for tile in live:
        row = tiles.row[tile]
        assert set(owner[tiles.tokens[tile]]) == {row}, "a tile reaches into another row"
    assert ((tiles.tokens >= 0) & (tiles.tokens < tokens)).all()
    assert ((tiles.flat_index >= 0) & (tiles.flat_index < tiles.tokens.size)).all()
