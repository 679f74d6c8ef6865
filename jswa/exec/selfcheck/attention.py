"""Checks of attention: each kind of layer in chosen buckets, on ragged rows and shuffled pages."""

import dataclasses
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jswa.config import Limits
from jswa.exec.pack import PackSpec, padding, unpack
from jswa.exec.programs.config import StepConfig, layer_tile_tokens
from jswa.exec.programs.indices import step_indices
from jswa.exec.programs.step import attend_layer
from jswa.exec.selfcheck.cases import Case, CheckedEngine
from jswa.model.attention import scales_of
from jswa.plan import COLUMNS

_ROWS = 3  # that have tokens
_LONGEST = 1_200  # tokens of a row


def attention_cases(engine: CheckedEngine) -> Iterator[Case]:
    """Yield the checks of attention."""
    model, limits, kernels, kv_dtype = engine.model, engine.limits, engine.kernels, engine.kv_dtype
    full = engine.layout.full and dataclasses.replace(engine.layout.full, devices=1)
    layout = dataclasses.replace(engine.layout, full=full)  # of devices that share keys, the first part
    kinds: dict[Hashable, int] = {}
    for layer, one in enumerate(model.layers):
        a = one.attention
        key = a.kind, a.num_heads, a.num_kv_heads, a.head_dim, a.v_head_dim, a.scale, a.reach, a.softcap, a.has_sinks
        kinds.setdefault(key, layer)
    for layer in kinds.values():
        attention = model.layers[layer].attention
        sizes = f"{attention.num_heads} heads of {attention.head_dim}, layer {layer} ({attention.kind})"
        scales = scales_of(engine.params, attention, layer) if kv_dtype.itemsize == 1 else None
        for bucket in engine.chosen:
            spec = PackSpec.of(bucket, page_size=limits.page_size, max_rows=limits.max_rows)
            config = StepConfig(model, layout, bucket, spec, kernels)
            run = partial(_attention_results, config, limits, layer, engine.dtype, kv_dtype, scales)
            what = f"decode of {bucket.rows} rows" if bucket.decode else f"prefill of {bucket.tokens} tokens"
            what += f" with {bucket.drafts} drafts" if bucket.drafts else ""
            yield Case(f"attention kernel {kernels.attention!r}, {sizes}, {what}", run)


def _attention_results(
    config: StepConfig, limits: Limits, layer: int, dtype: np.dtype, kv_dtype: np.dtype, scales: Array | None
) -> tuple[Array, Array]:
    """Return the results of a layer's attention kernel and of XLA's in float32, [T, H, V], 0 for padding tokens."""
    rng = np.random.default_rng(layer)
    a, layout, tokens = config.model.layers[layer].attention, config.layout, config.bucket.tokens
    state, packed, slabs = _content(config, limits, layer, rng)
    shape = layout.full if a.kind == "full" else layout.local
    assert shape is not None

    def normal(*size: int) -> Float[Array, "..."]:
        return jnp.asarray(rng.standard_normal(size, np.float32))

    # Scores of about 1, so that many keys have weight.
    q = (normal(tokens, a.num_heads, a.head_dim) / (abs(a.scale) * a.head_dim**0.5)).astype(dtype)
    kv = normal(tokens, shape.num_kv_heads, shape.row).astype(dtype)
    lane = normal(1, slabs, layout.slab_elems).astype(kv_dtype)
    # Beside a sink with the weight of many keys, the sum of a part's softmax shows in the result.
    heavy = 5.0 if shape.parts > 1 else 0.0
    sinks = (normal(a.num_heads) + heavy).astype(dtype) if a.has_sinks or heavy else None
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
    """Return page tables, the packed rows, and how many slabs the lane needs: ragged rows on shuffled pages."""
    bucket, layout = config.bucket, config.layout
    reach = config.model.layers[layer].attention.reach
    longest = min(limits.max_model_len, _LONGEST, max(300, (reach.span if reach else 0) + 70))
    rows = min(bucket.rows, _ROWS)
    most = bucket.per_row if bucket.decode else 170
    first = min(bucket.tokens - rows + 1, longest - 1, most)
    counts = [first] + [1] * (rows - 1)
    starts = [max(0, length - count) for length, count in zip((longest, longest // 3, 5), counts, strict=False)]
    starts = [min(start, limits.max_model_len - count) for start, count in zip(starts, counts, strict=True)]
    per_slab = 1 if reach is not None else layout.pages_per_slab
    pages = [-(-(start + count) // limits.page_size) for start, count in zip(starts, counts, strict=True)]
    ids = per_slab + rng.permutation(sum(pages)).astype(np.int32)
    table = np.zeros((limits.max_rows, limits.pages_per_row), np.int32)
    packed = padding(config.pack)
    inputs = unpack(packed, config.pack)
    for row, (start, count, end, held) in enumerate(zip(starts, counts, np.cumsum(pages), pages, strict=True)):
        table[row, :held] = ids[end - held : end]
        inputs.rows[row, [COLUMNS.index(name) for name in ("row_id", "start", "count")]] = row, start, count
    length = jnp.zeros(limits.max_rows, jnp.int32)
    state = {"full_table": jnp.asarray(table), "local_table": jnp.asarray(table), "length": length}
    return state, jnp.asarray(packed), 1 + -(-sum(pages) // per_slab)
