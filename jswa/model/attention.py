"""Projections and rotary embedding around the attention itself, which the caller supplies."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jswa.config import AttentionConfig
from jswa.model.layers import RmsNorm, RopeTables, linear, rotate, zeros


@runtime_checkable
class Attend(Protocol):
    """Store K and V of layer `layer` and attend to all that its queries may see: over pages, or densely."""

    def __call__(
        self, layer: int, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K V"], /
    ) -> Float[Array, "T H V"]:
        """Attention output per query head."""
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

    def __call__(self, x: Float[Array, "T M"], layer: int, ropes: RopeTables, attend: Attend) -> Float[Array, "T M"]:
        """Attention of each token, projected back to the model's width."""
        config = self.config
        q_size, v_size = config.num_heads * config.head_dim, _v_size(config)
        qkv = linear(x, self.qkv, self.qkv_bias)
        q = qkv[:, :q_size].reshape(-1, config.num_heads, config.head_dim)
        k = qkv[:, q_size:-v_size].reshape(-1, config.num_kv_heads, config.head_dim)
        v = qkv[:, -v_size:].reshape(-1, config.num_kv_heads, config.v_head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rope is not None:
            q, k = rotate(q, ropes[config.rope]), rotate(k, ropes[config.rope])
        out = attend(layer, q, k, v)
        return linear(out.reshape(len(x), -1), self.out, self.out_bias)


def _v_size(config: AttentionConfig) -> int:
    return config.num_kv_heads * config.v_head_dim
