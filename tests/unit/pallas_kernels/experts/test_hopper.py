"""Tests of the Hopper grouped matmul only: tunings, which weights it reads, its limits, and that it lowers."""

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import interpreter
from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts import eight_bits, int4_tiles
from pallas_kernels.experts.api import Implementation, grouped_matmul
from pallas_kernels.experts.glu import Activation, Glu
from pallas_kernels.experts.groups import Groups
from pallas_kernels.experts.hopper.heuristics import default_tuning
from pallas_kernels.experts.hopper.launch import Shape, Tuning, launch
from pallas_kernels.experts.mxfp4 import Mxfp4, tiles
from pallas_kernels.hopper import BLOCK_SMEM_BYTES, SM_SMEM_BYTES, SMEM_BYTES
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Quantized, QuantizedBlocks
from tests.support.kernels.grouped_calls import Call, check, make_call, run
from tools.aot.measures.tma import linted
from tools.cases.kernels.experts import DECODE_TOKENS, EDGES, LAYERS, PREFILL_TOKENS, SILU, Case, Form, Layer
from tools.cases.kernels.experts_shapes import MATRICES, Arguments, Matrix, arguments

GATED = Case("", (9, 0, 17), 128, 192, SILU, bias=True, dtype="bfloat16")
PLAIN = Case("", (9, 0, 17), 192, 256, dtype="float16")
ALL_TOKENS = (*DECODE_TOKENS, *PREFILL_TOKENS)


def shape_of(given: Arguments) -> Shape:
    """Return the shape that the launch is planned from."""
    shapes: list[Shape] = []

    def plan(x: jax.Array, weights: Any, bias: jax.Array | None) -> jax.Array:
        shapes.append(Shape.of(x, weights, bias, given.gated))
        return x

    jax.eval_shape(plan, given.x, given.weights, given.bias)
    return shapes[0]


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (GATED, Tuning(8, 1, 2, 2)),
        (GATED, Tuning(32, 2, 2, 3)),
        (PLAIN, Tuning(16, 1, 1, 3)),
        (PLAIN, Tuning(8, 2, 2, 2, band=1)),
    ],
    ids=str,
)
def test_all_tunings_give_the_same_result(case: Case, tuning: Tuning) -> None:
    """Tiles, consumers, stages and the order of tiles only change the speed."""
    call = make_call(case)
    check(run(call, case, "mosaic", tuning), call, case)


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (replace(GATED, sizes=(9, 0, 17, 8)), Tuning(8, 1, 2, 2, sms=1)),
        (replace(PLAIN, sizes=(9, 0, 40)), Tuning(32, 2, 1, 3, sms=1)),
        (replace(GATED, sizes=(9, 1), form="mxfp4"), Tuning(8, 2, 2, 2, sms=1, band=1)),
    ],
    ids=str,
)
def test_a_thread_block_takes_tile_after_tile(case: Case, tuning: Tuning) -> None:
    """The ring goes on from tile to tile, and results leave shared memory before the next ones are staged."""
    call = make_call(case)
    check(run(call, case, "mosaic", tuning), call, case)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("gated", [None, SILU], ids=["plain", "silu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_tilings_of_edges(rows: int, consumers: int, gated: Any, dtype: str) -> None:
    """Groups end just before, at and after the end of a tile."""
    case = Case("", EDGES, 64, 320, gated, bias=True, dtype=dtype)
    call = make_call(case, seed=rows)
    check(run(call, case, "mosaic", Tuning(rows, consumers, 2, 2, sms=4)), call, case)


def test_only_weights_of_experts_with_rows_are_read() -> None:
    """A decode step reads only the experts that it needs."""
    case = Case("", (0, 3, 0, 0, 8, 0), 128, 192, dtype="bfloat16")
    call = make_call(case)
    with interpreter.counted_copies() as made:
        run(call, case, "mosaic", Tuning(8, 1, 1, 2))
    assert made.count == 2 * 3 * 2 * (1 + 1)  # experts, blocks of columns, blocks of inputs: rows and weights


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(
    ("layer", "tokens"), [*((layer, 1) for layer in LAYERS), (LAYERS[0], 2048), (LAYERS[1], 2048)], ids=str
)
def test_layers_lower_for_hopper(layer: Layer, tokens: int, matrix: Matrix) -> None:
    """Lowering needs no GPU packages; `tools.aot.experts` runs the rest of the compilation."""
    lower(arguments(layer, matrix, tokens), layer.implementation)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_lower_for_hopper(activation: Activation) -> None:
    """Found on an H100: the exact GELU and ReLU were interpreted, but Mosaic lowered neither."""
    layer = replace(LAYERS[1], gated=Glu(activation))
    lower(arguments(layer, "up", 64), layer.implementation)


def lower(given: Arguments, implementation: Implementation) -> None:
    """Lower a call for a Hopper GPU, which checks register layouts, tiles, copies, shared memory and TMA's rules."""

    def call(x: jax.Array, weights: Any, starts: jax.Array, sizes: jax.Array, bias: Any) -> jax.Array:
        out: jax.Array = grouped_matmul(
            x, weights, Groups(starts, sizes), bias=bias, gated=given.gated, implementation=implementation
        )
        return out

    traced = jax.jit(call).trace(given.x, given.weights, *given.groups, given.bias)
    with linted():
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("tokens", ALL_TOKENS)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_default_tuning_keeps_enough_bytes_in_flight(layer: Layer, matrix: Matrix, tokens: int) -> None:
    """At least 48 KB of weights on each multiprocessor, which two thread blocks share if tiles are small."""
    shape = shape_of(arguments(layer, matrix, tokens))
    plan = launch(shape, default_tuning(shape))
    alone = plan.tuning.rows > 16 or (shape.overlaps and not plan.tuning.shared)
    assert plan.smem_bytes <= (SMEM_BYTES if alone else SM_SMEM_BYTES // 2 - BLOCK_SMEM_BYTES)
    assert plan.blocks == (132 if alone else 264)
    held = plan.tuning.stages * plan.tuning.parts * plan.tuning.consumers * plan.tuning.depth
    assert held * 64 * 64 * layer.bits / 8 * (1 if alone else 2) >= 48 * 1024
    assert plan.most_tiles >= min(layer.experts, tokens * layer.top_k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "needs bfloat16 or float16, not float32"),
        ({"inputs": 96}, "96 inputs: implementation = 'mosaic' needs a multiple of 64"),
        ({"outputs": 96}, "96 outputs: implementation = 'mosaic' needs a multiple of 64"),
    ],
)
def test_shapes_that_the_kernel_cannot_serve_are_an_error(change: dict[str, Any], message: str) -> None:
    """The call raises: no other implementation takes over, and no result is wrong."""
    case = Case("", **{"sizes": (8,), "dtype": "bfloat16", **change})
    call = make_call(case)
    with pytest.raises(ValueError, match=message):
        grouped_matmul(call.x, call.weights, call.groups, implementation="mosaic")


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("xla", "'xla' takes no weights in MXFP4 in tiles: must be 'mosaic'"),
        ("mosaic", "in MXFP4: must be 'xla' or 'cpu'"),
    ],
)
def test_weights_laid_out_for_another_implementation_are_an_error(implementation: Any, message: str) -> None:
    """Weights are laid out when they are loaded, never in a step."""
    call = make_call(Case("", (8,), 64, 64, dtype="bfloat16", form="mxfp4"))
    assert isinstance(call.weights, Mxfp4)
    weights = tiles(call.weights) if implementation == "xla" else call.weights
    with pytest.raises(ValueError, match=message):
        grouped_matmul(call.x, weights, call.groups, implementation=implementation)


def tiled(form: Form, dtype: str) -> tuple[Call, Any]:
    """Return a call, and its weights in tiles."""
    call = make_call(Case("", (8,), 128, 64, dtype=dtype, form=form))
    layouts: dict[type, Any] = {
        Mxfp4: tiles,
        Quantized: eight_bits.tiles,
        QuantizedBlocks: eight_bits.block_tiles,
        Int4: int4_tiles.tiles,
    }
    return call, layouts[type(call.weights)](call.weights)


@pytest.mark.parametrize(("form", "bits"), [("mxfp4", 4), ("int4", 4), ("int8", 8), ("fp8_blocks", 8)])
def test_weights_of_8_and_4_bits_need_bfloat16(form: Form, bits: int) -> None:
    """float16 has too few exponents for the scales of MXFP4, and tiles of the others are made for bfloat16."""
    call, weights = tiled(form, "float16")
    with pytest.raises(ValueError, match=f"with weights of {bits} bits needs bfloat16, not float16"):
        grouped_matmul(call.x, weights, call.groups, implementation="mosaic")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("int4", "in integers of 4 bits, in tiles"),
        ("fp8", "of 8 bits in tiles"),
        ("fp8_blocks", "of 8 bits in blocks, in tiles"),
    ],
)
def test_tiles_are_for_hopper_alone(form: Form, name: str) -> None:
    """XLA takes these weights as checkpoints have them."""
    call, weights = tiled(form, "bfloat16")
    for other in ("xla", "triton"):
        with pytest.raises(
            ValueError, match=f"{other!r} takes no weights {name}: must be 'mosaic' or 'mosaic_overlap'"
        ):
            grouped_matmul(call.x, weights, call.groups, implementation=other)


def test_inputs_that_are_no_whole_blocks_are_an_error() -> None:
    """A turn of the main loop is a block of 128 inputs."""
    call, weights = tiled("fp8_blocks", "bfloat16")
    weights = weights._replace(codes=weights.codes[:, :, :1])
    with pytest.raises(NoExpertKernel, match=r"64 inputs: .* with scales of blocks needs a multiple of 128"):
        grouped_matmul(call.x[:, :64], weights, call.groups, implementation="mosaic")


def test_rows_and_weights_of_two_types_are_an_error() -> None:
    """Rows are not cast silently."""
    call = make_call(PLAIN)
    with pytest.raises(ValueError, match="are \\['bfloat16', 'float16'\\]: implementation = 'mosaic' needs one"):
        grouped_matmul(call.x.astype(jnp.bfloat16), call.weights, call.groups, implementation="mosaic")


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(12, 1, 2, 2), "tiles of 12 rows do not fit 40 rows"),
        (Tuning(64, 1, 2, 2), "tiles of 64 rows do not fit 40 rows"),
        (Tuning(8, 1, 2, 1), "stages = 1 must be at least 2"),
        (Tuning(8, 1, 1, 2), "parts = 1 must be 2 for gates and ups"),
        (Tuning(8, 4, 2, 2), "takes 256 outputs at a time, of 192"),
        (Tuning(8, 2, 2, 8), "needs .* bytes of shared memory"),
        (Tuning(8, 1, 2, 2, depth=2), "depth = 2 must be 1, except for weights of 8 and 4 bits"),
        (Tuning(16, 1, 2, 2, cluster=2), "cluster = 2 must be 1, except for weights that are unpacked meanwhile"),
        (Tuning(16, 1, 2, 2, cluster=3), "cluster = 3 must be 1 or 2"),
    ],
)
def test_a_tuning_that_does_not_fit_is_an_error(tuning: Tuning, message: str) -> None:
    """Tuning tables are data, so they may be wrong."""
    shape = Shape(40, 3, 128, 192, jnp.dtype(jnp.bfloat16), SILU, bias=True, held="plain")
    with pytest.raises(ValueError, match=message):
        launch(shape, tuning)
