"""llama, mistral, qwen2, qwen3: llama's block, layers that differ in their window alone, one rotary embedding."""

from dataclasses import dataclass

from jswa.architecture import MlpConfig, ModelConfig, Norm, Reach
from jswa.model.hf.common import (
    FULL,
    SLIDING,
    activation,
    attention,
    head_size,
    num_layers,
    pre_norm_model,
    reaches,
    with_reaches,
)
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope


@dataclass(frozen=True)
class _Defaults:
    """What a family's config class says where config.json is silent. `head_dim` None: hidden size / heads."""

    vocab: int
    intermediate: int
    max_position: int
    kv_heads: int | None
    head_dim: int | None = None


def llama(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """All layers full."""
    bias, defaults = fields.boolean("attention_bias", False), _Defaults(32000, 11008, 2048, kv_heads=None)
    none: list[Reach | None] = [None] * num_layers(fields, 32)
    return _model(fields, eos, "llama", none, defaults, qkv_bias=bias, out_bias=bias, mlp_bias=True)


def mistral(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """All layers slide, or none where sliding_window is null; `layer_types` (ministral) wins where it is given."""
    window = fields.optional_integer("sliding_window", 4096)
    types = [FULL if window is None else SLIDING] * num_layers(fields, 32)
    types = fields.layer_types(types, allowed=(FULL, SLIDING))
    return _model(
        fields,
        eos,
        "mistral",
        reaches(fields, types, "sliding_window", window),
        _Defaults(32000, 14336, 131072, kv_heads=8),
    )


def qwen2(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Biases on q, k and v; layers from max_window_layers on slide, if any do."""
    defaults = _Defaults(151936, 22016, 32768, kv_heads=32)
    return _model(fields, eos, "qwen2", _qwen_reaches(fields), defaults, qkv_bias=True)


def qwen3(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """qwen2 with norms on q and k, and no biases unless asked for."""
    bias, defaults = fields.boolean("attention_bias", False), _Defaults(151936, 22016, 32768, kv_heads=32, head_dim=128)
    return _model(fields, eos, "qwen3", _qwen_reaches(fields), defaults, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen_reaches(fields: Fields) -> list[Reach | None]:
    count = num_layers(fields, 32)
    window = fields.optional_integer("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, low=0)
    types = [SLIDING if window is not None and index >= first else FULL for index in range(count)]
    return reaches(fields, fields.layer_types(types, allowed=(FULL, SLIDING)), "sliding_window", window)


def _model(
    fields: Fields,
    eos: tuple[int, ...],
    family: str,
    layers: list[Reach | None],
    defaults: _Defaults,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    heads, d_model = fields.integer("num_attention_heads", 32, high=4096), fields.width("hidden_size", 4096)
    head_dim = head_size(fields, heads, d_model, defaults.head_dim)
    norm = Norm(fields.number("rms_norm_eps", 1e-6))
    max_position = fields.integer("max_position_embeddings", defaults.max_position)
    base = attention(
        heads,
        fields.optional_integer("num_key_value_heads", defaults.kv_heads, high=4096) or heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=parse_rope(fields, head_dim, max_position),
        qk_norm=norm if qk_norm else None,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    mlp = MlpConfig(
        fields.width("intermediate_size", defaults.intermediate),
        activation(fields, "hidden_act", "silu"),
        bias=mlp_bias and fields.boolean("mlp_bias", False),
    )
    return pre_norm_model(
        fields,
        eos,
        family=family,
        attentions=with_reaches(base, layers),
        mlps=[mlp] * len(layers),
        norm=norm,
        d_model=d_model,
        vocab=defaults.vocab,
        max_position=max_position,
    )
