"""The fixtures that every test run compares, and the features of jswa/architecture/ by which they were chosen.

CHOSEN shows every family and every feature at least once, and 95 % of the pairs of a family and a feature that any
fixture shows. Among fixtures that show as much, it prefers the ones whose shapes take least time to compile. The other
fixtures run nightly. tests/unit/parity/test_selection.py names what a new fixture shows and CHOSEN does not.
"""

import dataclasses
from collections.abc import Iterator

from jswa.architecture import ModelConfig

CHOSEN = {
    "afmoe_period",
    "apertus_base",
    "apertus_relu2_bias_tied",
    "arcee_biases_tied",
    "beam_layer_types",
    "beam_no_ropes",
    "cohere2_bias_untied",
    "cohere2_moe_base",
    "cohere2_moe_layer_types",
    "cohere2_moe_prefix_pattern",
    "cohere2_vision_wrapped",
    "cohere_compass_wrapped",
    "cwm_scaling_null_mlp_bias",
    "dots1_base",
    "dots1_layer_types_bias",
    "ernie4_5_bias_untied",
    "exaone4_layer_types",
    "exaone4_unused_window",
    "exaone_moe_groups",
    "flint_layer_types",
    "gemma2_layer_types",
    "gemma3_text_all_sliding",
    "gemma3n_text_active_stream",
    "gemma3n_text_two_streams",
    "gemma3n_wrapped",
    "gemma4_text_moe_wide_shared",
    "gemma4_unified_shared",
    "gemma4_untied_moe",
    "gemma_gelu",
    "gemma_silu_bias_untied",
    "glm4_base",
    "glm4_partial_tied",
    "gpt_oss_rope_scaling_null",
    "granite_base",
    "granite_biases_untied",
    "granite_swa_base",
    "granite_swa_multipliers_thetas",
    "granitemoe_base",
    "granitemoe_swa_base",
    "granitemoe_swa_shared_thetas",
    "grug_moe_base",
    "hunyuan_v1_dense_base",
    "hunyuan_v1_dense_plain_rope_bias",
    "iquest_q1_all_keys",
    "kolibri1_layer_types_norm",
    "laguna_gating_false",
    "laguna_per_element",
    "llama4_text_every_second",
    "llama_rope_dynamic_short",
    "mellum_mtp_no_norm",
    "mellum_ropes",
    "mimo_v2_flash_bias_mtp",
    "mimo_v2_flash_value_scale_null",
    "ministral3_plain_rope_tied",
    "ministral3_window",
    "mistral_layer_types",
    "mistral_mqa",
    "mixtral_window",
    "muse_glimmer_layer_types",
    "nemotron_base",
    "nemotron_biases_tied",
    "olmo2_base",
    "olmo3_theta",
    "olmoe_gqa_norm_bias_tied",
    "phi3_long_su",
    "phi4_multimodal_adapters",
    "phimoe_base",
    "phimoe_short",
    "plamo3_yarn",
    "qwen2_base",
    "qwen2_moe_dense_layers",
    "qwen2_moe_window_before_layer_2",
    "qwen3_moe_window",
    "qwen3_window_nowhere",
    "seed_oss_base",
    "seed_oss_other_biases_tied",
    "rnj1_base",
    "smollm3_base",
    "smollm3_window",
    "spark2_5_base",
    "starcoder2_base",
    "starcoder2_no_bias_untied",
    "step3p7_text",
    "vaultgemma_layer_types_bias",
    "vaultgemma_softcaps",
}
# Sizes that every model has: none of them is a feature.
SIZES = {
    *("family", "vocab_size", "d_model", "max_position", "hidden", "inv_freq", "original", "dim", "num_experts"),
    *("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "scale", "size", "eps"),
}


def features(part: object) -> Iterator[str]:
    """Yield the features of a model or of a part: "Class.field=choice", or "Class.field" for an unusual number."""
    if isinstance(part, tuple):
        for inner in part:
            yield from features(inner)
    if not dataclasses.is_dataclass(part):
        return
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{type(part).__name__}.{field.name}"
        yield from features(value)
        if field.name in SIZES:
            continue
        if value is None or isinstance(value, bool | str):
            yield f"{name}={value}"
        elif dataclasses.is_dataclass(value):
            yield f"{name}={type(value).__name__}"
        elif value != field.default:
            yield name


def shown(model: ModelConfig) -> set[tuple[str, str]]:
    """Return the pairs of the model's family and each of its features."""
    return {(model.family, feature) for feature in features(model)}
