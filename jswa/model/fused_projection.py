"""The projection of q, k and v, as a layer passes it to the kernel that norms, rotates and writes in one."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jswa.architecture import AttentionConfig, ModelConfig, Norm, Rope
from jswa.model.fused_products import rms_of
from jswa.model.layers import RopeTables
from pallas_kernels.elementwise.api import Implementation
from pallas_kernels.elementwise.arguments import Heads, HeadWeights, Parts, Rms
from pallas_kernels.errors import NoElementwiseKernel


class Projection(NamedTuple):
    """Arguments of `rotate_and_write` that the layer knows.

    Attributes:
        heads: with rows for the heads of a group alone.
        dtype: of the activations.
    """

    qkv: Parts
    heads: Heads
    weights: HeadWeights
    rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None
    temperature: Float[Array, " T"] | None
    dtype: jnp.dtype
    implementation: Implementation

    def stored(self) -> Float[Array, "T K E"]:
        """Return K and V before norms and rotation, which are finite where what is stored is; in no order."""
        first = self.heads.heads * self.heads.head_dim
        total = self.qkv.values[:, :, first:].astype(jnp.float32).sum(axis=0).astype(self.dtype)
        if self.qkv.bias is not None:
            total = total + self.qkv.bias[None, first:]
        return total.reshape(len(total), self.heads.kv_heads, -1)


def heads_of(config: AttentionConfig) -> Heads:
    """Return the static parameters of a layer's heads. Raises NoElementwiseKernel if the kernel cannot serve them."""
    unserved = {
        "kv_from": config.kv_from is not None,
        "keys_as_values": config.keys_as_values,
        "qk_norm_all_heads": config.qk_norm_all_heads,
        "qk_norm_after_rope": config.qk_norm_after_rope,
        "key_sinks": config.key_sinks,
        "exclusive": config.exclusive,
        "stored_head_dim": config.stored_head_dim != config.head_dim,
    }
    for name, found in unserved.items():
        if found:
            raise NoElementwiseKernel(f"attention layers with {name}: choose elementwise=xla for this model")

    def norm(given: Norm | None) -> Rms | None:
        return None if given is None else rms_of(given)

    norms = norm(config.qk_norm), norm(config.qk_norm), norm(config.v_norm)
    group = config.num_heads // config.num_kv_heads
    own = Heads(config.num_heads, config.num_kv_heads, config.head_dim, *norms, rows=group)
    pairs = config.rope is not None and config.rope.interleaved
    return own._replace(v_head_dim=config.v_head_dim, v_scale=config.v_scale, interleaved=pairs)


def require_served(model: ModelConfig, implementation: Implementation) -> None:
    """Raise NoElementwiseKernel if a layer of the model needs more than the elementwise kernels do, with the reason."""
    if model.has_tail:
        raise NoElementwiseKernel("layers without KV at the end: choose elementwise=xla for this model")
    for layer in model.layers:
        more = (
            layer.parallel or layer.side or layer.scalar or layer.keeps_normed or model.per_layer_input or model.altup
        )
        if more:
            raise NoElementwiseKernel("a layer is more than attention and feed-forward: choose elementwise=xla")
        heads = heads_of(layer.attention)
        if implementation == "cpu":
            from pallas_kernels.cpu import elementwise as cpu

            cpu.require_served(heads)
        elif implementation == "mosaic":
            _require_hopper(model.d_model, heads, layer.attention.rope)
        for norm in (layer.pre_attn, layer.post_attn, layer.pre_mlp, layer.post_mlp, model.final_norm):
            if norm is not None:
                rms_of(norm)


def _require_hopper(width: int, heads: Heads, embedding: Rope | None) -> None:
    """Raise NoElementwiseKernel if Hopper's kernels cannot serve the model's width or such heads."""
    from pallas_kernels.elementwise.hopper import layouts, rope  # loads Mosaic's compiler

    list(layouts.chunks(width))
    rope.require_served(heads, 0 if embedding is None else len(embedding.inv_freq))


def tables_of(config: AttentionConfig, ropes: RopeTables) -> tuple[Array, Array] | None:
    """Return the layer's cos and sin, if it rotates."""
    return None if config.rope is None else ropes[config.rope]
