"""What a model is: `ModelConfig`, one `LayerConfig` per layer, and what they are made of.

All are frozen and hashable, so that they can be static arguments of a jitted function. No jax here.
A feature that a layer does not have is None, False or the neutral number; the decoder leaves it out.
Units: every length, window and position is in tokens; a window counts the query token itself.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

AttentionKind = Literal["full", "local"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class Norm:
    """x / rms(x) · (offset + weight) + bias, computed in float32.

    Gemma stores the weight minus one (offset 1). `cast_first` rounds x / rms(x) to the activation type before the
    weight is applied (llama) instead of after (gemma); float32 does not see it. `weighted` False: no weight at all.
    `centered` takes the mean away first, which makes it a LayerNorm.
    """

    eps: float
    offset: float = 0.0
    cast_first: bool = True
    weighted: bool = True
    centered: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2n dimensions, n = len(inv_freq); those from 2n on pass through.

    Pairs are (i, i + n) (half or NeoX style), or (2i, 2i + 1) where `interleaved` (GPT-J style).
    angle = position · inv_freq; cos and sin are multiplied by `scale`.
    An engine whose max_model_len exceeds `original` uses `beyond` in its place (LongRoPE, `ModelConfig.at_length`).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    original: int | None = None
    beyond: "Rope | None" = None


@dataclass(frozen=True)
class Reach:
    """Which keys a local layer's query at position q sees: sliding, k > q - size, or chunked, k ≥ ⌊q / size⌋ · size.

    `size` counts the query itself: keys seen at most.
    """

    size: int
    chunked: bool = False

    def first_visible(self, position: int) -> int:
        """Oldest position that a query at `position` sees, and so the oldest that any later query sees."""
        return position // self.size * self.size if self.chunked else max(0, position - (self.size - 1))

    def leaves_at(self, position: int) -> int:
        """First query position that no longer sees `position`."""
        return (position // self.size + 1) * self.size if self.chunked else position + self.size


@dataclass(frozen=True)
class Temperature:
    """Queries grow with their position: q · (1 + rate · ln(1 + n)), n = (position + offset) / period.

    Attributes:
        whole: n is rounded down (Llama 4, Ministral 3).
        power: the factor is (1 + n)^rate instead (beam).
    """

    period: float
    rate: float
    offset: int = 1
    whole: bool = True
    power: bool = False


@dataclass(frozen=True)
class Gate:
    """Attention output · activation(x · w + bias), before it is projected back; one gate per element or per head.

    `bias`: one learned number per head.
    """

    activation: Literal["sigmoid", "softplus"]
    per_head: bool = False
    bias: bool = False


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer; `reach` is None for a full layer.

    Attributes:
        qk_norm: on q and k, per head, or over all heads together with `qk_norm_all_heads` (olmo3).
        v_norm: per head, on the values.
        sinks: a learned logit per query head joins the softmax and takes its share of the weights.
        v_scale: values are multiplied by it before they are stored.
        kv_from: the layer whose stored keys and values this one reads; it has none of its own.
        keys_as_values: the key projection is the value projection too; K is normed by `qk_norm` and rotated, V by
            `v_norm` alone.
        folded_keys: of such a layer only V and the rotated part of K are stored. The rest of K is the rest of V times
            the k norm's weight, which the loader moves into the q norm's. Queries are laid out (rotated | rest), values
            (rest | rotated), so that K is the first `head_dim` and V the last `v_head_dim` numbers of what is stored.
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
    v_norm: Norm | None = None
    softcap: float | None = None
    sinks: bool = False
    v_scale: float = 1.0
    temperature: Temperature | None = None
    gate: Gate | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    kv_from: int | None = None
    keys_as_values: bool = False
    folded_keys: bool = False

    @property
    def kind(self) -> AttentionKind:
        """Which page view of the arena the layer reads: `local` layers hold what their reach needs."""
        return "full" if self.reach is None else "local"

    @property
    def kept_head_dim(self) -> int:
        """Numbers of a key that are stored beside its value."""
        return 2 * len(self.rope.inv_freq) if self.folded_keys and self.rope is not None else self.head_dim


@dataclass(frozen=True)
class MlpConfig:
    """Feed-forward: down(act(gate(x)) · up(x)), or down(act(up(x))) where it is not `gated`.

    Attributes:
        clamp: act(gate) ≤ clamp, |up| ≤ clamp.
        sparsity: gates are cut at mean + sparsity · standard deviation of the token's gates first (Gemma 3n).
    """

    hidden: int
    activation: Activation
    bias: bool = False
    gated: bool = True
    clamp: float | None = None
    sparsity: float | None = None


@dataclass(frozen=True)
class RouterConfig:
    """How experts are chosen and weighed; logits = x · w + bias, ties go to the lowest index.

    Attributes:
        score: what is ranked and weighs: "softmax" over all experts, or "sigmoid"; or logits are ranked, and the
            chosen ones weigh by their "top_k_softmax" or "top_k_sigmoid"; or "sparsemixer" (Phi-3.5-MoE, of two).
        jitter: sparsemixer's width of ties.
        norm: the router's own norm, over what the layer adds to, not over the experts' input (Gemma 4).
        logit_scale: logits are multiplied by it.
        softcap: logits become softcap · tanh(logit / softcap).
        selection_bias: a learned bias joins the scores for the choice, never the weights.
        normalize: weights are divided by their sum + `eps`.
        groups, top_groups: experts are chosen within the best groups, a group's merit being its two best scores.
        scale: factor of the weights.
        expert_scale: a learned factor per expert.
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
    """A mixture of experts, each an MLP of width `hidden`; `shared` is one that every token passes.

    Attributes:
        bias: experts have biases.
        clamp: as in `MlpConfig`; with `alpha`, gpt-oss's activation: gate ≤ clamp, |up| ≤ clamp,
            (up + 1) · gate · σ(alpha · gate).
        weight_on_input: the weight multiplies the expert's input instead of its output (Llama 4).
        shared_gate: the shared expert's output is multiplied by σ(x · w).
        mean: experts and shared expert are averaged, not added.
        devices: that share the experts, the same number of whole ones each (`jswa.model.partition`).
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
    """Experts beside a layer's dense feed-forward (Gemma 4).

    With the residual r: post_mlp(post_dense(mlp(pre_mlp(r))) + post(moe(pre(r)))), routed by r itself.
    """

    moe: MoeConfig
    pre: Norm
    post: Norm
    post_dense: Norm


@dataclass(frozen=True)
class Residual:
    """How a result joins the stream: keep · x + add · result."""

    keep: float = 1.0
    add: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer; a norm that is None is the identity.

    x = x + post_attn(attn(pre_attn(x))), then x = x + post_mlp(mlp(pre_mlp(x))); each + as its `Residual` says.

    Attributes:
        parallel: both halves read pre_attn(x), and their results are added together (Command R).
        scalar: the layer's whole output is multiplied by a learned number (Gemma 4).
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
    scalar: bool = False


@dataclass(frozen=True)
class PerLayerInput:
    """A second embedding, `dim` numbers per token and layer, that each layer mixes in (Gemma 3n, Gemma 4 E2B/E4B).

    Ids from `vocab_size` on count as 0.
    """

    dim: int
    vocab_size: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True)
class AltUp:
    """Gemma 3n's `streams` parallel residual streams, of which each layer runs the `active` one (arXiv 2301.13310).

    `laurel_rank`: of the low-rank branch beside attention (arXiv 2411.07501).
    """

    streams: int
    active: int
    laurel_rank: int
    corrects_scale: bool


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, derived from a checkpoint's config.json. `layers` says everything that differs by layer.

    Attributes:
        embed_norm: on the embeddings, behind `embed_scale`.
        logit_scale: logits are multiplied by it, before `final_softcap`.
        devices: that share the model. More than one: heads and widths are those of one device's part, and so is
            1 / devices of the vocabulary (`jswa.model.partition`).
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
        """The first of the layers at the end that store no KV: only tokens whose logits are wanted need run them."""
        return 1 + max((i for i, layer in enumerate(self.layers) if layer.attention.kv_from is None), default=-1)

    def at_length(self, max_model_len: int) -> "ModelConfig":
        """The model with the rotary embeddings that an engine of this max_model_len uses for all its texts.

        One set for all, chosen at start (as vLLM does): cached keys could not be used by a text that outgrows it.
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
