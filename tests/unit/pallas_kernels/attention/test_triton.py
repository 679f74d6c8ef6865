"""Tests of the Triton kernel: its interpreted source against the oracle, its launches, its errors.

Tests marked `triton` interpret it: `make test-triton` runs them in .venv-gpu, because Triton takes 1 GB.
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array

from pallas_kernels.attention.api import Implementation, paged_attention
from pallas_kernels.attention.rows import AttentionParams, PagedRows, QueryTiles, in_tiles, tile_rows
from pallas_kernels.attention.triton import call as triton_attention
from pallas_kernels.attention.triton.heuristics import default_tuning
from pallas_kernels.attention.triton.tuning import Shape, Tuning, column_parts
from tests.support.kernels.calls import check, make_call, run, tiles_of
from tests.support.nights import sample
from tests.support.oracles import Row
from tools.cases.kernels.attention import CASES, Case, RowSpec
from tools.cases.kernels.attention_layers import DECODE_LAYERS, Layer
from tools.cases.kernels.attention_lookback import LOOKBACK_CASES
from tools.cases.kernels.attention_matrix import matrix
from tools.cases.kernels.attention_parts import PARTS_CASES
from tools.cases.kernels.attention_shapes import Arguments, arguments

ROUNDOFFS = 2  # Triton's interpreter truncates where a GPU rounds
NAMED = {case.name: case for case in (*CASES, *LOOKBACK_CASES, *PARTS_CASES) if not case.kv_dtype}
SINKS_AND_WINDOW = NAMED["16 bits, 64/64 p16, window 64, sinks"]
FULL = NAMED["16 bits, 128/128 p64, full, softcap, splits"]
TILES = NAMED["16 bits, tiles of 8, chunk 128, first visible"]
RAGGED = NAMED["window 47 = 3p - 1, softcap"]
PARTS = NAMED["16 bits, two parts, 64/64 p32, sinks, decode"]
LAYERS = {layer.name: layer for layer in DECODE_LAYERS}
TUNINGS = [
    (SINKS_AND_WINDOW, Tuning(16, 16, 4, 2, 1)),
    (SINKS_AND_WINDOW, Tuning(16, 32, 4, 2, 5)),
    (SINKS_AND_WINDOW, Tuning(64, 128, 4, 2, 2)),
    (FULL, Tuning(16, 64, 4, 2, 3)),
    (FULL, Tuning(16, 16, 4, 2, 40)),
    (TILES, Tuning(16, 32, 4, 2, 1)),
    (TILES, Tuning(32, 16, 4, 2, 3)),
    (RAGGED, Tuning(16, 16, 4, 2, 2)),
    (RAGGED, Tuning(128, 64, 4, 2, 1)),
]
NAMED_TUNINGS = {f"{case.name}, {tuning}": (case, tuning) for case, tuning in TUNINGS}


def compare(case: Case, implementation: Implementation = "triton") -> None:
    """Compare the interpreted kernel with the oracle."""
    for rows in case.rows:
        padded = rows + (RowSpec(0, 0),) * (max(map(len, case.rows)) - len(rows))
        call = make_call(case, padded)
        out = run(call, case, implementation)
        tokens = check(out, call, case, roundoffs=ROUNDOFFS)
        np.testing.assert_array_equal(out[tokens:], 0)  # padding tokens


@pytest.mark.triton
@pytest.mark.parametrize("name", sample(list(NAMED), 8))
def test_a_token_attends_to_exactly_the_keys_it_may_see(interpreter: Any, name: str) -> None:
    """The result is the softmax over visible keys. All other cells hold NaN."""
    compare(NAMED[name])


@pytest.mark.triton
@pytest.mark.parametrize("case", [FULL, TILES, PARTS], ids=lambda case: case.name)
def test_keys_that_are_not_split_give_the_same_result(interpreter: Any, case: Case) -> None:
    """Of decode steps and of tiles of several tokens."""
    compare(case, "triton_whole")


@pytest.mark.triton
@pytest.mark.parametrize("name", sample(list(NAMED_TUNINGS), 6))
def test_all_tunings_give_the_same_result(interpreter: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, blocks and splits only change the speed. There may be more splits than blocks."""
    case, tuning = NAMED_TUNINGS[name]
    monkeypatch.setattr(triton_attention, "default_tuning", lambda *_: tuning)
    compare(replace(case, name=f"{case.name}, {tuning}"))  # compiled programs are cached by case


@pytest.mark.triton
@pytest.mark.nightly
@pytest.mark.parametrize("case", [*matrix()], ids=lambda case: case.name)
def test_matrix(interpreter: Any, case: Case) -> None:
    """All pairs of head sizes, windows, pages and groups agree with the oracle."""
    compare(case)


@pytest.mark.triton
def test_a_row_of_length_zero_gives_zeros(interpreter: Any) -> None:
    """Its page row may hold any ids. With splits, each part is empty."""
    case = replace(FULL, rows=((RowSpec(70, 1), RowSpec(0, 0), RowSpec(0, 0)),))
    out = run(make_call(case, case.rows[0]), case, "triton")
    np.testing.assert_array_equal(out[1:], 0)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("window", "chunk", "keys", "blocks"), [(40, None, 40, 2), (None, 64, 17, 1), (None, None, 401, 7)]
)
@pytest.mark.parametrize("page", [12, 16, 64])
def test_only_cells_that_the_query_sees_are_read(
    interpreter: Any, window: int | None, chunk: int | None, keys: int, blocks: int, page: int
) -> None:
    """The cost of a local layer does not depend on the context: only K and V of visible keys are read, and once.

    If a page holds whole blocks, here of 64 keys, page ids are read once per turn of the loop.
    """
    case = Case(
        "", ((RowSpec(400, 1),),), 1, page, window=window, chunk=chunk, heads=(2, 1, 64, 64), tile=1, dtype="bfloat16"
    )
    call = make_call(case, case.rows[0])
    check(run(call, case, "triton"), call, case, roundoffs=ROUNDOFFS)
    assert interpreter.READS["kv"] == keys * (64 + 64)
    assert interpreter.READS["page_rows"] == (blocks if page == 64 else keys)


@pytest.mark.triton
def test_pools_beyond_2_31_elements(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets have 64 bits: the last page of a pool of more than 2^31 elements is read correctly."""
    case = Case("", ((RowSpec(20, 1),),), 1, 16, heads=(2, 1, 64, 64), tile=1, dtype="float16")
    call = make_call(case, case.rows[0])
    used = call.page_rows[0, :2]
    first = 2**31 // call.kv[0].size
    # Only the pages in use are ever touched, so the pool takes no memory.
    pool = np.zeros((first + 2, *call.kv.shape[1:]), np.float16)
    pool[first:] = call.kv[used]
    execute = interpreter.execute

    def with_pool(kernel: Any, grid: Any, arrays: dict[str, np.ndarray], static: dict[str, Any]) -> None:
        pages = np.zeros_like(arrays["page_rows"])
        pages[0, :2] = first, first + 1
        execute(kernel, grid, {**arrays, "kv": pool, "page_rows": pages}, static)

    monkeypatch.setattr(interpreter, "execute", with_pool)
    check(run(call, case, "triton"), call, case, roundoffs=ROUNDOFFS)


@pytest.mark.triton
def test_the_interpreter_sees_reads_beyond_an_array(interpreter: Any) -> None:
    """All other tests rely on it: an address outside of the arrays is an error."""
    call = make_call(FULL, FULL.rows[0])
    wrong = replace(call, page_rows=np.full_like(call.page_rows, len(call.kv)))
    with pytest.raises(Exception, match="reach beyond an array"):
        run(wrong, FULL, "triton")


def test_without_jax_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never another implementation."""
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ImportError, match=r"kernels on Triton need .* pip install jax-triton"):
        trace(LAYERS["Mistral-7B"])


def shape_of(given: Arguments) -> Shape:
    """What the launch is planned from."""
    shapes: list[Shape] = []

    def plan(q: Array, kv: Array) -> Array:
        shapes.append(Shape.of(q, kv, given.rows, given.tiles, given.attend))
        return q

    jax.eval_shape(plan, given.q, given.kv)
    return shapes[0]


def test_small_windows_are_not_split_and_long_contexts_fill_the_gpu() -> None:
    """Splits depend on shapes alone: window, batch, heads."""
    splits = {name: default_tuning(shape_of(arguments(layer))).splits for name, layer in LAYERS.items()}
    assert splits["gpt-oss-20b local"] == splits["gpt-oss-20b local, one row"] == 1
    assert splits["gemma-3-27b local"] == splits["gemma-3-27b full"] == 1
    assert splits["gemma-3-27b local, one row"] > 1
    assert splits["gemma-3-27b full, one row"] * 16 >= 180
    assert splits["gpt-oss-20b full, one row"] * 8 >= 180


@given(st.integers(1, 512))
def test_a_head_size_is_one_or_two_powers_of_two(size: int) -> None:
    """They hold it, none is needless, and a sum of two powers of two ≥ 16 is not padded."""
    main, rest = column_parts(size)
    for part in (main, rest) if rest else (main,):
        assert part >= 16
        assert part & (part - 1) == 0
    assert main + rest >= size
    assert rest <= main
    assert (main < size) == (rest > 0)
    assert main + rest < 2 * size or size < 32
    if size % 16 == 0 and size.bit_count() <= 2:
        assert main + rest == size


@given(st.data())
def test_most_blocks_bounds_what_a_thread_block_visits(data: st.DataObject) -> None:
    """The rule for splits relies on this bound, wherever the queries lie."""
    page, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 30))
    held = page * columns
    reach = data.draw(st.sampled_from(["full", "window", "chunk"]))
    size = data.draw(st.integers(1, 300))
    lookback = data.draw(st.integers(0, 2)) if reach == "chunk" else 0
    attend = AttentionParams(
        1.0, size if reach == "window" else None, size if reach == "chunk" else None, lookback=lookback
    )
    queries, group = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    rows, block = 2 ** data.draw(st.integers(4, 7)), 2 ** data.draw(st.integers(4, 7))
    shape = Shape(1, queries, group, 1, 64, 64, 128, page, columns, 1, jnp.dtype("bfloat16"), attend)
    chunk = data.draw(st.integers(0, shape.chunks(rows) - 1))
    start = data.draw(st.integers(0, held - 1))
    first = start + chunk * rows // group
    last = min(start + min((chunk * rows + rows - 1) // group, queries - 1), held - 1)
    if first > last:
        return
    keys = Row(first, last - first + 1).keys(first, attend.window, attend.chunk, lookback)
    assert last // block - keys.start // block + 1 <= shape.most_blocks(rows, block)


def test_tokens_that_no_tile_holds_are_known() -> None:
    """The kernel writes no results for them, so the call replaces them by zeros."""
    counts = np.array([3, 0, 2], np.int32)
    zeros = jnp.zeros(3, jnp.int32)
    rows = PagedRows(zeros, jnp.asarray(counts), jnp.zeros((3, 1), jnp.int32), zeros, zeros)
    for size in (1, 2, 4):
        held = in_tiles(rows, tiles_of(counts, 8, size))
        assert held.tolist() == [True] * 5 + [False] * 3


def test_an_idle_row_between_others_has_no_live_query() -> None:
    """With a token per row, the token of an idle row has the index of the next row's tile, which does not hold it."""
    row, counts = jnp.arange(3, dtype=jnp.int32), jnp.array([1, 0, 1], jnp.int32)
    rows = PagedRows(
        jnp.full(3, 9, jnp.int32), counts, jnp.zeros((3, 4), jnp.int32), jnp.zeros_like(row), jnp.zeros_like(row)
    )
    tiles = tile_rows(counts, row, row, 1)
    assert tiles.flat_index.tolist() == [0, 1, 1]
    shape = Shape(3, 1, 1, 1, 64, 64, 128, 16, 4, 1, jnp.dtype("bfloat16"), AttentionParams(1.0))
    row_of, first, live, _, _ = triton_attention.program_items(shape, rows, tiles, 3).T.tolist()
    assert live == [1, 0, 1]
    assert (row_of[0], row_of[2]) == (0, 2)
    assert (first[0], first[2]) == (9, 9)


def trace(layer: Layer) -> None:
    """Trace a layer's call, which needs no Triton if it is an error."""
    given = arguments(layer)

    def attend(q: Array, kv: Array, rows: PagedRows, tiles: QueryTiles, sinks: Array | None) -> Array:
        return paged_attention(
            q, kv, rows, tiles, layer_index=given.layer_index, attend=given.attend, sinks=sinks, implementation="triton"
        )

    jax.eval_shape(attend, *given[:5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float8_e4m3fn"}, "needs bfloat16, float16 or float32, not float8_e4m3fn"),
        ({"heads": (32, 8, 576, 512)}, "head sizes 576 and 512: implementation = 'triton' takes at most 512"),
    ],
)
def test_shapes_that_the_kernel_cannot_serve_are_an_error(change: dict[str, object], message: str) -> None:
    """The call raises: no other implementation takes over, and no result is wrong."""
    with pytest.raises(ValueError, match=message):
        trace(replace(LAYERS["Mistral-7B"], **change))  # type: ignore[arg-type]


def test_queries_and_pages_of_two_types_are_an_error() -> None:
    """Queries are not cast silently."""
    given = arguments(LAYERS["Mistral-7B"])
    half = jax.ShapeDtypeStruct(given.q.shape, jnp.float16)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="queries are float16 and pages bfloat16"):
        shape_of(given._replace(q=half))


@pytest.mark.parametrize("tuning", [Tuning(8, 64, 4, 2, 1), Tuning(16, 48, 4, 2, 1), Tuning(16, 64, 4, 2, 65_536)])
def test_a_tuning_that_does_not_fit_is_an_error(tuning: Tuning) -> None:
    """A tuning that Triton cannot compile is refused before the call."""
    given = arguments(LAYERS["Mistral-7B"])
    call = partial(
        triton_attention.paged_attention, layer_index=given.layer_index, attend=given.attend, sinks=None, tuning=tuning
    )
    with pytest.raises(ValueError, match="rows and block must be powers of two from 16 on, splits at most 65535"):
        jax.eval_shape(call, *given[:4])
