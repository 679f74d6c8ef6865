"""Parity cases of families without local layers: Gemma 1, Seed-OSS, ERNIE 4.5, GLM-4, Granite 3, OLMoE and others.

What and why: as in cases.py.
"""

from tests.parity.case import BASE, LINEAR8, LLAMA3, SIZES, YARN, Case, Config, OldForm, OldHub, case, rope


def partial_hub(*only: str) -> OldForm:
    """Return the config with partial rotation as a key of its own, and with only these other keys, if any is given."""

    def form(config: Config) -> Config:
        share = config["rope_parameters"]["partial_rotary_factor"]
        old = OldHub(only=only, add={} if only else {"partial_rotary_factor": share})(config)
        if old.get("rope_scaling"):
            old["rope_scaling"] = {k: v for k, v in old["rope_scaling"].items() if k != "partial_rotary_factor"}
        return old

    return form


# gemma --------------------------------------------------------------------------------------------

GEMMA: Config = BASE | {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}


def gemma(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "gemma", GEMMA, old, kwargs)


GEMMA_CASES = (
    # This has the form of the 2b repository: one key head, and a key for the activation that is not read.
    gemma("base", OldHub(drop=("tie_word_embeddings",), add={"hidden_activation": "silu"})),
    # `gelu` means its approximation by tanh.
    gemma("gelu", OldHub(add={"hidden_act": "gelu"}), hidden_act="gelu", num_key_value_heads=4),
    gemma(
        "silu_bias_untied",
        OldHub(),
        hidden_act="silu",
        attention_bias=True,
        tie_word_embeddings=False,
        rms_norm_eps=0.1,
        num_key_value_heads=2,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 16 heads and key heads of 256, theta 1e4, eps 1e-6, gelu by tanh, tied.
    gemma("defaults", OldHub(only=SIZES), num_attention_heads=16, num_key_value_heads=16, head_dim=256),
)

# granite, granitemoe ------------------------------------------------------------------------------

MULTIPLIERS: Config = {
    "embedding_multiplier": 12,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
}
GRANITE: Config = BASE | MULTIPLIERS | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
GRANITE_MOE: Config = GRANITE | {"intermediate_size": 24, "num_local_experts": 6}
NEUTRAL: Config = dict.fromkeys(MULTIPLIERS, 1.0) | {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}


def granite(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "granite", GRANITE, old, kwargs)


def granite_moe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "granitemoe", GRANITE_MOE, old, kwargs)


GRANITE_CASES = (
    granite("base", OldHub(), rope_parameters=rope(1e7)),
    granite(
        "biases_untied",
        OldHub(),
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        head_dim=24,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        embedding_multiplier=3.5,
        rope_parameters=rope(500.0, YARN),
    ),
    # Only sizes are given. Defaults: 32 heads and key heads, all multipliers 1, theta 1e4, eps 1e-6, untied.
    granite("defaults", OldHub(only=SIZES), num_attention_heads=32, num_key_value_heads=None, **NEUTRAL),
)
GRANITE_MOE_CASES = (
    granite_moe("base", OldHub(drop=("num_experts_per_tok",))),
    granite_moe(
        "top3_bias_untied",
        OldHub(),
        num_experts_per_tok=3,
        attention_bias=True,
        tie_word_embeddings=False,
        hidden_act="gelu",
        rope_parameters=rope(500.0),
    ),
    # Only sizes are given. Defaults: 32 heads and key heads, 2 of 8 experts, all multipliers 1, untied.
    granite_moe(
        "defaults",
        OldHub(only=SIZES),
        num_attention_heads=32,
        num_key_value_heads=None,
        num_local_experts=8,
        **NEUTRAL,
    ),
)

# glm4 ---------------------------------------------------------------------------------------------

GLM4: Config = BASE | {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)}


def glm4(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "glm4", GLM4, old, kwargs)


GLM4_CASES = (
    # This has the form of the 9B repository: q, k and v have biases.
    glm4("base", partial_hub()),
    glm4(
        "partial_tied",
        partial_hub(),
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        num_key_value_heads=1,
        rope_parameters=rope(500.0, partial_rotary_factor=0.75),
    ),
    glm4("yarn", partial_hub(), head_dim=32, rope_parameters=rope(1e4, YARN, partial_rotary_factor=0.5)),
    # Only sizes are given. Defaults: 32 heads, 2 key heads of 128, half rotated, theta 1e4, eps 1.5625e-7, biases.
    glm4(
        "defaults",
        partial_hub(*SIZES, "pad_token_id"),
        num_attention_heads=32,
        head_dim=128,
        rms_norm_eps=0.00000015625,
    ),
)

# seed_oss, ernie4_5 -------------------------------------------------------------------------------

SEED_HUB = OldHub(add={"pretraining_tp": 1, "residual_dropout": 0.1, "attention_dropout": 0.1})


def seed_oss(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "seed_oss", BASE, old, kwargs)


def ernie(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "ernie4_5", BASE | {"head_dim": 24, "tie_word_embeddings": True}, old, kwargs)


SEED_OSS_CASES = (
    # q, k and v have biases, the output projection has none. The head dimension is not width / heads.
    seed_oss("base", SEED_HUB, head_dim=24, rope_parameters=rope(1e7)),
    seed_oss(
        "other_biases_tied",
        SEED_HUB,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        head_dim=None,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 80 heads, 8 key heads of 128, theta 1e4, eps 1e-6, biases of q, k and v, untied.
    seed_oss("defaults", OldHub(only=SIZES), num_attention_heads=80, num_key_value_heads=8, head_dim=128),
)
ERNIE_CASES = (
    ernie("base", OldHub(drop=("tie_word_embeddings", "rope_theta", "use_bias")), rope_parameters=rope(5e5)),
    ernie(
        "bias_untied",
        OldHub(),
        use_bias=True,
        tie_word_embeddings=False,
        head_dim=None,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 16 heads, 2 key heads of 128, theta 5e5, eps 1e-5, no biases, tied.
    ernie("defaults", OldHub(only=SIZES), num_attention_heads=16, head_dim=128),
)

# olmoe --------------------------------------------------------------------------------------------

OLMOE: Config = BASE | {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}


def olmoe(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "olmoe", OLMOE, old, kwargs)


OLMOE_CASES = (
    # This has the form of the repositories: weights do not add up to one.
    olmoe("base", OldHub(add={"clip_qkv": None}, drop=("norm_topk_prob",)), num_key_value_heads=4),
    olmoe(
        "gqa_norm_bias_tied",
        OldHub(),
        norm_topk_prob=True,
        num_experts_per_tok=3,
        attention_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only sizes are given. Defaults: 16 heads and key heads, 8 of 64 experts, theta 1e4, eps 1e-5, untied.
    olmoe(
        "defaults",
        OldHub(only=SIZES),
        num_attention_heads=16,
        num_key_value_heads=None,
        num_experts=64,
        num_experts_per_tok=8,
    ),
)

# arcee, nemotron ----------------------------------------------------------------------------------

NEMOTRON: Config = BASE | {"head_dim": 24, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)}


def arcee(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "arcee", BASE, old, kwargs)


def nemotron(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "nemotron", NEMOTRON, old, kwargs)


ARCEE_CASES = (
    # This has the form of the 4.5B repository. mscale counts only together with mscale_all_dim.
    arcee("base", OldHub(), head_dim=32, rope_parameters=rope(1e4, YARN, mscale=1.0)),
    arcee("biases_tied", OldHub(), attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=0.1),
    arcee("gelu", hidden_act="gelu", num_key_value_heads=1, rope_parameters=rope(500.0)),
    # Only sizes are given. Defaults: 32 heads and key heads, theta 1e4, eps 1e-5, relu², no biases, untied.
    arcee("defaults", OldHub(only=SIZES), num_attention_heads=32, num_key_value_heads=None),
)
NEMOTRON_CASES = (
    nemotron("base", partial_hub()),
    nemotron(
        "biases_tied",
        partial_hub(),
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        norm_eps=0.1,
        rope_parameters=rope(500.0, partial_rotary_factor=0.25),
    ),
    nemotron(
        "gelu_linear", partial_hub(), hidden_act="gelu", rope_parameters=rope(1e4, LINEAR8, partial_rotary_factor=1.0)
    ),
    # Only sizes are given. Defaults: 48 heads and key heads, half rotated, theta 1e4, eps 1e-5, relu², untied.
    # transformers fails without a number of key heads.
    nemotron(
        "defaults",
        partial_hub(*SIZES, "num_key_value_heads"),
        hidden_size=192,
        num_attention_heads=48,
        num_key_value_heads=48,
        head_dim=None,
    ),
)

# hunyuan_v1_dense ---------------------------------------------------------------------------------

ALPHA: Config = {
    "rope_type": "dynamic",
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
HUNYUAN_HUB = OldHub(
    "type", add={"use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms"}
)


def hunyuan(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "hunyuan_v1_dense", BASE | {"head_dim": 24}, old, kwargs)


HUNYUAN_CASES = (
    # This has the form of the repositories: a fixed `alpha` stretches the rotary base.
    hunyuan("base", HUNYUAN_HUB, rope_parameters=rope(1e4, ALPHA), tie_word_embeddings=True),
    hunyuan(
        "plain_rope_bias",
        OldHub(),
        attention_bias=True,
        hidden_act="gelu",
        rms_norm_eps=0.1,
        num_key_value_heads=1,
        rope_parameters=rope(500.0),
    ),
    # Without `alpha`, a rope of this type differs only beyond max_position_embeddings.
    hunyuan("dynamic", OldHub(), rope_parameters=rope(1e4, LINEAR8 | {"rope_type": "dynamic"})),
    # Only sizes are given. Defaults: 32 heads and key heads, theta 1e4, eps 1e-5, no biases, untied.
    # transformers fails without a head dimension.
    hunyuan(
        "defaults",
        OldHub(only=(*SIZES, "head_dim")),
        num_attention_heads=32,
        num_key_value_heads=None,
        head_dim=4,
    ),
)

# apertus ------------------------------------------------------------------------------------------


def apertus(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "apertus", BASE, old, kwargs)


APERTUS_CASES = (
    apertus("base", OldHub(add={"qk_norm": True, "post_norm": False}), rope_parameters=rope(12e6, LLAMA3)),
    apertus(
        "relu2_bias_tied",
        OldHub(),
        hidden_act="relu2",
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
        head_dim=24,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    # Only the form of version 5 can say that there is no scaling.
    apertus("gelu_plain_rope", hidden_act="gelu", num_key_value_heads=1, rope_parameters=rope(500.0)),
    # Only sizes are given. Defaults: 32 heads and key heads, theta 12e6, llama3 by 8 of 8192 positions, eps 1e-5.
    apertus("defaults", OldHub(only=SIZES), num_attention_heads=32, num_key_value_heads=None),
    # If there is no scaling, theta is not read.
    apertus("scaling_null", OldHub(add={"rope_scaling": None, "rope_theta": 500.0}), num_hidden_layers=2),
)

CASES = (
    *GEMMA_CASES,
    *GRANITE_CASES,
    *GRANITE_MOE_CASES,
    *GLM4_CASES,
    *SEED_OSS_CASES,
    *ERNIE_CASES,
    *OLMOE_CASES,
    *ARCEE_CASES,
    *NEMOTRON_CASES,
    *HUNYUAN_CASES,
    *APERTUS_CASES,
)
