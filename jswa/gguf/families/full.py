"""Configs of models whose layers are all full, and whose block is nearly llama's; dense.py has llama itself.

Where llama.cpp has a number in its program, not in the file, a function has it too.
"""

import math

import numpy as np

from jswa.errors import UnsupportedModel
from jswa.gguf.families.common import Config, biases, plain, usual
from jswa.gguf.families.keys import Model
from jswa.gguf.families.rope import rope_of, share

_ALPHAS = (1000.0, 50.0)  # of released Hunyuans, and the converter's default
_HUNYUAN_BASE = 10_000.0
# Sizes of state-space layers, which the converter writes of a Granite 4 that has none.
_UNUSED = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")


def granite(m: Model) -> Config:
    """Return the config of granite; a Granite 4 without state-space layers is one, too.

    Raises UnsupportedModel if q and k are not rotated.
    """
    for key in _UNUSED:
        m.integer(f"ssm.{key}", 0, low=0)
    for key in ("expert_count", "expert_used_count"):
        m.requires(key, 0)
    found = _scaled(m)
    m.requires("expert_shared_feed_forward_length", found["intermediate_size"])
    return {**found, "model_type": "granite", "mlp_bias": m.has("ffn_down.bias")}


def granitemoe(m: Model) -> Config:
    """Return the config of granitemoe. Raises UnsupportedModel if q and k are not rotated."""
    return {
        **_scaled(m),
        "model_type": "granitemoe",
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
    }


def _scaled(m: Model) -> Config:
    """Return the keys of both Granites; llama.cpp has the defaults of factors that the file lacks in its program."""
    m.requires("rope.scaling.finetuned", True)  # llama.cpp asks this key whether Granite rotates
    found = plain(m)
    return found | {
        "attention_bias": m.has("attn_q.bias"),
        "attention_multiplier": m.number("attention.scale", 1 / math.sqrt(found["head_dim"])),
        "embedding_multiplier": m.number("embedding_scale", 1.0),
        "residual_multiplier": m.number("residual_scale", 1.0),
        "logits_scaling": m.number("logit_scale"),
    }


def glm4(m: Model) -> Config:
    """Return the config of glm4: a part of each head is rotated."""
    found = usual(m)
    rotated = m.integer("rope.dimension_count", found["head_dim"], high=found["head_dim"])
    return {
        **found,
        **rope_of(m, rotated),
        "model_type": "glm4",
        "partial_rotary_factor": share(rotated, found["head_dim"]),
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
        "attention_bias": m.has("attn_q.bias"),
    }


def seed_oss(m: Model) -> Config:
    """Return the config of seed_oss."""
    return {
        **plain(m),
        **biases(m),
        "model_type": "seed_oss",
        "attention_out_bias": m.has("attn_output.bias"),
    }


def ernie4_5(m: Model) -> Config:
    """Return the config of ernie4_5."""
    return {**plain(m), "model_type": "ernie4_5", "use_bias": m.has("attn_q.bias")}


def olmoe(m: Model) -> Config:
    """Return the config of olmoe. llama.cpp has it in its program that weights of experts are not normalized."""
    m.requires("expert_weights_scale", 1.0)
    return {
        **plain(m),
        "model_type": "olmoe",
        "attention_bias": m.has("attn_q.bias"),
        "num_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
    }


def arcee(m: Model) -> Config:
    """Return the config of arcee. llama.cpp has relu² in its program."""
    return {**plain(m), **biases(m), "model_type": "arcee", "hidden_act": "relu2"}


def nemotron(m: Model) -> Config:
    """Return the config of nemotron. llama.cpp has relu² in its program."""
    found = usual(m)
    m.optional("attention.layer_norm_rms_epsilon")  # the converter writes the number twice
    rotated = m.integer("rope.dimension_count")
    return {
        **found,
        **rope_of(m, rotated),
        **biases(m),
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "partial_rotary_factor": _nemotron_share(m, found, rotated),
        "norm_eps": m.number("attention.layer_norm_epsilon"),
        "intermediate_size": m.same("feed_forward_length"),
    }


def _nemotron_share(m: Model, found: Config, rotated: int) -> float:
    """Return the share of a head that is rotated.

    The converter counts it in heads of hidden size / heads, rounded down. Where heads have another size, the share is
    the family's half if that gives the number.

    Raises UnsupportedModel if it does not.
    """
    width, heads, head_dim = found["hidden_size"], found["num_attention_heads"], found["head_dim"]
    if heads * head_dim == width and rotated <= head_dim:
        return share(rotated, head_dim)
    if rotated == width // 2 // heads:
        return 0.5
    limit = f"must be {width // 2 // heads}, for half of each head, because heads have another size than hidden / heads"
    raise UnsupportedModel(f"{m.where}: {m.arch}.rope.dimension_count = {rotated}: {limit}")


def hunyuan_dense(m: Model) -> Config:
    """Return the config of hunyuan_v1_dense.

    The converter writes the base that `alpha` has stretched; one of the usual alphas is found again, so that
    frequencies are computed of the same numbers.
    """
    found = plain(m)
    m.optional("rope.scaling.original_context_length")
    found |= {"model_type": "hunyuan_v1_dense", "attention_bias": m.has("attn_q.bias")}
    size = found["head_dim"]
    for alpha in _ALPHAS if size > 2 and found["rope_scaling"] is None else ():
        if np.float32(_HUNYUAN_BASE * alpha ** (size / (size - 2))) == np.float32(found["rope_theta"]):
            scaling = {"rope_type": "dynamic", "alpha": alpha, "factor": 1.0}
            return found | {"rope_theta": _HUNYUAN_BASE, "rope_scaling": scaling}
    return found


def apertus(m: Model) -> Config:
    """Return the config of apertus; the numbers of its activation are in the metadata."""
    found = plain(m)
    rotary = {"rope_type": "default", **(found.pop("rope_scaling") or {}), "rope_theta": found.pop("rope_theta")}
    return found | {
        "model_type": "apertus",
        "hidden_act": "xielu",
        "attention_bias": m.has("attn_q.bias"),
        "rope_parameters": rotary,
    }
