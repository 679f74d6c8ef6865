"""Tests of the Hopper attention kernel only: tunings, which pages it reads, its limits, and that it lowers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import interpreter, mosaic
from pallas_kernels.attention.api import tile_tokens
from pallas_kernels.attention.hopper.heuristics import default_tuning
from pallas_kernels.attention.hopper.launch import Shape, Tuning, launch
from pallas_kernels.attention.rows import AttentionParams
from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_SMEM_BYTES, SMEM_BYTES
from tests.support.kernels.calls import check, lower, make_call, run, run_packed, shape_of
from tests.support.nights import sample
from tests.support.oracles import Row
from tools.aot.measures.tma import recorded
from tools.cases.kernels.attention import CASES, Case, RowSpec
from tools.cases.kernels.attention_fp8 import FP8, FP8_CASES
from tools.cases.kernels.attention_layers import LAYERS
from tools.cases.kernels.attention_matrix import matrix, prefill_matrix
from tools.cases.kernels.attention_shapes import arguments

SINKS_AND_WINDOW = next(case for case in CASES if case.name == "16 bits, 64/64 p16, window 64, sinks")
FULL = next(case for case in CASES if case.name == "16 bits, 128/128 p64, full, softcap, splits")
OVERLAP = next(case for case in CASES if case.name == "16 bits, 512/512 of 640 p64, full")
EXTEND = next(case for case in CASES if case.name == "16 bits, prefill, 64/64 p16, window 70, sinks, cut")
EIGHT_BITS = next(case for case in FP8_CASES if case.name == "fp8 pages, 64/64 p16, window 64, sinks, scales")
UNSCALED = replace(EIGHT_BITS, kv_scales=None)
LAYER = {layer.name: layer for layer in LAYERS}

TUNINGS = [
    (SINKS_AND_WINDOW, Tuning(64, 1, 1, producer=False)),
    (SINKS_AND_WINDOW, Tuning(64, 2, 2, producer=True)),
    (SINKS_AND_WINDOW, Tuning(32, 3, 1, producer=False)),
    (FULL, Tuning(64, 2, 1, producer=True)),
    (OVERLAP, Tuning(64, 1, 1, producer=True)),
    (EXTEND, Tuning(64, 2, 1, producer=True, row_parts=2)),
    (EXTEND, Tuning(32, 2, 2, producer=True, row_parts=2)),
    (EXTEND, Tuning(64, 3, 1, producer=True, row_parts=2, ahead=True)),
    (EXTEND, Tuning(32, 3, 1, producer=False, row_parts=1, ahead=True)),
    (UNSCALED, Tuning(64, 2, 1, producer=True)),
    (UNSCALED, Tuning(64, 1, 2, producer=False)),
    (UNSCALED, Tuning(128, 3, 1, producer=False)),
]
NIGHTLY_TUNINGS = [
    *(pair for pair in TUNINGS if pair not in TUNINGS[::3]),
    (SINKS_AND_WINDOW, Tuning(128, 2, 3, producer=False)),
    (FULL, Tuning(64, 3, 1, producer=False)),
    (FULL, Tuning(32, 2, 5, producer=False)),
]


def named(pairs: list[tuple[Case, Tuning]], *marks: pytest.MarkDecorator) -> list[ParameterSet]:
    """Return the pairs as parameters of tests, named by both."""
    return [pytest.param(*pair, id=f"{pair[0].name}, {pair[1]}", marks=marks) for pair in pairs]


def compare(case: Case, tuning: Tuning | None = None) -> None:
    """Compare the interpreted kernel with the oracle."""
    for rows in case.rows:
        call = make_call(case, rows)
        check(run(call, case, "mosaic", tuning), call, case)


@pytest.mark.parametrize(("case", "tuning"), [*named(TUNINGS[::3]), *named(NIGHTLY_TUNINGS, pytest.mark.nightly)])
def test_all_tunings_give_the_same_result(case: Case, tuning: Tuning) -> None:
    """Blocks, stages, splits, the producer, row parts and scores ahead only change the speed."""
    compare(case, tuning)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*matrix(), *prefill_matrix()], ids=lambda case: case.name)
def test_matrix(case: Case) -> None:
    """All pairs of head sizes, windows, pages and groups agree with the oracle."""
    compare(case)


@pytest.mark.parametrize(("window", "chunk", "copies"), [(40, None, 4), (None, 64, 2), (None, None, 26)])
@pytest.mark.parametrize("splits", [1, 2])
def test_only_pages_that_the_query_sees_are_read(
    window: int | None, chunk: int | None, copies: int, splits: int
) -> None:
    """The cost of a local layer does not depend on the context. The window of 40 needs pages 22 to 25 only."""
    case = Case(
        "", ((RowSpec(400, 1),),), 1, 16, window=window, chunk=chunk, heads=(2, 1, 64, 64), tile=1, dtype="bfloat16"
    )
    call = make_call(case, case.rows[0])
    with interpreter.counted_copies() as made:
        out = run(call, case, "mosaic", Tuning(32, 2, splits, producer=False))
    check(out, call, case)
    assert made.count == splits + copies  # the queries, once per split, and whole blocks of two pages


@pytest.mark.parametrize("case", [FULL, EXTEND], ids=["decode", "prefill"])
def test_a_row_of_length_zero_gives_zeros(case: Case) -> None:
    """Its page row may hold any ids."""
    case = replace(case, rows=((RowSpec(70, 1), RowSpec(0, 0), RowSpec(0, 0)),))
    out = run(make_call(case, case.rows[0]), case, "mosaic")
    np.testing.assert_array_equal(out[1:], 0)


@pytest.mark.parametrize("name", sample(list(LAYER), 8))
def test_layers_lower_for_hopper(name: str) -> None:
    """Lowering needs no GPU packages; `make gpu-compile` runs the rest of the compilation."""
    lower(LAYER[name])


@pytest.mark.parametrize("name", sample(list(LAYER), 8))
def test_all_copies_are_swizzled(name: str) -> None:
    """Those of outputs too, whose shared memory names no tiles: Mosaic chooses them. Else rows would share banks."""
    with recorded() as found:
        lower(LAYER[name])
    assert found
    assert {descriptor.swizzle for descriptor in found} <= {32, 64, 128}


@given(st.data())
def test_most_blocks_bounds_what_the_queries_of_a_thread_block_see(data: st.DataObject) -> None:
    """Splits and work lists rely on this bound, wherever the queries lie and chunks begin."""
    page, columns = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 30))
    reach, size = data.draw(st.sampled_from(["full", "window", "chunk"])), data.draw(st.integers(1, 300))
    lookback = data.draw(st.integers(0, 2)) if reach == "chunk" else 0
    window, chunk = (size if reach == name else None for name in ("window", "chunk"))
    attend = AttentionParams(1.0, window, chunk, lookback=lookback)
    queries, block = data.draw(st.integers(1, 40)), 2 ** data.draw(st.integers(0, 7))
    dtype = jnp.dtype("bfloat16")
    shape = Shape(1, queries, 1, 1, 64, 64, 128, page, 99, columns, 1, dtype, attend)
    first = data.draw(st.integers(0, page * columns - 1))
    last = min(first + queries, page * columns) - 1
    keys = Row(first, 1).keys(first, window, chunk, lookback)
    assert last // block - keys.start // block + 1 <= shape.most_blocks(block, queries)


def test_small_windows_are_not_split_and_long_contexts_fill_the_gpu() -> None:
    """Splits depend on shapes alone: window, batch and heads."""
    splits = {name: default_tuning(shape_of(arguments(layer))).splits for name, layer in LAYER.items()}
    assert splits["gpt-oss-20b local"] == splits["gpt-oss-20b local, one row"] == 1
    assert splits["gemma-3-27b local"] == splits["gemma-3-27b full"] == 1
    assert splits["gemma-3-27b local, one row"] > 1
    assert splits["gemma-3-27b full, one row"] * 16 >= 200
    assert splits["gpt-oss-20b full, one row"] * 8 >= 200
    assert all(splits[name] == 1 for name, layer in LAYER.items() if layer.count == 8192)
    assert splits["prefill, gemma-3-27b full, 64 tokens"] * 2 * 16 >= 0.85 * 132


@pytest.mark.parametrize("name", LAYER)
def test_default_tuning_leaves_room_for_two_thread_blocks(name: str) -> None:
    """Two thread blocks fit on each multiprocessor, unless there are two consumers or rows are too long."""
    shape = shape_of(arguments(LAYER[name]))
    plan = launch(shape, default_tuning(shape))
    alone = shape.head_dim + shape.v_dim > 384 or plan.consumers > 1
    assert plan.smem_bytes <= (SMEM_BYTES if alone else SM_SMEM_BYTES // 2 - BLOCK_SMEM_BYTES)
    if plan.tuning.stages == 1 < plan.most_blocks(plan.tuning.block, plan.chunk_queries):
        assert shape.upcast  # wide heads, whose blocks take memory in both types
        with pytest.raises(ValueError, match="bytes of shared memory"):
            launch(shape, plan.tuning._replace(stages=2))


@pytest.mark.parametrize("name", [name for name, layer in LAYER.items() if layer.count == 8192])
def test_tiles_fill_the_rows_of_the_products(name: str) -> None:
    """Tiles of `tile_tokens` make 64 or 128 rows. A group of five leaves a few of them empty."""
    shape = shape_of(arguments(LAYER[name]))
    assert shape.queries == tile_tokens("mosaic", shape.group)
    plan = launch(shape, default_tuning(shape))
    assert plan.rows >= 0.9 * plan.tuning.row_parts * 64
    local = (shape.attend.window or shape.attend.chunk or 10**6) <= 128
    large = shape.upcast and shape.head_dim >= 256  # two stages in both types only fit beside 64 rows of queries
    assert plan.tuning.row_parts == (1 if shape.v_dim > 256 or local or large else 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "needs bfloat16, float16 or float8_e4m3fn, not float32"),
        ({"kv_dtype": "float8_e5m2"}, "needs bfloat16, float16 or float8_e4m3fn, not float8_e5m2"),
        ({"kv_dtype": FP8, "heads": (32, 8, 80, 64)}, "rows of 144 8-bit numbers: .* needs a multiple of 32"),
        ({"heads": (65, 1, 128, 128)}, "65 query heads per KV head: implementation = 'mosaic' takes at most 64"),
        ({"heads": (32, 8, 128, 320)}, "values of 320: implementation = 'mosaic' takes multiples of 128 above 256"),
        ({"heads": (32, 8, 576, 512)}, "head sizes 576 and 512: implementation = 'mosaic' takes at most 512"),
        ({"heads": (32, 8, 120, 128)}, "rows of 248 numbers: implementation = 'mosaic' needs a multiple of 16"),
        ({"page_size": 48}, "pages of 48 tokens: implementation = 'mosaic' takes 8, 16, 32 and multiples of 64"),
        ({"batch": 2**20, "layers_per_page": 2**10}, "exceed 2\\^31 boxes"),
    ],
)
def test_shapes_that_the_kernel_cannot_serve_are_an_error(change: dict[str, object], message: str) -> None:
    """The call raises: no other implementation takes over, and no result is wrong."""
    with pytest.raises(ValueError, match=message):
        lower(replace(LAYER["Mistral-7B"], **change))  # type: ignore[arg-type]


def test_queries_and_pages_of_two_types_are_an_error() -> None:
    """Queries are not cast silently."""
    given = arguments(LAYER["Mistral-7B"])
    half = jax.ShapeDtypeStruct(given.q.shape, jnp.float16)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="queries are float16 and pages bfloat16"):
        shape_of(given._replace(q=half))


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(24, 2, 1, producer=False), "blocks of 24 keys do not fit pages of 64"),
        (Tuning(64, 8, 1, producer=False), "needs .* bytes of shared memory"),
        (Tuning(64, 1, 1, producer=False, row_parts=2), "two consumers need a producer"),
        (Tuning(64, 1, 1, producer=True, row_parts=3), "row_parts = 3 must be 1 or 2"),
        (Tuning(64, 2, 1, producer=True, ahead=True), "ahead needs tiles of several queries and no splits"),
        (Tuning(64, 1, 1, producer=True, row_parts=2), "needs 2 stages"),
    ],
)
def test_a_tuning_that_does_not_fit_is_an_error(tuning: Tuning, message: str) -> None:
    """Tuning tables are data, so they may be wrong."""
    with pytest.raises(ValueError, match=message):
        launch(shape_of(arguments(LAYER["Mistral-7B"])), tuning)


def test_wide_values_need_a_producer() -> None:
    """Two consumers cannot both refill a stage, and there are no registers for a third."""
    shape = shape_of(arguments(LAYER["gemma-4-31B full"]))
    with pytest.raises(ValueError, match="two consumers need a producer"):
        launch(shape, Tuning(32, 2, 1, producer=False))
    with pytest.raises(ValueError, match="values of 512 take two consumers: row_parts = 2 must be 1"):
        launch(shape, Tuning(32, 1, 1, producer=True, row_parts=2))


def test_8_bit_pages_are_cast_64_keys_at_a_time_into_one_stage_or_by_a_producer() -> None:
    """A consumer that casts has no stage for the scores of the block after."""
    shape = shape_of(arguments(LAYER["fp8, prefill, gpt-oss-20b local"]))
    with pytest.raises(ValueError, match="8-bit pages need blocks of a multiple of 64 keys"):
        launch(shape, Tuning(32, 2, 1, producer=False))
    with pytest.raises(ValueError, match="8-bit pages need a producer for scores ahead"):
        launch(shape, Tuning(64, 2, 1, producer=False, ahead=True))
    few, many = (launch(shape, Tuning(64, stages, 1, producer=False)).smem_bytes for stages in (1, 4))
    assert many - few == 3 * 64 * shape.row, "stages of 8 bits alone"


@pytest.mark.parametrize("case", [EIGHT_BITS, UNSCALED], ids=["scales", "no scales"])
def test_packed_queries_over_8_bit_pages(case: Case) -> None:
    """With scales the bits are those of queries by token; without, the result is rounded once, to its own type."""
    call = make_call(case, case.rows[0])
    out = run_packed(call, case)
    check(out, call, case)
    if case.kv_scales is not None:
        np.testing.assert_array_equal(out[: len(call.rows)], run(call, case, "mosaic")[: len(call.rows)])


def test_queries_beyond_the_range_of_float16_are_cut() -> None:
    """8-bit pages make everything float16; results stay finite."""
    call = make_call(EIGHT_BITS, EIGHT_BITS.rows[0])
    out = run(replace(call, q=call.q * 1e6), EIGHT_BITS, "mosaic")
    assert np.isfinite(out).all()


def test_consumers_that_take_turns_need_a_stage_each() -> None:
    """And one more if scores are formed ahead. With fewer, each waits for a stage that the other holds."""
    shape = shape_of(arguments(LAYER["prefill, gemma-3-27b full"]))
    for tuning, least in ((Tuning(64, 1, 1, True, 2), 2), (Tuning(64, 2, 1, True, 2, True), 3)):
        with pytest.raises(ValueError, match=f"needs {least} stages"):
            launch(shape, tuning)
        launch(shape, tuning._replace(stages=least))


def test_the_interpreter_finds_races() -> None:
    """All interpreted tests rely on its race detector."""

    def body(out: mosaic.Ref, shared: mosaic.Ref) -> None:
        shared[...] = jnp.full((128,), 1.0, jnp.float32)  # written by both warpgroups, in no order
        mosaic.plgpu.commit_smem()
        mosaic.plgpu.copy_smem_to_gmem(shared, out)
        mosaic.plgpu.wait_smem_to_gmem(0)

    run_body = mosaic.kernel(
        body,
        name="racing",
        outputs=[((128,), jnp.dtype(jnp.float32))],
        grid={"x": 1},
        num_threads=2,
        scratch={"shared": mosaic.plgpu.SMEM((128,), jnp.float32)},
    )
    with interpreter.interpreted(detect_races=True):
        np.asarray(run_body()[0])
        assert interpreter.races_found()
