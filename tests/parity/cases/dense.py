"""Parity cases of dense families that differ little from Llama: Phi 3, Ministral 3, StarCoder 2, SmolLM 3, CWM.

What and why: as in cases.py.
"""

from dataclasses import replace

from tests.parity.case import BASE, LLAMA3, SIZES, YARN, Case, Config, F, Keys, OldForm, OldHub, S, W, case, rope

# phi3 ---------------------------------------------------------------------------------------------

PHI3: Config = BASE | {"sliding_window": W, "rms_norm_eps": 1e-5}
PHI3_HUB = OldHub(add={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_bias": False, "auto_map": {}})
SHORT = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8]
LONG = [1.0, 1.5, 2.5, 4.0, 7.0, 12.0, 20.0, 33.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def phi3(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "phi3", PHI3, old, kwargs)


def longrope(original: int, **options: object) -> Config:
    return {
        "max_position_embeddings": 4 * original,
        "original_max_position_embeddings": original,
        "rope_parameters": rope(1e4, LONGROPE, **options),
    }


def phi3_hub(**scaling: object) -> OldForm:
    """Return the config with partial rotation as its own key; the same key within the rope is ignored."""

    def form(config: Config) -> Config:
        old = OldHub("type")(config) | {"partial_rotary_factor": config["rope_parameters"]["partial_rotary_factor"]}
        if old["rope_scaling"]:
            kept = {k: v for k, v in old["rope_scaling"].items() if k != "partial_rotary_factor"}
            old["rope_scaling"] = kept | scaling
        return old

    return form


PHI3_CASES = (
    # This has the form of the 4k repositories. They set the key of a bias that Phi 3 does not have to false.
    phi3("base", PHI3_HUB, num_key_value_heads=4),
    phi3("gqa_partial", phi3_hub(), rope_parameters=rope(500.0, partial_rotary_factor=0.75)),
    # Only sizes are given. Defaults: 32 heads, as many key heads, no window, theta 1e4, eps 1e-5, untied.
    phi3(
        "defaults",
        OldHub(only=(*SIZES, "pad_token_id")),
        num_attention_heads=32,
        num_key_value_heads=None,
        sliding_window=None,
    ),
    # A text longer than `original` uses the long factors at all positions.
    phi3("long", OldHub("type"), **longrope(32)),
    phi3("short", OldHub("type"), **longrope(256)),
    # This has the form of Phi 4 mini: six pairs of sixteen dimensions rotate, and the embeddings are tied.
    phi3(
        "long_partial_tied",
        phi3_hub(),
        **longrope(32, partial_rotary_factor=0.75, short_factor=SHORT[:6], long_factor=LONG[:6]),
        tie_word_embeddings=True,
        sliding_window=64,
    ),
    # The first repositories call this rope `su`, some call it `yarn`. An explicit factor replaces the ratio of lengths.
    phi3("long_su", phi3_hub(type="su"), **longrope(32, factor=2.5)),
    phi3("short_yarn", phi3_hub(type="yarn"), **longrope(256, attention_factor=1.7)),
    # The original length outside of the rope is used, not the one within.
    phi3("outer_original", phi3_hub(original_max_position_embeddings=256), **longrope(32)),
    # The head dimension is not the width divided by the number of heads.
    phi3("head_dim", OldHub(), head_dim=24, hidden_act="gelu", rms_norm_eps=0.1, sliding_window=64),
)

# ministral3 ---------------------------------------------------------------------------------------

MINISTRAL3: Config = BASE | {"head_dim": 24, "rms_norm_eps": 1e-5}
YARN16 = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "ministral3", MINISTRAL3, old, kwargs)


MINISTRAL3_CASES = (
    # The query temperature counts in original lengths, too.
    ministral3("base", Keys(drop=("sliding_window",)), rope_parameters=rope(1e6, YARN16)),
    ministral3(
        "window",
        sliding_window=W,
        rope_parameters=rope(
            1e4,
            YARN16,
            beta_fast=0.5,
            beta_slow=0.1,
            llama_4_scaling_beta=0.5,
            mscale_all_dim=0.5,
            original_max_position_embeddings=7,
        ),
    ),
    # Only sizes are given. Defaults: 32 heads of 128, 8 key heads, theta 1e6, yarn by 16 of 16384 positions.
    ministral3(
        "defaults",
        Keys(only=SIZES),
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
    ),
    # The temperature applies with any rope.
    ministral3(
        "plain_rope_tied",
        rope_parameters=rope(1e4, llama_4_scaling_beta=0.9, original_max_position_embeddings=5),
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
        hidden_act="gelu",
    ),
    # Either all layers have the window or none, but the cache of transformers reads layer_types.
    replace(
        ministral3("layer_types_ignored", rope_parameters=rope(1e6, YARN16), sliding_window=W, layer_types=[F, S, F]),
        cached=False,
    ),
)

# starcoder2 ---------------------------------------------------------------------------------------

STARCODER2: Config = BASE | {"sliding_window": W, "tie_word_embeddings": True}
STARCODER2_HUB = OldHub(
    drop=("tie_word_embeddings",),
    add={"mlp_type": "default", "norm_type": "layer_norm", "layer_norm_epsilon": 0.5, "activation_function": "gelu"},
)


def starcoder2(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "starcoder2", STARCODER2, old, kwargs)


STARCODER2_CASES = (
    # Every linear layer and norm has a bias; the MLP has no gate.
    starcoder2("base", STARCODER2_HUB),
    # Without `use_bias`, only the norms keep their biases.
    starcoder2("no_bias_untied", OldHub(), use_bias=False, tie_word_embeddings=False, num_key_value_heads=4),
    # Only sizes are given. Defaults: 24 heads, 2 key heads, no window, theta 1e4, biases, gelu by tanh, tied.
    starcoder2("defaults", OldHub(only=SIZES), hidden_size=48, num_attention_heads=24, sliding_window=None),
    starcoder2(
        "head_dim_eps_silu",
        OldHub(),
        head_dim=24,
        norm_epsilon=0.1,
        hidden_act="silu",
        rope_parameters=rope(500.0, YARN),
    ),
)

# smollm3 ------------------------------------------------------------------------------------------

SMOLLM3: Config = BASE | {"num_hidden_layers": 5, "tie_word_embeddings": True, "rope_parameters": rope(5e6)}
SMOLLM3_PLAIN = OldHub(pattern=False, drop=("layer_types", "no_rope_layers"))


def smollm3(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "smollm3", SMOLLM3, old, kwargs)


SMOLLM3_CASES = (
    # The repositories have a window and do not use it. Layer 3 of the five has no rope.
    smollm3(
        "base",
        OldHub(pattern=False, drop=("tie_word_embeddings",), add={"sliding_window": W, "max_window_layers": 28}),
    ),
    # Only sizes are given. Defaults: 16 heads, 4 key heads, no rope in each fourth layer, theta 2e6, tied.
    smollm3(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "pad_token_id")),
        num_attention_heads=16,
        num_key_value_heads=4,
        rope_parameters=rope(2e6),
    ),
    # The layers without a rope are sliding layers.
    smollm3(
        "window",
        SMOLLM3_PLAIN,
        use_sliding_window=True,
        sliding_window=W,
        no_rope_layer_interval=2,
        attention_bias=True,
    ),
    smollm3(
        "no_rope_layers",
        OldHub(pattern=False, drop=("layer_types",)),
        no_rope_layers=[0, 1, 1, 0, 1],
        use_sliding_window=True,
        sliding_window=W,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_parameters=rope(500.0, YARN),
    ),
    # The two lists need not agree.
    smollm3(
        "layer_types",
        no_rope_layers=[1, 0, 0, 1, 1],
        layer_types=[S, S, F, F, S],
        use_sliding_window=True,
        sliding_window=W,
        head_dim=24,
        hidden_act="gelu",
        rms_norm_eps=0.1,
    ),
)

# cwm ----------------------------------------------------------------------------------------------

CWM: Config = BASE | {"num_hidden_layers": 5, "head_dim": 24, "sliding_window": W, "rms_norm_eps": 1e-5}
LLAMA3_16 = LLAMA3 | {"factor": 16.0, "original_max_position_embeddings": 8192}


def cwm(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "cwm", CWM, old, kwargs)


CWM_CASES = (
    # The first layer of every four is full.
    cwm("base", OldHub(pattern=False, drop=("layer_types",)), rope_parameters=rope(1e6, LLAMA3)),
    # Only sizes are given. Defaults: 48 heads, 8 key heads of 128, theta 1e6, llama3 by 16 of 8192 positions, untied.
    cwm(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        hidden_size=48,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters=rope(1e6, LLAMA3_16),
    ),
    cwm(
        "layer_types_tied",
        OldHub(pattern=False, add={"window_pattern": 2}),
        layer_types=[S, F, F, S, S],
        tie_word_embeddings=True,
        rope_parameters=rope(500.0, LLAMA3),
        rms_norm_eps=0.1,
        hidden_act="gelu",
    ),
    # If there is no scaling, theta is not read: the default is theta 1e6 and llama3 by 16. Attention has no bias.
    cwm(
        "scaling_null_mlp_bias",
        OldHub(pattern=False, add={"rope_scaling": None, "rope_theta": 500.0, "attention_bias": True}),
        mlp_bias=True,
        num_hidden_layers=2,
    ),
    cwm("plain_rope", num_hidden_layers=2, rope_parameters=rope(500.0)),
)

# vaultgemma ---------------------------------------------------------------------------------------

VAULTGEMMA: Config = BASE | {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "query_pre_attn_scalar": 32,
    "sliding_window": W,
    "tie_word_embeddings": True,
}
VAULTGEMMA_HUB = OldHub(pattern=False, drop=("layer_types",))


def vaultgemma(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "vaultgemma", VAULTGEMMA, old, kwargs)


VAULTGEMMA_CASES = (
    vaultgemma("base", VAULTGEMMA_HUB, attn_logit_softcapping=None, final_logit_softcapping=None),
    # Only sizes are given. Defaults: 8 heads, 4 key heads of 256, scale 256^-1/2, caps of 50 and 30, tied.
    vaultgemma(
        "defaults",
        OldHub(pattern=False, only=(*SIZES, "sliding_window")),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
    ),
    vaultgemma("softcaps", VAULTGEMMA_HUB, attn_logit_softcapping=0.5, final_logit_softcapping=3.0),
    # Scores and logits large enough for the default caps.
    replace(
        vaultgemma(
            "default_softcaps",
            OldHub(pattern=False, drop=("layer_types", "attn_logit_softcapping", "final_logit_softcapping")),
        ),
        scales=(("[qk]_proj", 2.5), (r"model\.norm\.", 4.0)),
    ),
    vaultgemma(
        "layer_types_bias",
        OldHub(pattern=False),
        layer_types=[F, S, S, F, S],
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_activation="silu",
        rms_norm_eps=0.1,
        rope_parameters=rope(500.0),
    ),
)

CASES = (*PHI3_CASES, *MINISTRAL3_CASES, *STARCODER2_CASES, *SMOLLM3_CASES, *CWM_CASES, *VAULTGEMMA_CASES)
