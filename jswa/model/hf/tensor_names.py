"""How a family names its tensors, as data; `weights.sources` turns it into the source of every parameter."""

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
    """Tensor names of a family, where they are not llama's. Everything is relative to `model.layers.N`.

    Attributes:
        norms: our norm to theirs.
        fused: q, k, v are one tensor, gate and up another.
        gate: of the attention's output, within `self_attn`.
        mlp: folder of a dense feed-forward.
        mlp_up, mlp_down: its matrices, where nothing is gated.
        router, router_bias, selection_bias, router_norm, expert_scale: of a mixture.
        experts: folder of the experts, and
        stored: how they lie there: "each" (one tensor per expert and matrix, [out, in]), "stacked" (one per matrix,
            [E, out, in]), "rows" ([E, gate | up, in] and [E, out, in]), "halves" ([E, in, gate | up]) or "interleaved"
            ([E, in, gate and up by turns]).
        expert_gate, expert_up, expert_down: their matrices' names, of "each" and "stacked".
        shared: folder of the shared expert; `shared_fused`: with gate and up in one, by these two names.
        shared_gate: its gate.
        sinks: within `self_attn`.
        extra_layers: checkpoints hold more layers than the config counts, for prediction of several tokens at once.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    fused: bool = False
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
    shared: str = "mlp.shared_experts"
    shared_fused: tuple[str, str] | None = None
    shared_gate: str = "mlp.shared_expert_gate"
    sinks: str = "sinks"
    extra_layers: bool = False
