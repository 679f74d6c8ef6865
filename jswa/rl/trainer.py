"""The decoder as a trainer runs it: whole texts, dense attention, gradients. For models that one device trains."""

from collections.abc import Sequence
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
from jswa.types import MAX_SAMPLING_MASK

__all__ = ["dense_attend", "handed_over", "logprobs", "parameters", "sampling_masks", "visible_keys"]


def parameters(model: str | Path = "tiny", dtype: str = "float32") -> Params:
    """Return the parameters of a checkpoint in the decoder's own names, which `LLM.update_weights` takes back.

    Raises ModelError.
    """
    return load_checkpoint(find_model(model), jnp.dtype(dtype))[1]


@partial(jax.jit, static_argnums=0)
def logprobs(
    model: ModelConfig,
    params: Params,
    texts: Int[Array, "B T"],
    masks: Int[Array, "B T1 n"] | None = None,
    temperature: float = 1.0,
) -> Float[Array, "B T1"]:
    """Return the log probability of each token but the first, given those before it; differentiable in `params`.

    `score` computes the same by other programs, so the two differ by rounding. Tokens behind the end of a text change
    nothing before them. Memory grows with T². The model is `llm.engine.model`, the parameters those of `parameters`.

    Args:
        masks: the ids of the tokens from which each token was drawn (`sampling_masks`): probabilities are shared among
            these alone, as in the rollout (DeepSeek-V3.2, §3.1). Negative ids are none; a token without ids has the
            whole vocabulary.
        temperature: of the rollout.
    """
    with jax.default_matmul_precision("highest"):
        decoder = bind(model, params)

        def one(tokens: Int[Array, " T"], mask: Int[Array, "T1 n"] | None) -> Float[Array, " T1"]:
            hidden = decoder(tokens, jnp.arange(len(tokens), dtype=jnp.int32), dense_attend(model))
            logits = decoder.logits(hidden[:-1]) / temperature
            total = jax.nn.logsumexp(logits, axis=-1)
            if mask is not None:
                kept = jnp.where(mask >= 0, jnp.take_along_axis(logits, jnp.maximum(mask, 0), axis=-1), -jnp.inf)
                some = (mask >= 0).any(axis=-1)
                # The gradient of the branch that is not chosen must be finite too.
                among = jax.nn.logsumexp(jnp.where(some[:, None], kept, 0.0), axis=-1)
                total = jnp.where(some, among, total)
            return jnp.take_along_axis(logits, tokens[1:, None], axis=-1)[:, 0] - total

        found: Float[Array, "B T1"] = jax.vmap(one, in_axes=(0, None if masks is None else 0))(texts, masks)
        return found


def sampling_masks(
    kept: Sequence[Int[np.ndarray, " n"]], begin: int, length: int, width: int = MAX_SAMPLING_MASK
) -> Int[np.ndarray, "T1 width"]:
    """Return the masks of a text for `logprobs`, of its tokens from the second on.

    Args:
        kept: a completion's `sampling_mask`.
        begin: tokens of the prompt.
        length: of the text with what pads it, T.
        width: ids of a token at most.

    Raises ValueError if a token has more ids, or the text is longer than `length`.
    """
    if begin + len(kept) > length or max((len(ids) for ids in kept), default=0) > width:
        raise ValueError(f"length = {length}, width = {width}: must have room for the text and for every mask")
    found = np.full((length - 1, width), -1, np.int32)
    for place, ids in enumerate(kept, start=begin - 1):
        found[place, : len(ids)] = ids
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
