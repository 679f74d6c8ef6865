"""Checks of the elementwise kernels: norms, rotation and KV writes, gates with their activation."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig
from jswa.exec.selfcheck.cases import Case, CheckedEngine, normal, widened
from jswa.kernels import Kernels
from jswa.model.attention import scales_of
from jswa.model.fused_products import adds_experts, gates_in_one, hidden_of, parts_of, rms_of
from jswa.model.fused_projection import heads_of
from jswa.model.layers import Mlp
from jswa.model.transformer import Params
from pallas_kernels.elementwise.api import Implementation as Elementwise
from pallas_kernels.elementwise.api import residual_norms, rotate_and_write
from pallas_kernels.elementwise.arguments import HeadWeights, Join, KVCells, Pairs, Parts, Rms
from pallas_kernels.experts.groups import row_count

_PAGES, _PAGE = 3, 16
_COLUMNS = 256  # of an MLP: more are further thread blocks of the same code
# More rows and tokens run the same code, but for the parts of a product, of which more than 256 tokens have one.
_ROWS, _TOKENS = 16, 300


class _Written(NamedTuple):
    """Results of `rotate_and_write`: queries, pages before and after, and the cells of the tokens."""

    q: Float[Array, "T K G D"]
    before: Float[Array, "P 1 K p E"]
    kv: Float[Array, "P 1 K p E"]
    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]


def elementwise_cases(engine: CheckedEngine) -> Iterator[Case]:
    """Yield the checks of norms, of rotation with KV writes, and of gates with their activation."""
    model, kernels, dtype = engine.model, engine.kernels, engine.dtype
    few = sorted({min(bucket.tokens, _TOKENS) for bucket in (engine.chosen[0], engine.chosen[-1])})
    yield from _norm_cases(model, dtype, few, kernels.elementwise)
    yield from _rope_cases(model, engine.params, few, kernels, dtype, engine.kv_dtype)
    yield from _gate_cases(model, dtype, sorted({bucket.tokens for bucket in engine.chosen}), kernels)


def _norm_cases(model: ModelConfig, dtype: np.dtype, sizes: Sequence[int], elementwise: Elementwise) -> Iterator[Case]:
    layers, norms = list(model.layers), dict[Hashable, tuple[Join, int, bool]]()
    following = [*(layer.pre_attn for layer in layers[1:]), model.final_norm]
    for layer, after in zip(layers, following, strict=True):
        for residual, post, pre, choices in (
            (layer.attn_residual, layer.post_attn, layer.pre_mlp, 0),
            (layer.mlp_residual, layer.post_mlp, after, _choices(layer)),
        ):
            own, read = (None if norm is None else rms_of(norm) for norm in (post, pre))
            shared = choices > 0 and layer.moe is not None and layer.moe.shared is not None
            kind = Join(own, read, residual.keep, residual.add), choices, shared
            norms.setdefault(kind, kind)
    for join, choices, shared in norms.values():
        for tokens in sizes:
            name = f"{model.d_model} columns, {tokens} tokens{f' of {choices} experts' * bool(choices)}"
            run = partial(_norm_results, join, choices, shared, tokens, model.d_model, dtype, elementwise)
            yield Case(f"elementwise kernel {elementwise!r}, norms, {name}", run)


def _rope_cases(
    model: ModelConfig,
    params: Params,
    sizes: Sequence[int],
    kernels: Kernels,
    dtype: np.dtype,
    kv_dtype: np.dtype,
) -> Iterator[Case]:
    in_8_bits, kinds = kv_dtype.itemsize == 1, dict[Hashable, tuple[AttentionConfig, bool]]()
    for layer, one in enumerate(model.layers):
        a = one.attention
        scaled = in_8_bits and scales_of(params, a, layer) is not None
        kinds.setdefault((heads_of(a), a.rope, a.temperature is None, a.qkv_bias, scaled), (a, scaled))
    for attention, scaled in kinds.values():
        for tokens in sizes:
            size = f"{attention.head_dim}/{attention.v_head_dim}"
            name = f"{attention.num_heads} heads of {size}, {tokens} tokens{', scales' * scaled}"
            given = attention, tokens, model.d_model, dtype, kv_dtype, scaled, kernels
            yield Case(
                f"elementwise kernel {kernels.elementwise!r}, rotation and KV, {name}", partial(_rope_results, *given)
            )
            if in_8_bits:
                yield Case(
                    f"elementwise kernel {kernels.elementwise!r}, KV in 8 bits, {name}", partial(_code_results, *given)
                )


def _gate_cases(model: ModelConfig, dtype: np.dtype, sizes: Sequence[int], kernels: Kernels) -> Iterator[Case]:
    found = [layer.mlp if isinstance(layer.mlp, MlpConfig) else layer.mlp.shared for layer in model.layers]
    for mlp in dict.fromkeys(mlp for mlp in found if mlp is not None):
        for tokens in (tokens for tokens in sizes if gates_in_one(mlp, tokens, model.d_model)):
            run = partial(_gate_results, mlp, tokens, model.d_model, dtype, kernels)
            yield Case(f"elementwise kernel {kernels.elementwise!r}, gates and ups, {tokens} tokens", run)


def _gate_results(
    config: MlpConfig, tokens: int, width: int, dtype: np.dtype, kernels: Kernels
) -> tuple[Float[Array, "T F"], Float[Array, "T F"]]:
    """Return the inputs of the down projection by the kernel, and by XLA in float32, of a few columns."""
    rng, few = np.random.default_rng(0), dataclasses.replace(config, hidden=min(config.hidden, _COLUMNS))
    x, weights = normal(rng, tokens, width).astype(dtype), normal(rng, width, 2 * few.hidden) / width**0.5

    def call(x: Array, implementation: Elementwise) -> Float[Array, "T F"]:
        mlp = Mlp(few, width, x.dtype)
        mlp.gate_up[...] = weights.astype(dtype).astype(x.dtype)
        if mlp.gate_up_bias is not None:
            mlp.gate_up_bias[...] = jnp.linspace(-1, 1, 2 * few.hidden).astype(dtype).astype(x.dtype)
        return hidden_of(mlp, x, None, implementation, kernels.sms)

    run = jax.jit(call, static_argnames="implementation")
    with jax.default_matmul_precision("highest"):
        return run(x, implementation=kernels.elementwise).astype(jnp.float32), run(widened(x), implementation="xla")


def _choices(layer: LayerConfig) -> int:
    """Return the experts whose results the norms' kernel adds, if it does."""
    return layer.moe.top_k if layer.moe is not None and adds_experts(layer.moe) else 0


def _norm_results(
    join: Join, choices: int, shared: bool, tokens: int, width: int, dtype: np.dtype, elementwise: Elementwise
) -> tuple[Float[Array, "2 T M"], Float[Array, "2 T M"]]:
    """Return residual streams and norms by the kernel, and by XLA in float32."""
    rng = np.random.default_rng(0)
    branch: Parts | Pairs = Parts(normal(rng, parts_of(tokens, width, width), tokens, width))
    if choices:
        rows = row_count(tokens * choices, 4)
        at = jnp.asarray(rng.permutation(rows)[: tokens * choices].reshape(tokens, choices), jnp.int32)
        every = normal(rng, parts_of(tokens, width, width), tokens, width) if shared else None
        branch = Pairs(normal(rng, rows, width).astype(dtype), at, jnp.abs(normal(rng, tokens, choices)), every)
    elif len(branch.values) == 1:
        branch = Parts(branch.values.astype(dtype))
    x = normal(rng, tokens, width).astype(dtype)
    weights = [_weight(rng, norm, width, dtype) for norm in (join.post, join.pre)]

    @partial(jax.jit, static_argnames="implementation")
    def call(branch: Any, x: Array, post: Any, pre: Any, implementation: Elementwise) -> Float[Array, "2 T M"]:
        found = residual_norms(branch, x, join, post_weight=post, pre_weight=pre, implementation=implementation)
        return jnp.stack([result.astype(jnp.float32) for result in found])

    wide = jax.tree.map(widened, (branch, x, *weights))
    return call(branch, x, *weights, implementation=elementwise), call(*wide, implementation="xla")


def _rope_calls(
    config: AttentionConfig,
    tokens: int,
    width: int,
    dtype: np.dtype,
    kv_dtype: np.dtype,
    scaled: bool,
    kernels: Kernels,
) -> tuple[_Written, _Written]:
    """Return what the kernel writes, and what XLA does in float32. A few tokens are written, the others dropped.

    Pages of 8 bits stay so, and queries are those that attention reads.
    """
    rng, heads, in_8_bits = np.random.default_rng(0), heads_of(config), kv_dtype.itemsize == 1
    if in_8_bits and kernels.attention in ("mosaic", "mosaic_splits"):
        heads = heads._replace(query_dtype=jnp.dtype("float16"))
    columns, sizes = heads.columns, (heads.head_dim, heads.head_dim, heads.v_size)
    parts = normal(rng, parts_of(tokens, width, columns), tokens, columns)
    half = 0 if config.rope is None else len(config.rope.inv_freq)
    angles = jnp.asarray(rng.uniform(0, 7, (tokens, half)), jnp.float32)
    number = np.arange(tokens)
    pages = np.where(number < _PAGES * _PAGE, number // _PAGE, _PAGES + number).astype(np.int32)
    norms = heads.q_norm, heads.k_norm, heads.v_norm
    given = (
        parts if len(parts) > 1 else parts.astype(dtype),
        HeadWeights(*(_weight(rng, norm, size, dtype) for norm, size in zip(norms, sizes, strict=True))),
        (jnp.cos(angles), jnp.sin(angles)) if half else None,
        normal(rng, columns).astype(dtype) if config.qkv_bias else None,
        None if config.temperature is None else 1 + jnp.abs(normal(rng, tokens)),
        jnp.exp2(normal(rng, 2, heads.kv_heads)) if scaled else None,
    )
    kv = normal(rng, _PAGES, 1, heads.kv_heads, _PAGE, heads.row).astype(kv_dtype)
    at = jnp.asarray(pages), jnp.asarray((number % _PAGE).astype(np.int32))

    @partial(jax.jit, static_argnames=("dtype", "implementation"))
    def call(
        kv: Array, values: Array, weights: Any, rope: Any, bias: Any, factor: Any, scales: Any, dtype: Any,
        implementation: Elementwise,
    ) -> _Written:  # fmt: skip
        cells = KVCells(*at, 0, kv.shape, scales)
        own = Parts(values, bias), kv, heads, weights, rope, cells, dtype
        q, written = rotate_and_write(*own, temperature=factor, implementation=implementation)
        return _Written(q[:, :, : heads.group].astype(jnp.float32), kv, written, *at)

    wide, kept = jax.tree.map(widened, given), kv if in_8_bits else widened(kv)
    found = call(kv, *given, dtype=jnp.dtype(dtype), implementation=kernels.elementwise)
    return found, call(kept, *wide, dtype=jnp.dtype("float32"), implementation="xla")


def _rope_results(*given: Any) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return queries, and pages of 16 bits, by the kernel and by XLA."""
    found, expected = (
        jnp.concatenate([each.q.reshape(-1), *([] if each.kv.dtype.itemsize == 1 else [widened(each.kv).reshape(-1)])])
        for each in _rope_calls(*given)
    )
    return found, expected


def _code_results(*given: Any) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Return the bytes of the cells that are written by the kernel and by XLA; -1 if another cell has changed.

    A number that is rounded otherwise in 16 bits may have another byte; of numbers in all, a few per cent.
    """

    @jax.jit
    def codes(of: _Written) -> Int[Array, " n"]:
        before, bits = (lax.bitcast_convert_type(pages, jnp.uint8).astype(jnp.int32) for pages in (of.before, of.kv))
        few = min(len(of.pages), _PAGES * _PAGE)
        at = of.pages[:few], 0, slice(None), of.offsets[:few]
        return jnp.where((before.at[at].set(0) == bits.at[at].set(0)).all(), bits[at], -1).reshape(-1)

    found, expected = map(codes, _rope_calls(*given))
    return found, expected


def _weight(rng: np.random.Generator, norm: Rms | None, size: int, dtype: np.dtype) -> Float[Array, " size"] | None:
    if norm is None or not norm.weighted:
        return None
    return jnp.asarray(rng.uniform(0.5, 1.5, size), dtype)
