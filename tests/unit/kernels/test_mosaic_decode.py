"""The Hopper decode kernel, beyond what all implementations share: tuning, page ids, limits, and that it lowers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels.abstract import Arguments, arguments
from pallas_kernels.api import paged_attention
from pallas_kernels.mosaic_launch import SM_SMEM_BYTES, SMEM_BYTES, Shape, Tuning, default_tuning, launch
from pallas_kernels.specs import CASES, DECODE_LAYERS, Case, Layer, RowSpec, matrix
from tests.unit.kernels.calls import expect, make_call, run

SINKS_AND_WINDOW = next(case for case in CASES if case.name == "16 bits, 64/64 p16, window 64, sinks")
FULL = next(case for case in CASES if case.name == "16 bits, 128/128 p64, full, softcap, splits")
OVERLAP = next(case for case in CASES if case.name == "16 bits, 512/512 of 640 p64, full")
LAYERS = {layer.name: layer for layer in DECODE_LAYERS}

TUNINGS = [
    (SINKS_AND_WINDOW, Tuning(64, 1, 1, loader=False)),
    (SINKS_AND_WINDOW, Tuning(64, 2, 2, loader=True)),
    (SINKS_AND_WINDOW, Tuning(128, 2, 3, loader=False)),
    (SINKS_AND_WINDOW, Tuning(32, 3, 1, loader=False)),
    (FULL, Tuning(64, 3, 1, loader=False)),
    (FULL, Tuning(64, 2, 1, loader=True)),
    (FULL, Tuning(32, 2, 5, loader=False)),
    (OVERLAP, Tuning(64, 1, 1, loader=True)),
]


def compare(case: Case, tuning: Tuning | None = None) -> None:
    """The kernel, interpreted, against the oracle."""
    for rows in case.rows:
        call = make_call(case, rows)
        expected = expect(call, case)
        np.testing.assert_allclose(run(call, case, "mosaic", tuning)[: len(expected)], expected, rtol=0, atol=2e-2)


def shape_of(given: Arguments) -> Shape:
    """What the launch is planned from."""
    shapes: list[Shape] = []

    def plan(q: jax.Array, kv: jax.Array) -> jax.Array:
        shapes.append(Shape.of(q, kv, given.rows, given.tiles, given.attend))
        return q

    jax.eval_shape(plan, given.q, given.kv)
    return shapes[0]


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


@pytest.mark.parametrize(("case", "tuning"), [pytest.param(*pair, id=f"{pair[0].name}, {pair[1]}") for pair in TUNINGS])
def test_any_tuning_gives_the_same(case: Case, tuning: Tuning) -> None:
    """Blocks, stages, splits and the loader are matters of speed."""
    compare(case, tuning)


@pytest.mark.nightly
@pytest.mark.parametrize("case", list(matrix()), ids=lambda case: case.name)
def test_matrix(case: Case) -> None:
    """Head sizes, windows, pages, groups and lengths in all combinations."""
    compare(case)


@pytest.mark.parametrize(("window", "chunk", "copies"), [(40, None, 4), (None, 64, 2), (None, None, 26)])
@pytest.mark.parametrize("splits", [1, 2])
def test_only_pages_that_the_query_sees_are_read(
    window: int | None, chunk: int | None, copies: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local layer's cost cannot depend on the context: copies are counted, here of pages 22 to 25 for the window."""
    callbacks = mosaic._interpreter().gpu_callbacks
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


def test_a_row_of_length_zero_gives_zeros() -> None:
    """Whatever its page row holds."""
    case = replace(FULL, rows=((RowSpec(70, 1), RowSpec(0, 0), RowSpec(0, 0)),))
    out = run(make_call(case, case.rows[0]), case, "mosaic")
    np.testing.assert_array_equal(out[1:], 0)


@pytest.mark.parametrize("name", LAYERS)
def test_decode_layers_lower_for_hopper(name: str) -> None:
    """The half of compilation that needs no GPU packages; `make gpu-compile` does the other half."""
    lower(LAYERS[name])


def test_small_windows_are_not_split_and_long_contexts_fill_the_gpu() -> None:
    """Splits depend on shapes alone: window, batch, heads."""
    splits = {name: default_tuning(shape_of(arguments(layer))).splits for name, layer in LAYERS.items()}
    assert splits["gpt-oss-20b local"] == splits["gpt-oss-20b local, one row"] == 1
    assert splits["gemma-3-27b local"] == splits["gemma-3-27b full"] == 1
    assert splits["gemma-3-27b local, one row"] > 1
    assert splits["gemma-3-27b full, one row"] * 16 >= 200
    assert splits["gpt-oss-20b full, one row"] * 8 >= 200


@pytest.mark.parametrize("name", LAYERS)
def test_default_tuning_leaves_room_for_two_thread_blocks(name: str) -> None:
    """On each multiprocessor, but for V that takes two warpgroups or rows that are too long."""
    shape = shape_of(arguments(LAYERS[name]))
    plan = launch(shape, default_tuning(shape))
    wide = shape.head_dim + shape.v_dim > 384
    assert plan.smem_bytes <= (SMEM_BYTES if wide else SM_SMEM_BYTES // 2 - 1024)
    assert plan.tuning.stages >= min(2, shape.most_blocks(plan.tuning.block))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "needs bfloat16 or float16, not float32"),
        ({"tile": 32}, "has no prefill kernel yet: 32 query tokens of 4 heads per KV head are 128 rows"),
        ({"heads": (32, 8, 576, 512)}, "head sizes 576 and 512: implementation = 'mosaic' takes at most 512"),
        ({"heads": (32, 8, 120, 128)}, "rows of 248 numbers: implementation = 'mosaic' needs a multiple of 16"),
        ({"page_size": 48}, "pages of 48 tokens: implementation = 'mosaic' takes 8, 16, 32 and multiples of 64"),
        ({"batch": 2**20, "slots": 2**10}, "exceed 2\\^31 boxes"),
    ],
)
def test_what_the_kernel_cannot_serve_is_an_error(change: dict[str, object], message: str) -> None:
    """Never another implementation, and never a wrong result."""
    with pytest.raises(ValueError, match=message):
        lower(replace(LAYERS["Mistral-7B"], **change))  # type: ignore[arg-type]


def test_queries_and_pages_of_two_types_are_an_error() -> None:
    """Nothing is cast silently."""
    given = arguments(LAYERS["Mistral-7B"])
    half = jax.ShapeDtypeStruct(given.q.shape, jnp.float16)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="queries are float16 and pages bfloat16"):
        shape_of(given._replace(q=half))


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(24, 2, 1, loader=False), "blocks of 24 keys do not fit pages of 64"),
        (Tuning(64, 8, 1, loader=False), "needs .* bytes of shared memory"),
    ],
)
def test_a_tuning_that_does_not_fit_is_an_error(tuning: Tuning, message: str) -> None:
    """Tuning tables are data: they may be wrong."""
    with pytest.raises(ValueError, match=message):
        launch(shape_of(arguments(LAYERS["Mistral-7B"])), tuning)


def test_a_wide_value_needs_a_loader() -> None:
    """Two computing warpgroups cannot both refill a stage."""
    with pytest.raises(ValueError, match="take two warpgroups, which need a loader"):
        launch(shape_of(arguments(LAYERS["gemma-4-31B full"])), Tuning(32, 2, 1, loader=False))


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
