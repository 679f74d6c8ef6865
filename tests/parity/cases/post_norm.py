"""Parity cases of OLMo 2 and 3 and EXAONE 4, which norm after each half of a layer, and of Cohere 2: parallel halves.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import BASE, LLAMA3, SIZES, YARN, Case, Config, F, OldForm, OldHub, S, W, case, rope

# olmo3 --------------------------------------------------------------------------------------------

OLMO3: Config = BASE | {"num_hidden_layers": 5, "sliding_window": W, "rope_theta": 5e5}
YARN8 = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# Repositories list the layer types, but have no `rope_local_base_freq`: both kinds of layers use the one theta.
OLMO3_HUB = OldHub(pattern=False, drop=("rope_local_base_freq",))


def olmo3(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "olmo3", OLMO3, old, kwargs)


OLMO2_CASES = (
    case("base", "olmo2", BASE, OldHub(), {"rope_parameters": rope(5e5), "rms_norm_eps": 0.1}),
    # Only sizes are given. Defaults: 32 heads, as many key heads, theta 1e4, eps 1e-5.
    case("defaults", "olmo2", BASE, OldHub(only=SIZES), {"num_attention_heads": 32, "num_key_value_heads": None}),
    case("bias_tied", "olmo2", BASE, OldHub(), {"attention_bias": True, "tie_word_embeddings": True}),
)
OLMO3_CASES = (
    # In the 7B repository every head has its own key, so key norms are as wide as query norms.
    olmo3("base", OLMO3_HUB, num_key_value_heads=4, rope_scaling=YARN8),
    # This has the form of the 32B repository. Only full layers are scaled.
    olmo3("gqa", OLMO3_HUB, rope_scaling=YARN8 | {"factor": 4.0, "attention_factor": 1.5}, hidden_act="gelu"),
    # Only sizes are given. Defaults: 32 heads, as many key heads, period four, theta 5e5, eps 1e-5, no scaling.
    olmo3(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        num_attention_heads=32,
        num_key_value_heads=None,
    ),
    # transformers 5.23 takes the one theta of an old config for full layers only, and 5e5 for sliding ones.
    replace(
        olmo3(
            "theta",
            OLMO3_HUB,
            rope_parameters={
                F: rope(1e4, YARN, beta_fast=4, beta_slow=0.5, original_max_position_embeddings=4096),
                S: rope(1e4),
            },
            layer_types=[F, S, S, F, S],
        ),
        old_is_read=False,
    ),
    olmo3("thetas", rope_parameters={F: rope(3e5, LLAMA3), S: rope(300.0)}, num_key_value_heads=1),
    olmo3("bias_tied_eps", OLMO3_HUB, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=0.1),
)

# exaone4 ------------------------------------------------------------------------------------------

EXAONE4: Config = BASE | {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "sliding_window": W,
    "rope_parameters": rope(1e6, LLAMA3),
}
EXAONE4_HUB = OldHub(pattern=False, add={"sliding_window_pattern": "LLLG"})
UNREADABLE = OldHub(pattern=False, drop=("layer_types",), add={"sliding_window_pattern": "LLG"})
NO_WINDOW = OldHub(pattern=False, drop=("layer_types",), add={"sliding_window_pattern": None})


def exaone4(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "exaone4", EXAONE4, old, kwargs)


EXAONE4_CASES = (
    # This has the form of the 32B repository. The pattern is read only if layer_types are absent.
    exaone4("base", EXAONE4_HUB),
    exaone4("pattern_3", OldHub(), sliding_window_pattern=3),
    # transformers fails on a pattern of letters unless there are layer_types.
    # There are six layers: a pattern of letters always makes the last layer full.
    replace(exaone4("pattern_letters", UNREADABLE, sliding_window_pattern=3, num_hidden_layers=6), old_is_read=False),
    # In the 1.2B repository there is no window, and every layer has a rope. transformers fails without layer_types.
    replace(
        exaone4(
            "no_window",
            NO_WINDOW,
            sliding_window=None,
            layer_types=[F] * 5,
            tie_word_embeddings=True,
            rms_norm_eps=0.1,
        ),
        old_is_read=False,
    ),
    # No layer uses the window, and no layer has a rope.
    exaone4("unused_window", layer_types=[F] * 3, num_hidden_layers=3, sliding_window_pattern=1),
    exaone4("layer_types", layer_types=[F, S, S, F, S], rope_parameters=rope(500.0), hidden_act="gelu"),
    # Only sizes are given. Defaults: 32 heads and key heads, head_dim from the width, period four, theta 1e4.
    exaone4(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=2,
        rope_parameters=rope(1e4),
    ),
)

# cohere2 ------------------------------------------------------------------------------------------

COHERE2: Config = BASE | {
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "sliding_window": W,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "rope_parameters": rope(5e4),
}
# These keys of the repositories are not read. Full layers have no rope.
COHERE2_HUB = OldHub(
    drop=("tie_word_embeddings",),
    add={
        "head_dim": 8,
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "use_qk_norm": False,
    },
)


def cohere2(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    """Return a case whose last norm makes up for the scale of the logits, so that they differ as much as elsewhere."""
    made = case(name, "cohere2", COHERE2, old, kwargs)
    return replace(made, scales=((r"^model\.norm\.", 1 / made.kwargs["logit_scale"]),))


COHERE2_CASES = (
    cohere2("base", COHERE2_HUB),
    # Only sizes are given. Defaults: 64 heads and key heads, period four, theta 1e4, tied, logits by 1/16.
    cohere2(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        hidden_size=128,
        num_attention_heads=64,
        num_key_value_heads=None,
        logit_scale=0.0625,
        rope_parameters=rope(1e4),
    ),
    cohere2("pattern_2", OldHub(drop=("logit_scale",)), sliding_window_pattern=2, logit_scale=0.0625),
    cohere2(
        "layer_types",
        layer_types=[F, F, S, F, S],
        layer_norm_eps=0.1,
        hidden_act="gelu",
        num_attention_heads=4,
        rope_parameters=rope(1e4, LLAMA3),
    ),
    cohere2("bias_untied", OldHub(), sliding_window_pattern=3, attention_bias=True, tie_word_embeddings=False),
    cohere2("head_dim", OldHub(), head_dim=24, sliding_window_pattern=4),
)

CASES = (*OLMO2_CASES, *OLMO3_CASES, *EXAONE4_CASES, *COHERE2_CASES)
