"""Parsers of models with gated attention (afmoe, step3p5, laguna, beam, spark2_5), and of kolibri1 with its norms."""

import dataclasses
import math
from typing import Any

from jswa.architecture import (
    AttentionGate,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    Residual,
    RouterConfig,
    Temperature,
)
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import (
    FULL,
    MAX_HEADS,
    MAX_LAYERS,
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
    llama_norms,
    mlp,
    reaches,
    sandwich,
    sigmoid_router,
    sparse_layers,
)
from jswa.model.hf.fields import Fields
from jswa.model.hf.mixture import unrotated_full
from jswa.model.hf.rope import parse_rope
from jswa.storage.json_object import shown


def afmoe(u: Usual) -> ModelConfig:
    """Parse afmoe: elementwise gates; full layers are not rotated; the first layers are dense."""
    fields = u.fields
    norm = dataclasses.replace(u.norm, cast_first=False)
    types = layer_types(u, every(u, fields.integer("global_attn_every_n_layers", 4)))
    kinds = unrotated_full(attention(u, rope=parse_rope(u), qk_norm=norm, gate=AttentionGate("sigmoid"), **biased(u)))
    hidden = fields.width("moe_intermediate_size", 1408)
    shared = fields.integer("num_shared_experts", 2, low=0, high=1024)
    moe = MoeConfig(
        **experts(u, "num_experts", 64, 6),
        hidden=hidden,
        activation=activation(u),
        router=RouterConfig(
            "sigmoid", selection_bias=True, normalize=True, eps=1e-20, scale=fields.number("route_scale", 1.0)
        ),
        shared=MlpConfig(hidden * shared, activation(u)) if shared else None,
    )
    dense = fields.integer("num_dense_layers", 1, low=0)
    mlps = [moe if index >= dense else mlp(u) for index in range(u.layers)]
    scale = math.sqrt(u.d_model) if fields.boolean("mup_enabled", False) else 1.0
    return decoder(u, by_type(u, types, kinds), mlps, sandwich(norm), final_norm=norm, embed_scale=scale)


def kolibri1(u: Usual) -> ModelConfig:
    """Parse kolibri1: full layers are not rotated; experts rank by biased logits and weigh by unbiased sigmoids."""
    fields = u.fields
    types = layer_types(u, every(u, 5))
    base = attention(u, rope=parse_rope(u), qk_norm=u.norm)
    moe = MoeConfig(
        **experts(u, _either(u, "num_local_experts", "num_experts"), 384, 6),
        hidden=fields.width("moe_intermediate_size", 512),
        activation=activation(u),
        router=RouterConfig("top_k_sigmoid", selection_bias=True, normalize=fields.boolean("norm_topk_prob", False)),
        shared=mlp(u, "shared_expert_intermediate_size", 512),
    )
    kinds = unrotated_full(base) if u.window else {FULL: base, SLIDING: base}
    return decoder(u, by_type(u, types, kinds), moe, sandwich(u.norm))


def beam(u: Usual) -> ModelConfig:
    """Parse beam: gates with a bias per head; unrotated layers scale queries by position; depth-scaled residuals."""
    fields = u.fields
    norm = dataclasses.replace(u.norm, cast_first=False)
    types = layer_types(u, [*every(u, 6)[:-1], FULL])
    nested = fields.table("rope_parameters")
    kinds = {}
    for kind in (FULL, SLIDING):
        base = attention(u, qk_norm=norm, gate=AttentionGate("sigmoid", bias=True), **biased(u))
        if nested.get(kind) is None and (nested or kind == FULL):
            growth = Temperature(2048.0, 0.1, whole=False, power=True)
            kinds[kind] = dataclasses.replace(base, temperature=growth)
        else:
            kinds[kind] = dataclasses.replace(base, rope=parse_rope(u, layer_type=kind))
    counts = experts(u, _either(u, "num_experts", "n_routed_experts"), 256, 8)
    fields = dataclasses.replace(fields, raw={"n_group": 8, "topk_group": 4, **fields.raw})
    router = sigmoid_router(dataclasses.replace(u, fields=fields), counts, normalize=True, scale=2.5)
    width = fields.width("moe_intermediate_size", 2560)
    moe = MoeConfig(**counts, hidden=width, activation=activation(u), router=router)
    mlps = [moe if sparse else mlp(u) for sparse in sparse_layers(u, [index >= 3 for index in range(u.layers)])]
    softcap = fields.null_or_number("final_logit_softcapping", 30.0)
    model = decoder(u, by_type(u, types, kinds), mlps, sandwich(norm), final_norm=norm, final_softcap=softcap)
    return dataclasses.replace(model, layers=tuple(map(_deepened, model.layers, range(u.layers))))


def _deepened(layer: LayerConfig, index: int) -> LayerConfig:
    def join(n: int) -> Residual:
        return Residual(keep=math.sqrt((n - 1) / n), add=1 / math.sqrt(n))

    return dataclasses.replace(layer, attn_residual=join(2 * index + 2), mlp_residual=join(2 * index + 3))


def laguna(u: Usual) -> ModelConfig:
    """Parse laguna: softplus gates; query heads by layer; rotary embedding by layer type.

    Raises UnsupportedModel if the router's weights multiply what the experts read.
    """
    fields = u.fields
    if fields.boolean("moe_apply_router_weight_on_input", False):
        raise UnsupportedModel(f"{fields.where}: moe_apply_router_weight_on_input = true is not implemented")
    types = layer_types(u, [FULL] * u.layers)
    heads = _heads_per_layer(u)
    full = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    gate = AttentionGate("softplus", per_head=_per_head(u))
    ropes = {
        kind: parse_rope(u, layer_type=kind, partial=1.0, default=default)
        for kind, default in ((FULL, full), (SLIDING, sliding))
    }
    attentions = [
        attention(u, num_heads=count, rope=ropes[kind], reach=reach, qk_norm=u.norm, gate=gate, **biased(u))
        for kind, reach, count in zip(types, reaches(u, types), heads, strict=True)
    ]
    capped = fields.raw.get("moe_router_logit_softcapping")  # 0 means none
    moe = MoeConfig(
        **experts(u, "num_experts", 256, 8),
        hidden=fields.width("moe_intermediate_size", 512),
        activation=activation(u),
        router=RouterConfig(
            "sigmoid",
            selection_bias=True,
            normalize=True,
            softcap=fields.number("moe_router_logit_softcapping", None) if capped else None,
            scale=fields.number("moe_routed_scaling_factor", 1.0),
        ),
        shared=mlp(u, "shared_expert_intermediate_size", 512),
    )
    mlps = [moe if sparse else mlp(u) for sparse in sparse_layers(u, [index > 0 for index in range(u.layers)])]
    return decoder(u, attentions, mlps, llama_norms(u.norm))


def spark2_5(u: Usual) -> ModelConfig:
    """Parse spark2_5: gates per head; each layer type has its own rotary base and share of rotated dimensions.

    Raises UnsupportedModel for what its modelling file accepts and no released checkpoint has.
    """
    fields = u.fields
    gated = fields.boolean("headwise_attn_output_gate", False)
    wanted = {"hidden_act": ("gelu", "gelu")} | ({"gate_attn_act_mode": ("sigmoid", "sigmoid")} if gated else {})
    for key, (default, limit) in wanted.items():
        if fields.string(key, default) != limit:
            raise UnsupportedModel(f"{fields.where}: {key} = {shown(fields.raw[key])}: must be {limit}")
    if fields.boolean("attention_bias", False):
        raise UnsupportedModel(f"{fields.where}: attention_bias = true is not implemented for {u.family}")
    norm = dataclasses.replace(u.norm, cast_first=False)
    types = layer_types(u, [FULL] * u.layers)
    gate = AttentionGate("sigmoid", per_head=True) if gated else None
    kinds = {
        kind: attention(u, rope=parse_rope(u, layer_type=kind, partial=1.0), gate=gate) for kind in sorted(set(types))
    }
    feed = mlp(u, activation=activation(u, default="gelu"), bias=fields.boolean("mlp_bias", False))
    return decoder(u, by_type(u, types, kinds), feed, llama_norms(norm), final_norm=norm)


def step3p5(u: Usual) -> ModelConfig:
    """Parse step3p5: gates per head; sliding layers have their own query heads; clamps and rotary bases by layer."""
    u = _without_extra_layers(u)
    fields = u.fields
    norm = dataclasses.replace(u.norm, offset=1.0, cast_first=False)
    types = layer_types(u, [FULL] * u.layers)
    scale = fields.number("query_pre_attn_scalar", float(u.head_dim)) ** -0.5
    gate = AttentionGate("sigmoid", per_head=_per_head(u))
    heads = _step_heads(u)
    attentions = [
        attention(
            u,
            num_heads=heads if reach is not None else u.heads,
            scale=scale,
            rope=_step_rope(u, kind, types.index(kind)),
            reach=reach,
            qk_norm=norm,
            gate=gate,
            **biased(u),
        )
        for kind, reach in zip(types, reaches(u, types), strict=True)
    ]
    return decoder(u, attentions, _step_mlps(u), llama_norms(norm), final_norm=norm)


_STEP_LISTS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)


def _without_extra_layers(u: Usual) -> Usual:
    """Cut lists by layer to the model's layers; entries for multi-token prediction layers may follow."""
    raw = u.fields.raw
    cut = {key: raw[key][: u.layers] for key in _STEP_LISTS if isinstance(raw.get(key), list)}
    return dataclasses.replace(u, fields=Fields({**raw, **cut}, u.fields.where))


def _step_heads(u: Usual) -> int:
    other = Fields(u.fields.table("attention_other_setting"), f"{u.fields.where}: attention_other_setting")
    sliding = u.fields.optional_integer("num_sliding_attention_heads", None, high=MAX_HEADS)
    table = u.fields.table("per_layer_config")
    own = [one.get("num_attention_heads") for one in table.values() if isinstance(one, dict)]
    if any(own):
        return Fields({"num_attention_heads": next(filter(None, own))}, f"{u.fields.where}: per_layer_config").integer(
            "num_attention_heads", None, high=MAX_HEADS
        )
    return sliding or other.integer("num_attention_heads", u.heads, high=MAX_HEADS)


def _step_rope(u: Usual, kind: str, index: int) -> Any:
    """Return the rotary embedding of a layer type, whose first layer has index `index`.

    The config has `rope_parameters` by type, or lists by layer. In the second form only full layers are scaled.
    """
    fields = u.fields
    if isinstance(fields.table("rope_parameters").get(kind), dict):
        return parse_rope(u, layer_type=kind, partial=1.0)
    raw = {key: value for key, value in fields.raw.items() if key != "rope_parameters"}
    for key, ours in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        value = raw.pop(key, None)
        if isinstance(value, list):
            if len(value) <= index:
                raise fields.wrong(key, f"must list {u.layers} numbers")
            raw[ours] = value[index]
        elif value is not None:
            raw[ours] = value
    by_layer = dataclasses.replace(u, fields=Fields(raw, fields.where))
    return parse_rope(by_layer, layer_type=kind, partial=1.0, scaled=kind == FULL)


def _step_mlps(u: Usual) -> list[MlpConfig | MoeConfig]:
    fields = u.fields
    sparse = sparse_layers(u, _step_sparse(u))
    limits, shared_limits = _limits(u, "swiglu_limits"), _limits(u, "swiglu_limits_shared")
    bias = fields.boolean("mlp_bias", False)
    moe = MoeConfig(
        **experts(u, "n_routed_experts", 288, 8),
        hidden=fields.width("moe_intermediate_size", 1280),
        activation="silu",
        router=RouterConfig(
            "sigmoid",
            selection_bias=True,
            normalize=True,
            scale=fields.number("moe_router_scaling_factor", 1.0),
        ),
    )
    shared = mlp(u, "share_expert_dim", 1280, bias=bias)
    return [
        dataclasses.replace(moe, clamp=limit, shared=dataclasses.replace(shared, clamp=shared_limit))
        if routed
        else mlp(u, bias=bias, clamp=shared_limit)
        for routed, limit, shared_limit in zip(sparse, limits, shared_limits, strict=True)
    ]


def _step_sparse(u: Usual) -> list[bool]:
    """Return which layers are mixtures: `moe_layers_enum`, a string or list of indices; else all from the fourth on."""
    listed = u.fields.raw.get("moe_layers_enum")
    if listed is None:
        return [index >= 3 for index in range(u.layers)]
    items = listed.split(",") if isinstance(listed, str) else listed
    items = [item.strip() if isinstance(item, str) else item for item in items] if isinstance(items, list) else [None]
    numbers = {int(item) for item in items if str(item).isdecimal() and len(str(item)) < 10}
    if len(items) > 2 * MAX_LAYERS or not all(item == "" or str(item)[:10].isdecimal() for item in items):
        raise u.fields.wrong("moe_layers_enum", "must list layer indices")
    return [index in numbers for index in range(u.layers)]


def _limits(u: Usual, key: str) -> list[float | None]:
    """Return one clamp per layer; 0 or null means none."""
    value = u.fields.raw.get(key) or [None] * u.layers
    if not isinstance(value, list) or len(value) < u.layers:
        raise u.fields.wrong(key, f"must list {u.layers} limits")
    return [Fields({key: one}, u.fields.where).number(key, None) if one else None for one in value]


def _heads_per_layer(u: Usual) -> list[int]:
    key = "num_attention_heads_per_layer"
    value = u.fields.raw.get(key)
    value = [u.heads] * u.layers if value is None else value
    if not isinstance(value, list) or len(value) != u.layers:
        raise u.fields.wrong(key, f"must list {u.layers} numbers of heads")
    return [Fields({key: one}, u.fields.where).integer(key, None, high=MAX_HEADS) for one in value]


def _per_head(u: Usual) -> bool:
    gating = u.fields.raw.get("gating", True)
    if gating not in (True, "per-head", "per-element", False):
        raise UnsupportedModel(f"{u.fields.where}: gating = {shown(gating)}: must be true, per-head or per-element")
    return gating in (True, "per-head")


def _either(u: Usual, first: str, second: str) -> str:
    return first if u.fields.raw.get(first) is not None else second
