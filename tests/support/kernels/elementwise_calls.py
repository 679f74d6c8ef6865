"""Make calls of elementwise kernels from cases: random arrays, the call of an implementation, the result in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.elementwise.api import Implementation, residual_norms, rotate_and_write
from pallas_kernels.elementwise.arguments import HeadWeights, Join, KVCells, Pairs, Parts, Rms
from pallas_kernels.experts.groups import row_count
from tests.support.kernels.device import hopper
from tools.cases.kernels.small.elementwise import NormCase, RopeCase

Arrays = dict[str, Any]


def norm_arrays(case: NormCase, seed: int = 0) -> Arrays:
    """Return random operands: parts in float32 if there are several, weights of which a norm has one."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    size: tuple[int, ...] = (case.parts, case.tokens, case.width)
    if case.choices:
        rows = rng.permutation(row_count(case.tokens * case.choices, 4))[: case.tokens * case.choices]
        own = {"rows": jnp.asarray(rows.reshape(case.tokens, -1), jnp.int32)}
        if case.weighted:
            own["weights"] = jnp.asarray(rng.uniform(0, 1, own["rows"].shape), jnp.float32)
        if case.shared:
            wide = jnp.float32 if case.shared > 1 else dtype
            own["shared"] = jnp.asarray(rng.standard_normal((case.shared, case.tokens, case.width)), wide)
        size = (row_count(case.tokens * case.choices, 4), case.width)
    values = rng.standard_normal(size)
    return {
        **(own if case.choices else {}),
        "values": jnp.asarray(values, jnp.float32 if case.parts > 1 else dtype),
        "bias": jnp.asarray(rng.standard_normal(case.width), dtype) if case.bias else None,
        "x": jnp.asarray(rng.standard_normal((case.tokens, case.width)), dtype),
        "post_weight": _weight(rng, case.post, case.width, dtype),
        "pre_weight": _weight(rng, case.pre, case.width, dtype),
    }


def call_norms(case: NormCase, arrays: Arrays, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Return the results in float32. Hopper kernels run as `device.hopper` says."""

    def call(given: Arrays) -> tuple[jax.Array, jax.Array]:
        branch: Parts | Pairs = Parts(given["values"], given["bias"])
        if case.choices:
            branch = Pairs(given["values"], given["rows"], given.get("weights"), given.get("shared"))
        out: tuple[jax.Array, jax.Array] = residual_norms(
            branch,
            given["x"],
            Join(case.post, case.pre, case.keep, case.add),
            post_weight=given["post_weight"],
            pre_weight=given["pre_weight"],
            implementation=implementation,
        )
        return out

    return _run(call, arrays, implementation)


def rope_arrays(case: RopeCase, seed: int = 0) -> Arrays:
    """Return random operands. Cells are distinct, and pages hold what no call may change."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    heads, columns = case.call, case.call.columns
    angles = rng.uniform(0, 7, (case.tokens, case.half))
    cells = rng.permutation(case.pages * case.page_size)[: case.tokens]
    pages = (cells // case.page_size).astype(np.int32)
    if case.dropped:
        pages[::3] = case.pages + np.arange(len(pages[::3]))
    cell = case.pages, case.layers_per_page, case.kv_heads, case.page_size, heads.row
    sizes = heads.head_dim, heads.head_dim, heads.v_size
    weights = (_weight(rng, norm, size, dtype) for norm, size in zip(case.norms, sizes, strict=True))
    values = rng.standard_normal((case.parts, case.tokens, columns))
    return {
        "values": jnp.asarray(values, jnp.float32 if case.parts > 1 else dtype),
        "bias": jnp.asarray(rng.standard_normal(columns), dtype) if case.bias else None,
        "kv": jnp.asarray(rng.standard_normal(cell), case.kv_dtype or dtype),
        "weights": HeadWeights(*weights),
        "rope": (jnp.cos(jnp.asarray(angles)), jnp.sin(jnp.asarray(angles))) if case.half else None,
        "pages": jnp.asarray(pages),
        "offsets": jnp.asarray((cells % case.page_size).astype(np.int32)),
        "temperature": jnp.asarray(rng.uniform(1, 2, case.tokens), jnp.float32) if case.temperature else None,
        "scales": _scales(rng, case.kv_heads) if case.scaled else None,
    }


def _scales(rng: np.random.Generator, kv_heads: int) -> jax.Array:
    """Return scales of K and of V: with the first one, some numbers of K are beyond the range of e4m3."""
    scales = 2 ** rng.uniform(-9, 1, (2, kv_heads))
    scales[0, 0] = 2.0**-9
    return jnp.asarray(scales, jnp.float32)


def rope_call(case: RopeCase, implementation: Implementation) -> Callable[[Arrays], tuple[jax.Array, jax.Array]]:
    """Return a function of the operands that returns the queries, without the rows beyond the group, and the pages."""
    heads = case.call

    def call(given: Arrays) -> tuple[jax.Array, jax.Array]:
        q, kv = rotate_and_write(
            Parts(given["values"], given["bias"]),
            given["kv"],
            heads,
            given["weights"],
            given["rope"],
            KVCells(given["pages"], given["offsets"], case.layers_per_page - 1, given["kv"].shape, given["scales"]),
            jnp.dtype(case.dtype) if case.kv_dtype else given["kv"].dtype,
            temperature=given["temperature"],
            implementation=implementation,
        )
        return q[:, :, : heads.group], kv

    return call


def call_rope(case: RopeCase, arrays: Arrays, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Return the queries, without the rows beyond the group, and the pages, in float32."""
    return _run(rope_call(case, implementation), arrays, implementation)


def in_float32(arrays: Arrays) -> Arrays:
    """Return the same numbers in float32."""
    wide: Arrays = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)
    return wide


def _run(call: Any, arrays: Arrays, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    # XLA may leave out roundings between two steps in float32; compiled kernels do not.
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    program = jax.jit(call, compiler_options=options)
    if implementation != "mosaic":
        return _wide(program(arrays))
    with hopper():
        return _wide(program(arrays))


def _wide(results: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    first, second = (np.asarray(result.astype(jnp.float32)) for result in results)
    return first, second


def _weight(rng: np.random.Generator, norm: Rms | None, size: int, dtype: jnp.dtype) -> jax.Array | None:
    if norm is None or not norm.weighted:
        return None
    return jnp.asarray(rng.uniform(0.5, 1.5, size), dtype)
