"""KV geometry of a config.json, also of families that jswa cannot run yet: enough to say how much memory they need.

Only what KV takes is read: heads, head sizes, windows, which layers are local, which share another layer's KV.
"""

from collections.abc import Callable
from typing import Any

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, Norm, Reach
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.common import FULL, SLIDING, head_size, num_layers
from jswa.model.hf.config import FAMILIES, parse_config
from jswa.model.hf.fields import Fields

_TEXT_PARTS = ("text_config", "llm_config")


def kv_geometry(raw: dict[str, Any]) -> ModelConfig:
    """A ModelConfig of the layers that own KV; exact where jswa runs the family. Raises UnsupportedModel."""
    fields = Fields(raw, "config.json")
    for key in _TEXT_PARTS:
        if isinstance(raw.get(key), dict):
            fields = Fields({"model_type": raw.get("model_type"), **raw[key]}, f"config.json: {key}")
    family = fields.string("model_type", None)
    family = {"gemma3": "gemma3_text", "llama4": "llama4_text", "mimo_v2": "mimo_v2_flash"}.get(family, family)
    if family in FAMILIES:
        plain = {key: value for key, value in fields.raw.items() if "quantization" not in key}
        return parse_config({**plain, "model_type": family})
    if family not in _PATTERNS:
        raise UnsupportedModel(f"config.json: model_type = {family!r}: the geometry of this family is not known")
    return _model(fields, family)


def _model(fields: Fields, family: str) -> ModelConfig:
    count = num_layers(fields, 0)
    heads = fields.integer("num_attention_heads", None, high=4096)
    d_model = fields.width("hidden_size", None)
    types = fields.raw.get("layer_types") or _PATTERNS[family](fields, count)
    if not isinstance(types, list) or len(types) < count or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(f"{fields.where}: layer_types = {types}: must name the types of {count} layers")
    if _shared_layers(fields) >= count:
        raise CheckpointError(f"{fields.where}: num_kv_shared_layers must be less than the {count} layers")
    local_names = {SLIDING, "chunked_attention", "local_attention"}
    window = fields.optional_integer("sliding_window", None) or fields.optional_integer("attention_window", None)
    layers = []
    for index, kind in enumerate(list(types)[: count - _shared_layers(fields)]):
        local = kind in local_names and window is not None
        kv_heads, head_dim = _shape(fields, index, heads, d_model, local=local)
        reach = Reach(window) if local and window is not None else None
        layers.append(AttentionConfig(max(heads, kv_heads), kv_heads, head_dim, head_dim, 1.0, None, reach=reach))
    norm = Norm(1e-6)
    mlp = MlpConfig(1, "silu")  # takes no KV; gemma3n has a width per layer
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", 1),
        d_model=d_model,
        max_position=fields.integer("max_position_embeddings", 131072),
        layers=tuple(LayerConfig(a, mlp, norm, None, norm, None) for a in layers),
        final_norm=norm,
        tie_embeddings=True,
    )


def _shared_layers(fields: Fields) -> int:
    """Layers at the end that read another layer's KV and own none (gemma3n, gemma4)."""
    return fields.integer("num_kv_shared_layers", 0, low=0)


def _shape(fields: Fields, index: int, heads: int, d_model: int, *, local: bool) -> tuple[int, int]:
    """KV heads and head size of a layer, which gemma4 and step keep per type or per layer."""
    kv_heads = fields.optional_integer("num_key_value_heads", None) or fields.optional_integer(
        "num_attention_groups", None
    )
    head_dim = head_size(fields, heads, d_model, None)
    if not local:
        kv_heads = fields.optional_integer("num_global_key_value_heads", None) or kv_heads
        head_dim = fields.optional_integer("global_head_dim", None) or head_dim
    own = fields.table("per_layer_config").get(str(index))
    if isinstance(own, dict):
        layer = Fields(own, f"{fields.where}: per_layer_config.{index}")
        return layer.integer("num_key_value_heads", kv_heads or heads), layer.integer("head_dim", head_dim)
    return kv_heads or heads, head_dim


def _every(period_key: str | None, default: int, *, full_at: int = -1) -> Callable[[Fields, int], list[str]]:
    """Full layers where i mod period = full_at (mod period), the rest local."""

    def pattern(fields: Fields, count: int) -> list[str]:
        value = fields.raw.get(period_key) if period_key else None
        period = len(value) if isinstance(value, str) else value if isinstance(value, int) else default
        if period < 1:
            raise CheckpointError(f"{fields.where}: {period_key} = {value!r}: must repeat after at least one layer")
        return [FULL if i % period == full_at % period else SLIDING for i in range(count)]

    return pattern


def _all_local(fields: Fields, count: int) -> list[str]:
    return [SLIDING] * count


def _gemma4(fields: Fields, count: int) -> list[str]:
    types = _every(None, 6)(fields, count)
    return [*types[:-1], FULL]


def _flint(fields: Fields, count: int) -> list[str]:
    return [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]


def _muse(fields: Fields, count: int) -> list[str]:
    return [FULL if (count - 1 - i) % 4 == 0 else SLIDING for i in range(count)]


def _cohere2_moe(fields: Fields, count: int) -> list[str]:
    dense = fields.integer("first_k_dense_replace", 0, low=0)
    prefix = fields.integer("prefix_dense_sliding_window_pattern", 1)
    period = fields.integer("sliding_window_pattern", 4)
    return [FULL if (i + 1) % (prefix if i < dense else period) == 0 else SLIDING for i in range(count)]


_PATTERNS: dict[str, Callable[[Fields, int], list[str]]] = {
    "phi3": _all_local,
    "phimoe": _all_local,
    "starcoder2": _all_local,
    "ministral3": _all_local,
    "vaultgemma": _every(None, 2),
    "gemma3n_text": _every(None, 5),
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "cohere2": _every("sliding_window_pattern", 4),
    "cohere2_moe": _cohere2_moe,
    "olmo3": _every(None, 4),
    "exaone4": _every("sliding_window_pattern", 4),
    "exaone_moe": _every("sliding_window_pattern", 4),
    "afmoe": _every("global_attn_every_n_layers", 4),
    "step3p5": _every(None, 4, full_at=0),
    "step3p7": _every(None, 4, full_at=0),
    "step3p7_text": _every(None, 4, full_at=0),
    "laguna": _every(None, 4, full_at=0),
    "mellum": _every(None, 4),
    "kolibri1": _every(None, 5),
    "muse_glimmer": _muse,
    "cwm": _every(None, 4, full_at=0),
    "granite_swa": _every(None, 4, full_at=0),
    "granitemoe_swa": _every(None, 4, full_at=0),
    "flint": _flint,
    "beam": _every(None, 6),
}
_PATTERNS |= {"gemma3n": _PATTERNS["gemma3n_text"], "gemma4": _gemma4, "gemma4_unified": _gemma4}
