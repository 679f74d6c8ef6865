"""Parity cases of Gemma 4 and Gemma 3n: shared keys and values, embeddings per layer, two kinds of heads.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import BASE, LINEAR8, SIZES, Case, Config, F, Keys, OldForm, OldHub, S, W, case, rope

# gemma4_text --------------------------------------------------------------------------------------

GEMMA4: Config = BASE | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "sliding_window": W,
    "tie_word_embeddings": True,
}
# This has the form of the E2B and E4B repositories. transformers ignores the unused keys of shared layers.
EMBEDDED: Config = {
    "layer_types": [S, S, F, S, S, F],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 100,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
K_EQ_V: Config = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS: Config = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}


def gemma4_hub(keys: Keys | None = None) -> OldForm:
    """Return the config with two keys for the heads of full layers; transformers saves a `per_layer_config` instead."""

    def form(config: Config) -> Config:
        if "text_config" in config:
            return config | {"text_config": form(config["text_config"])}
        old = {key: value for key, value in config.items() if key not in ("dtype", "per_layer_config")}
        full: Config = next(iter(config["per_layer_config"].values()), {})
        old["global_head_dim"] = full.get("head_dim", config.get("head_dim"))
        old["num_global_key_value_heads"] = full.get("num_key_value_heads")
        return keys(old) if keys else old

    return form


# Attention is not scaled: scores of wide heads are large, and float32 differs much from float64.
CALM = (("q_norm", 0.25),)


def gemma4(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return replace(case(name, "gemma4_text", GEMMA4, old, kwargs), scales=CALM)


def shared_tensors(layers: tuple[int, ...], sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return tensors of keys and values that repositories have, but that layers with shared KV do not read."""
    found: dict[str, tuple[int, ...]] = {}
    for layer, size in zip(layers, sizes, strict=True):
        prefix = f"model.layers.{layer}.self_attn."
        found |= {f"{prefix}{x}_proj.weight": (2 * size, 64) for x in "kv"} | {f"{prefix}k_norm.weight": (size,)}
    return found


GEMMA4_CASES = (
    gemma4("base", gemma4_hub(), **EMBEDDED, use_bidirectional_attention="vision"),
    replace(
        gemma4("unused_keys", gemma4_hub(), **EMBEDDED),
        extra_tensors=shared_tensors((3, 4, 5), (16, 16, 32)),
    ),
    # This has the form of the 12B and 31B repositories: period six, scale 1 and both ropes by default.
    gemma4("dense", gemma4_hub(Keys(drop=("layer_types", "rope_parameters"))), **K_EQ_V),
    # This has the form of the 26B repository.
    gemma4("moe", gemma4_hub(), num_hidden_layers=3, layer_types=[S, F, F], **K_EQ_V, **EXPERTS),
    # Only sizes are given. Defaults: 8 heads, 4 key heads of 256 and 512, embeddings of 256 per layer,
    # tied, period 6, both ropes; no experts, no softcap, no shared layers.
    replace(
        gemma4(
            "defaults",
            gemma4_hub(Keys(only=(*SIZES, "sliding_window", "vocab_size_per_layer_input"))),
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            global_head_dim=512,
            hidden_size_per_layer_input=256,
            vocab_size_per_layer_input=96,
        ),
        scales=(("q_norm", 0.1),),
    ),
    # Without k = v, full layers have as many key heads as the others. The last layer is always full, despite
    # layer_types.
    gemma4(
        "key_heads_ignored_last_full",
        gemma4_hub(Keys(add={"num_global_key_value_heads": 1, "layer_types": [F, S, S, S]})),
        num_hidden_layers=4,
        layer_types=[F, S, S, F],
        global_head_dim=16,
    ),
    # With k = v, null means the key heads of all layers.
    gemma4(
        "k_eq_v_no_key_heads",
        gemma4_hub(),
        num_hidden_layers=3,
        layer_types=[F, S, F],
        attention_k_eq_v=True,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    # This has everything at once, and a rope factor. Shared full layers read keys and values that differ, though k = v.
    gemma4(
        "mix",
        gemma4_hub(),
        **EMBEDDED | K_EQ_V | EXPERTS | {"use_double_wide_mlp": False, "top_k_experts": 3, "num_key_value_heads": 4},
        rope_parameters={
            F: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.6, "factor": 4.0},
            S: rope(300.0),
        },
    ),
    gemma4(
        "moe_wide_shared",
        gemma4_hub(),
        **EMBEDDED | EXPERTS | {"num_kv_shared_layers": 2, "layer_types": [S, F, S, F], "num_hidden_layers": 4},
        hidden_activation="silu",
        rms_norm_eps=0.1,
    ),
    # A default rope, here that of the full layers, ignores a partial factor.
    gemma4(
        "softcap_ropes",
        gemma4_hub(Keys(drop=("attention_bias", "hidden_activation"))),
        num_hidden_layers=4,
        layer_types=[S, F, S, F],
        final_logit_softcapping=3.0,
        hidden_size=40,
        intermediate_size=50,
        num_global_key_value_heads=2,
        rope_parameters={
            F: rope(1e4, LINEAR8),
            S: rope(1e4, {"rope_type": "proportional"}, partial_rotary_factor=0.5),
        },
    ),
    # Only transformers writes this form, which gives each layer its own heads, with k = v or without.
    gemma4(
        "per_layer_config",
        num_hidden_layers=4,
        layer_types=[S, F, S, F],
        num_attention_heads=8,
        per_layer_config={str(i): {"head_dim": 24, "num_key_value_heads": 4} for i in (1, 3)},
    ),
)

# gemma3n_text -------------------------------------------------------------------------------------

GEMMA3N: Config = BASE | {
    "num_hidden_layers": 6,
    "layer_types": [S, S, F, S, S, F],
    "head_dim": 16,
    "sliding_window": W,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 80,  # larger tokens have row 0
    "laurel_rank": 8,
    "tie_word_embeddings": True,
}
GEMMA3N_HUB = OldHub(pattern=False, drop=("altup_lr_multiplier",))
# The coefficients depend on numbers as small as 1/width. Without these factors they would be nearly constant.
ROUTED = (("modality_router", 10.0), *CALM)


def gemma3n(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return replace(case(name, "gemma3n_text", GEMMA3N, old, kwargs), scales=ROUTED)


GEMMA3N_CASES = (
    gemma3n(
        "base",
        GEMMA3N_HUB,
        activation_sparsity_pattern=[0.95, 0.5, 0.0, 0.95, 0.0, 0.0],
        intermediate_size=[96, 96, 96, 80, 112, 96],
    ),
    # Only sizes are given. Defaults: 8 heads, 2 key heads, head_dim 256, period five, the last 15 layers share,
    # the first ten are sparse, laurel of rank 64, embeddings of 256 per layer, softcap 30, tied.
    replace(
        gemma3n(
            "defaults",
            OldHub(pattern=False, only=(*SIZES, "sliding_window", "vocab_size_per_layer_input")),
            num_hidden_layers=20,
            layer_types=None,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            num_kv_shared_layers=15,
            hidden_size_per_layer_input=256,
            laurel_rank=64,
            hidden_size=32,
            intermediate_size=512,  # if few gates were open, the norm would have little input
        ),
        scales=(("q_norm", 0.05), ("_coefs", 0.25)),
    ),
    # Models of at most ten layers have no sparsity by default. No layer shares KV.
    gemma3n(
        "default_layers",
        OldHub(pattern=False, drop=("layer_types", "activation_sparsity_pattern")),
        layer_types=None,
        num_kv_shared_layers=0,
        rope_parameters={F: rope(3e5, LINEAR8), S: rope(500.0)},
        final_logit_softcapping=3.0,
    ),
    gemma3n(
        "two_streams",
        GEMMA3N_HUB,
        num_hidden_layers=4,
        layer_types=[F, S, S, F],
        num_key_value_heads=1,
        num_kv_shared_layers=1,
        altup_num_inputs=2,
        altup_correct_scale=False,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    # The active stream need not be the first, and the first never has the embeddings per layer added.
    gemma3n(
        "active_stream",
        GEMMA3N_HUB,
        num_hidden_layers=4,
        layer_types=[S, F, S, F],
        num_key_value_heads=4,
        num_kv_shared_layers=2,
        altup_num_inputs=3,
        altup_active_idx=2,
        hidden_activation="silu",
        rms_norm_eps=0.1,
        activation_sparsity_pattern=[0.0, 0.3, 0.0, 0.9],
    ),
)

CASES = (*GEMMA4_CASES, *GEMMA3N_CASES)
