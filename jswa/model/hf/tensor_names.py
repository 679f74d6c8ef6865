"""Tensor names of a family, as data; `tensor_map.sources` turns them into the source of every parameter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LLAMA_NORMS: Mapping[str, str] = {"pre_attn": "input_layernorm", "pre_mlp": "post_attention_layernorm"}
SANDWICH_NORMS: Mapping[str, str] = {
    "pre_attn": "input_layernorm",
    "post_attn": "post_attention_layernorm",
    "pre_mlp": "pre_feedforward_layernorm",
    "post_mlp": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Names:
    """Tensor names of a family; the defaults are llama's. Names are relative to `model.layers.N`.

    Attributes:
        norms: tensor name of each norm of `LayerConfig`.
        norm_gates: prefix of the gate of each norm that has one.
        fused: q, k and v are one tensor; gate and up are one tensor.
        fused_up: gate and up are one tensor; q, k and v are not.
        q_norm, k_norm: norms of q and k, below `self_attn`.
        gate: gate of the attention output, below `self_attn`.
        mlp: prefix of a dense feed-forward.
        mlp_up, mlp_down: names of its matrices up and down.
        router, router_bias, selection_bias, router_norm, expert_scale: tensors of a mixture's router.
        experts: prefix of the experts.
        stored: layout of the experts: "each" (one tensor per expert and matrix, [out, in]), "stacked" (one per matrix,
            [E, out, in]), "rows" ([E, gate | up, in] and [E, out, in]), "halves" ([E, in, gate | up]) or "interleaved"
            ([E, in, gate and up alternating]).
        expert_gate, expert_up, expert_down: names of an expert's matrices in the layouts "each" and "stacked".
        expert_rows: names of the two tensors in the layout "rows".
        shared: prefix of the shared expert.
        shared_fused: names of its two matrices if gate and up are one tensor.
        shared_gate: gate of the shared expert.
        sinks: attention sinks, below `self_attn`.
        attention: prefix of attention, where it is not `self_attn`.
        qkv: name of the tensor of q, k and v, if only these are one tensor.
        out: output projection, below `attention`.
        adapters: LoRA adapters of images or speech that the checkpoint has beside the text model, which does not use
            them.
        extra_layers: checkpoints have more layers than the config counts, for multi-token prediction.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    norm_gates: Mapping[str, str] = field(default_factory=dict)
    fused: bool = False
    fused_up: bool = False
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = "gate_proj"
    mlp: str = "mlp"
    mlp_up: str = "up_proj"
    mlp_down: str = "down_proj"
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    router_norm: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    experts: str = "mlp.experts"
    stored: Literal["each", "stacked", "rows", "halves", "interleaved"] = "each"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    expert_rows: tuple[str, str] = ("gate_up_proj", "down_proj")
    shared: str = "mlp.shared_experts"
    shared_fused: tuple[str, str] | None = None
    shared_gate: str = "mlp.shared_expert_gate"
    sinks: str = "sinks"
    attention: str = "self_attn"
    qkv: str | None = None
    out: str = "o_proj"
    adapters: tuple[str, ...] = ()
    extra_layers: bool = False


SANDWICH = Names(norms=SANDWICH_NORMS)
