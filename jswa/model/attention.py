"""Projections and rotary embedding around the attention itself, which the caller supplies."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.config import AttentionConfig, Temperature
from jswa.model.layers import RmsNorm, RopeTables, linear, rotate, zeros


@runtime_checkable
class Attend(Protocol):
    """Store K and V of layer `layer` and attend to all that its queries may see: over pages, or densely."""

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K V"],
        sinks: Float[Array, " H"] | None,
        /,
    ) -> Float[Array, "T H V"]:
        """Attention output per query head; `sinks` are the layer's, where it has any."""
        ...


class Attention(nnx.Module):
    """q, k and v are one matrix [M, H·D + K·D + K·V], in that order."""

    def __init__(self, config: AttentionConfig, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        q, k, v = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, _v_size(config)
        self.qkv = zeros(d_model, q + k + v, dtype=dtype)
        self.qkv_bias = zeros(q + k + v, dtype=dtype) if config.qkv_bias else None
        self.out = zeros(config.num_heads * config.v_head_dim, d_model, dtype=dtype)
        self.out_bias = zeros(d_model, dtype=dtype) if config.out_bias else None
        self.q_norm = RmsNorm(config.qk_norm, config.head_dim, dtype) if config.qk_norm else None
        self.k_norm = RmsNorm(config.qk_norm, config.head_dim, dtype) if config.qk_norm else None
        self.sinks = zeros(config.num_heads, dtype=dtype) if config.sinks else None

    def __call__(
        self, x: Float[Array, "T M"], layer: int, positions: Int[Array, " T"], ropes: RopeTables, attend: Attend
    ) -> Float[Array, "T M"]:
        """Attention of each token, projected back to the model's width."""
        config = self.config
        q_size, v_size = config.num_heads * config.head_dim, _v_size(config)
        qkv = linear(x, self.qkv, self.qkv_bias)
        q = qkv[:, :q_size].reshape(-1, config.num_heads, config.head_dim)
        k = qkv[:, q_size:-v_size].reshape(-1, config.num_kv_heads, config.head_dim)
        v = qkv[:, -v_size:].reshape(-1, config.num_kv_heads, config.v_head_dim)
        norms = (self.q_norm, self.k_norm) if self.q_norm is not None and self.k_norm is not None else None
        if norms is not None and norms[0].weight is not None:
            q, k = norms[0](q), norms[1](k)
        if config.rope is not None:
            q, k = rotate(q, config.rope, ropes), rotate(k, config.rope, ropes)
        if norms is not None and norms[0].weight is None:
            q, k = norms[0](q), norms[1](k)  # a norm without weight comes after the rotation (Llama 4)
        if config.temperature is not None:
            q = q * _temperature(config.temperature, positions)[:, None, None].astype(q.dtype)
        if config.v_scale != 1.0:
            v = v * jnp.asarray(config.v_scale, v.dtype)
        out = attend(layer, q, k, v, None if self.sinks is None else self.sinks[...])
        return linear(out.reshape(len(x), -1), self.out, self.out_bias)


def _temperature(config: Temperature, positions: Int[Array, " T"]) -> Float[Array, " T"]:
    steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / config.floor)
    return 1.0 + config.scale * jnp.log1p(steps)


def _v_size(config: AttentionConfig) -> int:
    return config.num_kv_heads * config.v_head_dim
