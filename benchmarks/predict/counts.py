"""Bytes and FLOP of a model's steps, by scope. All follow from the architecture, the storage formats and the rows.

Both models of a step's time count here: `benchmarks.predict.step` and that of the simulated fleets
(`benchmarks.scale.step_time`). Imports no jax.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jswa.architecture import AttentionConfig, AttentionKind, MlpConfig, ModelConfig, MoeConfig, Reach

MXFP4_BITS = 4.25  # per weight: 4, and a scale of 8 bits per 32 weights


@dataclass(frozen=True)
class Formats:
    """Bits per number.

    Attributes:
        weights: of the matrices in the layers.
        experts: of the experts' matrices; the same if None.
        ends: of embedding and head.
        kv: of the cache.
    """

    weights: float = 16
    experts: float | None = None
    ends: float = 16
    kv: float = 16

    @property
    def of_experts(self) -> float:
        """Bits per weight of an expert."""
        return self.weights if self.experts is None else self.experts


FORMATS = {
    "bf16": Formats(),
    "mxfp4": Formats(experts=MXFP4_BITS),
    "fp8": Formats(weights=8, ends=8),
    "fp8, fp8 KV": Formats(weights=8, ends=8, kv=8),
}


class Matrices(NamedTuple):
    """Numbers in the matrices that every step reads, by scope. Norms and biases are left out."""

    qkv: int
    o: int
    mlp: int
    router: int
    head: int


def matrices_of(part: ModelConfig) -> Matrices:
    """Return the numbers on each device."""
    d, attention, moes = part.d_model, [layer.attention for layer in part.layers], mixtures(part)
    dense = [layer.mlp for layer in part.layers if isinstance(layer.mlp, MlpConfig)]
    dense += [moe.shared for moe in moes if moe.shared is not None]
    return Matrices(
        qkv=sum(d * qkv_width(a) for a in attention),
        o=sum(d * a.num_heads * a.v_head_dim for a in attention),
        mlp=sum((3 if mlp.gated else 2) * d * mlp.hidden for mlp in dense),
        router=sum(d * moe.num_experts for moe in moes),
        head=part.vocab_size * d // part.devices,
    )


def qkv_width(a: AttentionConfig) -> int:
    """Return the numbers of a token's query, keys and values."""
    return a.num_heads * a.head_dim + a.num_kv_heads * (a.head_dim + a.v_head_dim)


def mixtures(part: ModelConfig) -> list[MoeConfig]:
    """Return the mixtures of experts of all layers."""
    return [layer.mlp for layer in part.layers if isinstance(layer.mlp, MoeConfig)]


def touched_experts(moe: MoeConfig, tokens: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return the experts that have tokens, on average, if tokens choose uniformly and independently."""
    touched: Float[np.ndarray, " n"] = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
    return touched


def expert_bytes(part: ModelConfig, tokens: Int[np.ndarray, " n"], bits: float) -> Float[np.ndarray, " n"]:
    """Return the bytes of the experts' weights that a step of so many tokens reads on each device."""
    total = np.zeros(len(tokens))
    for moe in mixtures(part):  # all devices have the same share of the chosen experts
        total += touched_experts(moe, tokens) / moe.devices * 3 * part.d_model * moe.hidden * (bits / 8)
    return total


def expert_numbers(part: ModelConfig) -> int:
    """Return the weights of all experts on each device."""
    return sum(moe.num_experts // moe.devices * 3 * part.d_model * moe.hidden for moe in mixtures(part))


def chosen_numbers(part: ModelConfig) -> float:
    """Return the experts' weights that one token is multiplied with on each device."""
    return sum(moe.top_k * 3 * part.d_model * moe.hidden / moe.devices for moe in mixtures(part))


def attentions(part: ModelConfig, kind: AttentionKind) -> list[AttentionConfig]:
    """Return the attention of all layers of a kind."""
    return [layer.attention for layer in part.layers if layer.attention.kind == kind]


def reach_of(part: ModelConfig) -> Reach | None:
    """Return the reach of the local layers."""
    local = attentions(part, "local")
    return local[0].reach if local else None


def kv_numbers(part: ModelConfig, kind: AttentionKind) -> int:
    """Return the numbers of a key and its value in all layers of a kind."""
    return sum(a.num_kv_heads * (a.stored_head_dim + a.v_head_dim) for a in attentions(part, kind))


def pair_flops(part: ModelConfig, kind: AttentionKind) -> int:
    """Return the FLOP of one pair of query and key in all layers of a kind."""
    return sum(2 * a.num_heads * (a.head_dim + a.v_head_dim) for a in attentions(part, kind))


class Visible(NamedTuple):
    """Keys that all rows read, and pairs of query and key, in each full and each local layer."""

    full_keys: int
    local_keys: int
    full_pairs: int
    local_pairs: int


def visible(reach: Reach | None, starts: Int[np.ndarray, " R"], counts: Int[np.ndarray, " R"]) -> Visible:
    """Count for a step whose row i runs positions [starts[i], starts[i] + counts[i])."""
    ends = starts + counts
    return Visible(
        int(ends.sum()),
        int((ends - first_visible(reach, starts)).sum()),
        int((ends * (ends + 1) // 2 - starts * (starts + 1) // 2).sum()),
        int((_seen(reach, ends) - _seen(reach, starts)).sum()),
    )


def first_visible(reach: Reach | None, at: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Return the oldest position that a query at each position sees; 0 if there are no local layers."""
    if reach is None:
        return np.zeros_like(at)
    first: Int[np.ndarray, "*n"] = np.maximum(reach.oldest(at), 0)
    return first


def _seen(reach: Reach | None, end: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
    """Return the number of pairs of a query at [0, end) and a key that it sees."""
    if reach is None:
        return np.zeros_like(end)
    size = reach.size
    if reach.chunked:
        hidden = np.maximum(end // size - reach.lookback, 0)  # chunks that a query at `end` no longer sees
        unseen = size * (size * (hidden * (hidden - 1) // 2) + end % size * hidden)
        pairs: Int[np.ndarray, "*n"] = end * (end + 1) // 2 - unseen
        return pairs
    short = np.minimum(end, size)
    pairs = short * (short + 1) // 2 + (end - short) * size
    return pairs
