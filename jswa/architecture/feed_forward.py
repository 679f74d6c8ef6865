"""The feed-forward of a layer: one MLP, or a mixture of experts."""

from dataclasses import dataclass, field
from typing import Literal

from jswa.architecture.attention import Norm

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class MlpConfig:
    """Feed-forward: down(act(gate(x)) · up(x)) if `gated`, else down(act(up(x))).

    Attributes:
        hidden: width of gate and up.
        clamp: upper bound of act(gate) and of |up|.
        sparsity: gates below mean + sparsity · standard deviation of the token's gates become 0 first (Gemma 3n).
        squared: act(up) is squared, in a feed-forward without a gate (relu², arXiv 2109.08668).
        xielu: the activation is xIELU with learned numbers, in a feed-forward without a gate (Apertus).
    """

    hidden: int
    activation: Activation
    bias: bool = False
    gated: bool = True
    clamp: float | None = None
    sparsity: float | None = None
    squared: bool = False
    xielu: bool = False


@dataclass(frozen=True)
class RouterConfig:
    """Choice and weights of a token's experts; logits = x · w + bias, ties go to the lowest index.

    Attributes:
        score: "softmax" (over all experts) and "sigmoid" rank experts by these scores and use them as weights.
            "top_k_softmax" and "top_k_sigmoid" rank experts by logits and apply the function to the chosen logits.
            "sparsemixer" is the router of Phi-3.5-MoE, which chooses two experts.
        jitter: tie width of sparsemixer.
        norm: the router's own norm of the residual stream; the router then does not read the experts' input (Gemma 4).
        logit_scale: factor of the logits.
        softcap: logits become softcap · tanh(logit / softcap).
        selection_bias: a learned bias is added to the scores for the choice, but not to the weights.
        normalize: weights are divided by their sum + `eps`.
        groups, top_groups: experts are chosen within the `top_groups` best of `groups` groups; a group is ranked by the
            sum of its two best scores.
        scale: factor of the weights.
        expert_scale: there is a learned factor per expert.
    """

    score: Literal["softmax", "sigmoid", "top_k_softmax", "top_k_sigmoid", "sparsemixer"]
    bias: bool = False
    jitter: float = 0.0
    norm: Norm | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    selection_bias: bool = False
    normalize: bool = False
    eps: float = 0.0
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    expert_scale: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts; each expert is a gated MLP of width `hidden`.

    Attributes:
        bias: experts have biases.
        clamp: as in `MlpConfig`. With `alpha` the activation is gpt-oss's: gate ≤ clamp, |up| ≤ clamp, and the result
            is (up + 1) · gate · σ(alpha · gate).
        weight_on_input: the router's weight multiplies the expert's input, not its output (Llama 4).
        shared: an expert that processes every token.
        shared_gate: the shared expert's output is multiplied by σ(x · w).
        mean: the outputs of routed and shared experts are averaged, not added.
        devices: number of devices that share the experts; each stores the same number of whole experts
            (`jswa.model.partition`).
    """

    num_experts: int
    top_k: int
    hidden: int
    activation: Activation
    router: RouterConfig
    bias: bool = False
    clamp: float | None = None
    alpha: float | None = None
    weight_on_input: bool = False
    shared: MlpConfig | None = None
    shared_gate: bool = False
    mean: bool = False
    devices: int = field(default=1, repr=False)


@dataclass(frozen=True)
class SideExperts:
    """Experts that run beside a layer's dense feed-forward (Gemma 4).

    The layer computes post_mlp(post_dense(mlp(pre_mlp(r))) + post(moe(pre(r)))) of the residual r; the router reads r.
    """

    moe: MoeConfig
    pre: Norm
    post: Norm
    post_dense: Norm
