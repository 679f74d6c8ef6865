"""Dense attention for training: the signature of the paged attention, and fast gradients on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jswa.architecture import AttentionConfig, ModelConfig, Reach
from jswa.model.attention import Attend

BLOCK = 128  # queries per block of a full layer


def dense_attend(config: ModelConfig) -> Attend:
    """Return causal attention over one whole sequence."""

    def attend(
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        _sinks: Float[Array, " H"] | None,
        /,
    ) -> Float[Array, "T H V"]:
        assert kv is not None
        k, v = jnp.split(kv, 2, axis=-1)
        attention = config.layers[layer].attention
        return (
            _full(attention, q, k, v) if attention.reach is None else _local(attention, attention.reach.size, q, k, v)
        )

    return attend


def without_full_layers(config: ModelConfig, window: int) -> ModelConfig:
    """Return the same model with its full layers cut to a window, to prove that they carry what is far away."""
    layers = [
        dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, reach=layer.attention.reach or Reach(window))
        )
        for layer in config.layers
    ]
    return dataclasses.replace(config, layers=tuple(layers))


def _full(a: AttentionConfig, q: Array, k: Array, v: Array) -> Array:
    """Attend block by block of queries, each to the keys up to its end: about half of all T x T scores."""
    length, outs = len(q), []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        visible = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
        outs.append(_attention(a, q[start:end], k[:end], v[:end], visible))
    return jnp.concatenate(outs)


def _local(a: AttentionConfig, window: int, q: Array, k: Array, v: Array) -> Array:
    """Attend from each block of `window` queries to its own and the previous block: T x 2W scores, not T x T."""
    length = len(q)
    pad = -length % window

    def blocks(x: Array) -> Array:
        return jnp.pad(x, ((0, pad), (0, 0), (0, 0))).reshape(-1, window, *x.shape[1:])

    def with_previous(x: Array) -> Array:
        return jnp.concatenate([jnp.roll(x, 1, axis=0), x], axis=1)

    keys = jnp.arange(2 * window)[None, :]
    queries = jnp.arange(window)[:, None] + window
    visible = (keys <= queries) & (keys > queries - window)
    first = jnp.arange((length + pad) // window)[:, None, None] == 0
    visible = visible[None] & ~(first & (keys < window)[None])
    out = jax.vmap(lambda *x: _attention(a, *x))(blocks(q), with_previous(blocks(k)), with_previous(blocks(v)), visible)
    return out.reshape(-1, *out.shape[2:])[:length]


def _attention(a: AttentionConfig, q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Return the softmax attention [T, H, V] of T queries to S keys under the mask `visible` [T, S].

    The query heads of one KV head are rows of one matrix product, which is faster on XLA's CPU backend.
    """
    rows = q.reshape(len(q), a.num_kv_heads, -1, a.head_dim).transpose(1, 2, 0, 3)
    groups = rows.shape[1]
    scores = (rows.reshape(a.num_kv_heads, -1, a.head_dim) * a.scale) @ k.transpose(1, 2, 0)
    scores = jnp.where(jnp.tile(visible, (groups, 1))[None], scores, -1e30)
    powers = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    out = (powers @ v.transpose(1, 0, 2)) / powers.sum(axis=-1, keepdims=True)
    out = out.reshape(a.num_kv_heads, groups, len(q), a.v_head_dim).transpose(2, 0, 1, 3)
    return out.reshape(len(q), a.num_heads, a.v_head_dim)
