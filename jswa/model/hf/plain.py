"""Parsers of models whose layers are all full, and whose block is nearly llama's; dense.py has llama itself."""

from collections.abc import Sequence
from typing import Any

from jswa.architecture import AttentionConfig, MlpConfig, ModelConfig, MoeConfig, Norm, Residual, Rope, RouterConfig
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import Usual, attention, biased, decoder, experts, llama_norms, mlp, sandwich
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope
from jswa.storage.json_object import shown

_MAX_ALPHA = 1e9  # repositories have 1,000
_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def seed_oss(u: Usual) -> ModelConfig:
    """Parse seed_oss: llama's block, in which q, k and v have biases, and the output projection none by default."""
    fields = u.fields
    qkv, out = fields.boolean("attention_bias", True), fields.boolean("attention_out_bias", False)
    layers = _all_full(u, rope=parse_rope(u), qkv_bias=qkv, out_bias=out)
    return decoder(u, layers, mlp(u, bias=fields.boolean("mlp_bias", False)), llama_norms(u.norm))


def ernie4_5(u: Usual) -> ModelConfig:
    """Parse ernie4_5: llama's block with interleaved rotary pairs; one key decides about all biases."""
    rope = parse_rope(u, theta=5e5, interleaved=True)
    feed = mlp(u, bias=u.fields.boolean("use_bias", False))
    return decoder(u, _all_full(u, rope=rope, **biased(u, "use_bias")), feed, llama_norms(u.norm))


def glm4(u: Usual) -> ModelConfig:
    """Parse glm4: norms before and after both halves; half of each head is rotated, in interleaved pairs."""
    rope = parse_rope(u, partial=0.5, interleaved=True)
    layers = _all_full(u, rope=rope, qkv_bias=u.fields.boolean("attention_bias", True))
    return decoder(u, layers, mlp(u), sandwich(u.norm))


def granite(u: Usual) -> ModelConfig:
    """Parse granite: llama's block with scaled embeddings, attention scores, residuals and logits."""
    return _granite(u, mlp(u, bias=u.fields.boolean("mlp_bias", False)))


def granitemoe(u: Usual) -> ModelConfig:
    """Parse granitemoe: granite with experts."""
    each = mlp(u)
    router = RouterConfig("top_k_softmax")
    moe = MoeConfig(
        **experts(u, "num_local_experts", 8, 2), hidden=each.hidden, activation=each.activation, router=router
    )
    return _granite(u, moe)


def _granite(u: Usual, feed: MlpConfig | MoeConfig) -> ModelConfig:
    scale = u.fields.number("attention_multiplier", 1.0)
    return granite_decoder(u, _all_full(u, rope=parse_rope(u), scale=scale, **biased(u)), feed)


def granite_decoder(u: Usual, attentions: Sequence[AttentionConfig], feed: MlpConfig | MoeConfig) -> ModelConfig:
    """Return llama's block with scaled embeddings, residuals and logits."""
    fields = u.fields
    residual = Residual(add=fields.number("residual_multiplier", 1.0))
    return decoder(
        u,
        attentions,
        feed,
        llama_norms(u.norm),
        layer={"attn_residual": residual, "mlp_residual": residual},
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def olmoe(u: Usual) -> ModelConfig:
    """Parse olmoe: llama's block with experts, and norms over all heads of q and of k.

    Raises UnsupportedModel if clip_qkv bounds q, k and v.
    """
    bound = u.fields.raw.get("clip_qkv")
    if bound is not None:
        raise UnsupportedModel(f"{u.fields.where}: clip_qkv = {shown(bound)} is not implemented: must be null")
    each = mlp(u)
    moe = MoeConfig(
        **experts(u, "num_experts", 64, 8),
        hidden=each.hidden,
        activation=each.activation,
        router=RouterConfig("softmax", normalize=u.fields.boolean("norm_topk_prob", False)),
    )
    layers = _all_full(u, rope=parse_rope(u), qk_norm=u.norm, qk_norm_all_heads=True, **biased(u))
    return decoder(u, layers, moe, llama_norms(u.norm))


def arcee(u: Usual) -> ModelConfig:
    """Parse arcee: llama's attention, and a feed-forward without a gate, of which relu² is the activation."""
    feed = _without_gate(u, bias=u.fields.boolean("mlp_bias", False))
    return decoder(u, _all_full(u, rope=parse_rope(u), **biased(u)), feed, llama_norms(u.norm))


def nemotron(u: Usual) -> ModelConfig:
    """Parse nemotron: arcee's feed-forward, LayerNorms with weights 1 + w, and a part of each head rotated."""
    norm = Norm(u.fields.number("norm_eps", 1e-5), offset=1.0, cast_first=False, centered=True, bias=True)
    feed = _without_gate(u, bias=u.fields.boolean("mlp_bias", False))
    layers = _all_full(u, rope=parse_rope(u, partial=0.5), **biased(u))
    return decoder(u, layers, feed, llama_norms(norm), final_norm=norm)


def hunyuan_v1_dense(u: Usual) -> ModelConfig:
    """Parse hunyuan_v1_dense: llama's block with norms of q and k behind their rotation.

    Raises UnsupportedModel if layers share KV (`use_cla`).
    """
    if u.fields.boolean("use_cla", False):
        raise UnsupportedModel(f"{u.fields.where}: use_cla = true (layers that share KV) is not implemented")
    layers = _all_full(u, rope=_hunyuan_rope(u), qk_norm=u.norm, qk_norm_after_rope=True, **biased(u))
    return decoder(u, layers, mlp(u), llama_norms(u.norm))


def _hunyuan_rope(u: Usual) -> Rope:
    """Return a rotary embedding whose base a fixed `alpha` stretches, as a model of type `dynamic` may have it."""
    key = "rope_scaling" if u.fields.raw.get("rope_scaling") else "rope_parameters"
    table = Fields(u.fields.table(key), f"{u.fields.where}: {key}")
    kind = table.string("rope_type", table.string("type", "default"))
    if kind != "dynamic" or not table.raw.get("alpha"):
        return parse_rope(u)
    alpha = table.number("alpha", None)
    if alpha > _MAX_ALPHA:
        raise table.wrong("alpha", f"must be at most {_MAX_ALPHA:g}")
    if u.head_dim <= 2:
        raise u.fields.wrong("head_dim", "must be above 2, because rope_scaling has alpha")
    theta = table.number("rope_theta", u.fields.number("rope_theta", 1e4))
    return parse_rope(u, base=theta * alpha ** (u.head_dim / (u.head_dim - 2)))


def apertus(u: Usual) -> ModelConfig:
    """Parse apertus: norms of q and k, and a feed-forward without a gate, of which xIELU is the activation."""
    if u.fields.string("hidden_act", "xielu") == "xielu":
        feed = MlpConfig(_width(u), "relu", gated=False, xielu=True)
    else:
        feed = _without_gate(u, bias=False)
    rope = parse_rope(u, theta=12e6, default=_APERTUS_ROPE)
    return decoder(u, _all_full(u, rope=rope, qk_norm=u.norm, **biased(u)), feed, llama_norms(u.norm))


def _all_full(u: Usual, **changes: Any) -> list[AttentionConfig]:
    return [attention(u, **changes)] * u.layers


def _without_gate(u: Usual, *, bias: bool) -> MlpConfig:
    """Return a feed-forward without a gate, whose activation is relu² unless the config names another."""
    if u.fields.string("hidden_act", "relu2") == "relu2":
        return MlpConfig(_width(u), "relu", bias=bias, gated=False, squared=True)
    return mlp(u, gated=False, bias=bias)


def _width(u: Usual) -> int:
    return u.fields.width("intermediate_size", u.defaults.intermediate_size)
