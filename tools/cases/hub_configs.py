"""config.json of released models as on the Hugging Face hub, one per row of `hub_kv.ROWS`.

Each config has those keys of the hub's file that describe the decoder, and no others.
"""

from typing import Any

Config = dict[str, Any]
_TYPES = {"F": "full_attention", "S": "sliding_attention"}
_FP8: Config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _types(pattern: str, count: int) -> list[str]:
    """Return the types of `count` layers, repeating the letters of the pattern."""
    return [_TYPES[pattern[i % len(pattern)]] for i in range(count)]


def _config(kind: str, layers: int, d: int, hidden: int, heads: int, kv: int, vocab: int, **rest: Any) -> Config:
    """Return a config; the positional arguments are keys that every family has."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": d, "intermediate_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, **rest,
    }  # fmt: skip


def _wrapped(kind: str, text: Config, **rest: Any) -> Config:
    """Return the config of a multimodal checkpoint around a text model."""
    return {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 1152}, **rest}


def _gemma2(layers: int, d: int, hidden: int, heads: int, kv: int, head_dim: int, scalar: int) -> Config:
    return _config(
        "gemma2", layers, d, hidden, heads, kv, 256000, head_dim=head_dim, query_pre_attn_scalar=scalar,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid",
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, attention_bias=False, eos_token_id=1,
    )  # fmt: skip


def _gemma3(layers: int, d: int, hidden: int, **rest: Any) -> Config:
    """Models of 4b and more, whose text part omits default values."""
    text: Config = {
        "model_type": "gemma3_text", "hidden_size": d, "intermediate_size": hidden, "num_hidden_layers": layers,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, **rest,
    }  # fmt: skip
    return _wrapped("gemma3", text, eos_token_id=[1, 106], mm_tokens_per_image=256, image_token_index=262144)


_GEMMA3_SMALL: Config = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": 512,
    "attention_bias": False, "eos_token_id": [1, 106],
}  # fmt: skip


def _gemma3n(layers: int, hidden: int, shared: int) -> Config:
    text = _config(
        "gemma3n_text", layers, 2048, 0, 8, 2, 262400, head_dim=256, layer_types=_types("SSSSF", layers),
        num_kv_shared_layers=shared, activation_sparsity_pattern=[0.95] * 10 + [0.0] * (layers - 10),
        altup_active_idx=0, altup_coef_clip=120.0, altup_correct_scale=True, altup_num_inputs=4, laurel_rank=64,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_local_base_freq=10000.0, rope_theta=1000000.0, rope_scaling=None, sliding_window=512,
    )  # fmt: skip
    text["intermediate_size"] = [hidden] * layers
    return _wrapped("gemma3n", text, audio_config={"hidden_size": 1536}, eos_token_id=[1, 106])


def _gemma4(
    layers: int, d: int, hidden: int, heads: int, kv: int, *, kind: str = "gemma4", pattern: str = "SSSSSF", **rest: Any
) -> Config:
    """Full layers have heads of 512, and a KV head count of their own if keys are the values."""
    given: Config = {
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": None, "attention_k_eq_v": False,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0,
        "enable_moe_block": False, "num_experts": None, "sliding_window": 1024, "max_position_embeddings": 262144,
        "layer_types": _types(pattern, layers), "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0, "attention_bias": False, "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision", "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }  # fmt: skip
    text = _config(f"{kind}_text", layers, d, hidden, heads, kv, 262144, **{**given, **rest})
    return _wrapped(kind, text, eos_token_id=[1, 106], tie_word_embeddings=True)


_GEMMA4_SMALL: Config = {
    "sliding_window": 512, "max_position_embeddings": 131072, "hidden_size_per_layer_input": 256,
    "use_bidirectional_attention": None,
}  # fmt: skip
_GEMMA4_MOE: Config = {
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Config:
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return _config(
        "gpt_oss", layers, 2880, 2880, 64, 8, 201088, head_dim=64, layer_types=_types("SF", layers),
        num_local_experts=experts, num_experts_per_tok=4, experts_per_token=4, swiglu_limit=7.0, hidden_act="silu",
        initial_context_length=4096, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=150000,
        rope_scaling={**rope, "original_max_position_embeddings": 4096}, sliding_window=128, attention_bias=True,
        tie_word_embeddings=False, eos_token_id=200002, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip


def _llama4(experts: int, **rest: Any) -> Config:
    """The list of layers without rotation is empty on the hub: the default."""
    text = _config(
        "llama4_text", 48, 5120, 8192, 40, 8, 202048, intermediate_size_mlp=16384, head_dim=128, hidden_act="silu",
        attention_chunk_size=8192, no_rope_layers=[], num_local_experts=experts, num_experts_per_tok=1,
        rms_norm_eps=1e-5, rope_theta=500000.0, attention_bias=False, tie_word_embeddings=False,
        eos_token_id=[200001, 200007, 200008], **rest,
    )  # fmt: skip
    return _wrapped("llama4", text, image_token_index=200092)


def _mimo(kind: str, pattern: str, d: int, heads: int, kv: int, experts: int, **rest: Any) -> Config:
    """`hybrid_layer_pattern`: 1 slides. 128 tokens before the query's own."""
    layers = len(pattern)
    return _config(
        kind, layers, d, 16384, heads, kv, 152576, head_dim=192, v_head_dim=128, swa_num_attention_heads=heads,
        swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128, sliding_window=128, sliding_window_size=128,
        attention_chunk_size=128, hybrid_layer_pattern=[int(c) for c in pattern],
        moe_layer_freq=[0] + [1] * (layers - 1), add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False, layernorm_epsilon=1e-5, partial_rotary_factor=0.334, swa_rope_theta=10000,
        n_routed_experts=experts, n_shared_experts=None, num_experts_per_tok=8,
        moe_intermediate_size=2048, routed_scaling_factor=None, scoring_func="sigmoid",
        topk_method="noaux_tc", n_group=1, topk_group=1, norm_topk_prob=True, hidden_act="silu", attention_bias=False,
        tie_word_embeddings=False, quantization_config=_FP8, **rest,
    )  # fmt: skip


_COHERE2: Config = {
    "head_dim": 128, "sliding_window": 4096, "logit_scale": 0.25, "layer_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 50000, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj", "use_qk_norm": False,
    "use_parallel_block": True, "use_gated_activation": True, "attention_bias": False, "eos_token_id": 255001,
}  # fmt: skip
_COHERE2_OLD: Config = {
    **_COHERE2, "sliding_window_pattern": 4, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first",
    "cache_implementation": "hybrid", "use_embedding_sharing": True,
}  # fmt: skip
_COHERE2_MOE: Config = {
    **_COHERE2, "num_experts": 128, "num_experts_per_tok": 8, "expert_selection_fn": "sigmoid",
}  # fmt: skip


def _olmo3(layers: int, d: int, hidden: int, heads: int, kv: int) -> Config:
    rope = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return _config(
        "olmo3", layers, d, hidden, heads, kv, 100278, layer_types=_types("SSSF", layers), sliding_window=4096,
        rope_theta=500000, max_position_embeddings=65536, rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False,
        rope_scaling={**rope, "attention_factor": 1.2079441541679836, "original_max_position_embeddings": 8192},
        tie_word_embeddings=False, eos_token_id=100257,
    )  # fmt: skip


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_8K: Config = {**_LLAMA3, "original_max_position_embeddings": 8192}
_EXAONE: Config = {
    "head_dim": 128, "sliding_window_pattern": "LLLG", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip


def _afmoe(layers: int, d: int, hidden: int, heads: int, kv: int, **rest: Any) -> Config:
    return _config(
        "afmoe", layers, d, hidden, heads, kv, 200192, head_dim=128, global_attn_every_n_layers=4,
        layer_types=_types("SSSF", layers), num_shared_experts=1, num_expert_groups=1, num_limited_groups=1,
        score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, mup_enabled=True, hidden_act="silu",
        rope_theta=10000, rope_scaling=None, rms_norm_eps=1e-5, tie_word_embeddings=False, **rest,
    )  # fmt: skip


def _step() -> Config:
    """45 layers, and 3 entries more in each list for layers that predict further tokens."""
    config = _config("step3p5", 45, 4096, 11264, 64, 0, 128896, num_attention_groups=8, head_dim=128)
    del config["num_key_value_heads"]
    other = {"attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8}
    return config | {
        "attention_other_setting": {**other, "head_dim": 128, "true_head_dim": 128},
        "layer_types": _types("FSSS", 48), "sliding_window": 512, "num_nextn_predict_layers": 3,
        "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
        "rope_scaling": {
            **_LLAMA3, "factor": 2.0, "original_max_position_embeddings": 131072, "high_freq_factor": 32.0,
        },
        "yarn_only_types": ["full_attention"], "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8,
        "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0, "use_moe_router_bias": True, "norm_expert_weight": True,
        "need_fp32_gate": True, "use_qk_norm": True, "use_head_wise_attn_gate": True,
        "swiglu_limits": [0.0] * 43 + [7.0, 7.0, 0.0, 0.0, 0.0], "swiglu_limits_shared": [0.0] * 44 + [16.0, 0, 0, 0],
        "tie_word_embeddings": False,
    }  # fmt: skip


def _yarn(factor: float, **rest: Any) -> Config:
    rope = {"rope_type": "yarn", "factor": factor, "beta_slow": 1.0, "original_max_position_embeddings": 8192}
    return {**rope, "rope_theta": 500000.0, **rest}


_MOE_512: Config = {
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "head_dim": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
_LAGUNA: Config = {
    **_MOE_512, "num_experts": 256, "num_experts_per_tok": 8, "layer_types": _types("FSSS", 40), "sliding_window": 512,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "mlp_layer_types": ["dense"] + ["sparse"] * 39,
    "mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True, "gating": "per-head",
    "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0, "max_position_embeddings": 524288,
    "rope_parameters": {
        "full_attention": _yarn(64.0, beta_fast=64.0, attention_factor=1.4159, partial_rotary_factor=0.5),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "attention_bias": False, "eos_token_id": [2, 24],
}  # fmt: skip
_MELLUM: Config = {
    "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True,
    "layer_types": _types("SSSF", 28), "mlp_layer_types": ["sparse"] * 28, "sliding_window": 1024,
    "max_window_layers": 0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {
        "full_attention": _yarn(16.0, beta_fast=32.0),
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "attention_bias": False, "tie_word_embeddings": False, "eos_token_id": 28,
}  # fmt: skip
_KOLIBRI: Config = {
    **_MOE_512, "num_local_experts": 384, "num_experts_per_tok": 6, "norm_topk_prob": False, "sliding_window": 513,
    "layer_types": _types("SSSSF", 50), "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 262144, "hidden_act": "silu", "quantization_config": _FP8,
}  # fmt: skip
_MUSE: Config = {
    "head_dim": 128, "sliding_window": 2048, "layer_types": _types("SSSF", 52), "hidden_activation": "silu",
    "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0] * 13, "qk_scale_factor": 3.87, "post_norm_eps": 1e-8,
    "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "eos_token_id": 200001,
}  # fmt: skip

CONFIGS: dict[str, Config] = {
    "Mistral-7B-v0.1": _config(
        "mistral", 32, 4096, 14336, 32, 8, 32000, sliding_window=4096, max_position_embeddings=32768, rope_theta=1e4,
        rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False, eos_token_id=2,
    ),
    "Phi-3-mini-4k": _config(
        "phi3", 32, 3072, 8192, 32, 32, 32064, sliding_window=2047, max_position_embeddings=4096, rope_theta=1e4,
        original_max_position_embeddings=4096, rope_scaling=None, rms_norm_eps=1e-5, hidden_act="silu",
        attention_bias=False, tie_word_embeddings=False, eos_token_id=32000,
    ),
    "gemma-2-2b": _gemma2(26, 2304, 9216, 8, 4, 256, 256),
    "gemma-2-9b": _gemma2(42, 3584, 14336, 16, 8, 256, 256),
    "gemma-2-27b": _gemma2(46, 4608, 36864, 32, 16, 128, 144),
    "gemma-3-270m": _config(
        "gemma3_text", 18, 640, 2048, 4, 1, 262144, **_GEMMA3_SMALL, layer_types=_types("SSSSSF", 18),
        _sliding_window_pattern=6, use_bidirectional_attention=False,
    ),
    "gemma-3-1b": _config("gemma3_text", 26, 1152, 6912, 4, 1, 262144, **_GEMMA3_SMALL, sliding_window_pattern=6),
    "gemma-3-4b": _gemma3(34, 2560, 10240),
    "gemma-3-12b": _gemma3(48, 3840, 15360, num_attention_heads=16, num_key_value_heads=8),
    "gemma-3-27b": _gemma3(
        62, 5376, 21504, num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168
    ),
    "gemma-3n-E2B": _gemma3n(30, 8192, 10),
    "gemma-3n-E4B": _gemma3n(35, 16384, 15),
    "gemma-4-E2B": _gemma4(
        35, 1536, 6144, 8, 1, pattern="SSSSF", num_kv_shared_layers=20, **{**_GEMMA4_SMALL, "use_double_wide_mlp": True}
    ),
    "gemma-4-E4B": _gemma4(42, 2560, 10240, 8, 2, num_kv_shared_layers=18, **_GEMMA4_SMALL),
    "gemma-4-12B": _gemma4(
        48, 3840, 15360, 16, 8, kind="gemma4_unified", num_global_key_value_heads=1, attention_k_eq_v=True
    ),
    "gemma-4-26B-A4B": _gemma4(
        30, 2816, 2112, 16, 8, num_global_key_value_heads=2, attention_k_eq_v=True, **_GEMMA4_MOE
    ),
    "gemma-4-31B": _gemma4(60, 5376, 21504, 32, 16, num_global_key_value_heads=4, attention_k_eq_v=True),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "Llama-4-Scout": _llama4(
        16, interleave_moe_layer_step=1, use_qk_norm=True, max_position_embeddings=10485760,
        rope_scaling={**_LLAMA3_8K, "factor": 16.0, "high_freq_factor": 1.0},
    ),
    "Llama-4-Maverick": _llama4(
        128, interleave_moe_layer_step=2, use_qk_norm=False, max_position_embeddings=1048576, rope_scaling=None,
        attn_temperature_tuning=4, floor_scale=8192, attn_scale=0.1,
    ),
    "MiMo-V2-Flash/V2.5": _mimo(
        "mimo_v2_flash", "011110" + "111110" * 7, 4096, 64, 4, 256, rope_theta=5000000, attention_value_scale=0.707,
        max_position_embeddings=262144, hybrid_block_size=None,
    ),
    "MiMo-V2.5-Pro": _mimo(
        "mimo_v2", "0111111" + "01111111" * 6 + "0111111" * 2 + "0", 6144, 128, 8, 384, rope_theta=10000000,
        attention_value_scale=0.612, attention_projection_layout="fused_qkv", max_position_embeddings=1048576,
        rope_parameters={"partial_rotary_factor": 0.334, "rope_theta": 10000000, "rope_type": "default"},
    ),
    "Command-R7B": _config("cohere2", 32, 4096, 14336, 32, 8, 256000, max_position_embeddings=132096, **_COHERE2_OLD),
    "Command-A-03-2025": _config(
        "cohere2", 64, 12288, 36864, 96, 8, 256000, max_position_embeddings=131072, **_COHERE2_OLD
    ),
    "Command-A-plus": _wrapped(
        "cohere2_vision",
        _config(
            "cohere2_moe", 32, 4096, 4096, 128, 8, 262144, layer_types=_types("SSSF", 32), first_k_dense_replace=0,
            num_shared_experts=4, shared_expert_combination_strategy="average", norm_topk_prob=True, rms_norm_eps=None,
            max_position_embeddings=500000, tie_word_embeddings=True, **_COHERE2_MOE,
        ),
        tie_word_embeddings=True,
    ),
    "North-Mini-Code": _config(
        "cohere2_moe", 49, 2048, 768, 32, 4, 262144, layer_types=_types("FSSS", 49), first_k_dense_replace=1,
        prefix_dense_intermediate_size=3072, prefix_dense_sliding_window_pattern=1, num_shared_experts=0,
        norm_topk_prob=False, rms_norm_eps=1e-6, max_position_embeddings=500000, tie_word_embeddings=None,
        **_COHERE2_MOE,
    ),
    "Olmo-3-7B": _olmo3(32, 4096, 11008, 32, 32),
    "Olmo-3-32B": _olmo3(64, 5120, 27648, 40, 8),
    "EXAONE-4.0-32B": _config(
        "exaone4", 64, 5120, 27392, 40, 8, 102400, **_EXAONE, sliding_window=4096, layer_types=_types("SSSF", 64),
        rope_scaling={**_LLAMA3_8K, "factor": 16.0}, max_position_embeddings=131072, eos_token_id=361,
    ),
    "K-EXAONE-236B": _config(
        "exaone_moe", 48, 6144, 18432, 64, 8, 153600, **_EXAONE, sliding_window=128, layer_types=_types("SSSF", 48),
        rope_scaling=None, max_position_embeddings=262144, num_experts=128, num_experts_per_tok=8, num_shared_experts=1,
        moe_intermediate_size=2048, first_last_k_dense_replace=1, is_moe_layer=[False] + [True] * 47, n_group=1,
        topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        eos_token_id=53,
    ),
    "Trinity-Large": _afmoe(
        60, 3072, 12288, 48, 8, sliding_window=4096, num_dense_layers=6, num_experts=256, num_experts_per_tok=4,
        moe_intermediate_size=3072, route_scale=2.448, max_position_embeddings=262144,
    ),
    "Trinity-Mini": _afmoe(
        32, 2048, 6144, 32, 4, sliding_window=2048, num_dense_layers=2, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1024, route_scale=2.826, max_position_embeddings=131072,
    ),
    "Step-3.5-Flash": _step(),
    "Laguna-XS.2": _config("laguna", 40, 2048, 8192, 48, 8, 100352, **_LAGUNA),
    "Mellum2-12B-A2.5B": _config("mellum", 28, 2304, 7168, 32, 4, 98304, **_MELLUM),
    "Kolibri-1": _config("kolibri1", 50, 2560, 0, 48, 4, 128000, **_KOLIBRI),
    "Muse-Glimmer-30B": _wrapped(
        "muse_glimmer", _config("muse_glimmer_text", 52, 6656, 19968, 32, 2, 202048, **_MUSE), image_token_id=200092
    ),
    "CWM-32B": _config(
        "cwm", 64, 6144, 21504, 48, 8, 128256, head_dim=128, sliding_window=8192, layer_types=_types("FSSS", 64),
        rope_theta=1000000.0, rope_scaling={**_LLAMA3_8K, "factor": 16.0}, max_position_embeddings=131072,
        rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False, eos_token_id=[128001, 128008, 128009],
    ),
    "granite-swash-2b": _config(
        "granite_swa", 24, 2560, 8192, 20, 4, 100352, sliding_window=128, layer_rope_theta=[10000.0] * 24,
        embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
        max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu", eos_token_id=100257,
    ),
    "Llama-3.1-8B": _config(
        "llama", 32, 4096, 14336, 32, 8, 128256, rope_theta=500000.0, rope_scaling={**_LLAMA3_8K, "factor": 8.0},
        max_position_embeddings=131072, rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=False, hidden_act="silu", eos_token_id=[128001, 128008, 128009],
    ),
    "Qwen3-32B": _config(
        "qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128, sliding_window=None, use_sliding_window=False,
        max_window_layers=64, rope_theta=1000000, rope_scaling=None, max_position_embeddings=40960, rms_norm_eps=1e-6,
        attention_bias=False, tie_word_embeddings=False, hidden_act="silu", eos_token_id=151645,
    ),
}  # fmt: skip
del CONFIGS["Kolibri-1"]["intermediate_size"]
