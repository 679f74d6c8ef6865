"""What adapters of several families share: layers and attention from the usual keys."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jswa.architecture import Activation, AttentionConfig, LayerConfig, MlpConfig, ModelConfig, MoeConfig, Norm, Reach
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.fields import Fields

MAX_LAYERS = 512
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def num_layers(fields: Fields, default: int) -> int:
    """`num_hidden_layers`."""
    return fields.integer("num_hidden_layers", default, high=MAX_LAYERS)


def head_size(fields: Fields, heads: int, d_model: int, default: int | None) -> int:
    """`head_dim`, or the share of one head in the width. Raises CheckpointError where that is nothing."""
    size = fields.optional_width("head_dim", default) or d_model // heads
    if size < 1:
        raise CheckpointError(f"{fields.where}: num_attention_heads = {heads} must be at most hidden_size = {d_model}")
    return size


def reaches(fields: Fields, types: Sequence[str], size_key: str, size: int | None) -> list[Reach | None]:
    """What each layer sees, by its layer type. Raises CheckpointError for local layers without a size."""
    if size is None and set(types) - {FULL}:
        raise CheckpointError(f"{fields.where}: {size_key} = None, but the model has local layers")
    return [None if kind == FULL or size is None else Reach(size, chunked=kind == CHUNKED) for kind in types]


def attention(heads: int, kv_heads: int, head_dim: int, v_head_dim: int | None = None, **rest: Any) -> AttentionConfig:
    """AttentionConfig, once its head counts fit together. Raises CheckpointError."""
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        )
    return AttentionConfig(heads, kv_heads, head_dim, v_head_dim or head_dim, **rest)


def activation(fields: Fields, key: str, default: str) -> Activation:
    """The activation function that a key names. Raises UnsupportedModel."""
    name = fields.string(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.where}: {key} = {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def pre_norm_layer(attention: AttentionConfig, mlp: MlpConfig | MoeConfig, norm: Norm) -> LayerConfig:
    """llama's block: a norm before attention and before the feed-forward, none behind."""
    return LayerConfig(attention, mlp, pre_attn=norm, post_attn=None, pre_mlp=norm, post_mlp=None)


def pre_norm_model(
    fields: Fields,
    eos: tuple[int, ...],
    *,
    family: str,
    attentions: Sequence[AttentionConfig],
    mlps: Sequence[MlpConfig | MoeConfig],
    norm: Norm,
    d_model: int,
    vocab: int,
    max_position: int,
) -> ModelConfig:
    """A model of llama's blocks."""
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", vocab),
        d_model=d_model,
        max_position=max_position,
        layers=tuple(pre_norm_layer(a, m, norm) for a, m in zip(attentions, mlps, strict=True)),
        final_norm=norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=eos,
    )


def with_reaches(base: AttentionConfig, reaches: Sequence[Reach | None]) -> list[AttentionConfig]:
    """One layer's attention for each reach."""
    return [dataclasses.replace(base, reach=reach) for reach in reaches]
