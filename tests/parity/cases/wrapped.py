"""Parity cases of text models within multimodal models, and of Step 3.5 and 3.7.

What and why: as in cases.py. Of the towers for images and sound a tensor or two is kept, which a loader must skip.
"""

from dataclasses import replace
from typing import Any

from tests.parity.case import BASE, LLAMA3, SIZES, Case, Config, F, Keys, OldForm, OldHub, S, W, case, rope
from tests.parity.cases.cases import V5_PREFIXES
from tests.parity.cases.dense import MINISTRAL3, YARN16
from tests.parity.cases.gemma import CALM, EMBEDDED, EXPERTS, GEMMA3N, GEMMA4, K_EQ_V, ROUTED, gemma4_hub

VISION: Config = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}

# gemma4, gemma4_unified, gemma3n ------------------------------------------------------------------

GEMMA4_VISION = VISION | {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 4,
    "pooling_kernel_size": 1,
}
UNIFIED_VISION: Config = {
    "patch_size": 2,
    "pooling_kernel_size": 1,
    "mm_embed_dim": 8,
    "mm_posemb_size": 4,
    "output_proj_dims": 8,
}


def gemma4(name: str, old: OldForm | None, text: Config, **top: object) -> Case:
    config: Config = {"text_config": GEMMA4 | text, "vision_config": GEMMA4_VISION}
    return Case(f"gemma4_{name}", "gemma4", config | top, old, scales=CALM)


def unified(name: str, old: OldForm | None = None, **text: object) -> Case:
    config: Config = {"text_config": GEMMA4 | K_EQ_V | text, "vision_config": UNIFIED_VISION}
    return Case(f"gemma4_unified_{name}", "gemma4_unified", config, old, scales=CALM)


GEMMA4_CASES = (
    gemma4("wrapped", gemma4_hub(), EMBEDDED | {"use_bidirectional_attention": "vision"}),
    # The outer config says whether embeddings are tied.
    gemma4(
        "untied_moe",
        gemma4_hub(),
        EXPERTS | {"num_hidden_layers": 3, "layer_types": [S, S, F], "final_logit_softcapping": 3.0},
        tie_word_embeddings=False,
    ),
    # This has the form of the 12B repository.
    unified("wrapped", gemma4_hub(Keys(drop=("layer_types", "rope_parameters")))),
    unified(
        "shared",
        gemma4_hub(),
        layer_types=[S, F, S, F],
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    # This is the text model alone.
    replace(
        case("base", "gemma4_unified_text", GEMMA4 | K_EQ_V, gemma4_hub(), {"layer_types": [S, S, F] * 2}),
        scales=CALM,
    ),
)


def gemma3n_whole(config: Config) -> Config:
    """Return the config of the whole model, which transformers cannot build without timm."""
    return {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "audio_config": {"model_type": "gemma3n_audio"},
        "model_type": "gemma3n",
        "text_config": config,
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
        "vision_config": {"architecture": "mobilenetv5_300m_enc", "model_type": "gemma3n_vision"},
    }


GEMMA3N_CASES = (
    Case(
        "gemma3n_wrapped",
        "gemma3n_text",
        GEMMA3N,
        OldHub(pattern=False, drop_top=("tie_word_embeddings",)),
        renames=(("model.", "model.language_model."),),
        extra_tensors={
            "model.audio_tower.conformer.0.norm.weight": (8,),
            "model.embed_audio.embedding.weight": (4, 8),
            "model.embed_vision.embedding_projection.weight": (64, 8),
            "model.vision_tower.timm_model.conv_stem.bn.weight": (8,),
        },
        scales=ROUTED,
        wrapped=gemma3n_whole,
        old_is_read=False,
    ),
)

# mistral3, exaone4_5, cohere2_vision, aya_vision --------------------------------------------------


def within(model_type: str, name: str, text: Config, vision: Config, old: OldForm | None = None, **top: object) -> Case:
    return Case(f"{model_type}_{name}", model_type, {"text_config": text, "vision_config": vision} | top, old)


def mistral3(name: str, text: Config, old: OldForm | None = None, **top: object) -> Case:
    return within("mistral3", name, text, VISION | {"model_type": "pixtral", "head_dim": 8}, old, **top)


MINISTRAL_TEXT: Config = MINISTRAL3 | {"model_type": "ministral3", "rope_parameters": rope(1e6, YARN16)}
MISTRAL_TEXT: Config = BASE | {"model_type": "mistral", "head_dim": 24, "sliding_window": W}
COHERE2_TEXT: Config = BASE | {
    "model_type": "cohere2",
    "num_hidden_layers": 4,
    "sliding_window": W,
    "logit_scale": 1.0,
}
EXAONE4_TEXT: Config = BASE | {
    "model_type": "exaone4",
    "head_dim": 24,
    "num_hidden_layers": 4,
    "sliding_window": W,
    "rope_parameters": rope(1e6, LLAMA3),
}
EXAONE4_VISION: Config = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "num_key_value_heads": 1,
    "patch_size": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
OTHER_CASES = (
    # This has the form of Ministral 3. Whether embeddings are tied is read from the outer config, which defaults to
    # tied.
    mistral3("ministral3", MINISTRAL_TEXT),
    # This has the form of Mistral Small 3.1: only the checkpoint shows that embeddings are not tied.
    mistral3(
        "mistral_untied",
        MISTRAL_TEXT,
        OldHub(drop_top=("tie_word_embeddings",), drop=("tie_word_embeddings",)),
        tie_word_embeddings=False,
    ),
    replace(mistral3("v5_names", MINISTRAL_TEXT, tie_word_embeddings=False), renames=V5_PREFIXES),
    # The first release has another name for the text model.
    within(
        "exaone4_5",
        "wrapped",
        EXAONE4_TEXT,
        EXAONE4_VISION,
        OldHub(pattern=False, add={"model_type": "exaone4_5_text", "sliding_window_pattern": "LLLG"}),
    ),
    # In transformers 5.23 only the text model scales its logits, and these two do not. So the scale is one here.
    within("cohere2_vision", "wrapped", COHERE2_TEXT, SIGLIP, OldHub(), alignment_intermediate_size=8),
    within("aya_vision", "wrapped", COHERE2_TEXT, SIGLIP, OldHub()),
)

# step3p7, step3p5 ---------------------------------------------------------------------------------

STEP: Config = BASE | {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "sliding_window": W,
    "layer_types": [F, S, S, S, F],
    "num_sliding_attention_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 40,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
    "rope_parameters": {
        F: rope(1e4, LLAMA3, partial_rotary_factor=0.5),
        S: rope(500.0, partial_rotary_factor=1.0),
    },
}
STEP_VISION = VISION | {"mlp_ratio": 1.0}
STEP_MTP: dict[str, tuple[int, ...]] = {
    "model.layers.5.eh_proj.weight": (64, 128),
    "model.layers.5.enorm.weight": (64,),
    "model.layers.5.self_attn.q_proj.weight": (144, 64),
}
LIMITS: Config = {
    "swiglu_limits": [0.0, 0.1, None, 0.0, 0.2],
    "swiglu_limits_shared": [0.05, 0.0, 0.1, 0.0, 0.05],
}
STEP_ALIASES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
}


def step_legacy(text: Config) -> Config:
    """Return the text config of the repositories: lists with all layers, also those of multi-token prediction."""
    lists = ("mlp_layer_types", "per_layer_config", "num_sliding_attention_heads", "rope_parameters", "dtype")
    kept = {key: value for key, value in text.items() if key not in lists and not key.startswith("mtp_")}
    old: Config = {STEP_ALIASES.get(key, key): value for key, value in kept.items()}
    kinds, ropes, ahead = text["layer_types"], text["rope_parameters"], text["num_nextn_predict_layers"]
    sparse = [str(i) for i, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    heads = {"attention_type": S, "num_attention_heads": text["num_sliding_attention_heads"], "head_dim": 24}
    scaling = {k: v for k, v in ropes[F].items() if k not in ("rope_theta", "partial_rotary_factor")}
    return old | {
        "attention_other_setting": heads | {"num_attention_groups": text["num_key_value_heads"]},
        "layer_types": kinds + [S] * ahead,
        "moe_layers_enum": ",".join(sparse),
        "moe_router_activation": "sigmoid",
        "partial_rotary_factors": [ropes[kind]["partial_rotary_factor"] for kind in kinds] + [1.0] * ahead,
        "rope_scaling": scaling,
        "rope_theta": [ropes[kind]["rope_theta"] for kind in kinds] + [500.0] * ahead,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "yarn_only_types": [F],
    }


def step3p7_legacy(config: Config) -> Config:
    """Return the config in the form of Step 3.7."""
    return config | {"text_config": step_legacy(config["text_config"]) | {"model_type": "step3p7_text"}}


def step3p5_legacy(config: Config) -> Config:
    """Return the config in the form of Step 3.5, a text model. transformers 5.23 has no model with logits for it."""
    top = {"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "torch_dtype": "float32"}
    return step_legacy(config["text_config"]) | top


def step(name: str, old: OldForm | None = None, **text: Any) -> Case:
    made = within("step3p7", name, STEP | text, STEP_VISION, old)
    ahead = text.get("num_nextn_predict_layers")
    return replace(made, extra_tensors=STEP_MTP if ahead else {}, old_is_read=old is not step3p5_legacy)


STEP_CASES = (
    step("base", step3p7_legacy, num_nextn_predict_layers=1, moe_router_scaling_factor=3.0),
    step("text", step3p5_legacy, num_nextn_predict_layers=1, moe_router_scaling_factor=3.0, **LIMITS),
    # A bound of zero or null means no bound. A dense layer has the bound of a shared expert.
    step("limits", step3p7_legacy, **LIMITS),
    step(
        "query_scalar_biases",
        query_pre_attn_scalar=6,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
        num_sliding_attention_heads=2,
        num_experts_per_tok=3,
    ),
    # Only sizes are given. Defaults: 64 heads in all layers, 8 key heads of 128, all layers full, the first three
    # dense, 8 of 288 experts, theta 1e4, no bounds, no scale.
    within(
        "step3p7",
        "defaults",
        STEP
        | {
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_sliding_attention_heads": 64,
            "head_dim": 128,
            "layer_types": None,
            "mlp_layer_types": None,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 4,
            "rope_parameters": None,
        },
        STEP_VISION,
        Keys(only=(*SIZES[1:], "sliding_window", "moe_intermediate_size", "share_expert_dim")),
    ),
)

CASES = (*GEMMA4_CASES, *GEMMA3N_CASES, *OTHER_CASES, *STEP_CASES)
