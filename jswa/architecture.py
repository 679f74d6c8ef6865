"""Description of a model's architecture: `ModelConfig`, one `LayerConfig` per layer, and their parts.

All classes are frozen and hashable, so they can be static arguments of a jitted function. This module imports no jax.
If a layer lacks a feature, its field is None, False or the neutral number, and the decoder skips the feature.
Units: every length, window and position is in tokens; a window includes the query token.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from jswa.reach import Reach as Reach

AttentionKind = Literal["full", "local"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Norm:
    """x / rms(x) · (offset + weight) + bias, computed in float32.

    Attributes:
        offset: Gemma stores the weight minus one, so its offset is 1.
        cast_first: x / rms(x) is cast to the activation dtype before it is multiplied by the weight (llama), not after
            (gemma). This makes no difference in float32.
        weighted: False if the norm has no weight.
        gate_rank: the result y is multiplied by σ(high(silu(low(y)))), of two matrices with this rank between them
            (Grug). 0: it is not.
        centered: the mean is subtracted first, which makes it a LayerNorm.
    """

    eps: float
    offset: float = 0.0
    cast_first: bool = True
    weighted: bool = True
    centered: bool = False
    bias: bool = False
    gate_rank: int = 0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2n dimensions, n = len(inv_freq); the other dimensions are not rotated.

    angle = position · inv_freq.

    Attributes:
        scale: factor of cos and sin.
        interleaved: pairs are (2i, 2i + 1) (GPT-J style) instead of (i, i + n) (half or NeoX style).
        original, beyond: LongRoPE. If max_model_len exceeds `original`, the engine uses `beyond` instead of this
            embedding (`ModelConfig.at_length`).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    original: int | None = None
    beyond: "Rope | None" = None


@dataclass(frozen=True)
class Temperature:
    """Scaling of queries by position: q · (1 + rate · ln(1 + n)), n = (position + offset) / period.

    Attributes:
        whole: n is rounded down (Llama 4, Ministral 3).
        power: the factor is (1 + n)^rate (beam).
    """

    period: float
    rate: float
    offset: int = 1
    whole: bool = True
    power: bool = False


@dataclass(frozen=True)
class AttentionGate:
    """Gate on the attention output before the output projection: output · activation(x · w + bias).

    Attributes:
        per_head: there is one gate per head instead of one per element.
        bias: there is a learned bias per head.
        scale: factor of the gate.
    """

    activation: Literal["sigmoid", "softplus"]
    per_head: bool = False
    bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer.

    Attributes:
        scale: factor of q · k.
        reach: the window or chunk of a local layer; None for a full layer.
        qk_norm: norm of q and k, per head, or over all heads together if `qk_norm_all_heads` (olmo3).
        qk_norm_after_rope: q and k are normed after they are rotated, not before (Hunyuan).
        v_norm: norm of the values, per head.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: a learned logit per query head takes part in the softmax (attention sink).
        key_sinks: a learned key per KV head, with a value of zero, takes part in every softmax (IQuest-Q1). It is
            subtracted from the keys that are stored: its own score is then 0, a sink, and the softmax is the same.
        exclusive: of each head's output, the part along the token's own value is taken away, before the gate (Grug).
        v_scale: values are multiplied by it before they are stored.
        kv_from: index of the layer whose stored KV this layer reads (shared KV); this layer then stores none.
        keys_as_values: the key projection also gives the values. K is normed by `qk_norm` and rotated, V is normed by
            `v_norm`.
        folded_keys: a layer with `keys_as_values` stores only V and the rotated part of K. The rest of K equals the
            rest of V times the weight of the k norm, and the loader moves that weight into the q norm. Queries are laid
            out as (rotated | rest) and values as (rest | rotated), so K is the first `head_dim` and V the last
            `v_head_dim` of the stored numbers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rope: Rope | None
    reach: Reach | None = None
    qk_norm: Norm | None = None
    qk_norm_all_heads: bool = False
    qk_norm_after_rope: bool = False
    v_norm: Norm | None = None
    softcap: float | None = None
    sinks: bool = False
    key_sinks: bool = False
    exclusive: bool = False
    v_scale: float = 1.0
    temperature: Temperature | None = None
    gate: AttentionGate | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    kv_from: int | None = None
    keys_as_values: bool = False
    folded_keys: bool = False

    @property
    def kind(self) -> AttentionKind:
        """The page view of the arena that the layer reads; "local" layers store only the tokens within reach."""
        return "full" if self.reach is None else "local"

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax has sinks, of either kind."""
        return self.sinks or self.key_sinks

    @property
    def stored_head_dim(self) -> int:
        """Numbers per KV head that the cache stores for a key, beside those of its value."""
        return 2 * len(self.rope.inv_freq) if self.folded_keys and self.rope is not None else self.head_dim


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


@dataclass(frozen=True)
class Residual:
    """Residual connection: keep · x + add · result."""

    keep: float = 1.0
    add: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer; a norm that is None is the identity.

    x = x + post_attn(attn(pre_attn(x))), then x = x + post_mlp(mlp(pre_mlp(x))); `Residual` weights each sum.

    Attributes:
        parallel: attention and feed-forward both read pre_attn(x), and both results are added to x (Command R).
        side: experts beside the dense feed-forward.
        keeps_normed: the sum after attention is of pre_attn(x), not of x (IQuest-Q1).
        scalar: the layer's output is multiplied by a learned number (Gemma 4).
    """

    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    pre_attn: Norm | None = None
    post_attn: Norm | None = None
    pre_mlp: Norm | None = None
    post_mlp: Norm | None = None
    parallel: bool = False
    side: SideExperts | None = None
    attn_residual: Residual = Residual()
    mlp_residual: Residual = Residual()
    keeps_normed: bool = False
    scalar: bool = False

    @property
    def moe(self) -> MoeConfig | None:
        """The layer's experts; None if it has none."""
        return self.mlp if isinstance(self.mlp, MoeConfig) else None if self.side is None else self.side.moe


@dataclass(frozen=True)
class PerLayerInput:
    """Per-layer embedding: `dim` numbers per token and layer, which each layer mixes in (Gemma 3n, Gemma 4 E2B/E4B).

    Token ids of `vocab_size` and above use row 0 of the table.
    """

    dim: int
    vocab_size: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True)
class AltUp:
    """Gemma 3n's parallel residual streams (AltUp, arXiv 2301.13310).

    Attributes:
        streams: number of residual streams.
        active: index of the stream that attention and feed-forward read.
        laurel_rank: rank of the low-rank branch beside attention (LAuReL, arXiv 2411.07501).
        corrects_scale: the active stream is multiplied by a learned scale before the per-layer embedding reads it.
    """

    streams: int
    active: int
    laurel_rank: int
    corrects_scale: bool


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, derived from a checkpoint's config.json.

    Attributes:
        family: model_type of the text decoder, the key in `jswa.model.hf.families.FAMILIES`.
        layers: everything that may differ between layers.
        embed_norm: norm of the embeddings, applied after `embed_scale`.
        logit_scale: factor of the logits, applied before `final_softcap`.
        devices: number of tensor parallel devices. If there are several, heads and widths are those of one device's
            shard; the device also stores vocab_size / devices rows of the embedding (`jswa.model.partition`).
    """

    family: str
    vocab_size: int
    d_model: int
    max_position: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm
    tie_embeddings: bool
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    logit_scale: float = 1.0
    final_softcap: float | None = None
    head_bias: bool = False
    per_layer_input: PerLayerInput | None = None
    altup: AltUp | None = None
    eos_token_ids: tuple[int, ...] = ()
    devices: int = field(default=1, repr=False)

    @property
    def tail(self) -> int:
        """Index of the first layer after the last one that stores KV.

        From there on, layers run only for tokens whose logits are wanted.
        """
        return 1 + max((i for i, layer in enumerate(self.layers) if layer.attention.kv_from is None), default=-1)

    @property
    def has_tail(self) -> bool:
        """Whether there is such a layer."""
        return self.tail < len(self.layers)

    def at_length(self, max_model_len: int) -> "ModelConfig":
        """Return the model with the rotary embeddings that an engine of this max_model_len uses for all sequences.

        The engine chooses one set at start (as vLLM does): if a sequence switched sets as it grew, its cached keys
        would be wrong.
        """

        def chosen(rope: Rope | None) -> Rope | None:
            if rope is None or rope.original is None:
                return rope
            longer = rope.beyond if max_model_len > rope.original else None
            return longer or dataclasses.replace(rope, original=None, beyond=None)

        return dataclasses.replace(
            self,
            layers=tuple(
                dataclasses.replace(
                    layer, attention=dataclasses.replace(layer.attention, rope=chosen(layer.attention.rope))
                )
                for layer in self.layers
            ),
        )
