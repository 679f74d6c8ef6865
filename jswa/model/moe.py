"""Mixture of experts: route, sort tokens by expert, run each expert over its own tokens, weigh and add.

The loop over tiles of sorted tokens reads the weights of experts that have tokens, and no others, so a decode step of
few rows costs few experts. Every tile has one expert; `lax.ragged_dot` would compute all experts for all tokens.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jswa.config import MoeConfig, RouterConfig
from jswa.model.layers import Mlp, activate, zeros

TILE_TOKENS = 16


class Moe(nnx.Module):
    """Experts [E, M, 2F] (gate and up halves) and [E, F, M], a router [M, E], and perhaps a shared expert."""

    def __init__(self, config: MoeConfig, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        experts, hidden = config.num_experts, config.hidden
        self.router = zeros(d_model, experts, dtype=dtype)
        self.router_bias = zeros(experts, dtype=dtype) if config.router.bias else None
        self.selection_bias = zeros(experts, dtype=dtype) if config.router.selection_bias else None
        self.gate_up = zeros(experts, d_model, 2 * hidden, dtype=dtype)
        self.down = zeros(experts, hidden, d_model, dtype=dtype)
        self.gate_up_bias = zeros(experts, 2 * hidden, dtype=dtype) if config.bias else None
        self.down_bias = zeros(experts, d_model, dtype=dtype) if config.bias else None
        self.shared = Mlp(config.shared, d_model, dtype) if config.shared else None

    def __call__(self, x: Float[Array, "T M"]) -> Float[Array, "T M"]:
        """Each token through its experts."""
        with jax.named_scope("moe"):
            logits = jnp.matmul(x, self.router[...], preferred_element_type=jnp.float32)
            if self.router_bias is not None:
                logits += self.router_bias[...].astype(jnp.float32)[None]
            bias = None if self.selection_bias is None else self.selection_bias[...].astype(jnp.float32)
            chosen, weights = route(self.config.router, logits, bias, self.config.top_k)
            out = self._experts(x, chosen, weights.astype(x.dtype))
            return out if self.shared is None else out + self.shared(x)

    def _experts(
        self, x: Float[Array, "T M"], chosen: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T M"]:
        """Sort (token, expert) pairs by expert, cut each expert's pairs into tiles, run tile by tile."""
        top_k, num_experts = self.config.top_k, self.config.num_experts
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # [T·k] pairs by expert
        counts = jnp.zeros(num_experts, jnp.int32).at[chosen.reshape(-1)].add(1)
        tiles = (counts + TILE_TOKENS - 1) // TILE_TOKENS
        tile_ends, ends = jnp.cumsum(tiles), jnp.cumsum(counts)
        inputs = jnp.take(x, order // top_k, axis=0)
        scale = weights.reshape(-1)[order][:, None]
        if self.config.weight_on_input:
            inputs = inputs * scale
        # Room for a whole tile behind the last pair, so that a tile never slides back over its neighbours.
        padded = jnp.concatenate([inputs, jnp.zeros((TILE_TOKENS, x.shape[1]), x.dtype)])

        def tile(index: Int[Array, ""], out: Float[Array, "P M"]) -> Float[Array, "P M"]:
            expert = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
            within = index - (tile_ends[expert] - tiles[expert])
            start = ends[expert] - counts[expert] + within * TILE_TOKENS
            result = self._expert(expert, lax.dynamic_slice_in_dim(padded, start, TILE_TOKENS))
            # Tiles run in order, so what this one writes past its expert's last pair is overwritten by the next.
            return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

        done = lax.fori_loop(0, tile_ends[-1], tile, jnp.zeros_like(padded))[: len(order)]
        if not self.config.weight_on_input:
            done = done * scale
        back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        return jnp.take(done, back, axis=0).reshape(len(x), top_k, -1).sum(axis=1)

    def _expert(self, expert: Int[Array, ""], x: Float[Array, "Q M"]) -> Float[Array, "Q M"]:
        config = self.config
        gate_up = x @ self.gate_up[...][expert]
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[...][expert][None]
        gate, up = jnp.split(gate_up, 2, axis=-1)
        if config.clamp is not None:
            gate, up = jnp.minimum(gate, config.clamp), jnp.clip(up, -config.clamp, config.clamp)
            hidden = (up + 1) * gate * jax.nn.sigmoid(gate * config.alpha)
        else:
            hidden = activate(config.activation, gate) * up
        out = hidden @ self.down[...][expert]
        return out if self.down_bias is None else out + self.down_bias[...][expert][None]


def route(
    config: RouterConfig, logits: Float[Array, "T E"], selection_bias: Float[Array, " E"] | None, top_k: int
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Chosen experts and their weights, float32."""
    if config.score == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits) if config.score == "sigmoid" else logits
    merit = scores if selection_bias is None else scores + selection_bias[None]
    if config.groups > 1:
        merit = _best_groups(config, merit)
    _, chosen = lax.top_k(merit, top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.score == "top_k_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    if config.score == "top_k_sigmoid":
        weights = jax.nn.sigmoid(weights)
    if config.normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + config.eps)
    return chosen, weights * config.scale


def _best_groups(config: RouterConfig, merit: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Merit, -inf for experts outside the best groups; a group's merit is the sum of its two best (DeepSeek-V3)."""
    grouped = merit.reshape(len(merit), config.groups, -1)
    best_two, _ = lax.top_k(grouped, 2)
    _, kept = lax.top_k(best_two.sum(axis=-1), config.top_groups)
    inside = jax.nn.one_hot(kept, config.groups, dtype=jnp.float32).sum(axis=1) > 0
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(merit.shape)
