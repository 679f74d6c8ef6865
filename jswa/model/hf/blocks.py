"""Parsers of models whose block is not llama's: olmo2, olmo3, exaone4, cohere2, granite_swa, muse_glimmer, plamo3."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jswa.architecture import AttentionConfig, AttentionGate, ModelConfig, MoeConfig, Norm, Rope, RouterConfig
from jswa.errors import UnsupportedModel
from jswa.model.hf.common import (
    FULL,
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
    post_norms,
    reaches,
    sandwich,
    sparse_layers,
)
from jswa.model.hf.fields import Fields
from jswa.model.hf.plain import granite_decoder
from jswa.model.hf.rope import parse_rope
from jswa.storage.json_object import shown


def olmo3(u: Usual) -> ModelConfig:
    """Parse olmo3: norms only after attention and feed-forward, and over all heads of q and of k.

    Only full layers scale their rotary embedding.
    """
    norm = dataclasses.replace(u.norm, cast_first=False)
    types = layer_types(u, every(u, 4))

    def kind(layer_type: str) -> AttentionConfig:
        rope = parse_rope(u, layer_type=layer_type, theta=5e5, scaled=layer_type == FULL)
        return attention(u, rope=rope, qk_norm=norm, qk_norm_all_heads=True, **biased(u))

    kinds = {name: kind(name) for name in sorted(set(types))}
    return decoder(u, by_type(u, types, kinds), mlp(u), post_norms(norm), final_norm=norm)


def olmo2(u: Usual) -> ModelConfig:
    """Parse olmo2: olmo3's block with full layers only."""
    norm = dataclasses.replace(u.norm, cast_first=False)
    base = attention(u, rope=parse_rope(u), qk_norm=norm, qk_norm_all_heads=True, **biased(u))
    return decoder(u, [base] * u.layers, mlp(u), post_norms(norm), final_norm=norm)


def exaone4(u: Usual) -> ModelConfig:
    """Parse exaone4: norms only after attention and feed-forward; in hybrid models, full layers are not rotated."""
    return decoder(u, exaone_attentions(u), mlp(u), post_norms(u.norm))


def exaone_attentions(u: Usual) -> list[AttentionConfig]:
    """Return attentions by `layer_types` or by `sliding_window_pattern`, a period or letters such as LLLG.

    Without a window all layers are full and rotated.
    """
    types = layer_types(u, _exaone_types(u)) if u.window else [FULL] * u.layers
    base = attention(u, rope=parse_rope(u), qk_norm=u.norm)
    full = dataclasses.replace(base, rope=None) if u.window else base
    return by_type(u, types, {FULL: full, SLIDING: base})


def _exaone_types(u: Usual) -> list[str]:
    pattern = u.fields.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        types = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(u.layers)]
        return [*types[:-1], FULL]  # the last layer is always full
    return every(u, u.fields.integer("sliding_window_pattern", 4))


def cohere2(u: Usual) -> ModelConfig:
    """Parse cohere2: attention and feed-forward in parallel after one LayerNorm; full layers are not rotated."""
    types = layer_types(u, every(u, u.fields.integer("sliding_window_pattern", 4)))
    return _parallel(u, _cohere_attentions(u, types, [False] * u.layers), mlp(u), _layer_norm(u))


def cohere_compass(u: Usual) -> ModelConfig:
    """Parse cohere_compass_text: cohere2's block; each layer type has its own rotary embedding, of halves, or none.

    The three axes of M-RoPE have the same positions in texts, so `mrope_section` is not read. transformers 5.17 to 5.22
    permuted the frequencies, which the released checkpoint does not expect; 5.16 and 5.23 do not.

    Raises CheckpointError for a layer type without an entry in rope_parameters, and for less than one number per head.
    """
    if u.d_model < u.heads:
        raise u.fields.wrong("hidden_size", f"must be at least num_attention_heads = {u.heads}")
    u = dataclasses.replace(u, head_dim=u.d_model // u.heads)  # transformers does not read head_dim
    types = layer_types(u, [FULL] * u.layers)
    ropes = u.fields.table("rope_parameters")
    if missing := sorted(set(types) - ropes.keys()):
        raise u.fields.wrong("rope_parameters", f"must have an object or null for {' and '.join(missing)}")
    kinds = {
        kind: attention(u, rope=None if ropes[kind] is None else parse_rope(u, layer_type=kind), **biased(u))
        for kind in sorted(set(types))
    }
    return _parallel(u, by_type(u, types, kinds), mlp(u), _layer_norm(u), logit_scale=1.0)


def cohere2_moe(u: Usual) -> ModelConfig:
    """Parse cohere2_moe: cohere2 with experts; the dense layers at the start may be full and rotated."""
    fields = u.fields
    first = fields.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS)
    prefix = fields.integer("prefix_dense_sliding_window_pattern", 1)
    rest = fields.integer("sliding_window_pattern", 4)
    pattern = [*[(i + 1) % prefix == 0 for i in range(first)], *[(i + 1) % rest == 0 for i in range(u.layers)]]
    types = layer_types(u, [FULL if full else SLIDING for full in pattern[: u.layers]])
    sparse = sparse_layers(u, [i >= first for i in range(u.layers)])
    dense = dataclasses.replace(
        mlp(u), hidden=fields.optional_width("prefix_dense_intermediate_size", None) or mlp(u).hidden
    )
    eps = fields.optional_number("rms_norm_eps", None)
    norm = _layer_norm(u) if eps is None else Norm(eps)
    rotated = [not moe and prefix == 1 for moe in sparse]
    moe = _cohere_moe(u)
    return _parallel(u, _cohere_attentions(u, types, rotated), [moe if one else dense for one in sparse], norm)


def _cohere_moe(u: Usual) -> MoeConfig:
    fields = u.fields
    selection = fields.string("expert_selection_fn", "softmax")
    combination = fields.string("shared_expert_combination_strategy", "average")
    if selection not in ("softmax", "sigmoid") or combination not in ("sum", "average"):
        raise UnsupportedModel(
            f"{fields.where}: expert_selection_fn = {shown(selection)}: must be softmax or sigmoid; "
            f"shared_expert_combination_strategy = {shown(combination)}: must be sum or average"
        )
    normalize = selection == "sigmoid" and fields.boolean("norm_topk_prob", True)
    shared, each = fields.integer("num_shared_experts", 0, low=0, high=1024), mlp(u)
    return MoeConfig(
        **experts(u, "num_experts", 8, 2),
        hidden=each.hidden,
        activation=each.activation,
        router=RouterConfig("top_k_softmax" if selection == "softmax" else "top_k_sigmoid", normalize=normalize),
        shared=dataclasses.replace(each, hidden=each.hidden * shared) if shared else None,
        mean=bool(shared) and combination == "average",
    )


def _cohere_attentions(u: Usual, types: list[str], rotated: Sequence[bool]) -> list[AttentionConfig]:
    rope = parse_rope(u, interleaved=True)
    base = attention(u, **biased(u))
    return [
        dataclasses.replace(base, reach=reach, rope=rope if reach is not None or rotates else None)
        for reach, rotates in zip(reaches(u, types), rotated, strict=True)
    ]


def _layer_norm(u: Usual) -> Norm:
    return Norm(u.fields.number("layer_norm_eps", 1e-5), centered=True, cast_first=False)


def _parallel(
    u: Usual, attentions: list[AttentionConfig], mlps: Any, norm: Norm, *, logit_scale: float = 0.0625
) -> ModelConfig:
    scale = u.fields.number("logit_scale", logit_scale)
    if u.fields.boolean("use_qk_norm", False):
        raise UnsupportedModel(f"{u.fields.where}: use_qk_norm = true is not implemented")
    return decoder(
        u, attentions, mlps, {"pre_attn": norm}, layer={"parallel": True}, final_norm=norm, logit_scale=scale
    )


def granite_swa(u: Usual) -> ModelConfig:
    """Parse granite_swa: sinks on all layers; scaled embeddings, residuals and logits; RoPE bases by layer."""
    return _granite(u, mlp(u, bias=u.fields.boolean("mlp_bias", False)))


def granitemoe_swa(u: Usual) -> ModelConfig:
    """Parse granitemoe_swa: granite_swa with experts, and optionally a shared one."""
    shared = u.fields.integer("shared_intermediate_size", 0, low=0, high=2**20)
    each = mlp(u)
    moe = MoeConfig(
        **experts(u, "num_local_experts", 8, 2),
        hidden=each.hidden,
        activation=each.activation,
        router=RouterConfig("top_k_softmax"),
        shared=dataclasses.replace(each, hidden=shared) if shared else None,
    )
    return _granite(u, moe)


def _granite(u: Usual, feed: Any) -> ModelConfig:
    types = layer_types(u, every(u, 4, full_at=0))
    ropes = layer_ropes(u, [parse_rope(u)] * u.layers)
    base = attention(u, scale=u.fields.number("attention_multiplier", 1.0), sinks=True, **biased(u))
    attentions = [
        dataclasses.replace(base, rope=rope, reach=reach) for rope, reach in zip(ropes, reaches(u, types), strict=True)
    ]
    return granite_decoder(u, attentions, feed)


def layer_ropes(u: Usual, default: Sequence[Rope | None]) -> list[Rope | None]:
    """Return rotary embeddings by `layer_rope_theta`; 0 means that a layer is not rotated. Raises CheckpointError."""
    thetas = u.fields.raw.get("layer_rope_theta")
    if thetas is None:
        return list(default)
    if not isinstance(thetas, list) or len(thetas) < u.layers:
        raise u.fields.wrong("layer_rope_theta", f"must list a base, or 0, for each of {u.layers} layers")
    each = [Fields({"base": theta}, f"{u.fields.where}: layer_rope_theta") for theta in thetas[: u.layers]]
    bases = [0.0 if one.raw["base"] in (0, None) else one.number("base", None) for one in each]
    known = {base: parse_rope(u, base=base) if base else None for base in set(bases)}
    return [known[base] for base in bases]


def muse_glimmer(u: Usual) -> ModelConfig:
    """Parse muse_glimmer: normed embeddings, weightless norms of q and k, elementwise gates, RoPE bases by layer."""
    fields = u.fields
    full = [(u.layers - 1 - i) % 4 == 0 for i in range(u.layers)]
    types = layer_types(u, [FULL if one else SLIDING for one in full])
    rope = parse_rope(u)
    # Only whether a listed rotary base is 0 matters; the other values are ignored.
    ropes = [rope if listed else None for listed in layer_ropes(u, [None if one else rope for one in full])]
    base = attention(
        u,
        scale=u.head_dim**-0.5 * fields.number("qk_scale_factor", 3.87),
        qk_norm=dataclasses.replace(u.norm, weighted=False),
        gate=AttentionGate("sigmoid"),
        **biased(u),
    )
    attentions = [
        dataclasses.replace(base, rope=rope, reach=reach) for rope, reach in zip(ropes, reaches(u, types), strict=True)
    ]
    pre = dataclasses.replace(u.norm, offset=1.0, cast_first=False)
    post = dataclasses.replace(pre, eps=fields.number("post_norm_eps", 1e-8))
    return decoder(
        u,
        attentions,
        mlp(u, activation=activation(u, "hidden_activation", "silu")),
        {**sandwich(pre), **post_norms(post)},
        embed_norm=dataclasses.replace(u.norm, weighted=False),
        logit_scale=fields.number("output_multiplier", 26**-0.5),
        final_softcap=fields.null_or_number("final_logit_softcapping", 20.0),
    )


def plamo3(u: Usual) -> ModelConfig:
    """Parse plamo3: norms before and after each half with offsets of their own; every eighth layer is full.

    Raises UnsupportedModel if projections have biases.
    """
    fields = u.fields
    if fields.boolean("attention_bias", False):
        raise UnsupportedModel(f"{fields.where}: attention_bias = true is not implemented for {u.family}")
    types = layer_types(u, every(u, fields.integer("sliding_window_pattern", 8)))
    norm = dataclasses.replace(u.norm, offset=1.0)
    kinds = {kind: attention(u, rope=_plamo3_rope(u, kind), qk_norm=norm) for kind in sorted(set(types))}
    # The offsets of vLLM's and mlx-lm's plamo3.py.
    post = {
        "post_attn": dataclasses.replace(norm, offset=1 / 5),
        "post_mlp": dataclasses.replace(norm, offset=1 / 5**1.5),
    }
    scale = math.sqrt(u.d_model) if fields.boolean("scale_embedding", False) else 1.0
    return decoder(
        u, by_type(u, types, kinds), mlp(u), {**llama_norms(norm), **post}, final_norm=norm, embed_scale=scale
    )


def _plamo3_rope(u: Usual, kind: str) -> Rope:
    """Return the rotary embedding of a layer type: of `rope_parameters`, or of the keys that the config has for it.

    Full layers may have YaRN, whose bounds are not rounded, as in vLLM and SGLang.
    """
    fields, nested = u.fields, u.fields.table("rope_parameters")
    where = f"{fields.where}: rope_parameters"
    if kind in nested:
        table = Fields(nested, where).table(kind)
    elif kind == SLIDING:
        table = {"rope_theta": fields.number("rope_local_theta", 10_000.0)}
    else:
        # No default for the base: published versions of the config class do not agree on it.
        table = {"rope_theta": fields.number("rope_theta", None)}
        factor = fields.number("rope_scaling_factor", 1.0)
        if factor != 1.0:
            original = fields.integer("initial_context_length", None)
            table |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            table |= {"truncate": False}
    return parse_rope(dataclasses.replace(u, fields=Fields({"rope_parameters": table}, where)))
