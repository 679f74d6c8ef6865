"""Parser of grug_moe: gated norms, exclusive attention, experts."""

import dataclasses

from jswa.architecture import AttentionGate, MlpConfig, ModelConfig, MoeConfig, Norm, Rope, RouterConfig
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import FULL, SLIDING, Usual, attention, by_type, decoder, experts, llama_norms, mlp
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope
from jswa.storage.json_object import shown

_PERIOD = 4  # every fourth layer is full, and the last one
_GATE_RANK = 128
_HEAD_NORM = Norm(1e-6, weighted=False)
# A choice by biased logits; the weights are sigmoids of the logits themselves, and their sum is 2.5.
_ROUTER = RouterConfig("top_k_sigmoid", selection_bias=True, normalize=True, eps=1e-9, scale=2.5)


def grug_moe(u: Usual) -> ModelConfig:
    """Parse grug_moe of schema 1, which is Levanter's Snowball: full layers are not rotated, sliding ones by half.

    Raises UnsupportedModel for other recipes of Grug (schema 2 has short convolutions).
    """
    _require_recipe(u)
    fields = u.fields
    norm = dataclasses.replace(u.norm, cast_first=False, gate_rank=_GATE_RANK)
    scale = fields.number("qk_mult", 1.5703274004183786) * u.head_dim**-0.5
    gate = AttentionGate("sigmoid", per_head=True, scale=2.0)
    base = attention(u, scale=scale, qk_norm=_HEAD_NORM, gate=gate, exclusive=True)
    last = u.layers - 1
    types = [FULL if i % _PERIOD == _PERIOD - 1 or i == last else SLIDING for i in range(u.layers)]
    kinds = {FULL: base, SLIDING: dataclasses.replace(base, rope=_half_rope(u))}
    routed = mlp(u, "moe_intermediate_size", 1280, activation="silu")
    moe = MoeConfig(
        **experts(u, "num_experts", 256, 4),
        hidden=routed.hidden,
        activation="silu",
        router=_ROUTER,
        shared=MlpConfig(fields.width("shared_expert_intermediate_size", 2560), "silu"),
    )
    return decoder(u, by_type(u, types, kinds), moe, llama_norms(norm), final_norm=norm, embed_norm=norm)


def _require_recipe(u: Usual) -> None:
    fields = u.fields
    recipe = {
        "grugmoe_artifact_schema_version": 1,
        "grugmoe_attention_mode": "production",
        "disable_pko": True,
        "disable_long_rope": True,
        "qk_mult_long_scale": 1.0,
    }
    for key, value in recipe.items():
        if fields.raw.get(key, value) != value:
            raise UnsupportedModel(f"{fields.where}: {key} = {shown(fields.raw[key])}: must be {value}")


def _half_rope(u: Usual) -> Rope:
    """Return an embedding of the first half of each head."""
    fields = u.fields
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    given = Fields(table, f"{fields.where}: rope_parameters")
    kind = given.string("rope_type", given.string("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"{given.where}: rope_type = {shown(kind)}: must be default")
    half = {"rope_type": "default", "partial_rotary_factor": 0.5}
    own = Fields({**fields.raw, "rope_parameters": half, "rope_scaling": None}, fields.where)
    theta = given.number("rope_theta", fields.number("rope_theta", 1e4))
    return parse_rope(dataclasses.replace(u, fields=own), partial=1.0, base=theta)
