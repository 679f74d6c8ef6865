"""Parity cases of Qwen 2, Qwen 3, Qwen 3 MoE and Mixtral, all of whose windows are optional.

What and why: as in cases.py.
"""

from tests.parity.case import BASE, SIZES, YARN, Case, Config, F, OldHub, S, W, case, rope

QWEN3: Config = BASE | {"num_hidden_layers": 4, "head_dim": 24}
QWEN3_MOE: Config = BASE | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
WINDOW: Config = {"use_sliding_window": True, "sliding_window": W}
UNUSED_WINDOW: Config = {"sliding_window": W, "max_window_layers": 1}
PLAIN = OldHub(pattern=False, drop=("layer_types",))


def qwen3(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "qwen3", QWEN3, old, kwargs)


def qwen2(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "qwen2", BASE | {"num_hidden_layers": 4}, old, kwargs)


def qwen3_moe(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "qwen3_moe", QWEN3_MOE, old, kwargs)


def mixtral(name: str, old: OldHub | None = None, **kwargs: object) -> Case:
    return case(name, "mixtral", BASE | {"num_local_experts": 4}, old, kwargs)


QWEN3_CASES = (
    # The window is given but not used.
    qwen3("base", OldHub(pattern=False, drop=("layer_types", "use_sliding_window"), add=UNUSED_WINDOW)),
    qwen3("window_from_layer_2", PLAIN, max_window_layers=2, **WINDOW),
    qwen3("window_everywhere", PLAIN, max_window_layers=0, **WINDOW),
    # max_window_layers is 28 if absent, so no layer of four has the window.
    qwen3("window_nowhere", OldHub(pattern=False, drop=("layer_types", "max_window_layers")), **WINDOW),
    qwen3("layer_types", layer_types=[S, F, S, F], rms_norm_eps=0.1, hidden_act="gelu", **WINDOW),
    # Only sizes are given. Defaults: 32 heads, 32 key heads, head_dim 128, theta 1e4.
    qwen3("defaults", OldHub(only=SIZES), num_attention_heads=32, num_key_value_heads=32, head_dim=128),
    qwen3(
        "key_heads_null",
        OldHub(pattern=False, drop=("layer_types",), add={"num_key_value_heads": None}),
        num_key_value_heads=4,
    ),
    qwen3("attention_bias_tied", PLAIN, attention_bias=True, tie_word_embeddings=True),
    qwen3("yarn", PLAIN, head_dim=32, rope_parameters=rope(1e6, YARN)),
)
QWEN2_CASES = (
    # The biases are always there.
    qwen2(
        "base",
        OldHub(pattern=False, drop=("layer_types",), add=UNUSED_WINDOW | {"attention_bias": False}),
    ),
    qwen2("window_from_layer_2", PLAIN, max_window_layers=2, **WINDOW),
    qwen2("window_everywhere_tied", PLAIN, max_window_layers=0, tie_word_embeddings=True, **WINDOW),
    qwen2("head_dim", PLAIN, head_dim=24, rope_parameters=rope(1e6)),
)
QWEN3_MOE_CASES = (
    qwen3_moe(
        "base",
        OldHub(drop=("num_local_experts", "mlp_only_layers"), add={"num_experts": 6} | UNUSED_WINDOW),
        norm_topk_prob=True,
    ),
    # By default, weights do not add up to one.
    qwen3_moe("no_norm", OldHub(drop=("norm_topk_prob", "decoder_sparse_step")), num_experts_per_tok=3),
    # By the step, layers 1 and 3 would have experts; layer 1 is excluded.
    qwen3_moe("dense_layers", decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=True),
    # Either all layers have the window or none: max_window_layers and layer_types are not read.
    qwen3_moe(
        "window",
        OldHub(pattern=False, add={"max_window_layers": 2, "layer_types": [F, F, F, F]}),
        norm_topk_prob=True,
        rope_parameters=rope(1e6),
        **WINDOW,
    ),
    qwen3_moe(
        "top1_bias_derived_head_dim",
        OldHub(drop=("head_dim",)),
        head_dim=16,
        num_experts_per_tok=1,
        attention_bias=True,
    ),
)
MIXTRAL_CASES = (
    mixtral("base", OldHub(drop=("head_dim", "sliding_window", "num_experts_per_tok", "rope_theta"))),
    mixtral("window", OldHub(pattern=False, add={"layer_types": [F, F, F]}), sliding_window=W, head_dim=24),
    mixtral("top3_theta", OldHub(), num_experts_per_tok=3, rope_parameters=rope(500.0), rms_norm_eps=0.1),
)

CASES = (*QWEN3_CASES, *QWEN2_CASES, *QWEN3_MOE_CASES, *MIXTRAL_CASES)
