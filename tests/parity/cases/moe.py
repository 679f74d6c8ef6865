"""Parity cases of families with experts beside shared ones: Qwen 2 MoE, AFMoE, dots 1, EXAONE MoE.

What and why: as in cases.py. Prompts are drawn so that no expert is chosen by a hair (choices.py).
"""

from dataclasses import replace

from tests.parity.case import BASE, LLAMA3, SIZES, Case, Config, F, Keys, OldForm, OldHub, S, W, case, rope

# qwen2_moe ----------------------------------------------------------------------------------------

QWEN2_MOE: Config = BASE | {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN2_MOE_PLAIN = OldHub(pattern=False, drop=("layer_types",))
WINDOW: Config = {"use_sliding_window": True, "sliding_window": W}
UNUSED_WINDOW: Config = {"sliding_window": W, "max_window_layers": 4}


def qwen2_moe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "qwen2_moe", QWEN2_MOE, old, kwargs)


QWEN2_MOE_CASES = (
    # The window is given but not used. Weights do not add up to one.
    qwen2_moe(
        "base",
        OldHub(
            pattern=False,
            drop=("layer_types", "use_sliding_window", "norm_topk_prob", "qkv_bias", "mlp_only_layers"),
            add=UNUSED_WINDOW,
        ),
    ),
    # Of the layers before `max_window_layers` (28 if absent) every other one slides. In Qwen 2 the layers from there on
    # slide.
    qwen2_moe("window", OldHub(pattern=False, drop=("layer_types", "max_window_layers")), **WINDOW),
    qwen2_moe(
        "window_before_layer_2",
        QWEN2_MOE_PLAIN,
        max_window_layers=2,
        norm_topk_prob=True,
        qkv_bias=False,
        rope_parameters=rope(1e6),
        **WINDOW,
    ),
    # By the step, layers 1 and 3 would have experts; layer 1 is excluded.
    qwen2_moe(
        "dense_layers",
        QWEN2_MOE_PLAIN,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        num_experts_per_tok=3,
    ),
    qwen2_moe("layer_types", layer_types=[F, S, S, F], head_dim=24, hidden_act="gelu", rms_norm_eps=0.1, **WINDOW),
    # Only sizes are given. Defaults: 16 heads and key heads, 4 of 60 experts, a step of one, biases, theta 1e4, untied.
    qwen2_moe(
        "defaults",
        OldHub(only=(*SIZES, "moe_intermediate_size", "shared_expert_intermediate_size")),
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
    ),
)

# afmoe --------------------------------------------------------------------------------------------

AFMOE: Config = BASE | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "sliding_window": W,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "global_attn_every_n_layers": 3,
}
# Routers have no other score and no groups: the keys that repositories have for them are not read.
AFMOE_HUB = OldHub(
    pattern=False,
    add={
        "load_balance_coeff": 5e-05,
        "n_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "score_func": "sigmoid",
        "topk_group": 1,
        "use_grouped_mm": True,
    },
)
AFMOE_PLAIN = OldHub(pattern=False, drop=("layer_types",))


def afmoe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "afmoe", AFMOE, old, kwargs)


AFMOE_CASES = (
    # This has the form of the repositories: embeddings scaled, weights that add up to `route_scale`.
    afmoe("base", AFMOE_HUB, mup_enabled=True, route_scale=2.448, num_hidden_layers=5),
    afmoe("period", AFMOE_PLAIN, num_dense_layers=0, num_shared_experts=2, rope_parameters=rope(500.0, LLAMA3)),
    afmoe(
        "layer_types",
        layer_types=[F, S, S, F],
        num_dense_layers=2,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        tie_word_embeddings=True,
        route_scale=0.5,
    ),
    # The gate of the attention has no bias.
    afmoe("bias_mha", AFMOE_HUB, attention_bias=True, num_key_value_heads=None, num_experts_per_tok=3),
    # Only sizes are given. Defaults: 16 heads and key heads of 128, one dense layer, 6 of 64 experts, 2 shared,
    # period four, theta 1e4, eps 1e-5; no scales.
    afmoe(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window", "moe_intermediate_size")),
        num_attention_heads=16,
        num_key_value_heads=None,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        global_attn_every_n_layers=4,
    ),
)

# dots1 --------------------------------------------------------------------------------------------

DOTS1: Config = BASE | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
DOTS1_PLAIN = OldHub(
    pattern=False,
    drop=("layer_types",),
    add={"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1},
)


def dots1(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "dots1", DOTS1, old, kwargs)


DOTS1_CASES = (
    # This has the form of the repositories: no window, weights that add up to `routed_scaling_factor`.
    dots1("base", DOTS1_PLAIN, sliding_window=None, norm_topk_prob=True, routed_scaling_factor=2.5),
    # By default weights do not add up to one, and no layer before 62 slides.
    dots1(
        "window_from_layer_2",
        OldHub(pattern=False, drop=("layer_types", "norm_topk_prob")),
        sliding_window=W,
        max_window_layers=2,
        n_shared_experts=2,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    dots1(
        "groups",
        OldHub(pattern=False, drop=("layer_types", "max_window_layers")),
        sliding_window=W,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    dots1(
        "layer_types_bias",
        layer_types=[S, F, S, S],
        sliding_window=W,
        attention_bias=True,
        first_k_dense_replace=0,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        n_group=2,
        routed_scaling_factor=0.5,
    ),
    # All values are defaults: 32 heads and key heads, all layers with experts and none sliding, theta 1e4.
    dots1(
        "defaults",
        OldHub(
            pattern=False,
            only=(*SIZES, "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
        ),
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=None,
        head_dim=2,
        first_k_dense_replace=0,
    ),
)

# exaone_moe ---------------------------------------------------------------------------------------

EXAONE_MOE: Config = BASE | {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "sliding_window": W,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rope_parameters": rope(1e6),
}
MTP = {"mtp.fc.weight": (64, 128), "mtp.layers.0.self_attn.q_proj.weight": (96, 64), "mtp.norm.weight": (64,)}


def exaone_moe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "exaone_moe", EXAONE_MOE, old, kwargs)


EXAONE_MOE_CASES = (
    # This has the form of the 236B repository. Its layer of multi-token prediction is not read.
    replace(
        exaone_moe(
            "base",
            Keys(
                drop=("first_k_dense_replace",),
                add={"is_moe_layer": [False, True], "num_nextn_predict_layers": 1, "scoring_func": "sigmoid"},
            ),
        ),
        extra_tensors=MTP,
    ),
    exaone_moe(
        "groups",
        OldHub(drop=("mlp_layer_types",)),
        sliding_window_pattern=2,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=2,
        num_shared_experts=2,
    ),
    # transformers fails on a pattern of letters unless there are layer_types.
    replace(
        exaone_moe(
            "pattern_letters",
            OldHub(pattern=False, drop=("layer_types", "mlp_layer_types"), add={"sliding_window_pattern": "LLG"}),
            sliding_window_pattern=3,
            num_hidden_layers=6,  # a pattern of letters always makes the last layer full
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
        old_is_read=False,
    ),
    exaone_moe(
        "layer_types",
        layer_types=[F, S, S, F, S],
        mlp_layer_types=["sparse", "dense", "sparse", "dense", "sparse"],
        hidden_act="gelu",
        rms_norm_eps=0.1,
        routed_scaling_factor=0.5,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 32 heads and key heads, 8 of 64 experts, the first layer dense, one shared expert,
    # weights that add up to 2.5, period four, theta 1e4.
    exaone_moe(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window", "moe_intermediate_size")),
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=2,
        num_experts=64,
        num_experts_per_tok=8,
        rope_parameters=rope(1e4),
    ),
)

CASES = (*QWEN2_MOE_CASES, *AFMOE_CASES, *DOTS1_CASES, *EXAONE_MOE_CASES)
