"""The decoder as a trainer runs it: whole texts, dense attention, gradients. For models that one device trains."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.model.attention import Attend
from jswa.model.binding import bind
from jswa.model.transformer import Params
from jswa.model.weights.load import load_checkpoint
from jswa.running.handed_over import handed_over
from jswa.storage.hub import find_model

__all__ = ["dense_attend", "handed_over", "logprobs", "parameters", "visible_keys"]


def parameters(model: str | Path = "tiny", dtype: str = "float32") -> Params:
    """Return the parameters of a checkpoint in the decoder's own names, which `LLM.update_weights` takes back.

    Raises ModelError.
    """
    return load_checkpoint(find_model(model), jnp.dtype(dtype))[1]


@partial(jax.jit, static_argnums=0)
def logprobs(model: ModelConfig, params: Params, texts: Int[Array, "B T"]) -> Float[Array, "B T1"]:
    """Return the log probability of each token but the first, given those before it; differentiable in `params`.

    `score` computes the same by other programs, so the two differ by rounding. Tokens behind the end of a text change
    nothing before them. Memory grows with T². The model is `llm.engine.model`, the parameters those of `parameters`.
    """
    with jax.default_matmul_precision("highest"):
        decoder = bind(model, params)

        def one(tokens: Int[Array, " T"]) -> Float[Array, " T1"]:
            hidden = decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32), dense_attend(model))
            table = jax.nn.log_softmax(decoder.logits(hidden[:-1]), axis=-1)
            return jnp.take_along_axis(table, tokens[1:, None], axis=-1)[:, 0]

        found: Float[Array, "B T1"] = jax.vmap(one)(texts)
        return found


def dense_attend(model: ModelConfig) -> Attend:
    """Return causal attention over one whole text, for every kind of layer."""
    stored: dict[int, Float[Array, "T K E"]] = {}

    def attend(
        layer: int,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T K E"] | None,
        sinks: Float[Array, " H"] | None,
        /,
    ) -> Float[Array, "T H V"]:
        attention = model.layers[layer].attention
        if kv is not None:
            stored[layer] = kv
        both = stored[layer if attention.kv_from is None else attention.kv_from]
        keys, values = both[..., : q.shape[-1]], both[..., -attention.v_head_dim :]
        return _attention(attention, q, keys, values, sinks)

    return attend


def _attention(
    a: AttentionConfig,
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H V"]:
    length, heads, groups = len(q), a.num_heads, a.num_heads // a.num_kv_heads
    by_head = q.reshape(length, a.num_kv_heads, groups, -1)
    scores = jnp.einsum("tkgd,skd->kgts", by_head, k, preferred_element_type=jnp.float32) * a.scale
    if a.softcap is not None:
        scores = a.softcap * jnp.tanh(scores / a.softcap)
    scores = jnp.where(visible_keys(a, length), scores, -jnp.inf).reshape(heads, length, length)
    if sinks is not None:  # keys without a value
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (heads, length, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., :length].reshape(a.num_kv_heads, groups, length, length)
    out = jnp.einsum("kgts,skv->tkgv", shares.astype(v.dtype), v)
    return out.reshape(length, heads, -1).astype(q.dtype)


def visible_keys(a: AttentionConfig, length: int) -> Bool[np.ndarray, "T T"]:
    """Return which keys (columns) each query sees."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    seen: Bool[np.ndarray, "T T"] = key <= query
    if a.reach is not None:
        seen &= key >= a.reach.oldest(query)
    return seen
