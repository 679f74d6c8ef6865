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
        mlp: folder of the feed-forward, dense or mixture.
        router, router_bias, selection_bias: within that folder.
        experts: "each" (one tensor per expert and matrix, [out, in]), "halves" ([E, in, gate | up]) or
            "interleaved" ([E, in, gate and up by turns]).
        expert: folder of the experts within `mlp`, and the matrices' names there.
        shared: folder of the shared expert within `mlp`.
        sinks: within `self_attn`.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    mlp: str = "mlp"
    router: str = "gate.weight"
    router_bias: str = "gate.bias"
    selection_bias: str = "gate.e_score_correction_bias"
    experts: Literal["each", "halves", "interleaved"] = "each"
    expert: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    sinks: str = "sinks"
