"""The attention of a layer: norms, rotary embeddings, gates, and what a query sees."""

from dataclasses import dataclass
from typing import Literal

from jswa.architecture.reach import Reach

AttentionKind = Literal["full", "local"]


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
