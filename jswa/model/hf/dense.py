"""Parsers of dense models with llama's block; they differ in windows, rotary embedding, biases, and q and k norms."""

from typing import Any

from jswa.architecture import MlpConfig, ModelConfig, Norm, Reach, Temperature
from jswa.errors import CheckpointError
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
    reaches,
    sliding_from,
)
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def llama(u: Usual) -> ModelConfig:
    """Parse llama: all layers are full."""
    feed = mlp(u, bias=u.fields.boolean("mlp_bias", False))
    return _model(u, [None] * u.layers, feed, rope=parse_rope(u), **biased(u))


def mistral(u: Usual) -> ModelConfig:
    """Parse mistral: all layers slide, or none if sliding_window is null; `layer_types` (ministral) overrides this."""
    return _model(u, _all_or_none(u), mlp(u), rope=parse_rope(u))


def ministral3(u: Usual) -> ModelConfig:
    """Parse ministral3: queries are scaled by position; all layers slide, or none."""
    rope = u.fields.table("rope_parameters") or u.fields.table("rope_scaling") or _MINISTRAL3_ROPE
    fields = Fields(rope, f"{u.fields.where}: rope_parameters")
    beta = None if not rope.get("llama_4_scaling_beta") else fields.number("llama_4_scaling_beta", None)
    original = fields.number("original_max_position_embeddings", float(u.max_position))
    temperature = None if beta is None else Temperature(original, beta, offset=0)
    types = sliding_from(u, u.window, 0)  # transformers ignores layer_types here
    rotary = parse_rope(u, default=_MINISTRAL3_ROPE)
    return _model(u, reaches(u, types), mlp(u), rope=rotary, temperature=temperature)


def qwen2(u: Usual) -> ModelConfig:
    """Parse qwen2: q, k and v have biases; layers from max_window_layers on slide if use_sliding_window is set."""
    return _model(u, _qwen_reaches(u), mlp(u), rope=parse_rope(u), qkv_bias=True)


def qwen3(u: Usual) -> ModelConfig:
    """Parse qwen3: as qwen2, with norms on q and k, and without biases by default."""
    return _model(u, _qwen_reaches(u), mlp(u), rope=parse_rope(u), qk_norm=u.norm, **biased(u))


def phi3(u: Usual) -> ModelConfig:
    """Parse phi3: a part of each head is rotated, possibly by LongRoPE; all layers slide, or none."""
    rope = parse_rope(u, partial=1.0, aliases={"su": "longrope", "yarn": "longrope"})
    return _model(u, reaches(u, sliding_from(u, u.window, 0)), mlp(u), rope=rope)


def starcoder2(u: Usual) -> ModelConfig:
    """Parse starcoder2: LayerNorms and biases everywhere, no gate in the feed-forward; all layers slide, or none."""
    bias = u.fields.boolean("use_bias", True)
    norm = Norm(u.fields.number("norm_epsilon", 1e-5), centered=True, bias=True)
    feed = mlp(u, activation=activation(u, default="gelu_pytorch_tanh"), gated=False, bias=bias)
    base = attention(u, rope=parse_rope(u), qkv_bias=bias, out_bias=bias)
    types = sliding_from(u, u.window, 0)
    return decoder(u, by_type(u, types, dict.fromkeys(types, base)), feed, llama_norms(norm), final_norm=norm)


def smollm3(u: Usual) -> ModelConfig:
    """Parse smollm3: every fourth layer is not rotated, and with use_sliding_window these layers slide."""
    interval = u.fields.integer("no_rope_layer_interval", 4)
    rotated = flags(u, "no_rope_layers", [int((i + 1) % interval != 0) for i in range(u.layers)])
    slides = u.fields.boolean("use_sliding_window", False)
    types = layer_types(u, [SLIDING if slides and u.window and not rope else FULL for rope in rotated])
    rope = parse_rope(u, theta=2e6)
    attentions = [
        attention(u, rope=rope if rotates else None, reach=reach, **biased(u))
        for rotates, reach in zip(rotated, reaches(u, types), strict=True)
    ]
    return decoder(u, attentions, mlp(u, bias=u.fields.boolean("mlp_bias", False)), llama_norms(u.norm))


def cwm(u: Usual) -> ModelConfig:
    """Parse cwm: the first of every four layers is full."""
    types = layer_types(u, every(u, 4, full_at=0))
    feed = mlp(u, bias=u.fields.boolean("mlp_bias", False))
    return _model(u, reaches(u, types), feed, rope=parse_rope(u, theta=1e6, default=_CWM_ROPE))


def flags(u: Usual, key: str, default: list[int]) -> list[int]:
    """Return a list of 0 and 1 per layer; an empty list counts as absent. Raises CheckpointError."""
    value = u.fields.raw.get(key) or default
    if not isinstance(value, list) or len(value) < u.layers or not all(entry in (0, 1) for entry in value):
        raise u.fields.wrong(key, f"must list {u.layers} of 0 and 1")
    return value[: u.layers]


def _all_or_none(u: Usual) -> list[Reach | None]:
    return reaches(u, layer_types(u, sliding_from(u, u.window, 0)))


def _qwen_reaches(u: Usual) -> list[Reach | None]:
    window = u.window if u.fields.boolean("use_sliding_window", False) else None
    types = layer_types(u, sliding_from(u, window, u.fields.integer("max_window_layers", 28, low=0)))
    if window is None and set(types) - {FULL}:
        raise CheckpointError(f"{u.fields.where}: use_sliding_window = false, but layer_types has local layers")
    return reaches(u, types)


def _model(u: Usual, layers: list[Reach | None], feed: MlpConfig, **changes: Any) -> ModelConfig:
    attentions = [attention(u, reach=reach, **changes) for reach in layers]
    return decoder(u, attentions, feed, llama_norms(u.norm))
