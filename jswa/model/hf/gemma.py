"""Parsers of gemma to gemma3, vaultgemma and rnj1: norms with weights 1 + w, embeddings times √d.

gemma4.py has Gemma 3n and 4.
"""

import dataclasses
import math
from typing import Any

from jswa.architecture import AttentionConfig, MlpConfig, ModelConfig, Norm, Reach, Rope
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import (
    CHUNKED,
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
from jswa.model.hf.fields import Fields
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


def rnj1(u: Usual) -> ModelConfig:
    """Parse rnj1, as vLLM 0.33 runs it: gemma3's block, whose chunked layers also see the chunk before the query's.

    `sliding_window` is the size of two chunks. Raises CheckpointError if `layer_types` is missing, if the window of
    chunked layers is not even, or if they have no rotary embedding of their own.
    """
    if u.fields.raw.get("layer_types") is None:
        raise u.fields.wrong("layer_types", f"must list {u.layers} of {FULL}, {CHUNKED}")
    types = layer_types(u, [FULL] * u.layers, (FULL, CHUNKED))
    own = FULL in u.fields.table("rope_parameters")
    theta = u.fields.number("rope_theta", 1e6)
    full = _own_rope(u, FULL, theta) if own else parse_rope(u, layer_type=FULL, theta=theta)
    kinds = {FULL: _attention(u, rope=full, qk_norm=_norm(u))}
    if CHUNKED in types:
        if not u.window or u.window % 2:
            raise u.fields.wrong("sliding_window", "must be even: it is the size of two chunks")
        reach = Reach(u.window // 2, chunked=True, lookback=1)
        kinds[CHUNKED] = _attention(u, rope=_own_rope(u, CHUNKED, 1e4), qk_norm=_norm(u), reach=reach)
    softcap = u.fields.optional_number("final_logit_softcapping", None)
    return decoder(u, [kinds[kind] for kind in types], gelu_mlp(u), sandwich(_norm(u)), **_rest(u, softcap))


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


def _own_rope(u: Usual, kind: str, theta: float) -> Rope:
    """Return the rotary embedding of a layer type from parameters of its own, which are read like flat ones."""
    tables = Fields(u.fields.table("rope_parameters"), f"{u.fields.where}: rope_parameters")
    if not isinstance(tables.raw.get(kind), dict):
        raise u.fields.wrong("rope_parameters", f"must have {kind}")
    own = Fields(tables.table(kind), f"{tables.where}.{kind}")
    flat = Fields({**u.fields.raw, "rope_parameters": own.raw, "rope_scaling": None}, u.fields.where)
    return parse_rope(dataclasses.replace(u, fields=flat), base=own.number("rope_theta", theta))


def _one_rope(u: Usual, norms: dict[str, Norm]) -> ModelConfig:
    types = layer_types(u, every(u, 2))
    base = _attention(u, rope=parse_rope(u), softcap=u.fields.null_or_number("attn_logit_softcapping", 50.0))
    softcap = u.fields.null_or_number("final_logit_softcapping", 30.0)
    return decoder(u, by_type(u, types, dict.fromkeys(types, base)), gelu_mlp(u), norms, **_rest(u, softcap))


def _rest(u: Usual, softcap: float | None) -> dict[str, Any]:
    return {"final_norm": _norm(u), "embed_scale": math.sqrt(u.d_model), "final_softcap": softcap}
