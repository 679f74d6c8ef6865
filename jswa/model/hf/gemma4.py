"""Parsers of gemma4 and gemma3n: shared KV, K = V layers, experts beside the dense feed-forward, per-layer embeddings.

Gemma 3n also has AltUp streams. Norms have plain weights, and attention is not scaled.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from jswa.architecture import (
    AltUp,
    AttentionConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    Norm,
    PerLayerInput,
    Rope,
    RouterConfig,
    SideExperts,
)
from jswa.errors import CheckpointError
from jswa.model.hf.common import (
    FULL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    SLIDING,
    Usual,
    activation,
    attention,
    biased,
    by_type,
    decoder,
    every,
    experts,
    layer_types,
    reaches,
    sandwich,
)
from jswa.model.hf.fields import Fields
from jswa.model.hf.gemma import causal, gelu_mlp
from jswa.model.hf.rope import parse_rope

_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def gemma4(u: Usual, *, per_layer_dim: int = 256) -> ModelConfig:
    """Parse gemma4: full layers have their own head sizes; the model's size decides about its other features."""
    causal(u)
    types = layer_types(u, every(u, 6))
    types = [*types[:-1], FULL]  # transformers always makes the last layer full
    ropes: dict[tuple[str, int], Rope] = {}
    attentions = [
        dataclasses.replace(_attention(u, kind, index, ropes), reach=reach)
        for index, (kind, reach) in enumerate(zip(types, reaches(u, types), strict=True))
    ]
    norm = _norm(u)
    shared = _shared_layers(u, 0)
    double = u.fields.boolean("use_double_wide_mlp", False)
    wide = [double and index >= u.layers - shared for index in range(u.layers)]
    base = gelu_mlp(u)
    own = u.fields.integer("hidden_size_per_layer_input", per_layer_dim, low=0, high=2**20) if per_layer_dim else 0
    return decoder(
        u,
        _with_shared_kv(u, attentions, types, shared),
        [dataclasses.replace(base, hidden=base.hidden * (2 if twice else 1)) for twice in wide],
        sandwich(norm),
        layer={"scalar": True, "side": _side(u, norm)},
        per_layer_input=_per_layer_input(u, own, norm),
        **_rest(u, norm, u.fields.optional_number("final_logit_softcapping", None)),
    )


def gemma4_unified(u: Usual) -> ModelConfig:
    """Parse gemma4_unified: as gemma4, without per-layer embeddings and experts."""
    return gemma4(u, per_layer_dim=0)


def gemma3n(u: Usual) -> ModelConfig:
    """Parse gemma3n: every fifth layer is full; AltUp streams; activation sparsity in the first layers."""
    types, norm = layer_types(u, every(u, 5)), _norm(u)
    full = parse_rope(u, layer_type=FULL, theta=1e6)
    sliding = parse_rope(u, layer_type=SLIDING, theta_key="rope_local_base_freq", theta=1e4, scaled=False)
    kinds = {kind: _normed(u, rope, norm) for kind, rope in ((FULL, full), (SLIDING, sliding))}
    streams = u.fields.integer("altup_num_inputs", 4, low=2, high=64)
    altup = AltUp(
        streams,
        u.fields.integer("altup_active_idx", 0, low=0, high=streams - 1),
        u.fields.width("laurel_rank", 64),
        corrects_scale=u.fields.boolean("altup_correct_scale", True),
    )
    return decoder(
        u,
        _with_shared_kv(u, by_type(u, types, kinds), types, _shared_layers(u, 15)),
        _gemma3n_mlps(u),
        sandwich(norm),
        per_layer_input=_per_layer_input(u, u.fields.width("hidden_size_per_layer_input", 256), norm),
        altup=altup,
        **_rest(u, norm, u.fields.null_or_number("final_logit_softcapping", 30.0)),
    )


def unfolded(model: ModelConfig) -> ModelConfig:
    """Return the same model with whole K and V stored in all layers, to measure what folded keys save."""

    def whole(a: AttentionConfig) -> AttentionConfig:
        if not a.folded_keys or a.rope is None:
            return a
        rest = (0.0,) * (a.head_dim // 2 - len(a.rope.inv_freq))
        rope = dataclasses.replace(a.rope, inv_freq=a.rope.inv_freq + rest)
        return dataclasses.replace(a, rope=rope, folded_keys=False)

    layers = (dataclasses.replace(layer, attention=whole(layer.attention)) for layer in model.layers)
    return dataclasses.replace(model, layers=tuple(layers))


def _norm(u: Usual) -> Norm:
    return dataclasses.replace(u.norm, cast_first=False)


def _normed(u: Usual, rope: Rope, norm: Norm, **changes: Any) -> AttentionConfig:
    unweighted = dataclasses.replace(norm, weighted=False)
    return attention(u, scale=1.0, rope=rope, qk_norm=norm, v_norm=unweighted, **biased(u), **changes)


def _attention(u: Usual, kind: str, index: int, ropes: dict[tuple[str, int], Rope]) -> AttentionConfig:
    """Return one layer's attention, by its type and by `per_layer_config`, the version-5 form of what differs.

    `ropes` caches rotary embeddings.
    """
    fields, full = u.fields, kind == FULL
    tied = full and fields.boolean("attention_k_eq_v", False)
    own = _per_layer(u, index)
    kv_heads, head_dim = u.kv_heads, u.head_dim
    if own is None and full:
        head_dim = fields.optional_integer("global_head_dim", 512, high=MAX_HEAD_DIM) or head_dim
        if tied:
            kv_heads = fields.optional_integer("num_global_key_value_heads", None, high=MAX_HEADS) or kv_heads
    elif own is not None:
        head_dim = own.integer("head_dim", head_dim, high=MAX_HEAD_DIM)
        kv_heads = own.integer("num_key_value_heads", kv_heads, high=MAX_HEADS)
    if (kind, head_dim) not in ropes:
        theta, default = (1e6, _FULL_ROPE) if full else (1e4, None)
        ropes[kind, head_dim] = parse_rope(u, layer_type=kind, head_dim=head_dim, default=default, theta=theta)
    rope = ropes[kind, head_dim]
    rotated = sum(1 for frequency in rope.inv_freq if frequency)
    folded = tied and 0 < rotated < head_dim // 2
    if folded:
        rope = dataclasses.replace(rope, inv_freq=rope.inv_freq[:rotated])
    return _normed(u, rope, _norm(u), head_dim=head_dim, num_kv_heads=kv_heads, keys_as_values=tied, folded_keys=folded)


def _per_layer(u: Usual, index: int) -> Fields | None:
    """Return the entry of `per_layer_config` for a layer; {} if it has none, None if there is no `per_layer_config`.

    Keys may have leading zeros.
    """
    if "per_layer_config" not in u.fields.raw:
        return None
    table = u.fields.table("per_layer_config")
    key = next((key for key in table if key.lstrip("0") == str(index or "") and key), "")
    return Fields(Fields(table, u.fields.where).table(key) if key else {}, f"{u.fields.where}: per_layer_config.{key}")


def _shared_layers(u: Usual, default: int) -> int:
    return u.fields.integer("num_kv_shared_layers", default, low=0, high=max(u.layers - 1, 0))


def _with_shared_kv(
    u: Usual, attentions: Sequence[AttentionConfig], types: Sequence[str], shared: int
) -> list[AttentionConfig]:
    """Make the last `shared` layers read the KV of the last layer of their type that stores its own."""
    owners = {kind: index for index, kind in enumerate(types[: u.layers - shared])}
    if missing := set(types) - set(owners):
        raise CheckpointError(
            f"{u.fields.where}: num_kv_shared_layers = {shared}: no {sorted(missing)[0]} layer has KV of its own"
        )
    return [
        dataclasses.replace(a, kv_from=owners[kind]) if index >= u.layers - shared else a
        for index, (a, kind) in enumerate(zip(attentions, types, strict=True))
    ]


def _side(u: Usual, norm: Norm) -> SideExperts | None:
    if u.family != "gemma4_text" or not u.fields.boolean("enable_moe_block", False):
        return None
    router = RouterConfig("softmax", norm=norm, logit_scale=u.d_model**-0.5, normalize=True, expert_scale=True)
    moe = MoeConfig(
        **experts(u, "num_experts", None, None, "top_k_experts"),
        hidden=u.fields.width("moe_intermediate_size", None),
        activation=activation(u, "hidden_activation", "gelu_pytorch_tanh"),
        router=router,
    )
    return SideExperts(moe, pre=norm, post=norm, post_dense=norm)


def _per_layer_input(u: Usual, dim: int, norm: Norm) -> PerLayerInput | None:
    if not dim:
        return None
    vocab = u.fields.integer("vocab_size_per_layer_input", 262144)
    return PerLayerInput(dim, vocab, activation(u, "hidden_activation", "gelu_pytorch_tanh"), norm)


def _gemma3n_mlps(u: Usual) -> list[MlpConfig]:
    """Return feed-forwards by widths and sparsities, each of which is one number or a list by layer."""
    widths, shares = u.fields.raw.get("intermediate_size"), u.fields.raw.get("activation_sparsity_pattern")
    sparse = [0.95] * 10 + [0.0] * (u.layers - 10) if u.layers > 10 else [0.0] * u.layers
    shares = _each(u, "activation_sparsity_pattern", sparse if shares is None else shares)
    mlps = []
    for width, share in zip(_each(u, "intermediate_size", widths or 16384), shares, strict=True):
        fields = Fields({"intermediate_size": width}, u.fields.where)
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise u.fields.wrong("activation_sparsity_pattern", "must be numbers in [0, 1)")
        cut = NormalDist().inv_cdf(share) if share else None
        act = activation(u, "hidden_activation", "gelu_pytorch_tanh")
        mlps.append(MlpConfig(fields.width("intermediate_size", None), act, sparsity=cut))
    return mlps


def _each(u: Usual, key: str, value: Any) -> list[Any]:
    each = value if isinstance(value, list) else [value] * u.layers
    if len(each) != u.layers:
        raise u.fields.wrong(key, f"must be a number or list {u.layers} numbers")
    return each


def _rest(u: Usual, norm: Norm, softcap: float | None) -> dict[str, Any]:
    return {"final_norm": norm, "embed_scale": math.sqrt(u.d_model), "final_softcap": softcap}
