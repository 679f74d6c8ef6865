"""Hugging Face config.json to ModelConfig: one adapter per model_type.

Facts per family are transformers 5.23's: a key that is absent has the default of that family's config class, since
checkpoints on the hub leave such keys out. Old hub forms and version-5 forms of the rotary parameters both parse.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jswa.config import Activation, AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.fields import Fields
from jswa.model.rope_hf import parse_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_MAX_LAYERS = 512
_MAX_WIDTH = 2**20


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a checkpoint folder.

    Raises CheckpointError where a file is missing, is not JSON, or has a key of the wrong type or range;
    UnsupportedModel where the architecture, or a feature it asks for, is not implemented.
    """
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(raw, eos_token_id=eos)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def parse_config(raw: dict[str, Any], *, eos_token_id: object = None) -> ModelConfig:
    """Derive the ModelConfig of a config.json. `eos_token_id` (generation_config.json) wins over the config's own."""
    outer = Fields(raw, "config.json")
    family = outer.string("model_type", None)
    fields = outer
    if family in _WRAPPERS:
        fields = Fields(outer.table("text_config"), "config.json: text_config")
        family = fields.string("model_type", _WRAPPERS[family])
    if family not in _ADAPTERS:
        raise UnsupportedModel(f"config.json: model_type = {family!r} is not one of {', '.join(sorted(_ADAPTERS))}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None or fields.raw.get(key) is not None:
            raise UnsupportedModel(f"config.json: {key} asks for quantised weights, which are not implemented")
    eos = eos_token_id if eos_token_id is not None else fields.raw.get("eos_token_id", raw.get("eos_token_id"))
    model = _ADAPTERS[family](fields, _token_ids(eos))
    if fields is not outer:
        # Of a multimodal checkpoint's text part transformers reads these from the top level, and caps no logits.
        tied = outer.boolean("tie_word_embeddings", True)
        model = dataclasses.replace(model, tie_embeddings=tied, final_softcap=None)
    return model


def _llama(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    count = fields.integer("num_hidden_layers", 32, high=_MAX_LAYERS)
    return _pre_norm(
        fields,
        eos,
        windows=[None] * count,
        intermediate=11008,
        kv_heads=None,
        max_position=2048,
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _mistral(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """All layers slide, or none where sliding_window is null; `layer_types` (ministral) wins where it is given."""
    window = fields.optional_integer("sliding_window", 4096)
    count = fields.integer("num_hidden_layers", 32, high=_MAX_LAYERS)
    default_types = ["full_attention" if window is None else "sliding_attention"] * count
    types = fields.layer_types(default_types, allowed=("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in types:
        raise CheckpointError(f"{fields.where}: sliding_window = None, but layer_types has sliding layers")
    return _pre_norm(
        fields,
        eos,
        windows=[window if kind == "sliding_attention" else None for kind in types],
        intermediate=14336,
        kv_heads=8,
        max_position=131072,
        attention_bias=False,
        mlp_bias=False,
    )


def _pre_norm(
    fields: Fields,
    eos: tuple[int, ...],
    *,
    windows: list[int | None],
    intermediate: int,
    kv_heads: int | None,
    max_position: int,
    attention_bias: bool,
    mlp_bias: bool,
) -> ModelConfig:
    """llama's block, layers that differ in their window alone: pre-norm, SwiGLU, one rotary embedding."""
    heads = fields.integer("num_attention_heads", 32, high=4096)
    d_model = fields.integer("hidden_size", 4096, high=_MAX_WIDTH)
    head_dim = fields.optional_integer("head_dim", None, high=_MAX_WIDTH) or d_model // heads
    if head_dim < 1:
        raise CheckpointError(f"{fields.where}: num_attention_heads = {heads} must be at most hidden_size = {d_model}")
    norm = Norm(fields.number("rms_norm_eps", 1e-6))
    max_position = fields.integer("max_position_embeddings", max_position)
    attention = _attention(
        heads,
        fields.optional_integer("num_key_value_heads", kv_heads, high=4096) or heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=parse_rope(fields, head_dim, max_position),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
    )
    mlp = MlpConfig(
        fields.integer("intermediate_size", intermediate), _activation(fields, "hidden_act", "silu"), mlp_bias
    )
    layers = tuple(
        LayerConfig(
            dataclasses.replace(attention, window=window),
            mlp,
            pre_attn=norm,
            post_attn=None,
            pre_mlp=norm,
            post_mlp=None,
        )
        for window in windows
    )
    return ModelConfig(
        family=fields.string("model_type", "llama"),
        vocab_size=fields.integer("vocab_size", 32000),
        d_model=d_model,
        max_position=max_position,
        layers=layers,
        final_norm=norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=eos,
    )


def _gemma3(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Sandwich norms with 1 + w, q and k norms, one rotary embedding per layer type, √d embedding scale."""
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModel("config.json: use_bidirectional_attention = true is not a decoder's attention")
    d_model = fields.integer("hidden_size", 2304, high=_MAX_WIDTH)
    heads, kv_heads = fields.integer("num_attention_heads", 8, high=4096), fields.integer("num_key_value_heads", 4)
    head_dim = fields.integer("head_dim", 256, high=_MAX_WIDTH)
    norm = Norm(fields.number("rms_norm_eps", 1e-6), offset=1.0, cast_first=False)
    max_position = fields.integer("max_position_embeddings", 131072)
    mlp = MlpConfig(
        fields.integer("intermediate_size", 9216), _activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    )
    bias = fields.boolean("attention_bias", False)
    count = fields.integer("num_hidden_layers", 26, high=_MAX_LAYERS)
    pattern = fields.integer("sliding_window_pattern", 6)
    default_types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    types = fields.layer_types(default_types, allowed=("full_attention", "sliding_attention"))
    window = fields.optional_integer("sliding_window", 4096)
    if window is None and "sliding_attention" in types:
        raise CheckpointError(f"{fields.where}: sliding_window = None, but the model has sliding layers")
    by_type = {
        kind: LayerConfig(
            _attention(
                heads,
                kv_heads,
                head_dim,
                scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
                window=window if kind == "sliding_attention" else None,
                rope=parse_rope(
                    fields,
                    head_dim,
                    max_position,
                    layer_type=kind,
                    theta_key="rope_theta" if kind == "full_attention" else "rope_local_base_freq",
                    theta=1e6 if kind == "full_attention" else 1e4,
                    scaled=kind == "full_attention",
                ),
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm,
            ),
            mlp,
            pre_attn=norm,
            post_attn=norm,
            pre_mlp=norm,
            post_mlp=norm,
        )
        for kind in sorted(set(types))
    }
    return ModelConfig(
        family="gemma3",
        vocab_size=fields.integer("vocab_size", 262208),
        d_model=d_model,
        max_position=max_position,
        layers=tuple(by_type[kind] for kind in types),
        final_norm=norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        embed_scale=math.sqrt(d_model),
        final_softcap=fields.optional_number("final_logit_softcapping", None),
        eos_token_ids=eos,
    )


def _attention(heads: int, kv_heads: int, head_dim: int, **rest: Any) -> AttentionConfig:
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
        )
    return AttentionConfig(heads, kv_heads, head_dim, head_dim, **rest)


def _activation(fields: Fields, key: str, default: str) -> Activation:
    name = fields.string(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{fields.where}: {key} = {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(x, int) and x >= 0 for x in ids):
        raise CheckpointError(f"eos_token_id = {value!r} must be a token id or a list of token ids")
    return tuple(ids)


_WRAPPERS = {"gemma3": "gemma3_text"}
_ADAPTERS: dict[str, Callable[[Fields, tuple[int, ...]], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "gemma3_text": _gemma3,
}
