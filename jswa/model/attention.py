"""Attention layer: projections, norms and rotary embedding around the attention function, which the caller supplies."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from jswa.architecture import AttentionConfig, AttentionGate, Norm, Temperature
from jswa.model.fused_products import linear_parts, weight_of
from jswa.model.fused_projection import Projection, heads_of, tables_of
from jswa.model.layers import Normalize, RopeTables, linear, normed, rotate, zeros
from jswa.model.lora import AdapterIds
from pallas_kernels.elementwise.api import Implementation
from pallas_kernels.elementwise.arguments import HeadWeights, Parts

_LEAST_SQUARES = 1e-6  # added to the squares of a value, by which a part along it is divided


@runtime_checkable
class Attend(Protocol):
    """Function that stores the K and V of a layer and attends to all keys that its queries may see.

    One implementation reads KV pages, another attends densely. For a layer with shared KV (`kv_from`), `kv` is None,
    and the function reads the KV of the owner. E is D + V, or less if the layer stores only a part of K
    (`folded_keys`).
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        sinks: Float[Array, " H"] | None,
        /,
    ) -> Float[Array, "T H V"]:
        """Return the attention output per query head; `sinks` are the attention sinks, if the layer has them."""
        ...


class Attention(nnx.Module):
    """One attention layer; q, k and v are one matrix [M, H·D + K·D + K·V], in this order.

    Layers with shared KV have no k and v columns; layers with `keys_as_values` have no v columns.
    """

    def __init__(self, config: AttentionConfig, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        q, k, v = projected(config)
        self.qkv = zeros(d_model, q + k + v, dtype=dtype)
        self.qkv_bias = zeros(q + k + v, dtype=dtype) if config.qkv_bias else None
        self.out = zeros(config.num_heads * config.v_head_dim, d_model, dtype=dtype)
        self.out_bias = zeros(d_model, dtype=dtype) if config.out_bias else None

        def norm(norm_config: Norm | None, heads: int) -> Normalize | None:
            size = config.head_dim * (heads if config.qk_norm_all_heads else 1)
            return Normalize(norm_config, size, dtype) if norm_config else None

        self.q_norm = norm(config.qk_norm, config.num_heads)
        self.k_norm = norm(config.qk_norm, config.num_kv_heads) if config.kv_from is None else None
        self.v_norm = Normalize(config.v_norm, config.v_head_dim, dtype) if config.v_norm and k else None
        self.sinks = zeros(config.num_heads, dtype=dtype) if config.sinks else None
        own = (config.num_kv_heads, config.head_dim)
        self.sink_key = zeros(*own, dtype=dtype) if config.key_sinks and config.kv_from is None else None
        self.gate = zeros(d_model, gates(config, config.gate), dtype=dtype) if config.gate else None
        self.gate_bias = zeros(config.num_heads, dtype=dtype) if config.gate and config.gate.bias else None

    def __call__(
        self,
        x: Float[Array, "T X"],
        layer: int,
        positions: Int[Array, " T"],
        ropes: RopeTables,
        attend: Attend,
        adapters: AdapterIds | None = None,
    ) -> Float[Array, "T M"]:
        """Return the attention output of each token, projected to the model's width M.

        X is M too, but in the first layer of EAGLE-3, which reads an embedding and a hidden state side by side.
        """
        config = self.config
        q_size, k_size, _ = projected(config)
        qkv = linear(x, self.qkv, self.qkv_bias, adapters)
        q = self._rotated(self.q_norm, self._heads(self.q_norm, qkv[:, :q_size]), ropes)
        if config.temperature is not None:
            # In float32: rounded to bfloat16, the factor would scale all scores of a query wrongly by up to 0.4 %.
            q = (q.astype(jnp.float32) * _temperature(config.temperature, positions)[:, None, None]).astype(q.dtype)
        kv = self._keys_and_values(qkv[:, q_size : q_size + k_size], qkv[:, q_size + k_size :], ropes)
        sinks = None if self.sinks is None else self.sinks[...]
        if config.key_sinks:  # the score of a sink's key, which was subtracted from the keys, and so from itself
            sinks = jnp.zeros(config.num_heads, q.dtype)
        out = attend(layer, q, kv, sinks)
        if config.exclusive and kv is not None:
            out = _without(out, kv[..., -config.v_head_dim :])
        return linear(self._gated(out, x, adapters).reshape(len(x), -1), self.out, self.out_bias, adapters)

    def stored(self, x: Float[Array, "T M"], ropes: RopeTables) -> Float[Array, "T K E"]:
        """Return what the layer stores of tokens, K and V side by side, without attending (DFlash's context)."""
        q_size, k_size, _ = projected(self.config)
        qkv = linear(x, self.qkv, self.qkv_bias)
        kv = self._keys_and_values(qkv[:, q_size : q_size + k_size], qkv[:, q_size + k_size :], ropes)
        assert kv is not None
        return kv

    def in_parts(
        self,
        x: Float[Array, "T M"],
        layer: int,
        positions: Int[Array, " T"],
        ropes: RopeTables,
        attend: Attend,
        adapters: AdapterIds | None,
        implementation: Implementation,
    ) -> Parts:
        """Return the same as a call, in parts.

        In place of q and kv, `attend` gets a `Projection`, which it norms, rotates and stores with that implementation.

        Raises NoElementwiseKernel if it cannot serve the layer.
        """
        config = self.config
        heads = heads_of(config)
        temperature = None if config.temperature is None else _temperature(config.temperature, positions)
        weights = HeadWeights(*(weight_of(norm) for norm in (self.q_norm, self.k_norm, self.v_norm)))
        qkv, rope = linear_parts(x, self.qkv, self.qkv_bias, adapters), tables_of(config, ropes)
        projection = Projection(qkv, heads, weights, rope, temperature, x.dtype, implementation)
        attend_projection: Callable[..., Array] = attend
        out = attend_projection(layer, projection, None, None if self.sinks is None else self.sinks[...])
        return linear_parts(self._gated(out, x, adapters).reshape(len(x), -1), self.out, self.out_bias, adapters)

    def _heads(self, norm: Normalize | None, x: Float[Array, "T n"]) -> Float[Array, "T N D"]:
        """Return x in heads, normed unless norms come after the rotation."""
        config = self.config
        heads = (len(x), -1, config.head_dim)
        if config.qk_norm_after_rope:
            return x.reshape(heads)
        return normed(norm, x).reshape(heads) if config.qk_norm_all_heads else normed(norm, x.reshape(heads))

    def _rotated(self, norm: Normalize | None, x: Float[Array, "T N D"], ropes: RopeTables) -> Float[Array, "T N D"]:
        """Return heads rotated, and normed if norms come after the rotation."""
        config = self.config
        turned = x if config.rope is None else rotate(x, config.rope, ropes)
        return normed(norm, turned) if config.qk_norm_after_rope else turned

    def _keys_and_values(
        self, k: Float[Array, "T k"], v: Float[Array, "T v"], ropes: RopeTables
    ) -> Float[Array, "T K E"] | None:
        """Return what the layer stores per token, K and V side by side; None if it reads another layer's KV."""
        config = self.config
        if config.kv_from is not None:
            return None
        values = k if config.keys_as_values else v
        values = normed(self.v_norm, values.reshape(len(k), config.num_kv_heads, config.v_head_dim))
        keys = self._rotated(self.k_norm, self._heads(self.k_norm, k)[..., -config.stored_head_dim :], ropes)
        if self.sink_key is not None:
            keys = keys - self.sink_key[...].astype(keys.dtype)[None]
        if config.v_scale != 1.0:
            values = values * jnp.asarray(config.v_scale, values.dtype)
        return jnp.concatenate([keys, values], axis=-1)

    def _gated(
        self, out: Float[Array, "T H V"], x: Float[Array, "T M"], adapters: AdapterIds | None
    ) -> Float[Array, "T H V"]:
        config = self.config.gate
        if config is None or self.gate is None:
            return out
        gate = linear(x, self.gate, None, adapters).reshape(*out.shape[:2], -1)
        if self.gate_bias is not None:
            gate = gate + self.gate_bias[...][None, :, None]
        function = jax.nn.sigmoid if config.activation == "sigmoid" else jax.nn.softplus
        gate = function(gate.astype(jnp.float32))
        return out * (gate if config.scale == 1.0 else gate * config.scale).astype(out.dtype)


def projected(config: AttentionConfig) -> tuple[int, int, int]:
    """Return the numbers of columns of q, k and v in the fused projection; 0 for each that the layer lacks."""
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.kv_from is not None:
        return q, 0, 0
    return q, k, 0 if config.keys_as_values else config.num_kv_heads * config.v_head_dim


def gates(config: AttentionConfig, gate: AttentionGate) -> int:
    """Return the number of gates per token."""
    return config.num_heads * (1 if gate.per_head else config.v_head_dim)


def _without(out: Float[Array, "T H V"], values: Float[Array, "T K V"]) -> Float[Array, "T H V"]:
    """Return the output of each head without its part along the token's own value."""
    own = jnp.repeat(values.astype(jnp.float32), out.shape[1] // values.shape[1], axis=1)
    wide = out.astype(jnp.float32)
    share = (wide * own).sum(axis=-1, keepdims=True) / ((own * own).sum(axis=-1, keepdims=True) + _LEAST_SQUARES)
    return (wide - share * own).astype(out.dtype)


def _temperature(config: Temperature, positions: Int[Array, " T"]) -> Float[Array, " T"]:
    steps = (positions.astype(jnp.float32) + config.offset) / config.period
    growth = config.rate * jnp.log1p(jnp.floor(steps) if config.whole else steps)
    return jnp.exp(growth) if config.power else 1.0 + growth


def scales_name(layer: int) -> str:
    """Return the name of a layer's scales among the parameters."""
    return f"layers.{layer}.attention.kv.scales"


def scales_of(params: Mapping[str, Array], attention: AttentionConfig, layer: int) -> Float32[Array, "2 K"] | None:
    """Return the scales of the KV that a layer reads, which may be another layer's (`kv_from`)."""
    return params.get(scales_name(layer if attention.kv_from is None else attention.kv_from))
