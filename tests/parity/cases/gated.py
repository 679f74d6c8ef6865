"""Parity cases of Laguna, Mellum, Flint, Kolibri 1 and Beam: experts, gated attention, sinks, layers without rope.

What and why: as in cases.py. All of these came with transformers 5, so there is no older form of their configs.
"""

from dataclasses import replace

from tests.parity.case import BASE, LLAMA3, SIZES, YARN, Case, Config, F, Keys, OldForm, S, W, case, rope

COMMON: Config = BASE | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "sliding_window": W,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

# laguna -------------------------------------------------------------------------------------------

LAGUNA: Config = COMMON | {"shared_expert_intermediate_size": 40, "layer_types": [F, S, S, F]}
YARN_LONG = YARN | {"original_max_position_embeddings": 4096, "beta_fast": 4.0, "beta_slow": 0.5}
YARN_PARTIAL = rope(1e4, YARN_LONG, partial_rotary_factor=0.5, attention_factor=1.4)


def laguna(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "laguna", LAGUNA, old, kwargs)


LAGUNA_CASES = (
    # This has the form of the XS.2 repository: more queries in sliding layers, a gate per head, yarn on part of the
    # full layers.
    laguna(
        "base",
        Keys(drop=("mlp_layer_types",)),
        num_attention_heads_per_layer=[4, 6, 6, 4],
        gating="per-head",
        rope_parameters={F: YARN_PARTIAL, S: rope(1e4, partial_rotary_factor=1.0)},
        moe_routed_scaling_factor=2.5,
    ),
    # Each element has a gate. Scores before the sigmoid are bounded.
    laguna(
        "per_element",
        gating="per-element",
        moe_router_logit_softcapping=0.5,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        tie_word_embeddings=True,
        num_experts_per_tok=3,
    ),
    # `false` does not mean "no gate": it means a gate for every element.
    laguna(
        "gating_false",
        Keys(drop=("rope_parameters",)),
        gating=False,
        attention_bias=True,
        layer_types=[S, F, S, F],
        hidden_act="gelu",
        rms_norm_eps=0.1,
    ),
    laguna(
        "sliding_partial",
        rope_parameters={F: rope(500.0, LLAMA3, partial_rotary_factor=1.0), S: rope(300.0, partial_rotary_factor=0.5)},
        num_attention_heads_per_layer=[2, 8, 4, 6],
    ),
    # Only sizes are given. Defaults: 48 heads, 8 key heads of 128, all layers full, half of a head rotates by theta
    # 5e5, the first layer dense, 8 of 256 experts, a gate per head, no scale.
    laguna(
        "defaults",
        Keys(only=(*SIZES, "moe_intermediate_size", "shared_expert_intermediate_size")),
        num_hidden_layers=2,
        layer_types=None,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        moe_intermediate_size=4,
        num_experts=256,
        num_experts_per_tok=8,
    ),
)

# mellum -------------------------------------------------------------------------------------------

MELLUM: Config = COMMON | {"layer_types": [S, S, S, F]}


def mellum(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "mellum", MELLUM, old, kwargs)


MELLUM_CASES = (
    # This has the form of the 12B repository: one theta, yarn for full layers; all layers have experts.
    mellum(
        "base",
        Keys(drop=("mlp_layer_types",), add={"num_experts": 8}),
        rope_parameters={F: rope(1e4, YARN_LONG, attention_factor=1.2), S: rope(1e4)},
    ),
    # The layers of multi-token prediction are not read.
    replace(
        mellum(
            "mtp_no_norm",
            norm_topk_prob=False,
            num_mtp_layers=1,
            layer_types=[F, S, F, S],
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
            attention_bias=True,
        ),
        extra_tensors={"mtp.fc.weight": (64, 128), "mtp.layers.0.input_layernorm.weight": (64,)},
    ),
    mellum(
        "ropes",
        rope_parameters={F: rope(500.0, LLAMA3), S: rope(300.0)},
        hidden_act="gelu",
        rms_norm_eps=0.1,
        tie_word_embeddings=True,
        num_experts_per_tok=3,
    ),
    # Only sizes are given. Defaults: 32 heads, 4 key heads of 128, all layers full, theta 5e5, 8 of 64 experts.
    mellum(
        "defaults",
        Keys(only=(*SIZES, "moe_intermediate_size")),
        num_hidden_layers=2,
        layer_types=None,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=8,
        num_experts=64,
        num_experts_per_tok=8,
    ),
)

# flint --------------------------------------------------------------------------------------------

FLINT: Config = COMMON | {"num_hidden_layers": 5, "shared_expert_intermediate_size": 40}


def flint(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "flint", FLINT, old, kwargs)


FLINT_CASES = (
    # Full layers: the first two, the last, and each i with i % 4 == 1. Layers without experts: the first two.
    flint("base", Keys(drop=("layer_types", "mlp_only_layers")), num_hidden_layers=7),
    flint(
        "layer_types",
        layer_types=[S, F, S, S, F],
        mlp_only_layers=[3],
        decoder_sparse_step=2,
        norm_topk_prob=False,
        rope_parameters=rope(500.0, LLAMA3),
    ),
    flint(
        "bias_tied_eps",
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
        hidden_act="gelu",
        num_experts_per_tok=3,
        mlp_only_layers=[],
        num_key_value_heads=1,
    ),
    # Only sizes are given. Defaults: 32 heads, 4 key heads of 128, 6 of 256 experts, theta 1e4.
    flint(
        "defaults",
        Keys(only=(*SIZES, "sliding_window", "moe_intermediate_size", "shared_expert_intermediate_size")),
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=4,
        num_experts=256,
        num_experts_per_tok=6,
    ),
)

# kolibri1 -----------------------------------------------------------------------------------------

KOLIBRI: Config = COMMON | {"num_hidden_layers": 6, "shared_expert_intermediate_size": 40}


def kolibri1(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "kolibri1", KOLIBRI, old, kwargs)


KOLIBRI_CASES = (
    # Every fifth layer is full and has no rope. Experts are chosen by logits and weighed by their sigmoid.
    kolibri1("base", Keys(drop=("layer_types",), add={"num_experts": 8})),
    kolibri1(
        "layer_types_norm",
        num_hidden_layers=4,
        layer_types=[F, S, F, S],
        norm_topk_prob=True,
        rope_parameters=rope(500.0, LLAMA3),
        tie_word_embeddings=True,
    ),
    kolibri1(
        "eps_gelu", num_hidden_layers=5, rms_norm_eps=0.1, hidden_act="gelu", num_experts_per_tok=3, sliding_window=3
    ),
    # Only sizes are given. Defaults: 48 heads, 4 key heads of 128, 6 of 384 experts, theta 1e4.
    kolibri1(
        "defaults",
        Keys(only=(*SIZES, "sliding_window", "moe_intermediate_size", "shared_expert_intermediate_size")),
        num_hidden_layers=1,
        num_attention_heads=48,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=4,
        num_experts=384,
        num_experts_per_tok=6,
    ),
)

# beam ---------------------------------------------------------------------------------------------

BEAM: Config = COMMON | {"n_group": 4, "topk_group": 2}


def beam(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "beam", BEAM, old, kwargs)


BEAM_CASES = (
    # Every sixth layer and the last are full, without a rope; the first three are dense.
    beam("base", Keys(drop=("layer_types", "mlp_layer_types", "rope_parameters")), num_hidden_layers=8),
    # The large epsilon keeps the norm that follows from undoing the scale of the routed experts.
    beam(
        "layer_types",
        rms_norm_eps=0.5,
        layer_types=[F, S, F, S],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        norm_topk_prob=False,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=0.5,
        final_logit_softcapping=None,
        attention_bias=True,
    ),
    # If full layers have a rope, they have no temperature.
    beam(
        "ropes_softcap",
        layer_types=[F, S, S, F],
        rope_parameters={F: rope(500.0, LLAMA3), S: rope(300.0)},
        n_group=1,
        topk_group=1,
        num_experts_per_tok=3,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
        hidden_act="gelu",
        rms_norm_eps=0.1,
    ),
    # No layer has a rope, but queries have a temperature: a third of a percent at the last token. Large scores show it.
    replace(
        beam(
            "no_ropes",
            num_hidden_layers=2,
            layer_types=[S, F],
            mlp_layer_types=["dense", "dense"],
            rope_parameters={F: None, S: None},
        ),
        scales=(("[qk]_norm", 3.0),),
    ),
    # Only sizes are given. Defaults: 48 heads, 8 key heads of 128, 8 of 256 experts in 4 of 8 groups, cap 30, theta
    # 1e4.
    beam(
        "defaults",
        Keys(only=(*SIZES, "sliding_window", "moe_intermediate_size")),
        num_hidden_layers=4,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        moe_intermediate_size=4,
        num_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
    ),
)

CASES = (*LAGUNA_CASES, *MELLUM_CASES, *FLINT_CASES, *KOLIBRI_CASES, *BEAM_CASES)
