"""llama.cpp's architectures that jswa reads, as data: the config of each, and the names and changes of its tensors.

What a converter does to the tensors of a family is undone when they are read (`tensors`): rows of q and k in another
order, norms that have 1 added to them, experts in stacks.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jswa.gguf.families import dense, full, gemma, mixtures, routed
from jswa.gguf.families.keys import Model

# Stems of tensors: `NAME.weight` and `NAME.bias` become `HF NAME.weight` and `HF NAME.bias`.
WHOLE: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}


def _shared(folder: str) -> Mapping[str, str]:
    """Return the stems of a shared expert."""
    return {f"ffn_{name}_shexp": f"{folder}.{name}_proj" for name in ("gate", "up", "down")}


# Norms that Gemma multiplies by after adding 1, as the converter does in advance.
_LAYER_NORMS = ("attn_norm", *_SANDWICH)
_ALL_NORMS = (*_LAYER_NORMS, *_QK_NORMS, "output_norm")
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_PER_LAYER_WHOLE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


@dataclass(frozen=True)
class Experts:
    """Where a family's experts are, below a layer, and how its checkpoints store them.

    Attributes:
        folder: prefix of the experts.
        stored: "each" (a tensor per expert and matrix), "stacked" (one per matrix), "rows" ([E, gate | up, in]),
            "halves" ([E, in, gate | up]) or "interleaved" ([E, in, gate and up alternating], with biases), as in
            `tensor_names.Names`.
        gate, up: names of the matrices in the layouts "each" and "stacked".
        gate_up: name of the matrix in the other layouts.
        down: name of the matrix.
    """

    folder: str
    stored: Literal["each", "stacked", "rows", "halves", "interleaved"] = "each"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"


@dataclass(frozen=True)
class Architecture:
    """How one of llama.cpp's architectures is read.

    Attributes:
        config: returns the keys of config.json.
        transformers: transformers' class by model_type; several if the metadata decide.
        layer: stems below `blk.N.`, beyond or instead of llama's.
        whole: stems of tensors of the whole model, beyond the usual ones.
        names: full names below `blk.N.` that keep no ending.
        experts: of a mixture.
        permuted: rows of q and k are stored with the pairs of a rotation beside each other.
        plus_one: stems of weights that are stored with 1 added; their biases are not.
        left_out: stems below `blk.N.` that the converter has made of the config.
        numbers: keys of metadata that list a number for each layer, and name and shape of the tensor of that number
            below a layer.
    """

    config: Callable[[Model], dict[str, Any]]
    transformers: Mapping[str, str]
    layer: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    experts: Experts | None = None
    permuted: bool = False
    plus_one: Collection[str] = ()
    left_out: Collection[str] = ()
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def stem(self, name: str) -> str | None:
        """Return transformers' stem, below a layer, of llama.cpp's; None if the architecture has no such tensor."""
        return self.layer.get(name, _LAYER.get(name))


_QWEN_EXPERTS = Experts("mlp.experts")
_MIXTRAL_EXPERTS = Experts("block_sparse_moe.experts", gate="w1", up="w3", down="w2")
_ROUTED = {**_ROUTER, **_shared("mlp.shared_experts")}
_SELECTION = "exp_probs_b.bias"  # what a router adds to scores before it chooses experts
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        dense.llama,
        {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"},
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_MIXTRAL_EXPERTS,
        permuted=True,
    ),
    "mistral3": Architecture(
        dense.mistral3,
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        permuted=True,
    ),
    "qwen2": Architecture(dense.qwen2, {"qwen2": "Qwen2ForCausalLM"}),
    "qwen3": Architecture(dense.qwen3, {"qwen3": "Qwen3ForCausalLM"}, _QK_NORMS),
    "qwen2moe": Architecture(
        mixtures.qwen2moe,
        {"qwen2_moe": "Qwen2MoeForCausalLM"},
        {**_ROUTER, **_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        experts=_QWEN_EXPERTS,
    ),
    "qwen3moe": Architecture(
        mixtures.qwen3moe, {"qwen3_moe": "Qwen3MoeForCausalLM"}, {**_ROUTER, **_QK_NORMS}, experts=_QWEN_EXPERTS
    ),
    "phi3": Architecture(
        dense.phi3,
        {"phi3": "Phi3ForCausalLM"},
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "starcoder2": Architecture(
        dense.starcoder2,
        {"starcoder2": "Starcoder2ForCausalLM"},
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "smollm3": Architecture(dense.smollm3, {"smollm3": "SmolLM3ForCausalLM"}, permuted=True),
    "gemma": Architecture(
        gemma.gemma, {"gemma": "GemmaForCausalLM"}, plus_one=("attn_norm", "ffn_norm", "output_norm")
    ),
    "gemma2": Architecture(gemma.gemma2, {"gemma2": "Gemma2ForCausalLM"}, _SANDWICH, plus_one=_ALL_NORMS),
    "gemma3": Architecture(
        gemma.gemma3, {"gemma3_text": "Gemma3ForCausalLM"}, {**_SANDWICH, **_QK_NORMS}, plus_one=_ALL_NORMS
    ),
    "gemma3n": Architecture(
        gemma.gemma3n,
        {"gemma3n_text": "Gemma3nForCausalLM"},
        {
            **_SANDWICH,
            **_QK_NORMS,
            **_PER_LAYER,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        {
            **_PER_LAYER_WHOLE,
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
        {"altup_correct_scale.weight": "altup.correct_output_scale"},
    ),
    "gemma4": Architecture(
        gemma.gemma4,
        {"gemma4_text": "Gemma4ForCausalLM"},
        {
            **_SANDWICH,
            **_QK_NORMS,
            **_PER_LAYER,
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        _PER_LAYER_WHOLE,
        {
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        Experts("experts", "rows"),
    ),
    "gpt-oss": Architecture(
        mixtures.gpt_oss,
        {"gpt_oss": "GptOssForCausalLM"},
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        names={"attn_sinks.weight": "self_attn.sinks"},
        experts=Experts("mlp.experts", "interleaved"),
    ),
    "olmo2": Architecture(
        dense.olmo2,
        {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"},
        {**_POST_NORMS, **_QK_NORMS},
    ),
    "cohere2": Architecture(dense.cohere2, {"cohere2": "Cohere2ForCausalLM"}),
    "exaone4": Architecture(dense.exaone4, {"exaone4": "Exaone4ForCausalLM"}, {**_POST_NORMS, **_QK_NORMS}),
    "llama4": Architecture(
        mixtures.llama4,
        {"llama4_text": "Llama4ForCausalLM"},
        {
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            **_shared("feed_forward.shared_expert"),
        },
        experts=Experts("feed_forward.experts", "halves"),
    ),
    "mimo2": Architecture(
        mixtures.mimo2,
        {"mimo_v2_flash": "MiMoV2FlashForCausalLM"},
        _ROUTER,
        names={
            "attn_sinks.weight": "self_attn.attention_sink_bias",
            "attn_sinks": "self_attn.attention_sink_bias",
            _SELECTION: "mlp.gate.e_score_correction_bias",
        },
        experts=_QWEN_EXPERTS,
    ),
    "phimoe": Architecture(
        dense.phimoe,
        {"phimoe": "PhimoeForCausalLM"},
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_MIXTRAL_EXPERTS,
    ),
    "dots1": Architecture(
        routed.dots1,
        {"dots1": "Dots1ForCausalLM"},
        {**_ROUTED, **_QK_NORMS},
        names={_SELECTION: "mlp.gate.e_score_correction_bias"},
        experts=_QWEN_EXPERTS,
    ),
    "exaone-moe": Architecture(
        routed.exaone_moe,
        {"exaone_moe": "ExaoneMoeForCausalLM"},
        {**_ROUTED, **_QK_NORMS},
        names={_SELECTION: "mlp.e_score_correction_bias"},
        experts=_QWEN_EXPERTS,
    ),
    "afmoe": Architecture(
        routed.afmoe,
        {"afmoe": "AfmoeForCausalLM"},
        {
            **_ROUTED,
            **_QK_NORMS,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
        },
        names={_SELECTION: "mlp.expert_bias"},
        experts=_QWEN_EXPERTS,
    ),
    "laguna": Architecture(
        routed.laguna,
        {"laguna": "LagunaForCausalLM"},
        {**_ROUTER, **_shared("mlp.shared_expert"), **_QK_NORMS, "attn_gate": "self_attn.g_proj"},
        names={_SELECTION: "mlp.experts.e_score_correction_bias"},
        experts=_QWEN_EXPERTS,
    ),
    "step35": Architecture(
        routed.step35,
        {"step3p5": "Step3p5ForCausalLM"},
        {**_shared("share_expert"), **_QK_NORMS, "attn_gate": "self_attn.g_proj", "ffn_gate_inp": "moe.gate"},
        names={_SELECTION: "moe.router_bias"},
        experts=Experts("moe", "stacked"),
        plus_one=("attn_norm", "ffn_norm", *_QK_NORMS, "output_norm"),
    ),
    "cohere2moe": Architecture(
        routed.cohere2moe, {"cohere2_moe": "Cohere2MoeForCausalLM"}, _ROUTED, experts=_QWEN_EXPERTS
    ),
    "mellum": Architecture(
        routed.mellum, {"mellum": "MellumForCausalLM"}, {**_ROUTER, **_QK_NORMS}, experts=_QWEN_EXPERTS
    ),
    "granite": Architecture(full.granite, {"granite": "GraniteForCausalLM"}, permuted=True),
    "granitemoe": Architecture(
        full.granitemoe,
        {"granitemoe": "GraniteMoeForCausalLM"},
        {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        experts=Experts("block_sparse_moe", "rows", gate_up="input_linear.weight", down="output_linear.weight"),
        permuted=True,
    ),
    "glm4": Architecture(
        full.glm4,
        {"glm4": "Glm4ForCausalLM"},
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "seed_oss": Architecture(
        full.seed_oss, {"seed_oss": "SeedOssForCausalLM"}, {"post_attention_norm": "post_attention_layernorm"}
    ),
    "ernie4_5": Architecture(full.ernie4_5, {"ernie4_5": "Ernie4_5ForCausalLM"}),
    "olmoe": Architecture(full.olmoe, {"olmoe": "OlmoeForCausalLM"}, {**_ROUTER, **_QK_NORMS}, experts=_QWEN_EXPERTS),
    "arcee": Architecture(full.arcee, {"arcee": "ArceeForCausalLM"}, permuted=True),
    "nemotron": Architecture(
        full.nemotron, {"nemotron": "NemotronForCausalLM"}, plus_one=("attn_norm", "ffn_norm", "output_norm")
    ),
    "hunyuan-dense": Architecture(
        full.hunyuan_dense,
        {"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
        {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "apertus": Architecture(
        full.apertus,
        {"apertus": "ApertusForCausalLM"},
        {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm", **_QK_NORMS},
        numbers={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
    ),
    "muse-glimmer": Architecture(
        dense.muse_glimmer,
        {"muse_glimmer_text": "MuseGlimmerForConditionalGeneration"},
        {**_SANDWICH, "attn_gate": "self_attn.gate_proj"},
        permuted=True,
        plus_one=_LAYER_NORMS,
        left_out=tuple(_QK_NORMS),
    ),
}
