"""Parsers of mixtures of experts with llama's block."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jswa.architecture import (
    AttentionConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    Norm,
    RouterConfig,
    Temperature,
)
from jswa.model.hf.blocks import exaone_attentions
from jswa.model.hf.common import (
    CHUNKED,
    FULL,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    SLIDING,
    Usual,
    activation,
    attention,
    biased,
    by_type,
    decoder,
    experts,
    layer_types,
    llama_norms,
    mlp,
    reaches,
    sigmoid_router,
    sliding_from,
    sparse_layers,
)
from jswa.model.hf.dense import flags
from jswa.model.hf.rope import parse_rope

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(u: Usual) -> ModelConfig:
    """Parse gpt_oss: every second layer slides; all have sinks; experts have biases and a clamped activation."""
    types = layer_types(u, [SLIDING if index % 2 == 0 else FULL for index in range(u.layers)])
    rope = parse_rope(u, theta=150_000.0, default=_GPT_OSS_ROPE)
    base = attention(u, rope=rope, sinks=True, **biased(u, default=True))
    moe = MoeConfig(
        **experts(u, "num_local_experts", 128, 4),
        hidden=mlp(u).hidden,
        activation="silu",
        router=RouterConfig("top_k_softmax", bias=True),
        bias=True,
        clamp=u.fields.number("swiglu_limit", 7.0),
        alpha=u.fields.number("swiglu_alpha", 1.702),
    )
    norm = dataclasses.replace(u.norm, cast_first=False)
    attentions = by_type(u, types, dict.fromkeys(types, base))
    return decoder(u, attentions, moe, llama_norms(norm), final_norm=norm)


def mimo_v2_flash(u: Usual) -> ModelConfig:
    """Parse mimo_v2_flash: full and sliding layers have their own head counts; values are narrower than keys."""
    fields = u.fields
    default = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(u.layers)]
    pattern = flags(u, "hybrid_layer_pattern", [int(kind == SLIDING) for kind in default])
    types = layer_types(u, [SLIDING if slides else FULL for slides in pattern])
    previous = fields.optional_integer("sliding_window_size", None)
    u = dataclasses.replace(
        u,
        window=fields.integer("sliding_window", 129) if previous is None else previous + 1,
        norm=Norm(fields.optional_number("rms_norm_eps", None) or fields.number("layernorm_epsilon", 1e-5)),
    )
    kinds = {kind: _mimo_attention(u, kind) for kind in (FULL, SLIDING)}
    listed = flags(u, "moe_layer_freq", [int(index > 0) for index in range(u.layers)])
    counts = experts(u, "n_routed_experts", 256, 8)
    moe = MoeConfig(
        **counts,
        hidden=fields.width("moe_intermediate_size", 2048),
        activation=activation(u),
        router=sigmoid_router(u, counts, normalize=True, scale=1.0),
    )
    mlps = [moe if sparse else mlp(u) for sparse in sparse_layers(u, [bool(one) for one in listed])]
    return decoder(u, by_type(u, types, kinds), mlps, llama_norms(u.norm), final_norm=u.norm)


def _mimo_attention(u: Usual, kind: str) -> AttentionConfig:
    fields, full = u.fields, kind == FULL
    rope = parse_rope(
        u,
        layer_type=kind,
        head_dim=u.head_dim if full else fields.integer("swa_head_dim", u.head_dim, high=MAX_HEAD_DIM),
        theta_key="rope_theta" if full else "swa_rope_theta",
        theta=5e6 if full else 1e4,
        partial=0.334,
    )
    v_head_dim = fields.integer("v_head_dim", 128, high=MAX_HEAD_DIM)
    return attention(
        u,
        num_heads=u.heads if full else fields.integer("swa_num_attention_heads", u.heads, high=MAX_HEADS),
        num_kv_heads=u.kv_heads if full else fields.integer("swa_num_key_value_heads", 2 * u.kv_heads, high=MAX_HEADS),
        head_dim=u.head_dim if full else fields.integer("swa_head_dim", u.head_dim, high=MAX_HEAD_DIM),
        v_head_dim=v_head_dim if full else fields.integer("swa_v_head_dim", v_head_dim, high=MAX_HEAD_DIM),
        rope=rope,
        sinks=fields.boolean(f"add_{'full' if full else 'swa'}_attention_sink_bias", not full),
        v_scale=fields.null_or_number("attention_value_scale", 0.707) or 1.0,
        qkv_bias=fields.boolean("attention_bias", False),
    )


def llama4_text(u: Usual) -> ModelConfig:
    """Parse llama4_text: chunked layers are rotated, full layers between them are not."""
    fields = u.fields
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = flags(u, "no_rope_layers", [int((index + 1) % interval != 0) for index in range(u.layers)])
    types = layer_types(u, [CHUNKED if rotates else FULL for rotates in rotated], allowed=(FULL, CHUNKED))
    rope = parse_rope(u, theta=500_000.0, interleaved=True)
    tuned = bool(fields.raw.get("attn_temperature_tuning", True))
    growth = Temperature(fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1)) if tuned else None
    normed = Norm(u.norm.eps, weighted=False) if fields.boolean("use_qk_norm", True) else None
    chunks = reaches(u, types, "attention_chunk_size", fields.optional_integer("attention_chunk_size", 8192))
    base = attention(u, **biased(u))
    rotating = {"rope": rope, "qk_norm": normed}  # a norm without weights commutes with the rotation
    attentions = [
        dataclasses.replace(base, reach=reach, **(rotating if rotates else {"temperature": growth}))
        for rotates, reach in zip(rotated, chunks, strict=True)
    ]
    return decoder(u, attentions, _llama4_mlps(u), llama_norms(u.norm))


def _llama4_mlps(u: Usual) -> list[MlpConfig | MoeConfig]:
    step = u.fields.integer("interleave_moe_layer_step", 1)
    sparse = _listed(u, "moe_layers", list(range(step - 1, u.layers, step)))
    each = mlp(u)
    moe = MoeConfig(
        **experts(u, "num_local_experts", 16, 1),
        hidden=each.hidden,
        activation=each.activation,
        router=RouterConfig("top_k_sigmoid"),
        weight_on_input=True,
        shared=each,
    )
    dense = mlp(u, "intermediate_size_mlp", 16384)
    return [moe if index in sparse else dense for index in range(u.layers)]


def mixtral(u: Usual) -> ModelConfig:
    """Parse mixtral: all layers slide, or none; the weights of the chosen experts add up to 1."""
    each = mlp(u)
    moe = MoeConfig(
        **experts(u, "num_local_experts", 8, 2),
        hidden=each.hidden,
        activation=each.activation,
        router=RouterConfig("softmax", normalize=True),
    )
    return _sliding(u, moe, rope=parse_rope(u, theta=1e6))


def qwen3_moe(u: Usual) -> ModelConfig:
    """Parse qwen3_moe: q and k are normed; all layers slide, or none; some layers may be dense."""
    count = u.fields.optional_integer("num_local_experts", None, high=MAX_EXPERTS) or u.fields.integer(
        "num_experts", 128, low=0, high=MAX_EXPERTS
    )
    window = u.window if u.fields.boolean("use_sliding_window", False) else None
    u = dataclasses.replace(u, window=window)
    return _sliding(u, _qwen_mlps(u, count, 8, 768), rope=parse_rope(u), qk_norm=u.norm, **biased(u))


def qwen2_moe(u: Usual) -> ModelConfig:
    """Parse qwen2_moe: every second of the first layers may slide; the shared expert has a gate."""
    fields = u.fields
    slides, first = fields.boolean("use_sliding_window", False), fields.integer("max_window_layers", 28, low=0)
    types = [SLIDING if slides and i % 2 == 0 and i < first else FULL for i in range(u.layers)]
    base = attention(u, rope=parse_rope(u), qkv_bias=fields.boolean("qkv_bias", True))
    shared = mlp(u, "shared_expert_intermediate_size", 5632)
    mlps = _qwen_mlps(
        u, fields.integer("num_experts", 60, low=0, high=MAX_EXPERTS), 4, 1408, shared=shared, shared_gate=True
    )
    u = u if slides else dataclasses.replace(u, window=None)
    return decoder(u, by_type(u, layer_types(u, types), {FULL: base, SLIDING: base}), mlps, llama_norms(u.norm))


def _qwen_mlps(u: Usual, count: int, top_k: int, width: int, **shared: Any) -> list[MlpConfig | MoeConfig]:
    """Return feed-forwards: every `decoder_sparse_step`-th is a mixture, except those in `mlp_only_layers`."""
    step, dense = u.fields.integer("decoder_sparse_step", 1), _listed(u, "mlp_only_layers", [])
    if not count:
        return [mlp(u)] * u.layers
    moe = MoeConfig(
        num_experts=count,
        top_k=u.fields.integer("num_experts_per_tok", top_k, high=count),
        hidden=u.fields.width("moe_intermediate_size", width),
        activation=activation(u),
        router=RouterConfig("softmax", normalize=u.fields.boolean("norm_topk_prob", False)),
        **shared,
    )
    return [moe if i not in dense and (i + 1) % step == 0 else mlp(u) for i in range(u.layers)]


def dots1(u: Usual) -> ModelConfig:
    """Parse dots1: q and k are normed; layers from max_window_layers on slide; the first layers are dense."""
    fields = u.fields
    types = layer_types(u, sliding_from(u, u.window, fields.integer("max_window_layers", 62, low=0)))
    base = attention(u, rope=parse_rope(u), qk_norm=u.norm, **biased(u))
    first = fields.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS)
    mlps: list[MlpConfig | MoeConfig] = [mlp(u)] * min(first, u.layers)
    if first < u.layers:
        shared = fields.integer("n_shared_experts", None, low=0, high=1024)
        mlps += [_deepseek_moe(u, "n_routed_experts", 1408, None, shared, scale=1.0)] * (u.layers - first)
    return decoder(u, by_type(u, types, dict.fromkeys(types, base)), mlps, llama_norms(u.norm))


def exaone_moe(u: Usual) -> ModelConfig:
    """Parse exaone_moe: exaone4's attention in llama's block; the first layer is dense."""
    fields = u.fields
    first = fields.integer("first_k_dense_replace", 1, low=0, high=MAX_LAYERS)
    shared = fields.integer("num_shared_experts", 1, low=0, high=1024)
    moe = _deepseek_moe(u, "num_experts", 1024, 64, shared, normalize=True, scale=2.5)
    sparse = sparse_layers(u, [i >= first for i in range(u.layers)])
    return decoder(u, exaone_attentions(u), [moe if one else mlp(u) for one in sparse], llama_norms(u.norm))


def _deepseek_moe(
    u: Usual, key: str, width: int, count: int | None, shared: int, *, scale: float, normalize: bool = False
) -> MoeConfig:
    """Return DeepSeek-V3's mixture: its router, and `shared` experts for all tokens, fused into one."""
    counts = experts(u, key, count, 8 if count else None)
    hidden = u.fields.width("moe_intermediate_size", width)
    return MoeConfig(
        **counts,
        hidden=hidden,
        activation=activation(u),
        router=sigmoid_router(u, counts, normalize=normalize, scale=scale),
        shared=MlpConfig(hidden * shared, activation(u)) if shared else None,
    )


def mellum(u: Usual) -> ModelConfig:
    """Parse mellum: q and k are normed; each layer type has its own rotary embedding."""
    types = layer_types(u, [FULL] * u.layers)
    kinds = {
        kind: attention(u, rope=parse_rope(u, layer_type=kind, theta=theta), qk_norm=u.norm, **biased(u))
        for kind, theta in ((FULL, 5e5), (SLIDING, 1e4))
    }
    key = "num_experts" if u.fields.raw.get("num_local_experts") is None else "num_local_experts"
    moe = MoeConfig(
        **experts(u, key, 64, 8),
        hidden=u.fields.width("moe_intermediate_size", 896),
        activation=activation(u),
        router=RouterConfig("softmax", normalize=u.fields.boolean("norm_topk_prob", True)),
    )
    mlps = [moe if sparse else mlp(u) for sparse in sparse_layers(u, [True] * u.layers)]
    return decoder(u, by_type(u, types, kinds), mlps, llama_norms(u.norm))


def phimoe(u: Usual) -> ModelConfig:
    """Parse phimoe: LayerNorms with biases, SparseMixer routing; all layers slide, or none."""
    fields = u.fields
    norm, each = Norm(u.norm.eps, centered=True, bias=True), mlp(u)
    counts = {**experts(u, "num_local_experts", 16, 2), "top_k": 2}  # SparseMixer always chooses two
    jitter = fields.number("router_jitter_noise", 0.01) if fields.raw.get("router_jitter_noise") != 0 else 0.0
    moe = MoeConfig(
        **counts, hidden=each.hidden, activation=each.activation, router=RouterConfig("sparsemixer", jitter=jitter)
    )
    attentions = _all_sliding(u, rope=parse_rope(u, theta=1e6), **biased(u))
    head = fields.boolean("lm_head_bias", False)
    return decoder(u, attentions, moe, llama_norms(norm), final_norm=norm, head_bias=head)


def flint(u: Usual) -> ModelConfig:
    """Parse flint: all layers have sinks; full layers are not rotated; a shared expert."""
    last, fields = u.layers - 1, u.fields
    types = layer_types(u, [FULL if i < 2 or i % 4 == 1 or i == last else SLIDING for i in range(u.layers)])
    dense, step = _listed(u, "mlp_only_layers", [0, 1]), fields.integer("decoder_sparse_step", 1)
    moe = MoeConfig(
        **experts(u, "num_experts", 256, 6),
        hidden=fields.width("moe_intermediate_size", 512),
        activation=activation(u),
        router=RouterConfig("sigmoid", normalize=fields.boolean("norm_topk_prob", True)),
        shared=mlp(u, "shared_expert_intermediate_size", 1024),
    )
    mlps = [moe if i not in dense and (i + 1) % step == 0 else mlp(u) for i in range(u.layers)]
    norm = dataclasses.replace(u.norm, cast_first=False)
    kinds = unrotated_full(attention(u, rope=parse_rope(u), qk_norm=norm, sinks=True, **biased(u)))
    return decoder(u, by_type(u, types, kinds), mlps, llama_norms(norm), final_norm=norm)


def unrotated_full(base: AttentionConfig, **full: Any) -> dict[str, AttentionConfig]:
    """Return attentions by layer type: sliding layers are rotated, full layers are not."""
    return {SLIDING: base, FULL: dataclasses.replace(base, rope=None, **full)}


def _sliding(u: Usual, mlps: MoeConfig | Sequence[MlpConfig | MoeConfig], **changes: Any) -> ModelConfig:
    return decoder(u, _all_sliding(u, **changes), mlps, llama_norms(u.norm))


def _all_sliding(u: Usual, **changes: Any) -> list[AttentionConfig]:
    """Return attentions that all slide, or are all full without a window."""
    return [attention(u, reach=reach, **changes) for reach in reaches(u, sliding_from(u, u.window, 0))]


def _listed(u: Usual, key: str, default: list[int]) -> list[int]:
    """Return a list of layer indices. Raises CheckpointError."""
    value = u.fields.raw.get(key)
    value = default if value is None else value
    if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
        raise u.fields.wrong(key, "must be a list of layer indices")
    return value
