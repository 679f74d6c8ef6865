"""The Hopper kernel, beyond what all implementations share: tuning, page ids, limits, and that it lowers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from pallas_kernels import mosaic
from pallas_kernels.attention.api import paged_attention
from pallas_kernels.attention.hopper.plan import (
    SM_SMEM_BYTES,
    SMEM_BYTES,
    Tuning,
    default_tuning,
    launch,
    tile_tokens,
)
from tests.support.kernels.calls import expect, make_call, run, shape_of
from tools.cases.attention import CASES, Case, RowSpec
from tools.cases.attention_fp8 import FP8, FP8_CASES
from tools.cases.attention_layers import LAYERS, Layer
from tools.cases.attention_matrix import matrix, prefill_matrix
from tools.cases.attention_shapes import arguments

SINKS_AND_WINDOW = next(case for case in CASES if case.name == "16 bits, 64/64 p16, window 64, sinks")
FULL = next(case for case in CASES if case.name == "16 bits, 128/128 p64, full, softcap, splits")
OVERLAP = next(case for case in CASES if case.name == "16 bits, 512/512 of 640 p64, full")
EXTEND = next(case for case in CASES if case.name == "16 bits, prefill, 64/64 p16, window 70, sinks, cut")
EIGHT_BITS = next(case for case in FP8_CASES if case.name == "fp8 pages, 64/64 p16, window 64, sinks, scales")
LAYER = {layer.name: layer for layer in LAYERS}

TUNINGS = [
    (SINKS_AND_WINDOW, Tuning(64, 1, 1, loader=False)),
    (SINKS_AND_WINDOW, Tuning(64, 2, 2, loader=True)),
    (SINKS_AND_WINDOW, Tuning(32, 3, 1, loader=False)),
    (FULL, Tuning(64, 2, 1, loader=True)),
    (OVERLAP, Tuning(64, 1, 1, loader=True)),
    (EXTEND, Tuning(64, 2, 1, loader=True, row_parts=2)),
    (EXTEND, Tuning(32, 2, 2, loader=True, row_parts=2)),
    (EXTEND, Tuning(64, 3, 1, loader=True, row_parts=2, ahead=True)),
    (EXTEND, Tuning(32, 3, 1, loader=False, row_parts=1, ahead=True)),
]
NIGHTLY_TUNINGS = [
    (SINKS_AND_WINDOW, Tuning(128, 2, 3, loader=False)),
    (FULL, Tuning(64, 3, 1, loader=False)),
    (FULL, Tuning(32, 2, 5, loader=False)),
]


def named(pairs: list[tuple[Case, Tuning]], *marks: pytest.MarkDecorator) -> list[ParameterSet]:
    """Pairs as parameters of tests."""
    return [pytest.param(*pair, id=f"{pair[0].name}, {pair[1]}", marks=marks) for pair in pairs]


def compare(case: Case, tuning: Tuning | None = None) -> None:
    """The kernel, interpreted, against the oracle."""
    for rows in case.rows:
        call = make_call(case, rows)
        expected = expect(call, case)
        np.testing.assert_allclose(run(call, case, "mosaic", tuning)[: len(expected)], expected, rtol=0, atol=2e-2)


def lower(layer: Layer) -> None:
    """Lower a layer for a GPU that is not there. Checks register layouts, tiles, copies and shared memory."""
    given = arguments(layer)

    def attend(q: jax.Array, kv: jax.Array, sinks: jax.Array | None) -> jax.Array:
        out: jax.Array = paged_attention(
            q,
            kv,
            jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), given.rows),
            jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), given.tiles),
            slot=given.slot,
            attend=given.attend,
            sinks=sinks,
            implementation="mosaic",
        )
        return out

    traced = jax.jit(attend).trace(given.q, given.kv, given.sinks)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("case", "tuning"), [*named(TUNINGS), *named(NIGHTLY_TUNINGS, pytest.mark.nightly)])
def test_any_tuning_gives_the_same(case: Case, tuning: Tuning) -> None:
    """Blocks, stages, splits, the loader, parts and scores ahead are matters of speed."""
    compare(case, tuning)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*matrix(), *prefill_matrix()], ids=lambda case: case.name)
def test_matrix(case: Case) -> None:
    """Head sizes, windows, pages, groups and lengths in all combinations."""
    compare(case)


@pytest.mark.parametrize(("window", "chunk", "copies"), [(40, None, 4), (None, 64, 2), (None, None, 26)])
@pytest.mark.parametrize("splits", [1, 2])
def test_only_pages_that_the_query_sees_are_read(
    window: int | None, chunk: int | None, copies: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local layer's cost cannot depend on the context: copies are counted, here of pages 22 to 25 for the window."""
    callbacks = mosaic.interpreter().gpu_callbacks
    copy, count = callbacks.copy_gmem_to_smem, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return copy(*arguments, **options)

    monkeypatch.setattr(callbacks, "copy_gmem_to_smem", counted)
    case = Case(
        "", ((RowSpec(400, 1),),), 1, 16, window=window, chunk=chunk, heads=(2, 1, 64, 64), tile=1, dtype="bfloat16"
    )
    call = make_call(case, case.rows[0])
    out = run(call, case, "mosaic", Tuning(32, 2, splits, loader=False))
    np.testing.assert_allclose(out, expect(call, case), rtol=0, atol=2e-2)
    assert count == splits + copies  # the queries, once per split, and whole blocks of two pages


@pytest.mark.parametrize("case", [FULL, EXTEND], ids=["decode", "prefill"])
def test_a_row_of_length_zero_gives_zeros(case: Case) -> None:
    """Whatever its page row holds."""
    case = replace(case, rows=((RowSpec(70, 1), RowSpec(0, 0), RowSpec(0, 0)),))
    out = run(make_call(case, case.rows[0]), case, "mosaic")
    np.testing.assert_array_equal(out[1:], 0)


@pytest.mark.parametrize("name", LAYER)
def test_layers_lower_for_hopper(name: str) -> None:
    """The half of compilation that needs no GPU packages; `make gpu-compile` does the other half."""
    lower(LAYER[name])


def test_small_windows_are_not_split_and_long_contexts_fill_the_gpu() -> None:
    """Splits depend on shapes alone: window, batch, heads."""
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
    """On each multiprocessor, but where two warpgroups compute, or rows are too long."""
    shape = shape_of(arguments(LAYER[name]))
    plan = launch(shape, default_tuning(shape))
    alone = shape.head_dim + shape.v_dim > 384 or plan.consumers > 1 or (shape.upcast and shape.head_dim > 64)
    assert plan.smem_bytes <= (SMEM_BYTES if alone else SM_SMEM_BYTES // 2 - 1024)
    if plan.tuning.stages == 1 < plan.most_blocks(plan.tuning.block, plan.chunk_queries):
        assert shape.upcast  # the blocks of both sizes, for wide heads
        with pytest.raises(ValueError, match="bytes of shared memory"):
            launch(shape, plan.tuning._replace(stages=2))


@pytest.mark.parametrize("name", [name for name, layer in LAYER.items() if layer.count == 8192])
def test_tiles_fill_the_rows_of_the_products(name: str) -> None:
    """Tiles of `tile_tokens` make 64 or 128 rows; a group of five leaves a few of them empty."""
    shape = shape_of(arguments(LAYER[name]))
    assert shape.queries == tile_tokens(shape.group)
    plan = launch(shape, default_tuning(shape))
    assert plan.rows >= 0.9 * plan.tuning.row_parts * 64
    local = (shape.attend.window or shape.attend.chunk or 10**6) <= 128
    large = shape.upcast and shape.head_dim >= 256  # two stages of both types fit beside 64 rows of queries alone
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
        ({"batch": 2**20, "slots": 2**10}, "exceed 2\\^31 boxes"),
    ],
)
def test_what_the_kernel_cannot_serve_is_an_error(change: dict[str, object], message: str) -> None:
    """Never another implementation, and never a wrong result."""
    with pytest.raises(ValueError, match=message):
        lower(replace(LAYER["Mistral-7B"], **change))  # type: ignore[arg-type]


def test_queries_and_pages_of_two_types_are_an_error() -> None:
    """Nothing is cast silently."""
    given = arguments(LAYER["Mistral-7B"])
    half = jax.ShapeDtypeStruct(given.q.shape, jnp.float16)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="queries are float16 and pages bfloat16"):
        shape_of(given._replace(q=half))


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(24, 2, 1, loader=False), "blocks of 24 keys do not fit pages of 64"),
        (Tuning(64, 8, 1, loader=False), "needs .* bytes of shared memory"),
        (Tuning(64, 1, 1, loader=False, row_parts=2), "two computing warpgroups need a loader"),
        (Tuning(64, 1, 1, loader=True, row_parts=3), "row_parts = 3 must be 1 or 2"),
        (Tuning(64, 2, 1, loader=True, ahead=True), "ahead needs tiles of several queries and no splits"),
        (Tuning(64, 1, 1, loader=True, row_parts=2), "needs 2 stages"),
    ],
)
def test_a_tuning_that_does_not_fit_is_an_error(tuning: Tuning, message: str) -> None:
    """Tuning tables are data: they may be wrong."""
    with pytest.raises(ValueError, match=message):
        launch(shape_of(arguments(LAYER["Mistral-7B"])), tuning)


def test_a_wide_value_needs_a_loader() -> None:
    """Two computing warpgroups cannot both refill a stage, and there are no registers for a third."""
    shape = shape_of(arguments(LAYER["gemma-4-31B full"]))
    with pytest.raises(ValueError, match="two computing warpgroups need a loader"):
        launch(shape, Tuning(32, 2, 1, loader=False))
    with pytest.raises(ValueError, match="values of 512 take two warpgroups: row_parts = 2 must be 1"):
        launch(shape, Tuning(32, 1, 1, loader=True, row_parts=2))


def test_8_bit_pages_need_a_loader() -> None:
    """It is the loader that casts them."""
    with pytest.raises(ValueError, match="8-bit pages need a loader and blocks of a multiple of 64 keys"):
        launch(shape_of(arguments(LAYER["fp8, gpt-oss-20b local"])), Tuning(64, 2, 1, loader=False))


def test_queries_beyond_the_range_of_float16_are_cut() -> None:
    """Over 8-bit pages: the numbers stay finite."""
    call = make_call(EIGHT_BITS, EIGHT_BITS.rows[0])
    out = run(replace(call, q=call.q * 1e6), EIGHT_BITS, "mosaic")
    assert np.isfinite(out).all()


def test_warpgroups_that_take_turns_need_as_many_stages() -> None:
    """And one more if scores are formed ahead: with fewer, each waits for what the other holds."""
    shape = shape_of(arguments(LAYER["prefill, gemma-3-27b full"]))
    for tuning, least in ((Tuning(64, 1, 1, True, 2), 2), (Tuning(64, 2, 1, True, 2, True), 3)):
        with pytest.raises(ValueError, match=f"needs {least} stages"):
            launch(shape, tuning)
        launch(shape, tuning._replace(stages=least))


def test_races_are_found() -> None:
    """The detector that all interpreted tests rely on sees a kernel that races."""

    def body(out: mosaic.Ref, shared: mosaic.Ref) -> None:
        shared[...] = jnp.full((128,), 1.0, jnp.float32)  # both warpgroups, unordered
        mosaic.plgpu.commit_smem()
        mosaic.plgpu.copy_smem_to_gmem(shared, out)
        mosaic.plgpu.wait_smem_to_gmem(0)

    run_body = mosaic.kernel(
        body,
        name="racing",
        outputs=[((128,), jnp.dtype(jnp.float32))],
        grid={"x": 1},
        num_threads=2,
        scratch=[mosaic.plgpu.SMEM((128,), jnp.float32)],
    )
    with mosaic.interpreted(detect_races=True):
        np.asarray(run_body()[0])
        assert mosaic.races_found()
