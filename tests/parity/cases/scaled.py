"""Parity cases of Cohere 2 MoE, Granite SWA, Granite MoE SWA, Phi MoE and Muse Glimmer.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import BASE, LLAMA3, SIZES, Case, Config, F, Keys, OldForm, OldHub, S, W, case, rope

# cohere2_moe --------------------------------------------------------------------------------------

COHERE2_MOE: Config = BASE | {
    "num_hidden_layers": 6,
    "head_dim": 24,
    "sliding_window": W,
    "intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "rope_theta": 5e4,
}


def cohere2_moe_hub(**keys: object) -> OldForm:
    """Return the config with rules instead of lists and theta as its own key. transformers ignores `rope_scaling`."""
    return Keys(drop=("layer_types", "mlp_layer_types", "rope_parameters"), add=keys)


def cohere2_moe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    """Return a case whose last norm makes up for the scale of the logits, so that they differ as much as elsewhere."""
    made = case(name, "cohere2_moe", COHERE2_MOE, old, kwargs)
    return replace(made, scales=((r"^model\.norm\.", 1 / made.kwargs["logit_scale"]),))


COHERE2_MOE_CASES = (
    # By default, routed and shared experts are averaged.
    cohere2_moe("base", cohere2_moe_hub(rope_theta=5e4), num_shared_experts=2),
    # This has the form of North Mini: first a dense, full layer with a rope; RMS norms; sigmoids that are not
    # normalised.
    cohere2_moe(
        "dense_prefix",
        cohere2_moe_hub(first_k_dense_replace=1),
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=80,
        rms_norm_eps=0.1,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        num_experts_per_tok=3,
        rope_theta=500.0,
    ),
    # Dense layers with a period of their own, and as wide as an expert, have no such rope.
    cohere2_moe(
        "prefix_pattern",
        cohere2_moe_hub(first_k_dense_replace=3, rope_scaling=None),
        first_k_dense_replace=3,
        prefix_dense_sliding_window_pattern=2,
        sliding_window_pattern=3,
        expert_selection_fn="sigmoid",
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    cohere2_moe(
        "layer_types",
        num_hidden_layers=4,
        layer_types=[F, S, F, S],
        mlp_layer_types=["sparse", "dense", "dense", "sparse"],
        layer_norm_eps=0.1,
        hidden_act="gelu",
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 64 heads and key heads of 128, 2 of 8 experts by softmax, none shared, theta 1e4,
    # period four, logits by 1/16, tied.
    cohere2_moe(
        "defaults",
        Keys(only=(*SIZES, "sliding_window")),
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=None,
        head_dim=128,
        num_experts=8,
        logit_scale=0.0625,
        rope_theta=1e4,
    ),
)

# granite_swa --------------------------------------------------------------------------------------

GRANITE: Config = BASE | {
    "num_hidden_layers": 5,
    "sliding_window": W,
    "attention_multiplier": 0.25,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
MULTIPLIERS: Config = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.5,
    "logits_scaling": 1.5,
}
# Zero means no rope. Every other number is a theta, and all layers have the same scaling.
THETAS = [0, 1e4, 500.0, 1e4, 0]


def granite(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "granite_swa", GRANITE, old, kwargs)


def granite_moe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    config = GRANITE | {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}
    return case(name, "granitemoe_swa", config, old, kwargs)


GRANITE_CASES = (
    # The first of every four layers is full. All layers have the same theta.
    granite(
        "base",
        OldHub(pattern=False, drop=("layer_types", "layer_rope_theta", "tie_word_embeddings")),
        rope_parameters=rope(500.0),
    ),
    granite("multipliers_thetas", layer_rope_theta=THETAS, rope_parameters=rope(1e6), **MULTIPLIERS),
    granite(
        "layer_types_bias",
        layer_types=[S, F, S, S, F],
        layer_rope_theta=THETAS,
        rope_parameters=rope(1e4, LLAMA3),
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        head_dim=24,
        hidden_act="gelu",
        rms_norm_eps=0.1,
    ),
    # Only sizes are given. Defaults: 20 heads, 4 key heads, scores not scaled at all, theta 1e4, tied.
    granite(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        hidden_size=80,
        num_attention_heads=20,
        num_key_value_heads=4,
        attention_multiplier=1.0,
    ),
)
GRANITE_MOE_CASES = (
    granite_moe("base", OldHub(pattern=False, drop=("layer_types", "layer_rope_theta")), rope_parameters=rope(500.0)),
    granite_moe(
        "shared_thetas",
        shared_intermediate_size=40,
        layer_rope_theta=THETAS,
        rope_parameters=rope(1e6),
        num_experts_per_tok=3,
        **MULTIPLIERS,
    ),
    granite_moe(
        "layer_types_bias",
        layer_types=[S, F, S, S, F],
        shared_intermediate_size=32,
        attention_bias=True,
        tie_word_embeddings=False,
        head_dim=24,
        hidden_act="gelu",
        rms_norm_eps=0.1,
    ),
    # Only sizes are given. Defaults: 32 heads and key heads, 2 of 8 experts, none shared, scores not scaled, untied.
    granite_moe(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        num_attention_heads=32,
        num_key_value_heads=None,
        num_local_experts=8,
        attention_multiplier=1.0,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
    ),
)

# phimoe -------------------------------------------------------------------------------------------

PHIMOE: Config = BASE | {
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "sliding_window": W,
    "rms_norm_eps": 1e-5,
}
FACTORS = [1.0, 1.5, 2.5, 4.0, 7.0, 12.0, 20.0, 33.0]
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.6}
PHIMOE_HUB = OldHub("type", drop=("num_experts_per_tok", "router_jitter_noise", "input_jitter_noise"))


def phimoe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "phimoe", PHIMOE, old, kwargs)


def phimoe_longrope(original: int, short: list[float], long: list[float]) -> Config:
    """Return LongRoPE keys. transformers 5.23 always rotates by the short factors, but uses the scale of the long."""
    factors = {"rope_type": "longrope", "short_factor": short, "long_factor": long} | MSCALES
    return {"rope_parameters": rope(1e4, factors, original_max_position_embeddings=original)}


PHIMOE_CASES = (
    # This has the form of the repositories: biases, also in the head, and always two experts.
    phimoe("base", PHIMOE_HUB, attention_bias=True, lm_head_bias=True, num_experts_per_tok=2),
    phimoe("short", PHIMOE_HUB, **phimoe_longrope(256, FACTORS, FACTORS[::-1]), max_position_embeddings=1024),
    phimoe("long", PHIMOE_HUB, **phimoe_longrope(32, FACTORS, FACTORS), max_position_embeddings=128),
    # Experts nearly as good as the best take some of its weight. `num_experts_per_tok`, here three, is ignored.
    phimoe("wide_jitter", OldHub(), router_jitter_noise=0.4, num_experts_per_tok=3, num_key_value_heads=1),
    phimoe("no_window", router_jitter_noise=0.1, sliding_window=None, head_dim=24, rms_norm_eps=0.1, hidden_act="gelu"),
    # Only sizes are given. Defaults: 32 heads, 8 key heads, no window, 16 experts, theta 1e6, no biases, untied.
    phimoe(
        "defaults",
        OldHub(only=SIZES),
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=16,
        sliding_window=None,
        rope_parameters=rope(1e6),
    ),
)

# muse_glimmer -------------------------------------------------------------------------------------

MUSE: Config = BASE | {
    "num_hidden_layers": 6,
    "head_dim": 24,
    "sliding_window": W,
    "rope_parameters": rope(1e4),
}
MUSE_VISION: Config = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
    "patch_size": 2,
}


def muse(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    """Return a case of the vision model, as only that has logits. Its last norm makes up for their default scale."""
    config = {"out_hidden_size": 32, "projector_hidden_size": 8, "vision_config": MUSE_VISION}
    scales = () if "output_multiplier" in kwargs else ((r"language_model\.norm\.", 5.0),)
    return Case(f"muse_glimmer_{name}", "muse_glimmer", config | {"text_config": MUSE | kwargs}, old, scales=scales)


MUSE_CASES = (
    # Every fourth layer, counted from the last, is full and has no rope.
    muse("base", Keys(drop=("layer_types", "layer_rope_theta")), rope_parameters=rope(500.0), qk_scale_factor=2.0),
    muse(
        "layer_types",
        num_hidden_layers=4,
        layer_types=[F, S, F, S],
        layer_rope_theta=[1e4, 0, 0, 1e4],
        qk_scale_factor=1.3,
        output_multiplier=2.0,
        final_logit_softcapping=3.0,
        attention_bias=True,
    ),
    muse(
        "eps_llama3",
        rms_norm_eps=0.1,
        post_norm_eps=0.5,
        qk_scale_factor=2.0,
        hidden_activation="gelu",
        rope_parameters=rope(500.0, LLAMA3),
        output_multiplier=1.0,
        num_key_value_heads=1,
    ),
    # Only sizes are given. Defaults: 32 heads, 2 key heads of 128, queries by 3.87, logits by .196, cap 20, theta 1e4.
    muse(
        "defaults",
        Keys(only=(*SIZES[1:], "sliding_window")),
        num_hidden_layers=3,
        num_attention_heads=32,
        head_dim=128,
    ),
)

CASES = (*COHERE2_MOE_CASES, *GRANITE_CASES, *GRANITE_MOE_CASES, *PHIMOE_CASES, *MUSE_CASES)
