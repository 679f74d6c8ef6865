"""Make calls of paged attention from cases: random pages, the call of an implementation, the expected result."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.api import Implementation, packed_form, paged_attention
from pallas_kernels.attention.hopper import call as hopper_attention
from pallas_kernels.attention.hopper.launch import Shape, Tuning
from pallas_kernels.attention.parts import combine_parts, part_of
from pallas_kernels.attention.rows import AttentionParams, PackedQueries, PagedRows, QueryTiles, tile_rows
from pallas_kernels.quantized import cut
from tests.support import oracles
from tests.support.kernels.device import hopper
from tests.support.oracles import Row
from tools.aot.measures.tma import linted
from tools.cases.kernels.attention import Case, RowSpec
from tools.cases.kernels.attention_layers import Layer
from tools.cases.kernels.attention_shapes import Arguments, arguments

TINY = 1e-30  # results that a sink presses below it are 0 in float32


@dataclass(frozen=True)
class Call:
    """Arrays of one call. Cells that no query of a row may see hold NaN, as stale or unwritten cells might."""

    q: Float[np.ndarray, "T H D"]
    kv: Float[np.ndarray, "P S K p E"]
    page_rows: Int[np.ndarray, "R N"]
    rows: list[Row]


def make_call(case: Case, specs: tuple[RowSpec, ...], seed: int = 0) -> Call:
    """Return a call with random queries and keys. Each row owns random pages; its page table ends in a page of NaN."""
    rng = np.random.default_rng(seed)
    heads, kv_heads, head_dim, v_dim = case.heads
    rows = [_row(case, spec) for spec in specs]
    used = [-(-row.end // case.page_size) - row.first_page if row.count else 0 for row in rows]
    assert max(used) <= case.width
    num_pages = 2 + len(rows) * case.width
    ids = rng.permutation(np.arange(2, num_pages))
    page_rows = np.ones((len(rows), case.width), np.int32)
    row_size = case.row or head_dim + v_dim
    kv = np.full((num_pages, case.layers_per_page, kv_heads, case.page_size, row_size), np.nan, np.float32)
    kv[0] = 0.0
    for index, row in enumerate(rows):
        page_rows[index, : used[index]], ids = ids[: used[index]], ids[used[index] :]
        seen = {key for position in range(row.start, row.end) for key in _keys(case, row, position)}
        for key in seen:
            cell = page_rows[index, key // case.page_size - row.first_page], case.layer_index, slice(None)
            kv[(*cell, key % case.page_size)] = rng.standard_normal(kv.shape[2::2])
    q = rng.standard_normal((case.tokens, heads, head_dim)).astype(np.float32)
    return Call(q, kv, page_rows, rows)


def _row(case: Case, spec: RowSpec) -> Row:
    if not spec.count:
        return Row(0, 0)
    row = Row(spec.start, spec.count, 0, spec.visible_from)
    first = _keys(case, row, row.start).start // case.page_size if case.pages_cut else 0
    return Row(spec.start, spec.count, first, spec.visible_from)


def _keys(case: Case, row: Row, position: int) -> range:
    return row.keys(position, case.window, case.chunk, case.lookback)


def check(out: Float[np.ndarray, "T H V"], call: Call, case: Case, *, roundoffs: float = 1.0) -> int:
    """Assert that a result is that of the oracle but for rounding to the case's type; return the number of tokens.

    In 16 bits a kernel rounds each weight of the softmax, and the result. The error is held against the lengths of
    what is rounded, for each token and head: a missing key of 500 is 13 times as large as what rounding may do.
    `roundoffs`: the error of one rounding, in unit roundoffs.
    """
    expected, weights = expect(call, case)
    found = out[: len(expected)]
    if case.dtype == "float32":
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        return len(expected)
    errors = np.linalg.norm(found - expected, axis=-1)
    allowed = roundoffs * roundoff(case.dtype) * (weights + np.linalg.norm(expected, axis=-1)) + TINY
    worst = np.nan_to_num(errors / allowed, nan=np.inf)
    token, head = np.unravel_index(int(worst.argmax()), worst.shape)
    assert worst.max() <= 1, f"{case.name}: token {token}, head {head}: {worst.max():.3g} times what rounding may do"
    return len(expected)


def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a type: the largest relative error of rounding to the nearest number."""
    return float(jnp.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]


def expect(call: Call, case: Case) -> tuple[Float[np.ndarray, "tokens H V"], Float[np.ndarray, "tokens H"]]:
    """Return the oracle's result for the arrays as they are stored, and the size of a rounding of the weights."""
    _, _, head_dim, v_dim = case.heads
    types = (call.q, case.dtype), (call.kv, case.kv_dtype or case.dtype)
    q, kv = (np.asarray(jnp.asarray(array, dtype).astype(jnp.float32)) for array, dtype in types)
    if case.kv_scales is not None:
        k_scales, v_scales = (np.array(scales, np.float32)[:, None] for scales in case.kv_scales)
        kv = kv * np.where(np.arange(kv.shape[-1]) >= kv.shape[-1] - v_dim, v_scales, k_scales)[:, None]
    return oracles.paged_attention(
        q,
        np.concatenate([kv[..., :head_dim], kv[..., -v_dim:]], axis=-1),  # side by side, even if they overlap in pages
        call.rows,
        call.page_rows,
        layer_index=case.layer_index,
        scale=_scale(case),
        window=case.window,
        softcap=case.softcap,
        chunk=case.chunk,
        lookback=case.lookback,
        sinks=None if case.sinks is None else np.array(case.sinks),
        smallest=float(jnp.finfo(case.dtype).tiny),  # type: ignore[no-untyped-call]
    )


def run(
    call: Call, case: Case, implementation: Implementation, tuning: Tuning | None = None
) -> Float[np.ndarray, "T H V"]:
    """Run a call with an implementation, in one program per case. Hopper kernels run as `device.hopper` says."""
    arrays = _arrays(call, case)
    if not implementation.startswith("mosaic"):
        out = _program(*arrays, case=case, implementation=implementation, tuning=None)
        return np.asarray(out.astype(jnp.float32))
    with hopper():
        out = _program(*arrays, case=case, implementation=implementation, tuning=tuning)
        return np.asarray(out.astype(jnp.float32))


def run_packed(call: Call, case: Case) -> Float[np.ndarray, "T H V"]:
    """Run a decode call on "mosaic" with queries as the elementwise one writes them; rows beyond the group hold NaN."""
    q, kv, rows, tiles = _arrays(call, case)
    attend, kv_heads = _attend(case), kv.shape[2]
    scales = None if case.kv_scales is None else jnp.array(case.kv_scales, jnp.float32)

    def program(q: Array, kv: Array) -> Array:
        form = packed_form(q, kv, rows, tiles, attend, "mosaic")
        assert form is not None
        grouped, (size, dtype) = q.reshape(len(q), kv_heads, -1, q.shape[2]), form
        wide = grouped.astype(jnp.float32)
        values = cut(wide if scales is None else wide * scales[0][None, :, None, None], dtype)
        more = size - values.shape[2]
        values = jnp.pad(values, ((0, 0), (0, 0), (0, more), (0, 0)), constant_values=jnp.nan)
        sinks = None if case.sinks is None else jnp.array(case.sinks, case.dtype)
        return paged_attention(
            PackedQueries(values, grouped.shape[2], q.dtype),
            kv,
            rows,
            tiles,
            layer_index=case.layer_index,
            attend=attend,
            sinks=sinks,
            kv_scales=scales,
            implementation="mosaic",
        )

    with hopper():
        out = jax.jit(program, compiler_options={"xla_backend_optimization_level": 0})(q, kv)
        assert out.dtype == q.dtype
        return np.asarray(out.astype(jnp.float32))


def _arrays(call: Call, case: Case) -> tuple[Array, Array, PagedRows, QueryTiles]:
    counts = np.array([row.count for row in call.rows], np.int32)
    return (
        jnp.asarray(call.q, case.dtype),
        jnp.asarray(call.kv, case.kv_dtype or case.dtype),
        PagedRows(
            jnp.array([row.start for row in call.rows], jnp.int32),
            jnp.asarray(counts),
            jnp.asarray(call.page_rows),
            jnp.array([row.first_page for row in call.rows], jnp.int32),
            jnp.array([row.visible_from for row in call.rows], jnp.int32),
        ),
        tiles_of(counts, case.tokens, case.tile),
    )


@partial(
    jax.jit,
    static_argnames=("case", "implementation", "tuning"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def _program(
    q: Float[Array, "T H D"],
    kv: Float[Array, "P S K p E"],
    rows: PagedRows,
    tiles: QueryTiles,
    *,
    case: Case,
    implementation: Implementation,
    tuning: Tuning | None,
) -> Float[Array, "T H V"]:
    sinks = None if case.sinks is None else jnp.array(case.sinks, case.dtype)
    scales = None if case.kv_scales is None else jnp.array(case.kv_scales, jnp.float32)
    if tuning is not None:
        return hopper_attention.paged_attention(
            q, kv, rows, tiles, layer_index=case.layer_index, attend=_attend(case), sinks=sinks, tuning=tuning
        )
    call = partial(
        paged_attention,
        q,
        tiles=tiles,
        layer_index=case.layer_index,
        attend=_attend(case),
        kv_scales=scales,
        implementation=implementation,
    )
    if case.parts == 1:
        return call(kv=kv, rows=rows, sinks=sinks)
    cells = [kv[..., part :: case.parts, :] for part in range(case.parts)]  # of each device
    parts = [call(kv=own, rows=part_of(rows, part, case.parts)) for part, own in enumerate(cells)]
    return combine_parts(jnp.stack(parts), sinks).astype(q.dtype)


def _attend(case: Case) -> AttentionParams:
    return AttentionParams(
        _scale(case), case.window, case.chunk, case.softcap, case.heads[3], case.lookback, case.parts
    )


def _scale(case: Case) -> float:
    return 0.4 if case.heads[2] < 16 else case.heads[2] ** -0.5


def token_rows(counts: Int[np.ndarray, " R"], tokens: int) -> Int[np.ndarray, " T"]:
    """Return the row of each token. Padding tokens have the last row."""
    padding = np.full(tokens - counts.sum(), len(counts) - 1)
    return np.concatenate([np.repeat(np.arange(len(counts)), counts), padding]).astype(np.int32)


@partial(jax.jit, static_argnames="size")
def _tiles(counts: Array, first_token: Array, token_row: Array, size: int) -> QueryTiles:
    return tile_rows(counts, first_token, token_row, size)


def tiles_of(counts: Int[np.ndarray, " R"], tokens: int, size: int) -> QueryTiles:
    """Return the tiles of rows that are contiguous in the step."""
    first_token = (np.cumsum(counts) - counts).astype(np.int32)
    tiles: QueryTiles = _tiles(counts, first_token, token_rows(counts, tokens), size)
    return tiles


def shape_of(given: Arguments) -> Shape:
    """Return the shape that the launch is planned from."""
    shapes: list[Shape] = []

    def plan(q: jax.Array, kv: jax.Array) -> jax.Array:
        shapes.append(Shape.of(q, kv, given.rows, given.tiles, given.attend))
        return q

    jax.eval_shape(plan, given.q, given.kv)
    return shapes[0]


def lower(layer: Layer) -> None:
    """Lower a layer for a Hopper GPU, which checks register layouts, tiles, copies, shared memory and TMA's rules."""
    given = arguments(layer)

    def attend(q: jax.Array, kv: jax.Array, sinks: jax.Array | None) -> jax.Array:
        out: jax.Array = paged_attention(
            q,
            kv,
            jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), given.rows),
            jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), given.tiles),
            layer_index=given.layer_index,
            attend=given.attend,
            sinks=sinks,
            implementation=layer.implementation,
        )
        return out

    traced = jax.jit(attend).trace(given.q, given.kv, given.sinks)
    with linted():
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
