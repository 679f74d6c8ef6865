"""Parsers of gemma to gemma3 and vaultgemma: norms with weights 1 + w, embeddings times √d. gemma4.py has 3n and 4."""

import dataclasses
import math
from typing import Any

from jswa.architecture import AttentionConfig, MlpConfig, ModelConfig, Norm
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import (
    FULL,
    SLIDING,
    Usual,
    activation,
    attention,
    biased,
    by_type,
    decoder,
    every,
    layer_types,
    llama_norms,
    mlp,
    sandwich,
)
from jswa.model.hf.rope import parse_rope
from jswa.storage.json_object import shown


def gemma(u: Usual) -> ModelConfig:
    """Parse gemma: all layers are full; `gelu` means its approximation by tanh, as in transformers.

    Raises UnsupportedModel for bidirectional attention.
    """
    if u.fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModel(f"{u.fields.where}: use_bidirectional_attention = true is not implemented")
    unit = activation(u, default="gelu_pytorch_tanh")
    feed = mlp(u, activation="gelu_tanh" if unit == "gelu" else unit)
    base = attention(u, rope=parse_rope(u), **biased(u))
    return decoder(u, [base] * u.layers, feed, llama_norms(_norm(u)), **_rest(u, None))


def gemma2(u: Usual) -> ModelConfig:
    """Parse gemma2: every second layer is full; attention scores and logits have softcaps unless these are null."""
    return _one_rope(u, sandwich(_norm(u)))


def vaultgemma(u: Usual) -> ModelConfig:
    """Parse vaultgemma: as gemma2, without norms after attention and feed-forward."""
    return _one_rope(u, llama_norms(_norm(u)))


def gemma3(u: Usual) -> ModelConfig:
    """Parse gemma3: every sixth layer is full; q and k are normed; each layer type has its own rotary embedding."""
    types = layer_types(u, every(u, u.fields.integer("sliding_window_pattern", 6)))
    full = parse_rope(u, layer_type=FULL, theta=1e6)
    sliding = parse_rope(u, layer_type=SLIDING, theta_key="rope_local_base_freq", theta=1e4, scaled=False)
    kinds = {
        FULL: _attention(u, rope=full, qk_norm=_norm(u)),
        SLIDING: _attention(u, rope=sliding, qk_norm=_norm(u)),
    }
    softcap = u.fields.optional_number("final_logit_softcapping", None)
    return decoder(u, by_type(u, types, kinds), gelu_mlp(u), sandwich(_norm(u)), **_rest(u, softcap))


def gelu_mlp(u: Usual, **changes: Any) -> MlpConfig:
    """Return Gemma's feed-forward."""
    return mlp(u, activation=activation(u, "hidden_activation", "gelu_pytorch_tanh"), **changes)


def causal(u: Usual) -> None:
    """Raise UnsupportedModel for bidirectional attention; `vision` is allowed, because it concerns images only."""
    both = u.fields.raw.get("use_bidirectional_attention")
    if both not in (None, False, "vision"):
        raise UnsupportedModel(
            f"{u.fields.where}: use_bidirectional_attention = {shown(both)}: must be false or vision"
        )


def _norm(u: Usual) -> Norm:
    return dataclasses.replace(u.norm, offset=1.0, cast_first=False)


def _attention(u: Usual, **rest: Any) -> AttentionConfig:
    causal(u)
    return attention(u, scale=u.fields.number("query_pre_attn_scalar", 256.0) ** -0.5, **biased(u), **rest)


def _one_rope(u: Usual, norms: dict[str, Norm]) -> ModelConfig:
    types = layer_types(u, every(u, 2))
    base = _attention(u, rope=parse_rope(u), softcap=u.fields.null_or_number("attn_logit_softcapping", 50.0))
    softcap = u.fields.null_or_number("final_logit_softcapping", 30.0)
    return decoder(u, by_type(u, types, dict.fromkeys(types, base)), gelu_mlp(u), norms, **_rest(u, softcap))


def _rest(u: Usual, softcap: float | None) -> dict[str, Any]:
    return {"final_norm": _norm(u), "embed_scale": math.sqrt(u.d_model), "final_softcap": softcap}
