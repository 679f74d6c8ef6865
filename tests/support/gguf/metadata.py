"""The metadata that llama.cpp's converter writes for each family, from config.json as hub repositories have it."""

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, ExpertGatingFuncType, GGUFWriter, RopeScalingType

from tests.support.gguf.full import FULL_ARCHES, FULL_EXTRA
from tests.support.gguf.routed import NAMED_HERE, ROUTED_EXTRA

Config = Mapping[str, Any]
_ARCHES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "phi3": MODEL_ARCH.PHI3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma3n_text": MODEL_ARCH.GEMMA3N,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "cohere2": MODEL_ARCH.COHERE2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "llama4_text": MODEL_ARCH.LLAMA4,
    "mimo_v2_flash": MODEL_ARCH.MIMO2,
    "phimoe": MODEL_ARCH.PHIMOE,
    "dots1": MODEL_ARCH.DOTS1,
    "exaone_moe": MODEL_ARCH.EXAONE_MOE,
    "afmoe": MODEL_ARCH.AFMOE,
    "step3p5": MODEL_ARCH.STEP35,
    **FULL_ARCHES,
}
# By model_type: llama.cpp's name, and the architecture of the gguf package that knows the names of its tensors.
ARCHES = {**{family: (MODEL_ARCH_NAMES[arch], arch) for family, arch in _ARCHES.items()}, **NAMED_HERE}


def write_metadata(w: GGUFWriter, c: Config) -> None:
    """Write what all families have, then what the family adds or replaces."""
    drafts = c.get("num_nextn_predict_layers") or 0
    w.add_block_count(c["num_hidden_layers"] + drafts)
    if drafts:
        w.add_nextn_predict_layers(drafts)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c.get("intermediate_size_mlp") or c["intermediate_size"])
    if c["model_type"] not in ("laguna", "step3p5"):
        w.add_head_count(c["num_attention_heads"])
    if c["model_type"] not in ("mimo_v2_flash", "gemma4_text", "step3p5"):
        w.add_head_count_kv(c["num_key_value_heads"])
    _rope(w, c)
    if (eps := c.get("rms_norm_eps", c.get("layernorm_epsilon"))) is not None:
        w.add_layer_norm_rms_eps(eps)
    if (eps := c.get("layer_norm_eps", c.get("norm_epsilon"))) is not None:
        w.add_layer_norm_eps(eps)
    _experts(w, c)
    if c.get("head_dim") and c["model_type"] not in ("gemma4_text", "phi3", "phimoe"):
        w.add_key_length(c["head_dim"])
        if c["model_type"] != "mimo_v2_flash":
            w.add_value_length(c["head_dim"])
    w.add_file_type(0)
    w.add_eos_token_id(c["eos_token_id"])
    extra = EXTRA.get(c["model_type"])
    if extra is not None:
        extra(w, c)


def _experts(w: GGUFWriter, c: Config) -> None:
    count = c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts")
    if count:
        w.add_expert_count(count)
        w.add_expert_used_count(c.get("num_experts_per_tok") or c["top_k_experts"])
    if c.get("n_group") is not None:
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])
    if "sigmoid" in (c.get("scoring_func"), c.get("score_func"), c.get("moe_router_activation")):
        w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _rope(w: GGUFWriter, c: Config) -> None:
    nested: Mapping[str, Any] = c.get("rope_parameters") or {}
    full: Mapping[str, Any] = nested.get("full_attention", nested)
    scaling: Mapping[str, Any] = c.get("rope_scaling") or full
    theta = c.get("rope_theta", full.get("rope_theta"))
    w.add_rope_freq_base(theta[0] if isinstance(theta, list) else theta)
    local = c.get(
        "rope_local_base_freq", c.get("swa_rope_theta", nested.get("sliding_attention", {}).get("rope_theta"))
    )
    if local is not None:
        w.add_rope_freq_base_swa(local)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        w.add_rope_scaling_type(RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        w.add_rope_scaling_type(RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if (factor := scaling.get("attention_factor")) is not None:
            w.add_rope_scaling_yarn_attn_factor(factor)
        if (fast := scaling.get("beta_fast")) is not None:
            w.add_rope_scaling_yarn_beta_fast(fast)
            w.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


def _llama(w: GGUFWriter, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def _ministral3(w: GGUFWriter, c: Config) -> None:
    _llama(w, c)
    w.add_rope_scaling_yarn_log_mul(c["rope_parameters"]["mscale_all_dim"])
    w.add_attn_temperature_scale(c["rope_parameters"]["llama_4_scaling_beta"])


def _qwen_moe(w: GGUFWriter, c: Config) -> None:
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in c:
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])


def _phi3(w: GGUFWriter, c: Config) -> None:
    original = c["original_max_position_embeddings"]
    w.add_rope_scaling_orig_ctx_len(original)
    share = c.get("partial_rotary_factor", 1.0)
    w.add_rope_dimension_count(int(share * c["hidden_size"]) // c["num_attention_heads"])
    w.add_sliding_window(c.get("sliding_window") or 0)
    if (c.get("rope_scaling") or {}).get("long_factor"):
        scale = c["max_position_embeddings"] / original
        w.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))) if scale > 1 else 1.0)


def _gemma2(w: GGUFWriter, c: Config) -> None:
    w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    w.add_final_logit_softcapping(c["final_logit_softcapping"])
    w.add_sliding_window(c["sliding_window"])


def _gemma3(w: GGUFWriter, c: Config) -> None:
    if c.get("final_logit_softcapping"):
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    if c.get("sliding_window_pattern") != 1:
        w.add_sliding_window(c["sliding_window"])


def _gemma3n(w: GGUFWriter, c: Config) -> None:
    _gemma3(w, c)
    w.add_altup_active_idx(c["altup_active_idx"])
    w.add_altup_num_inputs(c["altup_num_inputs"])
    w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    w.add_shared_kv_layers(c["num_kv_shared_layers"])
    cuts = [NormalDist().inv_cdf(share) if share else -np.inf for share in c["activation_sparsity_pattern"]]
    w.add_activation_sparsity_scale([float(np.float32(cut)) for cut in cuts])
    _pattern(w, c)


def _pattern(w: GGUFWriter, c: Config) -> None:
    w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])


def _gemma4(w: GGUFWriter, c: Config) -> None:
    _gemma3(w, c)
    shared, layers, width = c["num_kv_shared_layers"], c["num_hidden_layers"], c["intermediate_size"]
    w.add_shared_kv_layers(shared)
    w.add_embedding_length_per_layer_input(c.get("hidden_size_per_layer_input") or 0)
    _pattern(w, c)
    for add, size in ((w.add_key_length, "global_head_dim"), (w.add_value_length, "global_head_dim")):
        add(c[size])
    w.add_key_length_swa(c["head_dim"])
    w.add_value_length_swa(c["head_dim"])
    if c.get("moe_intermediate_size") is not None:
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if c.get("use_double_wide_mlp"):
        del w.kv_data[0][f"{w.arch}.feed_forward_length"]
        w.add_feed_forward_length([width * (1 if i < layers - shared else 2) for i in range(layers)])
    heads, own = c["num_key_value_heads"], c.get("num_global_key_value_heads")
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    w.add_head_count_kv(heads if own is None else [heads if one else own for one in slides])
    w.add_rope_dimension_count(c["global_head_dim"])
    w.add_rope_dimension_count_swa(c["head_dim"])


def _gpt_oss(w: GGUFWriter, c: Config) -> None:
    w.add_sliding_window(c["sliding_window"])
    w.add_expert_feed_forward_length(c["intermediate_size"])


def _olmo3(w: GGUFWriter, c: Config) -> None:
    w.add_sliding_window(c["sliding_window"])
    _pattern(w, c)


def _cohere2(w: GGUFWriter, c: Config) -> None:
    w.add_logit_scale(c["logit_scale"])
    w.add_sliding_window(c["sliding_window"])
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(int(c["rotary_pct"] * (c["hidden_size"] // c["num_attention_heads"])))
    w.add_rope_scaling_type(RopeScalingType.NONE)


def _exaone4(w: GGUFWriter, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    if c.get("sliding_window") is not None:
        w.add_sliding_window(c["sliding_window"])
        if "layer_types" in c:
            _pattern(w, c)


def _llama4(w: GGUFWriter, c: Config) -> None:
    _llama(w, c)
    w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    w.add_expert_feed_forward_length(c["intermediate_size"])


def _mimo2(w: GGUFWriter, c: Config) -> None:
    pattern = c["hybrid_layer_pattern"]
    w.add_head_count_kv([c["swa_num_key_value_heads"] if one else c["num_key_value_heads"] for one in pattern])
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(pattern)
    w.add_value_length(c["v_head_dim"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_rope_dimension_count(int(c["head_dim"] * c["partial_rotary_factor"]))
    if c.get("attention_value_scale") is not None:
        w.add_float32(f"{w.arch}.attention.value_scale", c["attention_value_scale"])


EXTRA: dict[str, Callable[[GGUFWriter, Config], None]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "ministral3": _ministral3,
    "smollm3": _llama,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "gpt_oss": _gpt_oss,
    "olmo3": _olmo3,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "llama4_text": _llama4,
    "mimo_v2_flash": _mimo2,
    "phimoe": _phi3,
    **ROUTED_EXTRA,
    **FULL_EXTRA,
}
