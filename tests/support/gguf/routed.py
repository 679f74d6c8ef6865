"""The metadata that llama.cpp's converter adds for mixtures with a shared expert, mellum and muse_glimmer.

The gguf package does not know all of these architectures yet; their names are here, with an architecture of the package
that has tensors of the same names.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, RopeScalingType

Config = Mapping[str, Any]
NAMED_HERE = {
    "laguna": ("laguna", MODEL_ARCH.STEP35),
    "cohere2_moe": ("cohere2moe", MODEL_ARCH.DOTS1),
    "mellum": ("mellum", MODEL_ARCH.DOTS1),
    "muse_glimmer_text": ("muse-glimmer", MODEL_ARCH.AFMOE),
}


def _pattern(w: GGUFWriter, kinds: list[str]) -> None:
    w.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _dots1(w: GGUFWriter, c: Config) -> None:
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])


def _exaone_moe(w: GGUFWriter, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    w.add_sliding_window(c["sliding_window"])
    _pattern(w, c["layer_types"])
    width, shared = c["moe_intermediate_size"], c["num_shared_experts"]
    w.add_expert_feed_forward_length(width)
    w.add_expert_shared_count(shared)
    w.add_expert_shared_feed_forward_length(width * shared)
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_rope_scaling_type(RopeScalingType.NONE)


def _afmoe(w: GGUFWriter, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    w.add_rope_dimension_count(c["head_dim"])
    w.add_expert_shared_count(c["num_shared_experts"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_leading_dense_block_count(c["num_dense_layers"])
    if "route_norm" in c:
        w.add_expert_weights_norm(c["route_norm"])
    w.add_expert_weights_scale(c["route_scale"])
    w.add_sliding_window(c["sliding_window"])


def _laguna(w: GGUFWriter, c: Config) -> None:
    w.add_vocab_size(c["vocab_size"])
    w.add_head_count(c["num_attention_heads_per_layer"])
    w.add_sliding_window(c["sliding_window"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    w.add_expert_weights_norm(True)
    w.add_expert_weights_scale(c["moe_routed_scaling_factor"])
    w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    kinds = c["mlp_layer_types"]
    w.add_leading_dense_block_count(next(i for i, kind in enumerate([*kinds, "end"]) if kind != "dense"))
    for kind, add in (
        ("full_attention", w.add_rope_dimension_count), ("sliding_attention", w.add_rope_dimension_count_swa),
    ):  # fmt: skip
        add(int(c["head_dim"] * c["rope_parameters"][kind].get("partial_rotary_factor", 1.0)))


def _step35(w: GGUFWriter, c: Config) -> None:
    drafts = c["num_nextn_predict_layers"]
    count = c["num_hidden_layers"] + drafts
    kinds, other = c["layer_types"], c["attention_other_setting"]
    slides = [kind == "sliding_attention" for kind in (*kinds, *["full_attention"] * drafts)][:count]
    w.add_head_count([other["num_attention_heads"] if one else c["num_attention_heads"] for one in slides])
    w.add_head_count_kv([other["num_attention_groups"] if one else c["num_attention_groups"] for one in slides])
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(slides)
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_expert_shared_feed_forward_length(c["share_expert_dim"])
    w.add_expert_weights_scale(c["moe_router_scaling_factor"])
    w.add_leading_dense_block_count(min(map(int, c["moe_layers_enum"].split(","))))
    w.add_moe_every_n_layers(1)
    for limits, add in (
        (c["swiglu_limits"], w.add_swiglu_clamp_exp), (c["swiglu_limits_shared"], w.add_swiglu_clamp_shexp),
    ):  # fmt: skip
        if limits is not None:
            add([one or 0.0 for one in (*limits, *[0.0] * drafts)])


def _cohere2_moe(w: GGUFWriter, c: Config) -> None:
    w.add_logit_scale(c["logit_scale"])
    w.add_sliding_window(c["sliding_window"])
    _pattern(w, c["layer_types"])
    w.add_vocab_size(c["vocab_size"])
    width, kinds = c["intermediate_size"], c["mlp_layer_types"]
    w.add_expert_feed_forward_length(width)
    w.add_leading_dense_block_count(next(i for i, kind in enumerate([*kinds, "end"]) if kind != "dense"))
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if shared := c["num_shared_experts"]:
        w.add_expert_shared_count(shared)
        w.add_expert_shared_feed_forward_length(width * shared)
    w.add_rope_dimension_count(c["head_dim"])
    w.add_rope_scaling_type(RopeScalingType.NONE)


def _mellum(w: GGUFWriter, c: Config) -> None:
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_sliding_window(c["sliding_window"])
    _pattern(w, c["layer_types"])


def _muse_glimmer(w: GGUFWriter, c: Config) -> None:
    w.add_final_logit_softcapping(c["final_logit_softcapping"])
    w.add_logit_scale(c["output_multiplier"])
    w.add_sliding_window(c["sliding_window"])
    _pattern(w, c["layer_types"])


ROUTED_EXTRA: dict[str, Callable[[GGUFWriter, Config], None]] = {
    "dots1": _dots1,
    "exaone_moe": _exaone_moe,
    "afmoe": _afmoe,
    "laguna": _laguna,
    "step3p5": _step35,
    "cohere2_moe": _cohere2_moe,
    "mellum": _mellum,
    "muse_glimmer_text": _muse_glimmer,
}
