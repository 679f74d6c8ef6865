"""Checks of routing: choices, weights, the order of rows, tiles and copies."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jswa.architecture import MoeConfig
from jswa.exec.selfcheck.cases import Case, CheckedEngine, normal
from jswa.model.fused_products import FEW_TOKENS
from jswa.model.routing import route, router_of
from pallas_kernels.experts.groups import Groups, Tiling, group_rows, list_tiles, row_count
from pallas_kernels.experts.routing import api as routing
from pallas_kernels.experts.routing.arguments import RouterWeights


def routing_cases(engine: CheckedEngine) -> Iterator[Case]:
    """Yield a check for each kind of router, in the smallest and the largest of the chosen buckets."""
    model, kernels = engine.model, engine.kernels
    for moe in dict.fromkeys(layer.moe for layer in model.layers if layer.moe is not None):
        for tokens in sorted({bucket.tokens for bucket in (engine.chosen[0], engine.chosen[-1])}):
            name = f"{moe.num_experts} experts of which {moe.top_k} are chosen, {tokens} tokens"
            run = partial(_routing_results, moe, tokens, model.d_model, engine.dtype)
            yield Case(f"routing kernels {kernels.routing!r}, {name}", run)


def _routing_results(
    moe: MoeConfig, tokens: int, width: int, dtype: np.dtype
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Return choices, weights, rows and tiles by the kernels and by XLA, all as integers; -1 if copies are wrong.

    Logits of a token are evenly spaced, so that rounding changes no choice.
    """
    rng, experts, k = np.random.default_rng(0), moe.num_experts, moe.top_k
    rows = row_count(tokens * k, experts)
    size = 16 if rows >= 16 else rows
    tiling = Tiling(size, rows // size + min(experts, rows // 8))
    logits = np.linspace(-4, 4, experts, dtype=np.float32)[rng.random((tokens, experts)).argsort(axis=1)]
    router, one = moe.router, jnp.ones(experts, jnp.float32)
    weights = RouterWeights(
        0 * one if router.bias else None,
        0 * one if router.selection_bias else None,
        one if router.expert_scale else None,
    )

    x = normal(rng, tokens, width).astype(dtype) if tokens <= FEW_TOKENS else None

    @jax.jit
    def by_kernel(logits: Array, weights: RouterWeights, x: Array | None) -> Int[Array, " n"]:
        scaled = moe.weight_on_input
        found = routing.route(logits[None], router_of(router, k), weights, (tiling,), x, scaled=scaled)
        flat = _flat(found.chosen, found.weights, found.groups, found.rows, found.pair, found.tiles[0])
        if x is None or found.inputs is None:
            return flat
        factors = found.weights.astype(x.dtype) if scaled else jnp.ones_like(found.weights, x.dtype)
        right = found.inputs[found.rows] == x[:, None] * factors[:, :, None]
        return jnp.where(right.all(), flat, -1)

    @jax.jit
    def by_xla(logits: Array, weights: RouterWeights) -> Int[Array, " n"]:
        chosen, mass = route(router, logits, weights.selection, k)
        groups, at, pair = group_rows(chosen, experts)
        return _flat(chosen, mass, groups, at, pair, list_tiles(groups, tiling, rows))

    found, expected = by_kernel(jnp.asarray(logits), weights, x), by_xla(jnp.asarray(logits), weights)
    equal = (found == expected).all().astype(jnp.int32)[None]  # a single number that differs is an error
    return equal, jnp.ones_like(equal)


def _flat(chosen: Array, weights: Array, groups: Groups, rows: Array, pair: Array, tiles: Array) -> Int[Array, " n"]:
    used = jnp.where(jnp.arange(len(tiles))[:, None] <= tiles[0, 0], tiles, 0)
    parts = chosen, jnp.round(256 * weights).astype(jnp.int32), *groups, rows, pair, used
    return jnp.concatenate([part.reshape(-1) for part in parts])
