"""Configs of mixtures of experts. Where llama.cpp has a number in its program, a function has it too."""

from jswa.gguf.families.common import Config, types, usual
from jswa.gguf.families.keys import Model
from jswa.gguf.families.rope import rope, share

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of the functions of a router


def _qwen_moe(m: Model) -> Config:
    """Return the keys of Qwen's mixtures; layers without a router are dense."""
    m.requires("expert_gating_func", SOFTMAX)
    m.requires("expert_weights_scale", 1.0)
    found = usual(m)
    found |= rope(m, found["head_dim"])
    return found | {
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length", 1),
        "num_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length", m.shape("ffn_gate_exps.weight", 3)[1]),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, routed in enumerate(m.which("ffn_gate_inp.weight")) if not routed],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def qwen2moe(m: Model) -> Config:
    """Return the config of qwen2_moe. llama.cpp has it in its program that weights of experts are not normalized."""
    shared = m.shape("ffn_gate_shexp.weight", 2)[0]
    return {
        **_qwen_moe(m),
        "model_type": "qwen2_moe",
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length", shared),
        "qkv_bias": m.has("attn_q.bias"),
    }


def qwen3moe(m: Model) -> Config:
    """Return the config of qwen3_moe. llama.cpp has it in its program that weights of experts are normalized."""
    return {
        **_qwen_moe(m),
        "model_type": "qwen3_moe",
        "norm_topk_prob": m.flag("expert_weights_norm", True),
        "attention_bias": m.has("attn_q.bias"),
    }


def gpt_oss(m: Model) -> Config:
    """Return the config of gpt_oss. llama.cpp has every second layer and the clamp of experts in its program."""
    found = usual(m)
    rotary = rope(m, found["head_dim"])
    if rotary["rope_scaling"] is not None:
        rotary["rope_scaling"]["truncate"] = False  # as transformers computes it; llama.cpp rounds
    m.requires("expert_gating_func", SOFTMAX)
    width = m.shape("ffn_gate_exps.weight", 3)[1]
    m.integer("feed_forward_length", width)
    return {
        **found,
        **rotary,
        "model_type": "gpt_oss",
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.integer("expert_feed_forward_length", width),
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(m.sliding(2)),
        "attention_bias": m.has("attn_q.bias"),
    }


def llama4(m: Model) -> Config:
    """Return the config of llama4. llama.cpp has chunks, temperatures and norms of queries in its program."""
    found = usual(m)
    step = m.integer("interleave_moe_layer_step")
    m.requires("attention.sliding_window", 8192)
    count = m.integer("expert_count")
    rotary = rope(m, found["head_dim"])
    return {
        **found,
        **rotary,
        "model_type": "llama4_text",
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": m.same("feed_forward_length"),
        "interleave_moe_layer_step": step,
        "num_local_experts": count,
        "num_experts_per_tok": m.integer("expert_used_count"),
        "attention_chunk_size": 8192,
        "attention_bias": m.has("attn_q.bias"),
        "layer_types": types(m.sliding(4), "chunked_attention"),
        "no_rope_layers": [int(one) for one in m.sliding(4)],
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": count != 128,
    }


def mimo2(m: Model) -> Config:
    """Return the config of mimo_v2_flash: sliding layers have their own KV heads, and values their own width.

    Raises CheckpointError if KV heads differ in another way.
    """
    found = usual(m, heads=False)
    slides = m.sliding(6)
    counts = m.widths("attention.head_count_kv")
    kinds = {kind: {count for count, one in zip(counts, slides, strict=True) if one is kind} for kind in (True, False)}
    if any(len(one) != 1 for one in kinds.values()):
        raise m.wrong("attention.head_count_kv", "must be the same for all layers of a type, of which both occur")
    head_dim, value_dim = m.integer("attention.key_length"), m.integer("attention.value_length")
    rotated = m.integer("rope.dimension_count", head_dim, high=head_dim)
    m.requires("expert_gating_func", SIGMOID)
    sinks = [a or b for a, b in zip(m.which("attn_sinks.weight"), m.which("attn_sinks"), strict=True)]
    heads = m.same("attention.head_count")
    local, full = kinds[True].pop(), kinds[False].pop()
    return found | {
        "model_type": "mimo_v2_flash",
        "layernorm_epsilon": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
        "head_dim": head_dim, "swa_head_dim": head_dim,
        "v_head_dim": value_dim, "swa_v_head_dim": value_dim,
        "num_key_value_heads": full, "swa_num_key_value_heads": local,
        "num_attention_heads": heads, "swa_num_attention_heads": heads,
        # The file has the window of the hub's config, which counts the tokens before the one that attends.
        "sliding_window_size": m.integer("attention.sliding_window"),
        "hybrid_layer_pattern": [int(one) for one in slides],
        "rope_theta": m.number("rope.freq_base", 10_000.0),
        "swa_rope_theta": m.number("rope.freq_base_swa", 10_000.0),
        "partial_rotary_factor": share(rotated, head_dim),
        "add_full_attention_sink_bias": any(a and not b for a, b in zip(sinks, slides, strict=True)),
        "add_swa_attention_sink_bias": any(a and b for a, b in zip(sinks, slides, strict=True)),
        "attention_value_scale": m.optional("attention.value_scale"),
        "attention_bias": m.has("attn_q.bias"),
        "n_routed_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "moe_intermediate_size": m.same("expert_feed_forward_length"),
        "moe_layer_freq": [int(one) for one in m.which("ffn_gate_inp.weight")],
        "n_group": m.integer("expert_group_count", 1), "topk_group": m.integer("expert_group_used_count", 1),
        "norm_topk_prob": m.flag("expert_weights_norm", True),
        "routed_scaling_factor": m.optional("expert_weights_scale"),
        "scoring_func": "sigmoid",
    }  # fmt: skip
