"""Tests of the Hopper kernel that unpacks weights of 4 bits while the product before runs; see also test_hopper."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpreter
from pallas_kernels.errors import NoExpertKernel
from pallas_kernels.experts.api import Implementation, grouped_matmul
from pallas_kernels.experts.hopper import overlap
from pallas_kernels.experts.hopper.heuristics import clustered_tuning, default_tuning, shared_tuning
from pallas_kernels.experts.hopper.launch import Shape, Tuning, launch
from pallas_kernels.experts.mxfp4 import Mxfp4
from pallas_kernels.experts.nvfp4 import Nvfp4
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Quantized, QuantizedBlocks
from pallas_kernels.ring import Ring
from tests.support.kernels.grouped_calls import check, make_call, run
from tools.cases.kernels.experts import GPT_OSS_GLU, SILU, Case, Form

GATED = Case("", (9, 0, 17), 128, 192, SILU, bias=True, dtype="bfloat16", form="mxfp4")
PLAIN = Case("", (9, 0, 17), 384, 256, dtype="bfloat16", form="mxfp4")
NAME: Implementation = "mosaic_overlap"


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (GATED, Tuning(8, 1, 2, 2)),
        (replace(GATED, sizes=(9, 1)), Tuning(8, 2, 2, 2, sms=1, band=1)),
        (PLAIN, Tuning(24, 2, 2, 2, depth=2)),
        (replace(PLAIN, sizes=(9, 0, 40)), Tuning(48, 1, 1, 3, depth=3, sms=1)),
        (replace(PLAIN, sizes=(9,)), Tuning(16, 2, 1, 2)),
    ],
    ids=str,
)
def test_all_tunings_give_the_bits_of_the_simple_kernel(case: Case, tuning: Tuning) -> None:
    """Rings of as few stages as there may be, refilled many times, from tile to tile; tiles of any multiple of 8."""
    call = make_call(case)
    out = run(call, case, NAME, tuning)
    check(out, call, case)
    np.testing.assert_array_equal(out[call.owned], run(call, case, "mosaic", tuning)[call.owned])


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (replace(GATED, form="int8", sizes=(9, 1)), Tuning(8, 2, 2, 2, sms=1, band=1)),
        (replace(PLAIN, form="fp8", sizes=(9, 0, 30)), Tuning(24, 1, 2, 2, depth=2)),
        (replace(PLAIN, form="fp8_blocks", sizes=(9, 0, 30)), Tuning(24, 1, 2, 2, depth=2)),
        (replace(GATED, form="fp8_blocks", sizes=(9, 1)), Tuning(8, 2, 2, 2, depth=2, sms=1, band=1)),
        (replace(PLAIN, form="fp8_blocks", sizes=(9, 100)), Tuning(88, 2, 1, 3, depth=2, sms=1)),
        (replace(PLAIN, form="int4", sizes=(9, 20)), Tuning(16, 2, 1, 3, depth=3, sms=1)),
        (replace(GATED, form="nvfp4", sizes=(9, 1)), Tuning(8, 2, 2, 2, sms=1, band=1)),
        (replace(PLAIN, form="nvfp4", sizes=(9, 20)), Tuning(16, 2, 1, 3, depth=3, sms=1)),
    ],
    ids=str,
)
def test_all_tunings_of_other_forms_give_the_same_bits(case: Case, tuning: Tuning) -> None:
    """With either name of the kernel."""
    call = make_call(case)
    out = run(call, case, NAME, tuning)
    check(out, call, case)
    np.testing.assert_array_equal(out[call.owned], run(call, case, "mosaic")[call.owned])


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (replace(GATED, sizes=(9, 0, 17)), Tuning(16, 1, 2, 2, cluster=2)),  # three blocks of outputs
        (replace(PLAIN, sizes=(9, 0, 40)), Tuning(32, 1, 1, 3, depth=2, sms=2, band=1, cluster=2)),
        (replace(GATED, form="fp8_blocks", sizes=(9, 20), outputs=256), Tuning(16, 2, 2, 2, depth=2, cluster=2)),
        (replace(PLAIN, form="int4", sizes=(17,)), Tuning(16, 1, 2, 2, depth=3, sms=2, cluster=2)),
    ],
    ids=str,
)
def test_a_cluster_gives_the_same_bits(case: Case, tuning: Tuning) -> None:
    """Two thread blocks release a stage for each other, also where the last outputs are computed twice.

    The interpreter lets each thread block make a shared copy for itself: see `test_ring_model` for what lands where.
    """
    call = make_call(case)
    out = run(call, case, NAME, tuning)
    check(out, call, case)
    np.testing.assert_array_equal(out[call.owned], run(call, case, NAME, tuning._replace(cluster=1))[call.owned])


def test_the_copies_of_a_cluster_have_the_same_rows() -> None:
    """Its thread blocks ask for the same source and the same stage in each turn, as a multicast needs."""
    case, tuning = replace(GATED, sizes=(9, 0, 17)), Tuning(16, 1, 2, 2, sms=2, cluster=2)
    call = make_call(case)
    with interpreter.counted_copies() as copies:
        run(call, case, NAME, tuning)
    rows = copies.made[0].source
    first, second = ([copy for copy in copies.made if copy.block == block] for block in range(2))
    shared = [copy.where for copy in first if copy.source == rows]
    assert shared == [copy.where for copy in second if copy.source == rows]
    assert len(shared) == 3 * 2 * 2  # tiles of rows, groups of columns, turns
    weights = [{copy.where for copy in made if copy.source != rows} for made in (first, second)]
    assert weights[0] != weights[1]


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [8, 48, 128])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "int4_wide", "nvfp4"])
def test_all_tilings_of_edges_of_other_forms(rows: int, depth: int, form: Form) -> None:
    """Groups end just before, at and after the end of a tile."""
    sizes = (0, 1, rows - 1, rows, rows + 1, 130, 0)
    case = replace(GATED, sizes=sizes, inputs=384, outputs=320, gated=GPT_OSS_GLU, form=form)
    call = make_call(case, seed=rows)
    check(run(call, case, NAME, Tuning(rows, 2, 2, 2, depth, sms=4)), call, case)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [8, 24, 64])
@pytest.mark.parametrize("consumers", [1, 2])
def test_all_tilings_of_edges_of_blocks(rows: int, consumers: int) -> None:
    """Groups end just before, at and after the end of a tile."""
    sizes = (0, 1, rows - 1, rows, rows + 1, 130, 0)
    case = replace(GATED, sizes=sizes, inputs=384, outputs=320, gated=GPT_OSS_GLU, form="fp8_blocks")
    call = make_call(case, seed=rows)
    check(run(call, case, NAME, Tuning(rows, consumers, 2, 2, depth=2, sms=4)), call, case)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [8, 24, 48, 80, 128])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("gated", [None, GPT_OSS_GLU], ids=["plain", "gpt-oss"])
def test_all_tilings_of_edges(rows: int, depth: int, gated: Any) -> None:
    """Groups end just before, at and after the end of a tile."""
    case = replace(GATED, sizes=(0, 1, rows - 1, rows, rows + 1, 130, 0), inputs=384, outputs=320, gated=gated)
    call = make_call(case, seed=rows)
    check(run(call, case, NAME, Tuning(rows, 2, 2, 2, depth, sms=4)), call, case)


@pytest.mark.parametrize(("form", "depth"), [("mxfp4", 1), ("fp8", 1), ("fp8_blocks", 2)])
def test_a_stage_that_is_released_while_a_product_reads_it_is_found(
    form: Form, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter reads a product's rows as late as a WGMMA may, so a wait too few is a race."""
    wait, release = overlap.Interpreted.wait, Ring.consumer_release
    late: list[overlap.Interpreted] = []

    def release_first(ring: Ring, turn: Any, turns: Any) -> None:
        release(ring, turn, turns)
        wait(late.pop(), 0)

    monkeypatch.setattr(overlap.Interpreted, "wait", lambda own, count: wait(own, count) if count else late.append(own))
    monkeypatch.setattr(Ring, "consumer_release", release_first)
    case = replace(PLAIN, form=form)
    call = make_call(case)
    with pytest.raises(AssertionError):
        run(call, case, NAME, Tuning(8, 1, 2, 2, depth))
    assert interpreter.races_found()


@pytest.mark.parametrize(("form", "depth"), [("mxfp4", 3), ("int8", 3), ("int4", 3), ("nvfp4", 3), ("fp8_blocks", 2)])
def test_three_copies_bring_a_stage(form: Form, depth: int) -> None:
    """Rows, and of each part the tiles of all consumers and units of inputs."""
    case = replace(PLAIN, sizes=(0, 3, 0, 8), form=form)
    call = make_call(case)
    with interpreter.counted_copies() as made:
        run(call, case, NAME, Tuning(8, 2, 2, 2, depth))
    assert made.count == 2 * 384 // (64 * depth) * 3  # experts, turns, copies


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (64, 8), (256, 16), (2048, 80), (8192, 128)])
@pytest.mark.parametrize("gated", [None, SILU], ids=["plain", "silu"])
def test_tiles_of_weights_in_blocks_leave_registers_for_their_sums(tokens: int, rows: int, gated: Any) -> None:
    """A turn is the inputs of a block. Two parts have 64 rows at most: see `tools.aot.experts` for spills."""
    shape = Shape(8 * tokens + 1792, 256, 4096, 2048, jnp.dtype(jnp.bfloat16), gated, False, "fp8_blocks")
    tuning = launch(shape, default_tuning(shape)).tuning
    assert (tuning.consumers, tuning.depth) == (2, 2)
    assert tuning.parts == (1 if gated is None and rows > 64 else 2)
    assert tuning.rows == (rows if gated is None else min(rows, 64))
    assert tuning.stages >= 4


def test_a_turn_of_other_inputs_than_a_block_is_an_error() -> None:
    """A turn has one scale."""
    shape = Shape(8, 1, 384, 256, jnp.dtype(jnp.bfloat16), None, False, "fp8_blocks")
    with pytest.raises(ValueError, match="depth = 3 must be 2 for weights with scales of blocks"):
        launch(shape, Tuning(8, 1, 1, 2, depth=3))


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(24, 1, 2, 2, cluster=2), "cluster = 2 needs tiles of a multiple of 16 rows"),
        (Tuning(16, 3, 2, 2, cluster=2), "cluster = 2 needs as many blocks of outputs, of which there are 1"),
    ],
)
def test_a_cluster_that_does_not_fit_is_an_error(tuning: Tuning, message: str) -> None:
    """Thread blocks copy whole eights of rows, and have columns of their own."""
    shape = Shape(40, 3, 128, 192, jnp.dtype(jnp.bfloat16), SILU, True, "mxfp4_joined")
    with pytest.raises(ValueError, match=message):
        launch(shape, tuning)


@pytest.mark.parametrize(
    ("tuning", "held", "message"),
    [
        (Tuning(24, 2, 2, 2, shared=True), "mxfp4_joined", "tiles of at most 16 rows"),
        (Tuning(16, 2, 2, 2, shared=True), "mxfp4", "weights that are unpacked meanwhile"),
        (Tuning(16, 2, 2, 6, depth=3, shared=True), "mxfp4_joined", "do not fit twice"),
    ],
)
def test_thread_blocks_that_cannot_share_are_an_error(tuning: Tuning, held: Any, message: str) -> None:
    shape = Shape(40, 3, 384, 512, jnp.dtype(jnp.bfloat16), SILU, True, held)
    with pytest.raises(ValueError, match=message):
        launch(shape, tuning)


def test_thread_blocks_that_share_give_the_same_bits() -> None:
    """Each has tiles of its own."""
    call, tuning = make_call(GATED), Tuning(16, 2, 2, 2, sms=1)
    alone, shared = (run(call, GATED, NAME, tuning._replace(shared=value)) for value in (False, True))
    check(shared, call, GATED)
    np.testing.assert_array_equal(shared[call.owned], alone[call.owned])


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("gated", [None, GPT_OSS_GLU], ids=["plain", "gpt-oss"])
def test_two_thread_blocks_share_a_multiprocessor(tokens: int, gated: Any) -> None:
    """By default, in tiles of few rows: with two or four stages, whose numbers need no division."""
    rows = -(-4 * tokens // 8) * 8 + 7 * min(4 * tokens, 32)
    shape = Shape(-(-rows // 8) * 8, 32, 2880, 2880, jnp.dtype(jnp.bfloat16), gated, True, "mxfp4_joined")
    tuning = launch(shape, default_tuning(shape))
    assert tuning.blocks == 2 * tuning.tuning.sms
    assert tuning.tuning.stages in (2, 4)
    assert tuning.tuning == shared_tuning(shape)
    assert not default_tuning(replace(shape, rows=2_048)).shared


@pytest.mark.parametrize("tokens", [65, 96, 256, 511])
@pytest.mark.parametrize("gated", [None, GPT_OSS_GLU], ids=["plain", "gpt-oss"])
def test_clusters_have_the_default_s_tiles_in_sixteens(tokens: int, gated: Any) -> None:
    """With as many stages as fit; a default has no cluster."""
    shape = Shape(
        -(-4 * tokens // 8) * 8 + 7 * 32, 32, 2880, 2880, jnp.dtype(jnp.bfloat16), gated, True, "mxfp4_joined"
    )
    first, tuning = default_tuning(shape), clustered_tuning(shape)
    assert (first.cluster, tuning.cluster) == (1, 2)
    assert not tuning.shared
    assert first.rows <= tuning.rows < first.rows + 16
    alone = launch(shape, tuning._replace(cluster=1))
    assert launch(shape, tuning).column_groups == -(-alone.columns // 2)
    assert tuning.stages >= 3


@pytest.mark.parametrize("tokens", [1, 64, 65, 96, 128, 256, 384, 511])
@pytest.mark.parametrize(("experts", "gated"), [(32, None), (32, GPT_OSS_GLU), (128, GPT_OSS_GLU)])
def test_tiles_have_the_rows_of_most_groups(tokens: int, experts: int, gated: Any) -> None:
    """At least the mean and two standard deviations, and fewer than 10 rows more.

    A ring has three stages or more, if its thread block has a multiprocessor to itself.
    """
    rows = 4 * tokens + 7 * min(experts, 4 * tokens)
    shape = Shape(-(-rows // 8) * 8, experts, 2880, 2880, jnp.dtype(jnp.bfloat16), gated, True, "mxfp4_joined")
    tuning = launch(shape, default_tuning(shape)).tuning
    mean = -(-4 * tokens // experts)
    assert mean + 2 * (mean * (1 - 1 / experts)) ** 0.5 <= tuning.rows < mean + 2 * mean**0.5 + 10
    assert tuning.depth == 3
    assert tuning.stages >= (2 if tuning.shared else 3)
    assert (tuning.consumers, tuning.parts) == (2, 1 if tuning.shared and gated is None else 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            jnp.zeros((1, 64, 64), jnp.bfloat16),
            "takes no weights in bfloat16: must be 'xla' or 'mosaic' or 'triton'",
        ),
        (Quantized(jnp.zeros((1, 64, 64), jnp.int8), jnp.ones((1, 64))), "of 8 bits: must be 'xla'"),
        (
            QuantizedBlocks(jnp.zeros((1, 128, 64), jnp.uint8), jnp.ones((1, 1, 1))),
            "of 8 bits in blocks: must be 'xla'",
        ),
        (
            Int4(jnp.zeros((1, 32, 64), jnp.uint8), *[jnp.ones((1, 2, 64), jnp.uint8)] * 2),
            "in integers of 4 bits",
        ),
        (
            Mxfp4(jnp.zeros((1, 64, 32), jnp.uint8), jnp.zeros((1, 64, 2), jnp.uint8)),
            "in MXFP4: must be",
        ),
        (
            Nvfp4(jnp.zeros((1, 32, 64), jnp.uint8), jnp.zeros((1, 4, 64), jnp.uint8), jnp.ones((1, 64))),
            "in NVFP4: must be 'xla'",
        ),
    ],
    ids=["plain", "int8", "fp8_blocks", "int4", "blocks", "nvfp4"],
)
def test_other_weights_are_an_error(weights: Any, message: str) -> None:
    """The call raises: no other implementation takes over."""
    call = make_call(Case("", (8,), 64, 64, dtype="bfloat16"))
    with pytest.raises(NoExpertKernel, match=message):
        grouped_matmul(call.x, weights, call.groups, implementation=NAME)
