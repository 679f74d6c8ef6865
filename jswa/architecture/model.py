"""A layer of the decoder, and the whole model."""

import dataclasses
from dataclasses import dataclass, field

from jswa.architecture.attention import AttentionConfig, Norm, Rope
from jswa.architecture.feed_forward import Activation, MlpConfig, MoeConfig, SideExperts


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
        context_devices: number of neighbouring devices that share the tokens of each full layer's KV: device d of them
            stores the tokens at positions ≡ d.
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
    context_devices: int = field(default=1, repr=False)

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
