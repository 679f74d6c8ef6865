"""Pools of more than 2^31 elements, and page tables of 10M tokens: no index of the XLA path wraps around."""

import math
import mmap
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend import core
from jaxtyping import Array, Float

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.buckets import Bucket
from jswa.exec.pack import PackSpec, pack, unpack
from jswa.exec.programs.indices import step_indices
from jswa.exec.programs.logits_state import init_logits_state
from jswa.exec.programs.pages import copy_pages, row_batches, set_rows
from jswa.exec.programs.state import DeviceState
from jswa.exec.programs.transfer import read_slots
from jswa.plan import TableRow
from pallas_kernels.attention.api import paged_attention, write_kv
from pallas_kernels.attention.rows import AttentionParams, PagedRows, tile_rows
from tests.support.builders import make_layout, make_plan
from tests.support.oracles import small_model

PAGE, HEAD = 16, 8
CELLS = (1, 1, PAGE, 2 * HEAD)  # one layer and KV head
MANY = 2**31 // math.prod(CELLS)  # pages of 2^31 elements; those of a test come behind them
POOL = (MANY + 4, *CELLS)
FP8 = jnp.dtype(ml_dtypes.float8_e4m3fn)


def attend(q: Float[Array, "1 1 D"], kv: Float[Array, "P 1 1 p E"]) -> Float[Array, "1 1 D"]:
    """Return attention of one query at the end of the pool's last but one and last page."""
    counts = jnp.ones(1, jnp.int32)
    zero = jnp.zeros(1, jnp.int32)
    rows = PagedRows(counts * (2 * PAGE - 1), counts, jnp.array([[MANY + 2, MANY + 3]], jnp.int32), zero, zero)
    tiles = tile_rows(counts, zero, zero, 1)
    return paged_attention(q, kv, rows, tiles, layer_index=0, attend=AttentionParams(HEAD**-0.5))


def expect(q: Float[np.ndarray, "1 1 D"], values: Float[np.ndarray, "T E"]) -> Float[np.ndarray, "1 1 D"]:
    """Return the same of keys and values by token, in float64."""
    scores = values[:, :HEAD].astype(np.float64) @ q[0, 0] * HEAD**-0.5
    weights = np.exp(scores - scores.max())
    return np.asarray(weights @ values[:, HEAD:].astype(np.float64) / weights.sum())[None, None]


def case() -> tuple[Float[np.ndarray, "1 1 D"], Float[np.ndarray, "T E"]]:
    """Return a query, and the keys and values of two pages."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((2 * PAGE, 2 * HEAD)).astype(np.float32)
    return rng.standard_normal((1, 1, HEAD)).astype(np.float32), values.astype(FP8).astype(np.float32)


def test_attention_reads_the_last_pages_of_a_pool_beyond_2_31_elements() -> None:
    """The pool is mapped memory of which only the last pages are ever touched."""
    q, values = case()
    memory = np.frombuffer(mmap.mmap(-1, 2 * math.prod(POOL)), np.float16).reshape(POOL)
    memory[-2:, 0, 0] = values.reshape(2, PAGE, -1)
    pool = jax.dlpack.from_dlpack(memory)
    assert pool.unsafe_buffer_pointer() == memory.ctypes.data, "the pool was copied"
    # Queries and weights are rounded to float16 as well: to 2^-11 of numbers below 4.
    np.testing.assert_allclose(jax.jit(attend)(q.astype(np.float16), pool), expect(q, values), rtol=0, atol=8e-3)


def products(jaxpr: core.Jaxpr) -> list[str]:
    """Return the products of integers in a program."""
    inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if isinstance(p, core.ClosedJaxpr)]
    own = [
        str(eqn) for eqn in jaxpr.eqns
        if eqn.primitive.name in ("mul", "dot_general") and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)  # type: ignore[attr-defined]
    ]  # fmt: skip
    return own + [product for one in inner for product in products(one)]


def scatters(jaxpr: core.Jaxpr) -> list[Any]:
    """Return all scatters in a program."""
    inner = [p.jaxpr for e in jaxpr.eqns for p in e.params.values() if isinstance(p, core.ClosedJaxpr)]
    own = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scatter"]
    return own + [eqn for one in inner for eqn in scatters(one)]


def test_kv_is_written_by_page_layer_and_offset_so_that_no_int32_is_an_offset_in_the_pool() -> None:
    """XLA computes the offset, in 64 bits where the array needs them; the program multiplies no integers."""
    shape = partial(jax.ShapeDtypeStruct)
    pool = shape((2**31 - 1, *CELLS), FP8)  # as many pages as int32 can name: 2^39 elements
    ids, values = shape((3,), jnp.int32), shape((3, 1, 2 * HEAD), jnp.float32)

    def write(kv: Array, new: Array, pages: Array, offsets: Array) -> Array:
        return write_kv(kv, new, pages=pages, offsets=offsets, layer_index=0)

    program = jax.make_jaxpr(write)(pool, values, ids, ids).jaxpr
    assert not products(program)
    (scatter,) = scatters(program)
    assert scatter.invars[0].aval.shape == pool.shape
    numbers = scatter.params["dimension_numbers"]
    assert set(numbers.scatter_dims_to_operand_dims) == {0, 1, 3}, "page, layer, offset"


@pytest.mark.nightly
def test_writes_and_copies_reach_the_last_pages_of_a_pool_beyond_2_31_elements() -> None:
    """In a real pool of 2 GiB, which no program copies."""
    q, values = case()
    layout = make_layout(PAGE, None, num_full=1, num_local=0)

    def write(kv: Array, new: Array, pages: Array, offsets: Array) -> Array:
        return write_kv(kv, new, pages=pages, offsets=offsets, layer_index=0)

    pool = jnp.zeros(POOL, FP8)
    first = np.array([MANY, MANY + 1], np.int32).repeat(PAGE)
    offsets = np.tile(np.arange(PAGE, dtype=np.int32), 2)
    pool = jax.jit(write, donate_argnums=0)(pool, values[:, None], first, offsets)
    moves = np.array([[MANY, MANY + 1], [MANY + 2, MANY + 3], [MANY, MANY + 1]], np.int32)
    copy = jax.jit(partial(copy_pages, layout=layout), donate_argnums=0)
    (lane,) = copy([pool.reshape(1, len(pool), -1)], moves)
    state = {"lanes": [lane]}
    (found,) = jax.jit(partial(read_slots, layout=layout))(state, np.array([0, 1, MANY, MANY + 3], np.int32))
    pages = np.asarray(found).astype(np.float32).reshape(4, PAGE, -1)
    assert not pages[:2].any(), "a page wrapped around"
    assert np.array_equal(pages[2:].reshape(2 * PAGE, -1), values)
    np.testing.assert_allclose(jax.jit(attend)(q, lane.reshape(POOL)), expect(q, values), rtol=0, atol=1e-6)


def test_page_tables_of_ten_million_tokens() -> None:
    """Rows far apart find their pages: tokens are written to, and windows cut from, the right entries."""
    length, window, bucket = 10 * 2**20, 1024, Bucket(12, 3, decode=False)
    layout = KVLayout.of(small_model("LF", window=window, max_position=length), PAGE)
    limits = Limits(length, 3, 12, PAGE, num_slabs=2)
    width = limits.pages_per_row
    pages = np.arange(3 * width, dtype=np.int32).reshape(3, width) * 1_000 + 7  # up to 2^31
    tables = jnp.zeros((3, width), jnp.int32), jnp.zeros((3, width), jnp.int32), jnp.zeros(3, jnp.int32)
    rows = [TableRow(slot, pages[slot], 0, pages[slot][::-1]) for slot in range(3)]
    for batch in row_batches(rows, width, 3):
        tables = set_rows(tables, jnp.asarray(batch))
    starts, counts = np.array([length - 5, 8 * 2**20 - 3, 17], np.int32), np.array([5, 4, 2], np.int32)
    plan = make_plan(np.arange(3), starts, counts)
    spec = PackSpec.of(bucket, page_size=PAGE, max_rows=3)
    state = DeviceState(
        lanes=[jnp.zeros((1, 2, layout.slab_elems))], full_table=tables[0], local_table=tables[1],
        length=jnp.zeros(3, jnp.int32), last_token=jnp.zeros(3, jnp.int32), for_logits=init_logits_state(1, 32),
        texts=None, carry=None, draft_lanes=[],
    )  # fmt: skip
    run = jax.jit(partial(step_indices, layout=layout, bucket=bucket))
    found = jax.tree.map(np.asarray, run(unpack(pack(plan, spec), spec), state))
    positions = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
    slots = np.arange(3).repeat(counts)
    assert (found.positions[:11] == positions).all()
    for kind, table in ((found.full, pages), (found.local, pages[:, ::-1])):
        assert (kind.write_pages[:11] == table[slots, positions // PAGE]).all()
        assert (kind.write_offsets[:11] == positions % PAGE).all()
    first = np.maximum(starts - window + 1, 0) // PAGE
    assert (found.local.rows.first_page == first).all()
    for row in range(3):
        seen = pages[row, ::-1][first[row] : (starts[row] + counts[row] - 1) // PAGE + 1]
        assert (found.local.rows.page_rows[row, : len(seen)] == seen).all()
        assert (found.full.rows.page_rows[row] == pages[row]).all()
