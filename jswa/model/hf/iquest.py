"""Parser of iquest_q1: key sinks, a residual stream of normed inputs, experts."""

import dataclasses

from jswa.architecture import LayerConfig, ModelConfig, MoeConfig, Norm, Residual, Rope, RouterConfig
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import FULL, SLIDING, Usual, attention, by_type, decoder, experts, llama_norms, mlp
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope
from jswa.storage.json_object import shown

_LISTS = ("first_layers_types", "hybrid_layers_types_block", "last_layers_types")
_USUAL_LISTS = ([FULL], [FULL, SLIDING, SLIDING, SLIDING], [FULL, FULL, FULL])


def iquest_q1(u: Usual) -> ModelConfig:
    """Parse iquest_q1, as SGLang 0.5.23 runs it.

    All layers but the first keep the normed input in the residual stream, and have no norm after the feed-forward.
    Raises UnsupportedModel for features that SGLang refuses too, and for rotary embeddings other than the default.
    """
    _require_plain(u)
    fields, norm = u.fields, dataclasses.replace(u.norm, cast_first=False)
    scale = fields.optional_number("softmax_scale", None) or u.head_dim**-0.5
    base = attention(u, scale=scale, qk_norm=norm, key_sinks=fields.boolean("enable_sink_attention", True))
    ropes = {FULL: _rope(u, _theta(u)), SLIDING: _rope(u, fields.number("swa_rope_theta", 1e4))}
    kinds = {kind: dataclasses.replace(base, rope=rope) for kind, rope in ropes.items()}
    attentions = by_type(u, _types(u), kinds)
    for index in _indices(u, "no_rope_layers", []):
        attentions[index] = dataclasses.replace(attentions[index], rope=None)
    dense = mlp(u, "dense_intermediate_size", 12_288)
    router = RouterConfig("top_k_softmax")
    sparse = MoeConfig(
        **experts(u, "num_experts", 256, 8), hidden=mlp(u).hidden, activation=dense.activation, router=router
    )
    without = _indices(u, "mlp_only_layers", [0])
    mlps = [dense if index in without else sparse for index in range(u.layers)]
    norms = {**llama_norms(norm), "post_attn": norm}
    logits = fields.number("logit_scale", 1.0)
    model = decoder(u, attentions, mlps, norms, final_norm=norm, logit_scale=logits)
    first, *others = model.layers
    return dataclasses.replace(model, layers=(_first(u, first, norm), *(_later(u, layer) for layer in others)))


def _first(u: Usual, layer: LayerConfig, norm: Norm) -> LayerConfig:
    return dataclasses.replace(
        layer,
        post_mlp=norm,
        attn_residual=Residual(add=u.fields.number("first_layer_attn_out_scale", 1.0)),
        mlp_residual=Residual(add=u.fields.number("first_layer_ffn_out_scale", 1.0)),
    )


def _later(u: Usual, layer: LayerConfig) -> LayerConfig:
    return dataclasses.replace(
        layer,
        keeps_normed=True,
        attn_residual=Residual(add=u.fields.number("attn_out_scale", 1.0)),
        mlp_residual=Residual(add=u.fields.number("ffn_out_scale", 0.53881590608)),
    )


def _require_plain(u: Usual) -> None:
    fields = u.fields
    plain = {
        "attention_bias": fields.boolean("attention_bias", False) is False,
        "use_over_encoding": not fields.raw.get("use_over_encoding"),
        "moe_router_dtype": fields.string("moe_router_dtype", "fp32") == "fp32",
        "shared_kv_num_layers": not fields.raw.get("shared_kv_num_layers"),
    }
    for key, holds in plain.items():
        if not holds:
            raise UnsupportedModel(f"{fields.where}: {key} = {shown(fields.raw[key])} is not implemented")


def _types(u: Usual) -> list[str]:
    """Return the type of each layer: some first ones, a block several times, and some last ones."""
    fields = u.fields
    first, block, last = (_listed(u, key, usual) for key, usual in zip(_LISTS, _USUAL_LISTS, strict=True))
    times = fields.integer("num_hybrid_layers_block", 21, low=0)
    if not (fields.boolean("use_hybrid_layers", True) and fields.boolean("use_sliding_window", True)):
        return [FULL] * u.layers
    if len(first) + len(block) * times + len(last) != u.layers:
        raise fields.wrong("num_hybrid_layers_block", f"must give {u.layers} layers with {', '.join(_LISTS)}")
    return [*first, *block * times, *last]


def _listed(u: Usual, key: str, default: list[str]) -> list[str]:
    value = u.fields.raw.get(key)
    value = default if value is None else value
    if not isinstance(value, list) or len(value) > u.layers or not all(kind in (FULL, SLIDING) for kind in value):
        raise u.fields.wrong(key, f"must list at most {u.layers} of {FULL}, {SLIDING}")
    return value


def _indices(u: Usual, key: str, default: list[int]) -> list[int]:
    value = u.fields.raw.get(key)
    value = default if value is None else value
    if not isinstance(value, list) or len(value) > u.layers:
        raise u.fields.wrong(key, f"must list layers from 0 to {u.layers - 1}")
    return [Fields({key: index}, u.fields.where).integer(key, None, low=0, high=u.layers - 1) for index in value]


def _table(u: Usual) -> Fields:
    """Return the parameters of the rotary embedding, in either form of a config."""
    table = u.fields.table("rope_parameters") or u.fields.table("rope_scaling")
    return Fields(table, f"{u.fields.where}: rope_parameters")


def _theta(u: Usual) -> float:
    return _table(u).number("rope_theta", u.fields.number("rope_theta", 1e6))


def _rope(u: Usual, theta: float) -> Rope:
    """Return an embedding of the first `rotary_dim` dimensions; null: those of `partial_rotary_factor`, or all."""
    fields, table = u.fields, _table(u)
    kind = table.string("rope_type", table.string("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"{table.where}: rope_type = {shown(kind)}: must be default")
    share = table.share("partial_rotary_factor", None) or 1.0
    if "rotary_dim" not in fields.raw or fields.raw["rotary_dim"] is not None:
        share = fields.integer("rotary_dim", 32, low=2, high=u.head_dim) / u.head_dim
    flat = {"rope_type": "default", "partial_rotary_factor": share}
    own = Fields({**fields.raw, "rope_parameters": flat, "rope_scaling": None}, fields.where)
    return parse_rope(dataclasses.replace(u, fields=own), partial=1.0, base=theta)
