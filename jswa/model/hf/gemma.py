"""gemma2 and gemma3: norms before and behind each half of a layer, with weights 1 + w; embeddings times √d."""

import dataclasses
import math
from typing import Any

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import FULL, SLIDING, activation, attention, num_layers, reaches
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope


def gemma2(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Every second layer full; softcaps on scores and logits, unless null."""
    count = num_layers(fields, 26)
    types = [SLIDING if index % 2 == 0 else FULL for index in range(count)]
    types = fields.layer_types(types, allowed=(FULL, SLIDING))
    max_position = fields.integer("max_position_embeddings", 8192)
    rope = parse_rope(fields, fields.width("head_dim", 256), max_position)
    softcap = fields.null_or_number("attn_logit_softcapping", 50.0)
    base = _attention(fields, rope=rope, softcap=softcap)
    return _model(
        fields,
        eos,
        "gemma2",
        {FULL: base, SLIDING: base},
        types,
        vocab=256000,
        max_position=max_position,
        final_softcap=fields.null_or_number("final_logit_softcapping", 30.0),
    )


def gemma3(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Every sixth layer full; q and k norms; one rotary embedding per layer type."""
    count, pattern = num_layers(fields, 26), fields.integer("sliding_window_pattern", 6)
    types = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(count)]
    types = fields.layer_types(types, allowed=(FULL, SLIDING))
    max_position, head_dim = fields.integer("max_position_embeddings", 131072), fields.width("head_dim", 256)
    full = parse_rope(fields, head_dim, max_position, layer_type=FULL, theta=1e6)
    sliding = parse_rope(
        fields, head_dim, max_position, layer_type=SLIDING, theta_key="rope_local_base_freq", theta=1e4, scaled=False
    )
    norm = _norm(fields)
    by_type = {
        FULL: _attention(fields, rope=full, qk_norm=norm),
        SLIDING: _attention(fields, rope=sliding, qk_norm=norm),
    }
    return _model(
        fields,
        eos,
        "gemma3_text",
        by_type,
        types,
        vocab=262208,
        max_position=max_position,
        final_softcap=fields.optional_number("final_logit_softcapping", None),
    )


def _norm(fields: Fields) -> Norm:
    return Norm(fields.number("rms_norm_eps", 1e-6), offset=1.0, cast_first=False)


def _attention(fields: Fields, **rest: Any) -> AttentionConfig:
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModel(f"{fields.where}: use_bidirectional_attention = true is not a decoder's attention")
    bias = fields.boolean("attention_bias", False)
    return attention(
        fields.integer("num_attention_heads", 8, high=4096),
        fields.width("num_key_value_heads", 4),
        fields.width("head_dim", 256),
        scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        **rest,
    )


def _model(
    fields: Fields,
    eos: tuple[int, ...],
    family: str,
    by_type: dict[str, AttentionConfig],
    types: list[str],
    *,
    vocab: int,
    max_position: int,
    final_softcap: float | None,
) -> ModelConfig:
    norm, d_model = _norm(fields), fields.width("hidden_size", 2304)
    window = fields.optional_integer("sliding_window", 4096)
    mlp = MlpConfig(
        fields.width("intermediate_size", 9216), activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    )
    layers = [
        LayerConfig(
            dataclasses.replace(by_type[kind], reach=reach),
            mlp,
            pre_attn=norm,
            post_attn=norm,
            pre_mlp=norm,
            post_mlp=norm,
        )
        for kind, reach in zip(types, reaches(fields, types, "sliding_window", window), strict=True)
    ]
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", vocab),
        d_model=d_model,
        max_position=max_position,
        layers=tuple(layers),
        final_norm=norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        embed_scale=math.sqrt(d_model),
        final_softcap=final_softcap,
        eos_token_ids=eos,
    )
