"""gemma2, gemma3, vaultgemma: norms with weights 1 + w, embeddings times √d. Gemma 3n and 4 are in gemma4.py."""

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


def gemma2(u: Usual) -> ModelConfig:
    """Every second layer full; softcaps on scores and logits, unless null."""
    return _one_rope(u, sandwich(_norm(u)))


def vaultgemma(u: Usual) -> ModelConfig:
    """gemma2 without norms behind attention and feed-forward."""
    return _one_rope(u, llama_norms(_norm(u)))


def gemma3(u: Usual) -> ModelConfig:
    """Every sixth layer full; q and k norms; one rotary embedding per layer type."""
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
    """Gemma's feed-forward."""
    return mlp(u, activation=activation(u, "hidden_activation", "gelu_pytorch_tanh"), **changes)


def causal(u: Usual) -> None:
    """Raise UnsupportedModel for an encoder's attention; "vision" concerns images alone."""
    both = u.fields.raw.get("use_bidirectional_attention")
    if both not in (None, False, "vision"):
        raise UnsupportedModel(
            f"{u.fields.where}: use_bidirectional_attention = {shown(both)} is not a decoder's attention"
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
