"""Parity cases of the families that mix layer kinds: gpt-oss, Gemma 2, MiMo-V2-Flash and Llama 4.

What and why: as in cases.py. The prompts of models with experts are drawn so that no expert is
chosen by less than ROUTER_MARGIN (make_fixtures.py): rounding cannot send a token elsewhere.
"""

from tests.parity.case import BASE, LINEAR8, LLAMA3, SIZES, YARN, Case, Config, F, OldHub, S, W, case, rope

CHUNKED = "chunked_attention"
# gpt_oss ------------------------------------------------------------------------------------------

YARN32 = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GPT_OSS: Config = BASE | {
    "intermediate_size": 48,
    "head_dim": 32,
    "sliding_window": W,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": rope(150000.0, YARN32),
}
GPT_OSS_HUB = OldHub(
    pattern=False,
    drop=("swiglu_alpha",),
    add={"experts_per_token": 1, "initial_context_length": 16, "hidden_act": "gelu", "rope_theta": 150000},
)


def gpt_oss(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "gpt_oss", GPT_OSS, old, kwargs)


GPT_OSS_CASES = (
    # Of the keys that the hub form adds, only theta is read; here it is a whole number.
    gpt_oss("base", GPT_OSS_HUB),
    # Only sizes are given. Defaults: 64 heads of 64, 8 key heads, 4 of 128 experts, alternating layers
    # from a sliding one on, biases, eps, the clamp, theta 150000 and yarn by 32 of 4096 positions.
    gpt_oss(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        intermediate_size=8,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
        max_position_embeddings=131072,
        rope_parameters=None,
    ),
    # If the config has no scaling, the default is yarn by 32 with the given theta.
    gpt_oss(
        "rope_scaling_null",
        OldHub(pattern=False, add={"rope_scaling": None}),
        rope_parameters=rope(1e4, YARN32, original_max_position_embeddings=4096),
    ),
    # If a yarn dict has no `truncate`, the bounds are rounded.
    gpt_oss("yarn_truncates", OldHub("type", pattern=False), rope_parameters=rope(150000.0, YARN)),
    gpt_oss(
        "rope_plain",
        OldHub(pattern=False, add={"rope_scaling": {"rope_type": "default"}}, drop=("layer_types", "rope_theta")),
        rope_parameters=rope(150000.0),
    ),
    gpt_oss("no_attention_bias", OldHub(pattern=False), attention_bias=False),
    # Random experts this narrow reach the default clamp of 7.
    gpt_oss("clamp", OldHub(pattern=False, drop=("swiglu_limit", "swiglu_alpha")), intermediate_size=2),
    gpt_oss("swiglu_options", swiglu_limit=0.5, swiglu_alpha=0.8),
    gpt_oss("layer_types_top1", num_hidden_layers=5, layer_types=[F, S, S, F, S], num_experts_per_tok=1),
    gpt_oss("all_experts", num_local_experts=3, num_experts_per_tok=3, sliding_window=3),
    gpt_oss(
        "tied_mqa_eps",
        OldHub(pattern=False),
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
        vocab_size=131,
    ),
)

# gemma2 -------------------------------------------------------------------------------------------

GEMMA2: Config = BASE | {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": W,
    "tie_word_embeddings": True,
}
GEMMA2_HUB = OldHub(pattern=False, drop=("layer_types",))


def gemma2(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "gemma2", GEMMA2, old, kwargs)


GEMMA2_CASES = (
    # Gemma 2 reads neither `hidden_act` nor the other keys for windows.
    gemma2(
        "base",
        OldHub(
            pattern=False,
            drop=("layer_types",),
            add={"hidden_act": "silu", "sliding_window_size": 3, "sliding_window_pattern": 3},
        ),
    ),
    # Only sizes are given. Defaults: 8 heads, 4 key heads, head_dim 256, scale 256^-1/2, tied, caps.
    gemma2(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
    ),
    gemma2("small_softcaps", GEMMA2_HUB, attn_logit_softcapping=0.5, final_logit_softcapping=1.5),
    # Null turns a cap off; only a missing key means the default.
    gemma2(
        "null_softcaps",
        GEMMA2_HUB,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=1,
    ),
    # Scores and logits are large enough for the default caps of 50 and 30 to matter.
    gemma2(
        "default_softcaps",
        OldHub(pattern=False, drop=("layer_types", "attn_logit_softcapping", "final_logit_softcapping")),
        query_pre_attn_scalar=1,
    ),
    gemma2("query_scalar", GEMMA2_HUB, query_pre_attn_scalar=56, head_dim=24),
    gemma2("attention_bias_untied", GEMMA2_HUB, attention_bias=True, tie_word_embeddings=False),
    gemma2("layer_types", num_hidden_layers=4, layer_types=[F, S, S, F]),
    gemma2("silu_eps_vocab131", hidden_activation="silu", rms_norm_eps=0.1, vocab_size=131),
    # sqrt(40) is not a whole number. The one rope serves both kinds of layers.
    gemma2(
        "width40_linear",
        OldHub("type", pattern=False, drop=("layer_types",)),
        hidden_size=40,
        intermediate_size=50,
        sliding_window=3,
        rope_parameters=rope(500.0, LINEAR8),
    ),
)

# mimo_v2_flash ------------------------------------------------------------------------------------

MIMO: Config = BASE | {
    "num_hidden_layers": 7,  # by default full, 4 sliding, full, sliding
    "head_dim": 24,
    "v_head_dim": 16,
    "num_key_value_heads": 1,  # of the full layers; the sliding ones have twice as many
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window_size": W - 1,
}


def mimo_hub(config: Config) -> Config:
    """Return the config with the keys of the repositories. transformers reads few, and has the rest as defaults."""
    own = ("dtype", "layer_types", "mlp_layer_types", "rms_norm_eps", "rope_parameters", "sliding_window")
    full, sliding = config["rope_parameters"][F], config["rope_parameters"][S]
    return {key: value for key, value in config.items() if key not in own} | {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_chunk_size": config["sliding_window"] - 1,
        "hybrid_block_size": None,
        "hybrid_layer_pattern": [int(kind == S) for kind in config["layer_types"]],
        "layernorm_epsilon": config["rms_norm_eps"],
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "n_shared_experts": None,
        "partial_rotary_factor": full["partial_rotary_factor"],
        "rope_theta": full["rope_theta"],
        "routed_scaling_factor": None if config["routed_scaling_factor"] == 1 else config["routed_scaling_factor"],
        "scoring_func": "sigmoid",
        "sliding_window": config["sliding_window"] - 1,
        "sliding_window_size": config["sliding_window"] - 1,
        "swa_head_dim": config["head_dim"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_rope_theta": sliding["rope_theta"],
        "swa_v_head_dim": config["v_head_dim"],
        "topk_method": "noaux_tc",
        "torch_dtype": "float32",
        "transformers_version": "4.50.0",
    }


def mimo_sparse(config: Config) -> Config:
    """Return the config with its sizes alone; all other values are defaults."""
    sizes = (*SIZES, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "sliding_window_size")
    return {key: config[key] for key in sizes}


def mimo_ropes(full: float, sliding: float, partial: float) -> Config:
    return {kind: rope(theta, partial_rotary_factor=partial) for kind, theta in ((F, full), (S, sliding))}


def mimo(name: str, **kwargs: object) -> Case:
    return Case(f"mimo_v2_flash_{name}", "mimo_v2_flash", MIMO | kwargs, mimo_hub)


MIMO_LAYERS = {"layer_types": [S, F, S, S], "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}
MIMO_CASES = (
    mimo("base"),
    # 64 heads of 192 and 128, 4 and 8 key heads, values by .707, weights that add up to one.
    Case(
        "mimo_v2_flash_defaults",
        "mimo_v2_flash",
        MIMO
        | {
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
        },
        mimo_sparse,
    ),
    mimo("groups", n_group=4, topk_group=2, num_experts_per_tok=3),
    mimo("one_group_of_two", n_group=2, topk_group=1, num_experts_per_tok=3, norm_topk_prob=False),
    mimo("no_norm_scaled", norm_topk_prob=False, routed_scaling_factor=2.5),
    mimo("value_scale", attention_value_scale=0.3, routed_scaling_factor=0.5),
    mimo("value_scale_null", num_hidden_layers=3, attention_value_scale=None, sliding_window_size=2),
    Case(
        "mimo_v2_flash_bias_mtp",
        "mimo_v2_flash",
        MIMO | {"num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": True},
        mimo_hub,
        extra_tensors={"model.mtp.layers.0.eh_proj.weight": (64, 128), "model.mtp.layers.0.enorm.weight": (64,)},
    ),
    # transformers would ignore these values in the hub form: they differ from its defaults.
    Case(
        "mimo_v2_flash_layer_types",
        "mimo_v2_flash",
        MIMO
        | MIMO_LAYERS
        | {
            "num_hidden_layers": 4,
            "sliding_window_size": None,
            "sliding_window": 4,
            "rms_norm_eps": 0.1,
            "rope_parameters": mimo_ropes(3e5, 500.0, 0.5),
        },
        mimo_hub,
        old_is_read=False,
    ),
)

# llama4_text, llama4 ------------------------------------------------------------------------------

LLAMA4: Config = BASE | {
    "num_hidden_layers": 5,  # by default layer 3 is full and has no rope
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "attention_chunk_size": W,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
LLAMA4_DERIVED = ("layer_types", "moe_layers")
LLAMA4_HUB = OldHub(pattern=False, drop=LLAMA4_DERIVED, add={"no_rope_layers": [], "for_llm_compression": False})
LLAMA4_VISION: Config = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 4,
    "patch_size": 2,
    "vision_output_dim": 8,
    "projector_input_dim": 8,
    "projector_output_dim": 8,
}


def llama4(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "llama4_text", LLAMA4, old, kwargs)


LLAMA4_CASES = (
    llama4("base", LLAMA4_HUB),
    # Only sizes are given. Defaults: 40 heads of 128, 8 key heads, one of 16 experts, temperature by 0.1.
    # Only floor_scale is not the default: its 8192 positions would hide the temperature.
    llama4(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "intermediate_size_mlp", "attention_chunk_size", "floor_scale")),
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=16,
        attn_scale=0.1,
        max_position_embeddings=131072,
    ),
    # The first repositories have a 4 here. transformers 5 refuses it, older versions read it as true.
    Case(
        "llama4_text_temperature_4",
        "llama4_text",
        LLAMA4 | {"rope_parameters": rope(5e5, LLAMA3, high_freq_factor=1.0)},
        OldHub(pattern=False, drop=LLAMA4_DERIVED, add={"no_rope_layers": [], "attn_temperature_tuning": 4}),
        old_is_read=False,
    ),
    # Experts in every second layer, no norm of queries and keys, the layers without rope listed.
    llama4(
        "every_second",
        OldHub(pattern=False, drop=LLAMA4_DERIVED),
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        no_rope_layers=[1, 0, 1, 1, 0],
    ),
    llama4("no_temperature", OldHub(pattern=False, drop=LLAMA4_DERIVED), attn_temperature_tuning=False),
    llama4(
        "interval_temperature",
        OldHub(pattern=False, drop=(*LLAMA4_DERIVED, "no_rope_layers")),
        no_rope_layer_interval=2,
        floor_scale=3,
        attn_scale=0.9,
    ),
    llama4("top2", LLAMA4_HUB, num_experts_per_tok=2),
    llama4("all_experts", num_experts_per_tok=3, num_local_experts=3, moe_layers=[0, 3]),
    # The mask follows layer_types; rope, norm and temperature follow no_rope_layers.
    llama4(
        "layer_types",
        no_rope_layers=[1, 0, 1, 0, 1],
        layer_types=[F, CHUNKED, CHUNKED, F, F],
        moe_layers=[],
    ),
    llama4("chunk5_llama3", LLAMA4_HUB, attention_chunk_size=5, rope_parameters=rope(5e5, LLAMA3), head_dim=32),
    llama4("chunk100_eps_gelu", attention_chunk_size=100, rms_norm_eps=0.1, hidden_act="gelu"),
    llama4("bias_tied_mqa", LLAMA4_HUB, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    Case(
        "llama4_wrapped",
        "llama4",
        {"text_config": LLAMA4 | {"interleave_moe_layer_step": 2}, "vision_config": LLAMA4_VISION},
        LLAMA4_HUB,
    ),
)

CASES = (*GPT_OSS_CASES, *GEMMA2_CASES, *MIMO_CASES, *LLAMA4_CASES)
