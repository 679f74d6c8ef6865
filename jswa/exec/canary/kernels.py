"""Compares the kernels that an engine runs with plain XLA in float32, at start, on small content.

The shapes are those of the engine's steps, so the code that is checked is the code that will run; only the arena has
few pages, and only a few rows and experts have tokens. A compiler that gives wrong code is found before a request is.
"""

import dataclasses
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jswa.architecture import ModelConfig, MoeConfig
from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.errors import KernelError
from jswa.exec.buckets import Bucket
from jswa.exec.canary.dense import dense_cases, head_cases
from jswa.exec.canary.small import Case, fp8_cases, small_cases
from jswa.exec.compile.ptxas import find_ptxas
from jswa.exec.compile.store import ProgramStore
from jswa.exec.pack import PackSpec, padding, unpack
from jswa.exec.programs.config import StepConfig, layer_tile_tokens
from jswa.exec.programs.indices import step_indices
from jswa.exec.programs.step import attend_layer
from jswa.forms.base.form import Place
from jswa.forms.table import matrix_at
from jswa.kernels import Kernels
from jswa.model.attention import scales_of
from jswa.model.binding import run_dtype
from jswa.model.transformer import Params
from jswa.plan import COLUMNS
from pallas_kernels.experts.api import grouped_matmul, variant
from pallas_kernels.experts.glu import Glu
from pallas_kernels.experts.groups import ALIGN, Groups, row_count
from pallas_kernels.experts.stacks import stack_of
from pallas_kernels.interpreter import interpreting

_log = logging.getLogger("jswa")
_THREADS = 8  # compile at once
_ROWS = 3  # that have tokens
_LONGEST = 1_200  # tokens of a row
_GROUP_UNITS = 40  # of 8 rows: the largest group of an expert
# Kernels round probabilities and results to their type, half an eps each time; wrong code is off by whole values.
_ROUNDINGS = 4
_DIFFERENT = 1 / 8  # of the tokens: a sum that is rounded otherwise may draw another one


def check_kernels(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    limits: Limits,
    buckets: Sequence[Bucket],
    kernels: Kernels,
    kv_dtype: np.dtype,
    store: ProgramStore | None = None,
) -> int:
    """Compare the kernels with XLA's on one device of this host; return how many.

    Not again if the store knows that they agreed: of the same sources, compilers and device, in the same shapes.

    Attention is checked in the smallest, the middle and the largest decode bucket, in the largest for each number of
    drafts, and in the smallest and the largest other one, for each kind of layer; experts, and linear
    layers in tiles, in every tuning that the buckets lead to; products of 8-bit factors for each size of a matrix, with
    few tokens and with many. XLA's own and the experts of a CPU, which are no compiler's work, are not checked.

    Args:
        model, layout: of one device's part.

    Raises KernelError that names the first kernel whose numbers differ by more than rounding.
    """
    compare = partial(_compare, model, params, layout, limits, buckets, kernels, kv_dtype)
    if store is None:
        return compare()
    fixed = dataclasses.replace(limits, num_blocks=0)  # as the memory that is free is never the same
    return store.figure(f"kernels {model} {layout} {fixed} {buckets} {kernels} {kv_dtype}", (params,), "", compare)


def _compare(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    limits: Limits,
    buckets: Sequence[Bucket],
    kernels: Kernels,
    kv_dtype: np.dtype,
) -> int:
    begin = time.perf_counter()
    local = {name: value.addressable_shards[0].data for name, value in params.items()}
    cases: list[Case] = []
    if kernels.attention != "xla":
        cases += _attention_cases(model, local, layout, limits, _chosen(buckets), kernels, kv_dtype)
    if kernels.experts not in ("xla", "cpu", "reference"):
        cases += _expert_cases(model, local, buckets, kernels)
    if kernels.linear == "mosaic":
        cases += dense_cases(model, local, buckets, run_dtype(params), kernels.sms)
        if kernels.sums != "xla":
            cases += head_cases(model, local, buckets, run_dtype(params), kernels.sms)
    if kernels.linear == "fp8":
        cases += fp8_cases(local, _chosen(buckets), run_dtype(params))
    cases += small_cases(model, local, _chosen(buckets), kernels, run_dtype(params), kv_dtype)
    # Threads, since nearly all of the time is compilation; the interpreter is a setting of this thread.
    with ThreadPoolExecutor(_THREADS) as pool:
        results = map(_difference, cases) if interpreting() else pool.map(_difference, cases)
        for case, (difference, bound) in zip(cases, results, strict=True):
            _log.debug("%s: differs from XLA by %.3g, at most %.3g is rounding", case.kernel, difference, bound)
            if not difference <= bound:  # NaN too
                raise KernelError(case.kernel, difference, bound, str(find_ptxas() or "ptxas was not found"))
    if cases:
        _log.info("%d kernels agree with XLA (%.1f s)", len(cases), time.perf_counter() - begin)
    return len(cases)


def _difference(case: Case) -> tuple[float, float]:
    """Return the largest difference where XLA's result is finite, and the largest that rounding can make.

    Of integers, such as tokens: the share that differs.
    """
    results = case.run()
    if jnp.issubdtype(results[1].dtype, jnp.integer):
        found, expected = map(np.asarray, results)
        return float((found != expected).mean()), _DIFFERENT
    found, expected = (np.asarray(array, np.float32) for array in results)
    eps = 2.0**-7  # of bfloat16, the coarsest type that kernels run in
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0, 0.0
    most = float(np.abs(expected[finite]).max())
    with np.errstate(invalid="ignore"):
        return float(np.abs(found - expected)[finite].max()), _ROUNDINGS * eps * most


def _chosen(buckets: Sequence[Bucket]) -> list[Bucket]:
    plain = [bucket for bucket in buckets if not bucket.drafts]
    decode, mixed = ([b for b in plain or buckets if b.decode is kind] for kind in (True, False))
    picked = [*decode[:1], *decode[len(decode) // 2 :][:1], *decode[-1:], *mixed[:1], *mixed[-1:]]
    picked += {bucket.drafts: bucket for bucket in buckets if bucket.drafts}.values()
    return list(dict.fromkeys(picked))


def _attention_cases(
    model: ModelConfig,
    params: Params,
    layout: KVLayout,
    limits: Limits,
    buckets: Sequence[Bucket],
    kernels: Kernels,
    kv_dtype: np.dtype,
) -> Iterator[Case]:
    kinds: dict[Hashable, int] = {}
    for layer, one in enumerate(model.layers):
        a = one.attention
        key = a.kind, a.num_heads, a.num_kv_heads, a.head_dim, a.v_head_dim, a.scale, a.reach, a.softcap, a.sinks
        kinds.setdefault(key, layer)
    for layer in kinds.values():
        attention = model.layers[layer].attention
        sizes = f"{attention.num_heads} heads of {attention.head_dim}, layer {layer} ({attention.kind})"
        scales = scales_of(params, attention, layer) if kv_dtype.itemsize == 1 else None
        for bucket in buckets:
            spec = PackSpec.of(bucket, page_size=limits.page_size, max_rows=limits.max_rows)
            config = StepConfig(model, layout, bucket, spec, kernels)
            run = partial(_attention_results, config, limits, layer, run_dtype(params), kv_dtype, scales)
            what = f"decode of {bucket.rows} rows" if bucket.decode else f"prefill of {bucket.tokens} tokens"
            what += f" with {bucket.drafts} drafts" if bucket.drafts else ""
            yield Case(f"attention kernel {kernels.attention!r}, {sizes}, {what}", run)


def _attention_results(
    config: StepConfig, limits: Limits, layer: int, dtype: np.dtype, kv_dtype: np.dtype, scales: Array | None
) -> tuple[Array, Array]:
    """Return the results of a layer's attention kernel and of XLA's in float32, [T, H, V], 0 for padding tokens."""
    rng = np.random.default_rng(layer)
    a, layout, tokens = config.model.layers[layer].attention, config.layout, config.bucket.tokens
    state, packed, blocks = _content(config, limits, layer, rng)
    shape = layout.full if a.kind == "full" else layout.local
    assert shape is not None

    def normal(*size: int) -> Float[Array, "..."]:
        return jnp.asarray(rng.standard_normal(size, np.float32))

    # Scores of about 1, so that many keys have weight.
    q = (normal(tokens, a.num_heads, a.head_dim) / (abs(a.scale) * a.head_dim**0.5)).astype(dtype)
    kv = normal(tokens, shape.num_kv_heads, shape.row).astype(dtype)
    lane = normal(1, blocks, layout.block_elems).astype(kv_dtype)
    sinks = normal(a.num_heads).astype(dtype) if a.sinks else None
    found = _attend(config, layer, state, packed, lane, q, kv, sinks, scales)
    wide = lane if kv_dtype.itemsize == 1 else lane.astype(jnp.float32)
    q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
    plain = StepConfig(config.model, layout, config.bucket, config.pack)
    with jax.default_matmul_precision("highest"):
        expected = _attend(plain, layer, state, packed, wide, q, kv, sinks, scales)
    return found, expected


@partial(jax.jit, static_argnames=("config", "layer"))
def _attend(
    config: StepConfig, layer: int, state: Any, packed: Array, lane: Array, q: Array, kv: Array, sinks: Array | None,
    scales: Array | None,
) -> Float[Array, "T H V"]:  # fmt: skip
    sizes = [layer_tile_tokens(config, layer)]
    inputs = unpack(packed, config.pack)
    state = {**state, "lanes": [lane]}
    indices = step_indices(inputs, state, layout=config.layout, bucket=config.bucket, tile_tokens=sizes)
    _, out = attend_layer(config, indices, layer, lane, q, kv, sinks, scales, last=False)
    return jnp.where(indices.real[:, None, None], out.astype(jnp.float32), 0.0)


def _content(
    config: StepConfig, limits: Limits, layer: int, rng: np.random.Generator
) -> tuple[dict[str, Array], Array, int]:
    """Return page tables, the packed rows, and how many blocks the lane needs: ragged rows on shuffled pages."""
    bucket, layout = config.bucket, config.layout
    reach = config.model.layers[layer].attention.reach
    longest = min(limits.max_model_len, _LONGEST, max(300, (reach.size if reach else 0) + 70))
    rows = min(bucket.rows, _ROWS)
    most = bucket.per_row if bucket.decode else 170
    first = min(bucket.tokens - rows + 1, longest - 1, most)
    counts = [first] + [1] * (rows - 1)
    starts = [max(0, length - count) for length, count in zip((longest, longest // 3, 5), counts, strict=False)]
    starts = [min(start, limits.max_model_len - count) for start, count in zip(starts, counts, strict=True)]
    per_block = 1 if reach is not None else layout.pages_per_block
    pages = [-(-(start + count) // limits.page_size) for start, count in zip(starts, counts, strict=True)]
    ids = per_block + rng.permutation(sum(pages)).astype(np.int32)
    table = np.zeros((limits.max_rows, limits.pages_per_row), np.int32)
    packed = padding(config.pack)
    inputs = unpack(packed, config.pack)
    for row, (start, count, end, held) in enumerate(zip(starts, counts, np.cumsum(pages), pages, strict=True)):
        table[row, :held] = ids[end - held : end]
        inputs.rows[row, [COLUMNS.index(name) for name in ("row_id", "start", "count")]] = row, start, count
    length = jnp.zeros(limits.max_rows, jnp.int32)
    state = {"full_table": jnp.asarray(table), "local_table": jnp.asarray(table), "length": length}
    return state, jnp.asarray(packed), 1 + -(-sum(pages) // per_block)


def _expert_cases(model: ModelConfig, params: Params, buckets: Sequence[Bucket], kernels: Kernels) -> Iterator[Case]:
    seen: set[Hashable] = set()
    for owner, moe in _mixtures(model):
        for matrix in ("gate_up", "down"):
            prefix = f"{owner}.{matrix}"
            weights = stack_of(matrix_at(Place(prefix, (0, 0, 0)), params))  # its arrays tell its sizes
            bias = params.get(f"{prefix}_bias")
            gated = Glu(moe.activation, moe.clamp, moe.alpha) if matrix == "gate_up" else None
            for bucket in buckets:
                x: Any = jax.ShapeDtypeStruct((_rows(moe, bucket.tokens), weights.inputs), run_dtype(params))  # type: ignore[no-untyped-call]
                key = _variant(x, weights, bias, gated, kernels)
                if (matrix, gated, key) in seen:
                    continue
                seen.add((matrix, gated, key))
                run = partial(_expert_results, x, weights, bias, gated, kernels)
                yield Case(f"expert kernel {kernels.experts!r}, {prefix}, {bucket.tokens} tokens", run)


def _mixtures(model: ModelConfig) -> Iterator[tuple[str, MoeConfig]]:
    """Yield the names of the mixtures of experts, and their configs."""
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mlp, MoeConfig):
            yield f"layers.{index}.mlp", layer.mlp
        if layer.side is not None:
            yield f"layers.{index}.side.moe", layer.side.moe


def _rows(moe: MoeConfig, tokens: int) -> int:
    experts = moe.num_experts // moe.devices
    return row_count(tokens * moe.top_k, experts + (moe.devices > 1))


def _variant(x: jax.ShapeDtypeStruct, weights: Any, bias: Any, gated: Glu | None, kernels: Kernels) -> Hashable:
    """Return what tells the kernel of a call apart, from the shape of its input alone."""
    found = list[Hashable]()
    jax.eval_shape(lambda rows: found.append(variant(rows, weights, bias, gated, kernels.experts, kernels.sms)), x)
    return found[0]


def _expert_results(
    x: jax.ShapeDtypeStruct, weights: Any, bias: Array | None, gated: Glu | None, kernels: Kernels
) -> tuple[Array, Array]:
    """Return the results of an expert kernel and of XLA in float32, [R, N]: 0 for rows of no expert."""
    rows = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape, np.float32)).astype(x.dtype)
    arrays = jax.tree.leaves(weights)
    experts = arrays[0].shape[0]
    units = x.shape[0] // ALIGN
    # The first expert has one row, the last has five, and the one between them several tiles if there is room.
    sizes = np.zeros(experts, np.int32)
    sizes[0] = 1
    if units > 1 and experts > 1:
        sizes[-1] = 5
    if units > 2 and experts > 2:
        sizes[experts // 2] = ALIGN * min(units - 2, _GROUP_UNITS) - 3
    aligned = -(-sizes // ALIGN) * ALIGN
    starts = (np.cumsum(aligned) - aligned).astype(np.int32)
    groups, busy = Groups(jnp.asarray(starts), jnp.asarray(sizes)), np.flatnonzero(sizes)
    found = _multiply(rows, weights, groups, bias, gated, kernels)
    few: Any = jax.tree.map(lambda array: array[busy], weights)
    own = None if bias is None else bias[busy].astype(jnp.float32)
    wide = few.numbers()
    few_groups = Groups(groups.starts[busy], groups.sizes[busy])
    expected = _multiply(rows.astype(jnp.float32), wide, few_groups, own, gated, Kernels(experts="reference"))
    return found, expected


@partial(jax.jit, static_argnames=("gated", "kernels"))
def _multiply(
    x: Array, weights: Any, groups: Groups, bias: Array | None, gated: Glu | None, kernels: Kernels
) -> Float[Array, "R N"]:
    out = grouped_matmul(x, weights, groups, bias=bias, gated=gated, implementation=kernels.experts, sms=kernels.sms)
    row = jnp.arange(len(x))[:, None]
    mine = ((row >= groups.starts[None]) & (row < (groups.starts + groups.sizes)[None])).any(axis=1)
    return jnp.where(mine[:, None], out.astype(jnp.float32), 0.0)
