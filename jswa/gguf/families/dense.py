"""Configs of dense models: the keys of config.json that their metadata and tensors stand for.

Where llama.cpp has a number in its program, not in the file, the function has it too, and says so.
"""

import math

from jswa.errors import UnsupportedModel
from jswa.gguf.families.common import Config, biases, plain, types, usual
from jswa.gguf.families.keys import Model
from jswa.gguf.families.rope import LONG, SHORT, rope, share
from jswa.gguf.file.rows import vector


def llama(m: Model) -> Config:
    """Return the config of llama, or of mixtral if the file has experts; llama.cpp keeps no window of Mistral."""
    found = plain(m)
    count = m.integer("expert_count", 0, low=0)
    if not count:
        m.requires("expert_used_count", 0)
        return {**found, **biases(m), "model_type": "llama"}
    found |= {"num_local_experts": count, "num_experts_per_tok": m.integer("expert_used_count")}
    return {**found, "model_type": "mixtral", "sliding_window": None}


def mistral3(m: Model) -> Config:
    """Return the config of mistral, or of ministral3 if queries are scaled by position."""
    found: Config = {**plain(m), "sliding_window": None}
    beta, log_mul = m.optional("attention.temperature_scale"), m.optional("rope.scaling.yarn_log_multiplier")
    scaling = found.pop("rope_scaling")
    theta = found.pop("rope_theta")
    flat = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    if log_mul is not None:
        flat |= {"mscale": 1.0, "mscale_all_dim": log_mul}
    if beta is None:
        return {**found, "rope_parameters": flat, "model_type": "mistral"}
    return {**found, "rope_parameters": {**flat, "llama_4_scaling_beta": beta}, "model_type": "ministral3"}


def qwen2(m: Model) -> Config:
    """Return the config of qwen2; llama.cpp keeps no window of Qwen."""
    return {**plain(m), "model_type": "qwen2", "use_sliding_window": False}


def qwen3(m: Model) -> Config:
    """Return the config of qwen3."""
    return {**plain(m), "model_type": "qwen3", "use_sliding_window": False, "attention_bias": m.has("attn_q.bias")}


def phi3(m: Model) -> Config:
    """Return the config of phi3: a part of each head is rotated, by LongRoPE if the file has its factors.

    Raises CheckpointError if so much of a head cannot be rotated, or a factor is there without its factors.
    """
    found = usual(m)
    head_dim, rotated = found["head_dim"], m.integer("rope.dimension_count", found["head_dim"])
    if rotated % 2 or rotated > head_dim:
        raise m.wrong("rope.dimension_count", f"must be even and at most {head_dim}, the size of a head")
    longest = found["max_position_embeddings"]
    original = m.integer("rope.scaling.original_context_length", longest, low=2)
    m.text("rope.scaling.type", "longrope")
    attention = m.optional("rope.scaling.attn_factor")
    scaling: Config | None = None
    if LONG in m.tensors or SHORT in m.tensors:
        m.shape(LONG, 1), m.shape(SHORT, 1)  # raises if one is missing
        factors = {
            f"{name}_factor": [float(one) for one in vector(m.tensors[key], rotated // 2)]
            for name, key in (("short", SHORT), ("long", LONG))
        }
        scaling = {"rope_type": "longrope", **factors}
        # The factor that transformers computes itself is left to it: the file has it in float32 only.
        if attention is not None and not math.isclose(attention, _longrope_factor(longest, original), rel_tol=1e-6):
            scaling["attention_factor"] = attention
    elif m.optional("rope.scaling.factor") not in (None, 1.0):
        raise m.wrong("rope.scaling.factor", f"must be 1 without {LONG}")
    return found | {
        "model_type": "phi3",
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
        "sliding_window": m.integer("attention.sliding_window", 0, low=0) or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": share(rotated, head_dim),
        "rope_theta": m.number("rope.freq_base", 10_000.0),
        "rope_scaling": scaling,
    }


def _longrope_factor(longest: int, original: int) -> float:
    """Return LongRoPE's own factor of cos and sin (Ding et al. 2024)."""
    return math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original else 1.0


def phimoe(m: Model) -> Config:
    """Return the config of phimoe: phi3's with experts, biases and whole heads rotated.

    A file keeps one factor of cos and sin, that of Phi-3: those of phimoe's own config are lost.
    """
    m.requires("rope.dimension_count", usual(m)["head_dim"])
    found = phi3(m)
    del found["partial_rotary_factor"]
    if found["rope_scaling"] is not None:
        usual_one = _longrope_factor(found["max_position_embeddings"], found["original_max_position_embeddings"])
        factor = found["rope_scaling"].pop("attention_factor", usual_one)
        found["rope_scaling"] |= {"short_mscale": factor, "long_mscale": factor}
    return found | {
        "model_type": "phimoe",
        "attention_bias": m.has("attn_q.bias"),
        "lm_head_bias": "output.bias" in m.tensors,
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
    }


def muse_glimmer(m: Model) -> Config:
    """Return the config of muse_glimmer_text. The converter makes norms of q and k of the factor of scores.

    Raises UnsupportedModel if they are none of that kind.
    """
    found = plain(m)
    slides = m.sliding(4)
    of_q, of_k = _numbers(m, "attn_q_norm.weight"), _numbers(m, "attn_k_norm.weight")
    if len(of_q) != 1 or of_k != {1.0}:
        raise UnsupportedModel(f"{m.where}: attn_q_norm and attn_k_norm: must have one number, and ones")
    return found | {
        "model_type": "muse_glimmer_text",
        "attention_bias": m.has("attn_q.bias"),
        "qk_scale_factor": of_q.pop(),
        "output_multiplier": m.number("logit_scale"),
        "final_logit_softcapping": m.optional("final_logit_softcapping"),
        "post_norm_eps": 1e-8,
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(slides),
        "layer_rope_theta": [found["rope_theta"] if one else 0 for one in slides],
    }


def _numbers(m: Model, name: str) -> set[float]:
    """Return the numbers that a vector of all layers has. Raises CheckpointError for a layer without it."""
    (size,) = m.shape(name, 1)
    found: set[float] = set()
    for index in range(m.layers):
        found |= set(map(float, map(str, vector(m.tensor(f"blk.{index}.{name}"), size))))
    return found


def starcoder2(m: Model) -> Config:
    """Return the config of starcoder2; llama.cpp keeps no window of it."""
    found = usual(m)
    return {
        **found,
        **rope(m, found["head_dim"]),
        "model_type": "starcoder2",
        "intermediate_size": m.same("feed_forward_length"),
        "norm_epsilon": m.number("attention.layer_norm_epsilon"),
        "use_bias": m.has("attn_q.bias"),
        "sliding_window": None,
    }


def smollm3(m: Model) -> Config:
    """Return the config of smollm3. llama.cpp has it in its program that every fourth layer is not rotated."""
    return {**plain(m), **biases(m), "model_type": "smollm3", "use_sliding_window": False, "sliding_window": None}


def olmo2(m: Model) -> Config:
    """Return the config of olmo2, or of olmo3 if layers slide."""
    found = {**plain(m), "attention_bias": m.has("attn_q.bias")}
    window = m.integer("attention.sliding_window", 0, low=0)
    if not window:
        return {**found, "model_type": "olmo2"}
    return {**found, "model_type": "olmo3", "sliding_window": window, "layer_types": types(m.sliding(4))}


def cohere2(m: Model) -> Config:
    """Return the config of cohere2."""
    found = usual(m)
    rotary = rope(m, found["head_dim"])
    return {
        **found,
        **rotary,
        "model_type": "cohere2",
        "intermediate_size": m.same("feed_forward_length"),
        "layer_norm_eps": m.number("attention.layer_norm_epsilon"),
        "logit_scale": m.number("logit_scale"),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(m.sliding(4)),
        "attention_bias": m.has("attn_q.bias"),
    }


def exaone4(m: Model) -> Config:
    """Return the config of exaone4; a model without a window has only full layers."""
    found = plain(m)
    window = m.integer("attention.sliding_window", 4096 if m.layers == 64 else 0, low=0)
    if not window:
        return {**found, "model_type": "exaone4", "sliding_window": None, "layer_types": types([False] * m.layers)}
    return {**found, "model_type": "exaone4", "sliding_window": window, "layer_types": types(m.sliding(4))}
