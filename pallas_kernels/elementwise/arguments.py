"""The static parameters and groups of arrays of these kernels' calls, and the one formula that they share.

Shape letters: see `api`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Rms(NamedTuple):
    """x / rms(x) · (offset + weight), in float32.

    Attributes:
        cast_first: x / rms(x) is rounded to the activations' type before it is multiplied by the weight.
        weighted: False if there is no weight.
    """

    eps: float
    offset: float = 0.0
    cast_first: bool = True
    weighted: bool = True


class Parts(NamedTuple):
    """The result of a product: the sum of its parts, rounded to the activations' type, then the bias added.

    Attributes:
        values: partial sums; one part in the activations' type is the result.
        bias: of the product, or None.
    """

    values: Float[Array, "S T N"]
    bias: Float[Array, " N"] | None = None


class Pairs(NamedTuple):
    """The results of a token's experts: their sum in float32, in order, rounded to the activations' type.

    Attributes:
        values: the results of all experts, sorted by expert.
        rows: the rows of each token's experts.
        weights: factors of these rows, or None: they are 1.
        shared: the result of an expert of all tokens, which is added last, in parts like that of a product; or None.
    """

    values: Float[Array, "R N"]
    rows: Int[Array, "T k"]
    weights: Float[Array, "T k"] | None = None
    shared: Float[Array, "S T N"] | None = None


class Join(NamedTuple):
    """Static parameters of `residual_norms`: the norm of the branch, the weights of the sum, the norm of the sum."""

    post: Rms | None
    pre: Rms | None
    keep: float = 1.0
    add: float = 1.0


class Heads(NamedTuple):
    """Static parameters of `rotate_and_write`: a token's columns are q of all heads, then K, then V of all KV heads.

    Attributes:
        head_dim: of Q and K.
        q_norm, k_norm, v_norm: norms of each head before it is rotated; V is not rotated.
        rows: rows of the result per token and KV head, G or more.
        v_head_dim: of V; None: that of K.
        v_scale: factor of V, in the activations' type.
        interleaved: pairs that are rotated are (2i, 2i + 1) instead of (i, i + n).
        query_dtype: if it is given, queries are multiplied by K's scales (`KVCells`) and cut to the range of this type,
            as attention reads them over pages of 8 bits. None: they have the activations' type.
    """

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Rms | None
    k_norm: Rms | None
    v_norm: Rms | None
    rows: int
    v_head_dim: int | None = None
    v_scale: float = 1.0
    interleaved: bool = False
    query_dtype: jnp.dtype | None = None

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def v_size(self) -> int:
        """Numbers of a head of V."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def row(self) -> int:
        """E, numbers per token and KV head in pages: those of K, then those of V."""
        return self.head_dim + self.v_size

    @property
    def columns(self) -> int:
        """Columns of a token's projection."""
        return self.heads * self.head_dim + self.kv_heads * self.row


class HeadWeights(NamedTuple):
    """Weights of the norms of the heads, where the norm has one."""

    q: Float[Array, " D"] | None = None
    k: Float[Array, " D"] | None = None
    v: Float[Array, " V"] | None = None


class KVCells(NamedTuple):
    """Where each token's K and V belong: page and offset in it. A token whose page is ≥ P is dropped.

    Attributes:
        shape: P, L, K, p and E.
        scales: factors of the numbers in pages of 8 bits, of K and of V; None: 1. A number is stored divided by its
            scale, and cut to the range of the pages' type.
    """

    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]
    layer_index: int
    shape: tuple[int, ...]
    scales: Float[Array, "2 K"] | None = None


def scaled(
    norm: Rms,
    wide: Float[Array, "..."],
    inverse: Float[Array, "..."],
    weight: Float[Array, "..."] | None,
    dtype: jnp.dtype,
) -> Float[Array, "..."]:
    """Return numbers times 1 / rms, times the weight that has their shape, rounded to the type as `norm` says."""
    out = wide * inverse
    if weight is None:
        return out.astype(dtype)
    if norm.cast_first:
        return out.astype(dtype) * (norm.offset + weight).astype(dtype)
    return (out * (norm.offset + weight.astype(jnp.float32))).astype(dtype)
