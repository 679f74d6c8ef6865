"""Configs of the Gemmas. Where llama.cpp has a number in its program, not in the file, a function has it too."""

import math
from statistics import NormalDist

import numpy as np

from jswa.errors import UnsupportedModel
from jswa.gguf.families.common import Config, plain, types, usual
from jswa.gguf.families.keys import Model
from jswa.gguf.families.rope import FACTORS, rope
from jswa.gguf.file.rows import vector


def gemma(m: Model) -> Config:
    """Return the config of gemma. llama.cpp has its activation, and its base of rotations, in its program."""
    return {
        **plain(m),
        "model_type": "gemma",
        "attention_bias": m.has("attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def gemma2(m: Model) -> Config:
    """Return the config of gemma2. llama.cpp has the scale of queries, softcaps and window in its program."""
    found = plain(m)
    widest = m.layers == 46  # 27B
    return found | {
        "model_type": "gemma2",
        "attention_bias": m.has("attn_q.bias"),
        "query_pre_attn_scalar": _scalar(found, widest=widest),
        "attn_logit_softcapping": m.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.number("final_logit_softcapping", 30.0),
        "sliding_window": m.integer("attention.sliding_window", 4096),
        "layer_types": types(m.sliding(2)),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _scalar(found: Config, *, widest: bool) -> int:
    """Return the square of the number that queries are divided by; the largest model has its own."""
    return int(found["hidden_size"] // found["num_attention_heads"] if widest else found["head_dim"])


def gemma3(m: Model) -> Config:
    """Return the config of gemma3. llama.cpp has the scale of queries and every sixth layer in its program."""
    found = plain(m, local_base=True)
    window = m.integer("attention.sliding_window", 0, low=0)
    slides = m.sliding(6) if window else [False] * m.layers
    return found | {
        "model_type": "gemma3_text",
        "attention_bias": m.has("attn_q.bias"),
        "query_pre_attn_scalar": _scalar(found, widest=m.layers == 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": m.optional("final_logit_softcapping"),
        "sliding_window": window or 4096,
        "layer_types": types(slides),
        "rope_local_base_freq": m.number("rope.freq_base_swa", 10_000.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def gemma3n(m: Model) -> Config:
    """Return the config of gemma3n. llama.cpp has the softcap in its program.

    Raises CheckpointError if the cuts of activations are no numbers.
    """
    found = usual(m)
    cuts = m.each("activation_sparsity_scale", -math.inf)
    if not all(isinstance(cut, float) and not math.isnan(cut) for cut in cuts):
        raise m.wrong("activation_sparsity_scale", "must be numbers")
    streams = m.integer("altup.num_inputs")
    return {
        **found,
        **rope(m, found["head_dim"], local_base=True),
        "model_type": "gemma3n_text",
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.widths("feed_forward_length"),
        "final_logit_softcapping": m.number("final_logit_softcapping", 30.0),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(m.sliding(5)),
        "rope_local_base_freq": m.number("rope.freq_base_swa", 10_000.0),
        "num_kv_shared_layers": m.integer("attention.shared_kv_layers", max(m.layers - 20, 0), low=0),
        "hidden_size_per_layer_input": m.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": m.shape("per_layer_token_embd.weight", 2)[0],
        "altup_num_inputs": streams,
        "altup_active_idx": m.integer("altup.active_idx", 0, low=0, high=streams - 1),
        "altup_correct_scale": m.has("altup_correct_scale.weight"),
        "laurel_rank": m.shape("laurel_l.weight", 2)[0],
        # The file has the quantile of the share: 0.95 is 1.6448536.
        "activation_sparsity_pattern": [round(NormalDist().cdf(cut), 6) if cut > -8 else 0.0 for cut in cuts],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def gemma4(m: Model) -> Config:
    """Return the config of gemma4: full layers have their own heads, and `rope_freqs` tells which numbers rotate.

    Raises CheckpointError if feed-forwards or heads differ in another way.
    """
    found = usual(m, heads=False)
    slides = m.sliding(6)
    full, local = m.integer("attention.key_length"), m.integer("attention.key_length_swa")
    for key, wanted in (("value_length", full), ("value_length_swa", local)):
        m.requires(f"attention.{key}", wanted)
    m.requires("rope.dimension_count", full)
    m.requires("rope.dimension_count_swa", local)
    shared = m.integer("attention.shared_kv_layers", 0, low=0)
    widths, width = m.widths("feed_forward_length"), m.widths("feed_forward_length")[0]
    doubled = [width * 2 if index >= m.layers - shared else width for index in range(m.layers)]
    if widths not in ([width] * m.layers, doubled):
        raise m.wrong("feed_forward_length", "must be one width, or twice as much in layers that share KV")
    tied = any(k and not v for k, v in zip(m.which("attn_k.weight"), m.which("attn_v.weight"), strict=True))
    count = m.integer("expert_count", 0, low=0)
    experts = {"enable_moe_block": False} if not count else {
        "enable_moe_block": True, "num_experts": count, "top_k_experts": m.integer("expert_used_count"),
        "moe_intermediate_size": m.same("expert_feed_forward_length"),
    }  # fmt: skip
    own = m.integer("embedding_length_per_layer_input", 0, low=0)
    per_layer = {"vocab_size_per_layer_input": m.shape("per_layer_token_embd.weight", 2)[0]} if own else {}
    return {
        **found, **experts, **per_layer, **_gemma4_heads(m, slides),
        "num_attention_heads": m.same("attention.head_count"),
        "model_type": "gemma4_text",
        "head_dim": local,
        "global_head_dim": full,
        "attention_k_eq_v": tied,
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": width,
        "use_double_wide_mlp": widths != [width] * m.layers,
        "final_logit_softcapping": m.optional("final_logit_softcapping"),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": types(slides),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": own,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": m.number("rope.freq_base", 1e6),
                "partial_rotary_factor": _rotated(m, full) / (full // 2),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", 1e4)},
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma4_heads(m: Model, slides: list[bool]) -> Config:
    """Return the KV heads of sliding and of full layers. Raises UnsupportedModel if layers of a type differ."""
    counts = m.widths("attention.head_count_kv")
    kinds = {kind: {count for count, one in zip(counts, slides, strict=True) if one is kind} for kind in (True, False)}
    if any(len(found) > 1 for found in kinds.values()):
        raise m.wrong("attention.head_count_kv", "must be the same for all layers of a type")
    local, full = kinds[True] or kinds[False], kinds[False] or kinds[True]
    return {"num_key_value_heads": local.pop(), "num_global_key_value_heads": set(full or counts).pop()}


def _rotated(m: Model, head_dim: int) -> int:
    """Return how many pairs of a full layer's heads rotate: the factor of the others is 1e30."""
    if FACTORS not in m.tensors:
        return head_dim // 2
    factors = vector(m.tensors[FACTORS], head_dim // 2)
    rotated = int(np.count_nonzero(factors == 1))
    if not ((factors[:rotated] == 1).all() and (factors[rotated:] >= 1e29).all()):
        raise UnsupportedModel(f"{m.tensors[FACTORS].where}: must be factors of 1, then of 1e30")
    return rotated
