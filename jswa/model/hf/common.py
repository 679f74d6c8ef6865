"""Builders that the families' parsers share: common config keys, read once, and layers and models made from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jswa.architecture import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    Norm,
    Reach,
    RouterConfig,
)
from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.fields import Fields
from jswa.storage.json_object import shown

MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_EXPERTS = 512, 4096, 8192, 4096
MAX_ALL_EXPERTS = 2**18  # of all layers, because a checkpoint may have a tensor for each of their matrices
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


@dataclass(frozen=True)
class Defaults:
    """Defaults of a family's config class, by the name of the key in config.json.

    `num_key_value_heads` None: as many as query heads. `head_dim` None: hidden_size / num_attention_heads.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class Usual:
    """Values of the keys that nearly every family has; `fields` reads the others."""

    fields: Fields
    family: str
    eos: tuple[int, ...]
    defaults: Defaults
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    window: int | None
    norm: Norm


def usual(fields: Fields, family: str, eos: tuple[int, ...], defaults: Defaults) -> Usual:
    """Read the common keys. Raises CheckpointError that names the key."""
    heads = fields.integer("num_attention_heads", defaults.num_attention_heads, high=MAX_HEADS)
    d_model = fields.width("hidden_size", defaults.hidden_size)
    head_dim = fields.optional_integer("head_dim", defaults.head_dim, high=MAX_HEAD_DIM) or d_model // heads
    if head_dim < 1:
        raise CheckpointError(f"{fields.where}: num_attention_heads = {heads}: must be at most hidden_size = {d_model}")
    kv_heads = fields.optional_integer("num_key_value_heads", defaults.num_key_value_heads, high=MAX_HEADS) or heads
    lowest = 0 if "use_sliding_window" in fields.raw else 1  # qwen2_moe saves 0 if there is no window
    return Usual(
        fields,
        family,
        eos,
        defaults,
        layers=fields.integer("num_hidden_layers", defaults.num_hidden_layers, high=MAX_LAYERS),
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings", defaults.max_position_embeddings),
        window=fields.optional_integer("sliding_window", defaults.sliding_window, low=lowest) or None,
        norm=Norm(fields.number("rms_norm_eps", defaults.rms_norm_eps)),
    )


def attention(u: Usual, **changes: Any) -> AttentionConfig:
    """Return attention with the common head counts, scaled by 1 / √head_dim, and with `changes`.

    Raises CheckpointError for invalid counts.
    """
    head_dim = changes.get("head_dim", u.head_dim)
    usual_heads = {"num_heads": u.heads, "num_kv_heads": u.kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    built = AttentionConfig(**{**usual_heads, "scale": head_dim**-0.5, "rope": None, **changes})
    if built.num_heads % built.num_kv_heads:
        raise CheckpointError(
            f"{u.fields.where}: num_attention_heads = {built.num_heads}: must be a multiple of "
            f"num_key_value_heads = {built.num_kv_heads}"
        )
    return built


def biased(u: Usual, key: str = "attention_bias", default: bool = False) -> dict[str, bool]:
    """Return fields for biases on all four projections of attention, or on none."""
    bias = u.fields.boolean(key, default)
    return {"qkv_bias": bias, "out_bias": bias}


def mlp(u: Usual, key: str = "intermediate_size", default: int | None = None, **changes: Any) -> MlpConfig:
    """Return a gated feed-forward of the width that a key names."""
    hidden = u.fields.width(key, default or u.defaults.intermediate_size)
    return MlpConfig(hidden, **{"activation": activation(u), **changes})


def activation(u: Usual, key: str = "hidden_act", default: str = "silu") -> Activation:
    """Return the activation function that a key names. Raises UnsupportedModel."""
    name = u.fields.string(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{u.fields.where}: {key} = {shown(name)}: must be one of {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def experts(u: Usual, key: str, default: int | None, top_k: int | None, top_key: str = "num_experts_per_tok") -> Any:
    """Return {num_experts, top_k} of a mixture; `key` counts the experts."""
    count = u.fields.integer(key, default, high=MAX_EXPERTS)
    return {"num_experts": count, "top_k": u.fields.integer(top_key, top_k, high=count)}


def sigmoid_router(u: Usual, counts: Mapping[str, int], *, normalize: bool, scale: float) -> RouterConfig:
    """Return DeepSeek-V3's router: sigmoid scores, a selection bias and groups.

    `normalize` and `scale` are the family's defaults. Raises UnsupportedModel for other scores, CheckpointError if the
    groups cannot split the experts.
    """
    fields, count, top_k = u.fields, counts["num_experts"], counts["top_k"]
    # dots1 configs say "noaux_tc"; transformers computes sigmoid scores for them too.
    if fields.string("scoring_func", "sigmoid") not in ("sigmoid", "noaux_tc"):
        raise UnsupportedModel(f"{fields.where}: scoring_func = {shown(fields.raw['scoring_func'])}: must be sigmoid")
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if count % groups or (groups > 1 and count // groups < 2) or not top_k <= top_groups * (count // groups) <= count:
        raise CheckpointError(
            f"{fields.where}: n_group = {groups}, topk_group = {top_groups}: must split {count} experts into equal "
            f"groups of at least 2, and topk_group groups must have num_experts_per_tok = {top_k} experts"
        )
    return RouterConfig(
        "sigmoid",
        selection_bias=True,
        normalize=fields.boolean("norm_topk_prob", normalize),
        eps=1e-20,
        groups=groups,
        top_groups=top_groups,
        scale=fields.optional_number("routed_scaling_factor", scale) or 1.0,
    )


def every(u: Usual, period: int | None, *, full_at: int = -1) -> list[str]:
    """Return layer types: layers with index ≡ full_at (mod period) are full, the others slide.

    Without a period all layers slide.
    """
    return [FULL if period and i % period == full_at % period else SLIDING for i in range(u.layers)]


def sliding_from(u: Usual, window: int | None, first: int) -> list[str]:
    """Return layer types: layers from `first` on slide if there is a window."""
    return [SLIDING if window is not None and i >= first else FULL for i in range(u.layers)]


def layer_types(u: Usual, default: list[str], allowed: Sequence[str] = (FULL, SLIDING)) -> list[str]:
    """Return `layer_types` of the config, or else the family's own rule."""
    return u.fields.layer_types(default, allowed=tuple(allowed))


def reaches(u: Usual, types: Sequence[str], key: str = "sliding_window", size: int | None = None) -> list[Reach | None]:
    """Return each layer's reach by its type. Raises CheckpointError if a local layer has no size."""
    size = size or (u.window if key == "sliding_window" else None)
    if size is None and set(types) - {FULL}:
        raise u.fields.wrong(key, "must be a size, because the model has local layers")
    return [None if kind == FULL or size is None else Reach(size, chunked=kind == CHUNKED) for kind in types]


def by_type(
    u: Usual, types: Sequence[str], kinds: Mapping[str, AttentionConfig], **reach: Any
) -> list[AttentionConfig]:
    """Return each layer's attention, chosen by its type, with its reach."""
    sizes = reaches(u, types, **reach)
    return [dataclasses.replace(kinds[kind], reach=size) for kind, size in zip(types, sizes, strict=True)]


def sparse_layers(u: Usual, default: Sequence[bool]) -> list[bool]:
    """Return which layers are mixtures of experts: `mlp_layer_types`, or else the family's rule.

    Raises CheckpointError if `mlp_layer_types` does not name the kind of each layer.
    """
    types = u.fields.raw.get("mlp_layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list) or len(types) < u.layers or not set(map(str, types)) <= {"dense", "sparse"}:
        raise u.fields.wrong("mlp_layer_types", f"must list {u.layers} of dense, sparse")
    return [kind == "sparse" for kind in types[: u.layers]]


def llama_norms(norm: Norm) -> dict[str, Norm]:
    """Return a norm before attention and one before the feed-forward."""
    return {"pre_attn": norm, "pre_mlp": norm}


def sandwich(norm: Norm) -> dict[str, Norm]:
    """Return norms before and after both attention and feed-forward."""
    return {**llama_norms(norm), **post_norms(norm)}


def post_norms(norm: Norm) -> dict[str, Norm]:
    """Return a norm after attention and one after the feed-forward."""
    return {"post_attn": norm, "post_mlp": norm}


def decoder(
    u: Usual,
    attentions: Sequence[AttentionConfig],
    mlps: MlpConfig | MoeConfig | Sequence[MlpConfig | MoeConfig],
    norms: Mapping[str, Norm],
    *,
    layer: Mapping[str, Any] | None = None,
    **rest: Any,
) -> ModelConfig:
    """Return a model whose layers differ only in attention and feed-forward.

    Raises CheckpointError if all layers together have more than `MAX_ALL_EXPERTS` experts.

    Args:
        layer: further fields of every layer.
        rest: further fields of the model.
    """
    each = [mlps] * u.layers if isinstance(mlps, MlpConfig | MoeConfig) else mlps
    beside = layer["side"].moe.num_experts * u.layers if layer and layer.get("side") else 0
    if beside + sum(one.num_experts for one in each if isinstance(one, MoeConfig)) > MAX_ALL_EXPERTS:
        raise CheckpointError(f"{u.fields.where}: all layers together must have at most {MAX_ALL_EXPERTS} experts")
    extra = {**norms, **(layer or {})}
    fields = {
        "family": u.family,
        "vocab_size": u.fields.integer("vocab_size", u.defaults.vocab_size),
        "d_model": u.d_model,
        "max_position": u.max_position,
        "layers": tuple(LayerConfig(a, m, **extra) for a, m in zip(attentions, each, strict=True)),
        "final_norm": u.norm,
        "tie_embeddings": u.fields.boolean("tie_word_embeddings", u.defaults.tie_word_embeddings),
        "eos_token_ids": u.eos,
    }
    return ModelConfig(**{**fields, **rest})
