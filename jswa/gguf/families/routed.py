"""Configs of mixtures with a shared expert, most of whose routers rank experts by sigmoids and a bias.

Where llama.cpp has a number in its program, not in the file, a function has it too.
"""

from jswa.errors import UnsupportedModel
from jswa.gguf.families.common import Config, plain, sparse, types, usual
from jswa.gguf.families.keys import Model
from jswa.gguf.families.mixtures import SIGMOID, SOFTMAX
from jswa.gguf.families.rope import FACTORS, rope, rope_by_type


def _experts(m: Model) -> Config:
    """Return the keys of experts that rank by sigmoids."""
    m.requires("expert_gating_func", SIGMOID)
    return {
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.same("expert_feed_forward_length"),
    }


def _deepseek(m: Model, count: str, shared: str) -> Config:
    """Return the keys of DeepSeek-V3's mixture; `count`, `shared`: the family's names of the numbers of experts."""
    found = _experts(m)
    number = m.integer("expert_shared_count")
    m.requires("expert_shared_feed_forward_length", number * found["moe_intermediate_size"])
    return found | {
        count: m.integer("expert_count"),
        shared: number,
        "first_k_dense_replace": m.integer("leading_dense_block_count", 0, low=0),
        "n_group": m.integer("expert_group_count", 1),
        "topk_group": m.integer("expert_group_used_count", 1),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "routed_scaling_factor": m.number("expert_weights_scale", 1.0),
    }


def dots1(m: Model) -> Config:
    """Return the config of dots1; llama.cpp keeps no window of it."""
    return {
        **plain(m),
        **_deepseek(m, "n_routed_experts", "n_shared_experts"),
        "model_type": "dots1",
        "attention_bias": m.has("attn_q.bias"),
        "sliding_window": None,
    }


def exaone_moe(m: Model) -> Config:
    """Return the config of exaone_moe."""
    found = plain(m)
    return {
        **found,
        **_deepseek(m, "num_experts", "num_shared_experts"),
        "model_type": "exaone_moe",
        "mlp_layer_types": sparse(m),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(m.sliding(4)),
    }


def afmoe(m: Model) -> Config:
    """Return the config of afmoe. llama.cpp has scaled embeddings and every fourth layer in its program."""
    for key in ("expert_group_count", "expert_group_used_count"):
        m.requires(key, 1)
    m.requires("expert_weights_norm", True)
    found = plain(m)
    return {
        **found,
        **_experts(m),
        "model_type": "afmoe",
        "attention_bias": m.has("attn_q.bias"),
        "num_experts": m.integer("expert_count"),
        "num_shared_experts": m.integer("expert_shared_count", 0, low=0),
        "num_dense_layers": m.integer("leading_dense_block_count", 0, low=0),
        "route_scale": m.number("expert_weights_scale", 1.0),
        "mup_enabled": True,
        "global_attn_every_n_layers": 4,
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(m.sliding(4)),
    }


def laguna(m: Model) -> Config:
    """Return the config of laguna. llama.cpp has every fourth layer, from the first, in its program.

    A file keeps no softcap of the router.
    """
    heads, head_dim = m.widths("attention.head_count"), m.integer("attention.key_length")
    m.requires("attention.value_length", head_dim)
    m.requires("expert_weights_norm", True)
    m.requires("expert_shared_count", 1)
    window = m.integer("attention.sliding_window", 0, low=0)
    slides = m.sliding(4, full_at=0) if window else [False] * m.layers
    full = m.integer("rope.dimension_count", head_dim, high=head_dim)
    local = m.integer("rope.dimension_count_swa", full, high=head_dim)
    per_head = m.shape("attn_gate.weight", 2)[0] == heads[0]
    return {
        **usual(m, heads=False),
        **_experts(m),
        **rope_by_type(m, head_dim, full, local),
        "model_type": "laguna",
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": m.same("attention.head_count_kv", heads[0]),
        "head_dim": head_dim,
        "attention_bias": m.has("attn_q.bias"),
        "gating": "per-head" if per_head else "per-element",
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
        "mlp_layer_types": _with_dense(m),
        "num_experts": m.integer("expert_count"),
        "moe_routed_scaling_factor": m.number("expert_weights_scale"),
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "sliding_window": window or None,
        "layer_types": types(slides),
    }


def step35(m: Model) -> Config:
    """Return the config of step3p5. llama.cpp has it in its program that full layers rotate half of each head.

    Raises UnsupportedModel if heads differ within a type of layers, or for factors of frequencies but Llama 3's: the
    converter computes them for whole heads.
    """
    slides, counts = m.sliding(4), m.widths("attention.head_count")
    kinds = {kind: {n for n, one in zip(counts, slides, strict=True) if one is kind} for kind in (True, False)}
    if any(len(one) > 1 for one in kinds.values()):
        raise UnsupportedModel(f"{m.where}: {m.arch}.attention.head_count: must be the same for all layers of a type")
    local, full = kinds[True] or kinds[False], kinds[False] or kinds[True]
    head_dim = m.integer("attention.key_length")
    m.requires("attention.value_length", head_dim)
    m.requires("expert_weights_norm", True)
    m.integer("moe_every_n_layers", 1)  # the layers that have experts tell more
    rotated = m.integer("rope.dimension_count", head_dim, high=head_dim)
    rotary = rope_by_type(
        m, head_dim, rotated // 2, m.integer("rope.dimension_count_swa", rotated, high=head_dim), factors=head_dim
    )
    if FACTORS in m.tensors and rotary["rope_parameters"]["full_attention"]["rope_type"] != "llama3":
        raise UnsupportedModel(f"{m.tensors[FACTORS].where}: must be factors of Llama 3's scaling")
    return {
        **usual(m, heads=False),
        **_experts(m),
        **rotary,
        "model_type": "step3p5",
        "num_attention_heads": full.pop(),
        "num_sliding_attention_heads": set(local or counts).pop(),
        "num_key_value_heads": m.same("attention.head_count_kv"),
        "head_dim": head_dim,
        "attention_bias": m.has("attn_q.bias"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
        "mlp_layer_types": _with_dense(m),
        "n_routed_experts": m.integer("expert_count"),
        "moe_router_scaling_factor": m.number("expert_weights_scale", 1.0),
        "share_expert_dim": m.integer("expert_shared_feed_forward_length"),
        "swiglu_limits": _limits(m, "swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits(m, "swiglu_clamp_shexp"),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(slides),
    }


def _with_dense(m: Model) -> list[str]:
    """Return which layers are mixtures; the tensors say more than the number of dense layers at the start."""
    m.integer("leading_dense_block_count", 0, low=0)
    return sparse(m)


def _limits(m: Model, key: str) -> list[float | None]:
    """Return a clamp for each layer; 0 means none. Raises CheckpointError."""
    values = m.each(key, 0.0)
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1e30 for one in values):
        raise m.wrong(key, "must be numbers from 0 to 1e30")
    return [float(one) or None for one in values]


def cohere2moe(m: Model) -> Config:
    """Return the config of cohere2_moe. llama.cpp rotates all dense layers at the start, and averages shared experts.

    Raises CheckpointError if shared experts have another width than their number tells.
    """
    found = usual(m)
    rotary = rope(m, found["head_dim"])
    m.requires("expert_weights_scale", 1.0)
    experts = _experts(m)
    width, shared = experts.pop("moe_intermediate_size"), m.integer("expert_shared_count", 0, low=0)
    m.requires("expert_shared_feed_forward_length", shared * width)
    m.same("feed_forward_length", width)  # of experts or of dense layers: the tensors tell
    dense = m.shape("ffn_gate.weight", 2)[0] if m.has("ffn_gate.weight") else None
    return {
        **found,
        **rotary,
        **experts,
        "model_type": "cohere2_moe",
        "intermediate_size": width,
        "prefix_dense_intermediate_size": dense,
        "prefix_dense_sliding_window_pattern": 1,
        "mlp_layer_types": _with_dense(m),
        "num_experts": m.integer("expert_count"),
        "num_shared_experts": shared,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "rms_norm_eps": m.optional("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": m.optional("attention.layer_norm_epsilon") or 1e-5,
        "logit_scale": m.number("logit_scale"),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(m.sliding(4, full_at=0)),
        "attention_bias": m.has("attn_q.bias"),
    }


def mellum(m: Model) -> Config:
    """Return the config of mellum. llama.cpp has it in its program that weights of experts are normalized."""
    m.requires("expert_gating_func", SOFTMAX)
    m.requires("expert_weights_scale", 1.0)
    found = usual(m)
    window = m.integer("attention.sliding_window", 0, low=0)
    m.requires("rope.dimension_count", found["head_dim"])
    return {
        **found,
        **rope_by_type(m, found["head_dim"], found["head_dim"], found["head_dim"]),
        "model_type": "mellum",
        "attention_bias": m.has("attn_q.bias"),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
        "mlp_layer_types": sparse(m),
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.same("expert_feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", True),
        "sliding_window": window or None,
        "layer_types": types(m.sliding(4) if window else [False] * m.layers),
    }
