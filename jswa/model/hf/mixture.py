"""gpt_oss, mimo_v2_flash, llama4_text, mixtral, qwen3_moe: mixtures of experts in llama's block."""

from collections.abc import Sequence

from jswa.architecture import MlpConfig, ModelConfig, MoeConfig, Norm, RouterConfig, Temperature
from jswa.errors import CheckpointError
from jswa.model.hf.common import (
    CHUNKED,
    FULL,
    SLIDING,
    activation,
    attention,
    head_size,
    num_layers,
    pre_norm_model,
    reaches,
    with_reaches,
)
from jswa.model.hf.fields import Fields
from jswa.model.hf.rope import parse_rope

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Every second layer slides; sinks on all; biased experts with a clamped activation."""
    count, heads = num_layers(fields, 36), fields.integer("num_attention_heads", 64, high=4096)
    types = [SLIDING if index % 2 == 0 else FULL for index in range(count)]
    types = fields.layer_types(types, allowed=(FULL, SLIDING))
    head_dim, max_position = fields.width("head_dim", 64), fields.integer("max_position_embeddings", 131072)
    bias, window = fields.boolean("attention_bias", True), fields.optional_integer("sliding_window", 128)
    base = attention(
        heads,
        fields.optional_integer("num_key_value_heads", 8, high=4096) or heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=parse_rope(fields, head_dim, max_position, theta=150_000.0, default=_GPT_OSS_ROPE),
        sinks=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    moe = MoeConfig(
        fields.width("num_local_experts", 128),
        _top_k(fields, "num_local_experts", 128, 4),
        fields.width("intermediate_size", 2880),
        "silu",
        RouterConfig("top_k_softmax", bias=True),
        bias=True,
        clamp=fields.number("swiglu_limit", 7.0),
        alpha=fields.number("swiglu_alpha", 1.702),
    )
    return pre_norm_model(
        fields,
        eos,
        family="gpt_oss",
        attentions=with_reaches(base, reaches(fields, types, "sliding_window", window)),
        mlps=[moe] * count,
        norm=Norm(fields.number("rms_norm_eps", 1e-5), cast_first=False),
        d_model=fields.width("hidden_size", 2880),
        vocab=201088,
        max_position=max_position,
    )


def mimo_v2_flash(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Layers of two kinds with head counts of their own; values narrower than keys; sinks on sliding layers."""
    count = num_layers(fields, 48)
    types = _mimo_types(fields, count)
    max_position = fields.integer("max_position_embeddings", 131072)
    norm = Norm(fields.optional_number("rms_norm_eps", None) or fields.number("layernorm_epsilon", 1e-5))
    previous = fields.optional_integer("sliding_window_size", None)
    window = fields.integer("sliding_window", 129) if previous is None else previous + 1
    full_kv = fields.width("num_key_value_heads", 4)
    head_dim, scale = fields.width("head_dim", 192), fields.null_or_number("attention_value_scale", 0.707)
    by_type = {
        kind: attention(
            fields.integer("num_attention_heads", 64, high=4096),
            full_kv if kind == FULL else fields.width("swa_num_key_value_heads", 2 * full_kv),
            head_dim,
            fields.width("v_head_dim", 128),
            scale=head_dim**-0.5,
            rope=parse_rope(
                fields,
                head_dim,
                max_position,
                layer_type=kind,
                theta_key="rope_theta" if kind == FULL else "swa_rope_theta",
                theta=5e6 if kind == FULL else 1e4,
                partial=0.334,
            ),
            sinks=fields.boolean(f"add_{'full' if kind == FULL else 'swa'}_attention_sink_bias", kind != FULL),
            v_scale=scale or 1.0,
            qkv_bias=fields.boolean("attention_bias", False),
        )
        for kind in (FULL, SLIDING)
    }
    dense = MlpConfig(fields.width("intermediate_size", 16384), activation(fields, "hidden_act", "silu"))
    attentions = [
        with_reaches(by_type[kind], [reach])[0]
        for kind, reach in zip(types, reaches(fields, types, "sliding_window", window), strict=True)
    ]
    return pre_norm_model(
        fields,
        eos,
        family="mimo_v2_flash",
        attentions=attentions,
        mlps=[_mimo_moe(fields) if sparse else dense for sparse in _mimo_sparse(fields, count)],
        norm=norm,
        d_model=fields.width("hidden_size", 4096),
        vocab=152576,
        max_position=max_position,
    )


def _mimo_types(fields: Fields, count: int) -> list[str]:
    """`layer_types` (version 5), or `hybrid_layer_pattern` (hub: 1 slides), or the first and every sixth layer full."""
    types = [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(count)]
    pattern = fields.raw.get("hybrid_layer_pattern")
    if isinstance(pattern, list):
        if len(pattern) != count or not all(entry in (0, 1) for entry in pattern):
            raise CheckpointError(f"{fields.where}: hybrid_layer_pattern = {pattern}: must list {count} of 0 and 1")
        types = [SLIDING if entry else FULL for entry in pattern]
    return fields.layer_types(types, allowed=(FULL, SLIDING))


def _mimo_sparse(fields: Fields, count: int) -> list[bool]:
    """`mlp_layer_types` (version 5), or `moe_layer_freq` (hub), or all layers but the first."""
    types = fields.raw.get("mlp_layer_types")
    if isinstance(types, list) and len(types) == count and set(map(str, types)) <= {"dense", "sparse"}:
        return [kind == "sparse" for kind in types]
    frequency = fields.raw.get("moe_layer_freq")
    if isinstance(frequency, list) and len(frequency) == count:
        return [bool(entry) for entry in frequency]
    if types is not None or frequency is not None:
        raise CheckpointError(f"{fields.where}: mlp_layer_types and moe_layer_freq must list {count} layers")
    return [index > 0 for index in range(count)]


def _mimo_moe(fields: Fields) -> MoeConfig:
    experts, top_k = fields.width("n_routed_experts", 256), _top_k(fields, "n_routed_experts", 256, 8)
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if experts % groups or (groups > 1 and experts // groups < 2) or not top_k <= kept * experts // groups <= experts:
        raise CheckpointError(
            f"{fields.where}: n_group = {groups}, topk_group = {kept}: must cut {experts} experts into equal groups of "
            f"at least 2, of which the kept ones hold the {top_k} that a token takes"
        )
    return MoeConfig(
        experts,
        top_k,
        fields.width("moe_intermediate_size", 2048),
        activation(fields, "hidden_act", "silu"),
        RouterConfig(
            "sigmoid",
            selection_bias=True,
            normalize=fields.boolean("norm_topk_prob", True),
            eps=1e-20,
            groups=groups,
            top_groups=kept,
            scale=fields.optional_number("routed_scaling_factor", 1.0) or 1.0,
        ),
    )


def llama4_text(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Chunked layers with rotary embedding and, between them, full layers without."""
    count, heads = num_layers(fields, 48), fields.integer("num_attention_heads", 40, high=4096)
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.raw.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or not all(entry in (0, 1) for entry in rotated):
        raise CheckpointError(f"{fields.where}: no_rope_layers = {rotated}: must list {count} of 0 and 1")
    types = fields.layer_types([CHUNKED if rope else FULL for rope in rotated[:count]], allowed=(FULL, CHUNKED))
    head_dim = head_size(fields, heads, fields.width("hidden_size", 5120), 128)
    max_position, eps = fields.integer("max_position_embeddings", 131072), fields.number("rms_norm_eps", 1e-5)
    rope = parse_rope(fields, head_dim, max_position, theta=500_000.0, interleaved=True)
    tuned = bool(fields.raw.get("attn_temperature_tuning", True))
    temperature = Temperature(fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1)) if tuned else None
    normed = fields.boolean("use_qk_norm", True)
    bias = fields.boolean("attention_bias", False)
    chunks = reaches(fields, types, "attention_chunk_size", fields.optional_integer("attention_chunk_size", 8192))
    attentions = [
        attention(
            heads,
            fields.optional_integer("num_key_value_heads", 8, high=4096) or heads,
            head_dim,
            scale=head_dim**-0.5,
            rope=rope if rotates else None,
            reach=reach,
            qk_norm=Norm(eps, weighted=False) if normed and rotates else None,
            temperature=None if rotates else temperature,
            qkv_bias=bias,
            out_bias=bias,
        )
        for rotates, reach in zip(rotated[:count], chunks, strict=True)
    ]
    return pre_norm_model(
        fields,
        eos,
        family="llama4_text",
        attentions=attentions,
        mlps=_llama4_mlps(fields, count),
        norm=Norm(eps),
        d_model=fields.width("hidden_size", 5120),
        vocab=202048,
        max_position=max_position,
    )


def _llama4_mlps(fields: Fields, count: int) -> list[MlpConfig | MoeConfig]:
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.raw.get("moe_layers")
    sparse = list(range(step - 1, count, step)) if sparse is None else sparse
    if not isinstance(sparse, list) or not all(isinstance(index, int) and 0 <= index < count for index in sparse):
        raise CheckpointError(f"{fields.where}: moe_layers = {sparse}: must list layers from 0 to {count - 1}")
    act, hidden = activation(fields, "hidden_act", "silu"), fields.width("intermediate_size", 8192)
    moe = MoeConfig(
        fields.width("num_local_experts", 16),
        _top_k(fields, "num_local_experts", 16, 1),
        hidden,
        act,
        RouterConfig("top_k_sigmoid"),
        weight_on_input=True,
        shared=MlpConfig(hidden, act),
    )
    dense = MlpConfig(fields.width("intermediate_size_mlp", 16384), act)
    return [moe if index in sparse else dense for index in range(count)]


def mixtral(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """All layers slide, or none; weights of the chosen experts add up to 1."""
    count = num_layers(fields, 32)
    moe = MoeConfig(
        fields.width("num_local_experts", 8),
        _top_k(fields, "num_local_experts", 8, 2),
        fields.width("intermediate_size", 14336),
        activation(fields, "hidden_act", "silu"),
        RouterConfig("softmax", normalize=True),
    )
    window = fields.optional_integer("sliding_window", None)
    types = [FULL if window is None else SLIDING] * count
    return _softmax_model(
        fields, eos, "mixtral", types, window, [moe] * count, kv_heads=8, d_model=4096, vocab=32000,
        max_position=131072, eps=1e-5, theta=1e6, qk_norm=False,
    )  # fmt: skip


def qwen3_moe(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    """Norms on q and k; all layers slide, or none; some layers may be dense."""
    count = num_layers(fields, 24)
    act = activation(fields, "hidden_act", "silu")
    experts = fields.optional_integer("num_local_experts", None) or fields.integer("num_experts", 128, low=0)
    step, dense_only = fields.integer("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense_only, list):
        raise CheckpointError(f"{fields.where}: mlp_only_layers = {dense_only}: must be a list of layers")
    dense = MlpConfig(fields.width("intermediate_size", 6144), act)
    moe = MoeConfig(
        max(experts, 1),
        fields.integer("num_experts_per_tok", 8, high=max(experts, 1)) if experts else 1,
        fields.width("moe_intermediate_size", 768),
        act,
        RouterConfig("softmax", normalize=fields.boolean("norm_topk_prob", False)),
    )
    sparse = [experts > 0 and i not in dense_only and (i + 1) % step == 0 for i in range(count)]
    window = fields.optional_integer("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    types = [FULL if window is None else SLIDING] * count
    return _softmax_model(
        fields, eos, "qwen3_moe", types, window, [moe if s else dense for s in sparse], kv_heads=4, d_model=2048,
        vocab=151936, max_position=32768, eps=1e-6, theta=1e4, qk_norm=True,
    )  # fmt: skip


def _softmax_model(
    fields: Fields,
    eos: tuple[int, ...],
    family: str,
    types: list[str],
    window: int | None,
    mlps: Sequence[MlpConfig | MoeConfig],
    *,
    kv_heads: int,
    d_model: int,
    vocab: int,
    max_position: int,
    eps: float,
    theta: float,
    qk_norm: bool,
) -> ModelConfig:
    heads, d_model = fields.integer("num_attention_heads", 32, high=4096), fields.width("hidden_size", d_model)
    head_dim = head_size(fields, heads, d_model, None)
    max_position = fields.integer("max_position_embeddings", max_position)
    norm = Norm(fields.number("rms_norm_eps", eps))
    bias = qk_norm and fields.boolean("attention_bias", False)
    base = attention(
        heads,
        fields.optional_integer("num_key_value_heads", kv_heads, high=4096) or heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=parse_rope(fields, head_dim, max_position, theta=theta),
        qk_norm=norm if qk_norm else None,
        qkv_bias=bias,
        out_bias=bias,
    )
    return pre_norm_model(
        fields,
        eos,
        family=family,
        attentions=with_reaches(base, reaches(fields, types, "sliding_window", window)),
        mlps=mlps,
        norm=norm,
        d_model=d_model,
        vocab=vocab,
        max_position=max_position,
    )


def _top_k(fields: Fields, experts_key: str, experts: int, default: int) -> int:
    return fields.integer("num_experts_per_tok", default, high=fields.integer(experts_key, experts))
