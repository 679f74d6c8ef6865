"""Parity cases of models that come with towers: Cohere Compass (North Micro Vision) and Phi-4 multimodal.

What and why: as in cases.py. Of the towers a tensor or two is kept, which a loader must skip.
"""

from dataclasses import replace
from typing import Any

from tests.parity.case import BASE, LLAMA3, SIZES, Case, Config, F, Keys, OldForm, OldHub, S, W, case, rope
from tests.parity.cases.dense import LONGROPE, longrope, phi3_hub

# cohere_compass -----------------------------------------------------------------------------------

MROPE: Config = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
COMPASS: Config = BASE | {
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "sliding_window": W,
    "layer_types": [S, S, S, F, S],
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "rope_parameters": {S: rope(5e4, **MROPE), F: None},
}
COMPASS_VISION: Config = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}


# The last norm makes up for the scale of the logits, so that they differ as much as elsewhere.
LOUD = ((r"model\.norm\.", 4.0),)


def compass(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    made = case(name, "cohere_compass_text", COMPASS, old, kwargs)
    return replace(made, scales=LOUD if made.kwargs["logit_scale"] else ())


def dangling(config: Config) -> Config:
    """Return the config as the repository has it: a base and a type beside those of the layer types, and no meaning."""
    text: Config = config.get("text_config", config)
    ropes = text["rope_parameters"] | {"rope_theta": 1e4, "rope_type": "default"}
    changed = {key: value for key, value in text.items() if key != "dtype"} | {"rope_parameters": ropes}
    outer = config | {"text_config": changed} if text is not config else changed
    return {key: value for key, value in outer.items() if key != "dtype"} | {"torch_dtype": "float32"}


COMPASS_CASES = (
    compass("base", dangling),
    # Every layer type may have a rope of its own; without a scale, logits are as they are.
    compass(
        "ropes_bias_untied",
        layer_types=[F, S, F, S, S],
        rope_parameters={F: rope(300.0), S: rope(1e4, LLAMA3)},
        attention_bias=True,
        tie_word_embeddings=False,
        layer_norm_eps=0.1,
        hidden_act="gelu",
        logit_scale=None,
    ),
    # Only sizes are given. Defaults: 64 heads and key heads, all layers full, logits not scaled, tied.
    compass(
        "defaults",
        Keys(only=(*SIZES, "rope_parameters")),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=None,
        layer_types=None,
        logit_scale=None,
        rope_parameters={F: rope(1e4)},
    ),
    Case(
        "cohere_compass_wrapped",
        "cohere_compass",
        {"text_config": COMPASS, "vision_config": COMPASS_VISION, "tie_word_embeddings": True},
        dangling,
        scales=LOUD,
    ),
)

# phi4_multimodal ----------------------------------------------------------------------------------

PHI4_VISION: Config = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": 8,
    "crop_size": 8,
    "patch_size": 2,
}
PHI4_AUDIO: Config = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_blocks": 1,
    "num_attention_heads": 1,
    "ext_pw_out_channel": 8,
    "depthwise_separable_out_channel": 8,
    "nemo_conv_channels": 8,
    "input_size": 16,
    "bias_max_distance": 4,
}
PHI4: Config = BASE | {
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "sliding_window": W,
    "vision_config": PHI4_VISION,
    "audio_config": PHI4_AUDIO,
}
SIX = {name: LONGROPE[name][:6] for name in ("short_factor", "long_factor")}  # pairs that rotate
PLACES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
WIDTHS = {"self_attn.qkv_proj": (64, 128), "self_attn.o_proj": (64, 64), "mlp.gate_up_proj": (64, 192)}
LAYERS = [f"model.layers.{index}.{place}" for index in range(3) for place in PLACES]


def phi4(name: str, old: OldForm | None = None, **kwargs: object) -> Case:
    return case(name, "phi4_multimodal", PHI4, old, kwargs)


def phi4mm(config: Config) -> Config:
    """Return the config of the repository's main branch, whose modelling file transformers does not have."""
    towers = ("audio_config", "vision_config", "rope_parameters", "dtype")
    lora = {"dp": 0.01, "layer": "layers.*", "lora_alpha": 512, "r": 2}
    ropes: dict[str, Any] = config["rope_parameters"]
    return {key: value for key, value in config.items() if key not in towers} | {
        "architectures": ["Phi4MMForCausalLM"],
        "embd_layer": {"embedding_cls": "image_audio"},
        "full_attn_mod": 1,
        "model_type": "phi4mm",
        "partial_rotary_factor": ropes["partial_rotary_factor"],
        "rope_scaling": {"type": "longrope", **SIX},
        "rope_theta": ropes["rope_theta"],
        "speech_lora": lora,
        "torch_dtype": "float32",
        "vision_lora": lora,
    }


def adapters() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of two adapters, which a text does not use."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in LAYERS:
        inputs, outputs = WIDTHS.get(layer.split(".", 3)[3], (96, 64))
        for kind in ("speech", "vision"):
            shapes[f"{layer}.lora_A.{kind}.weight"] = (2, inputs)
            shapes[f"{layer}.lora_B.{kind}.weight"] = (outputs, 2)
    return shapes


PHI4_LONG = longrope(32, partial_rotary_factor=0.75, **SIX)
PHI4_CASES = (
    phi4("base", phi3_hub(), rope_parameters=rope(500.0, partial_rotary_factor=0.75)),
    phi4("long_tied", phi3_hub(), tie_word_embeddings=True, sliding_window=None, **PHI4_LONG),
    # Only sizes are given. Defaults: 32 heads, 8 key heads, no window, theta 1e4, eps 1e-5, untied.
    phi4(
        "defaults",
        OldHub(only=(*SIZES, "pad_token_id", "vision_config", "audio_config")),
        num_attention_heads=32,
        num_key_value_heads=8,
        sliding_window=None,
    ),
    # The main branch of the repository: adapters of images and speech beside the matrices, which texts do not use.
    replace(
        phi4("adapters", **PHI4_LONG),
        renames=tuple((f"{layer}.", f"{layer}.base_layer.") for layer in LAYERS),
        extra_tensors=adapters(),
        wrapped=phi4mm,
    ),
)

CASES = (*COMPASS_CASES, *PHI4_CASES)
