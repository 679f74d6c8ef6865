"""Gemma 3n's parallel residual streams (AltUp, arXiv 2301.13310); the per-layer embedding of Gemma 3n and Gemma 4."""

from functools import reduce
from operator import add
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import AltUp, Norm, PerLayerInput
from jswa.forms.matrix import plain_of
from jswa.model.layers import Normalize, linear, zeros
from pallas_kernels.cpu.experts import grouped_products
from pallas_kernels.elementwise.sums import Implementation as Sums
from pallas_kernels.elementwise.sums import apart, row_means
from pallas_kernels.experts.glu import activate
from pallas_kernels.experts.groups import Groups

_LEAST_MAGNITUDE = 1e-5


class PerLayerEmbedding(nnx.Module):
    """Mean of a second embedding table [V', L·P] and a projection [M, L·P] of the ordinary embedding."""

    def __init__(self, config: PerLayerInput, layers: int, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        self.embed = zeros(config.vocab_size, layers * config.dim, dtype=dtype)
        self.project = zeros(d_model, layers * config.dim, dtype=dtype)
        self.norm = Normalize(config.norm, config.dim, dtype)

    def __call__(self, tokens: Int[Array, " T"], x: Float[Array, "T M"]) -> Float[Array, "T L P"]:
        """Return the numbers that each layer mixes in; x is the scaled ordinary embedding of the tokens."""
        config, embed = self.config, self.embed[...]
        own = embed[jnp.where(tokens < config.vocab_size, tokens, 0)] * jnp.asarray(config.dim**0.5, embed.dtype)
        projected = linear(x, self.project, None) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        projected = self.norm(projected.reshape(len(tokens), -1, config.dim))
        return (projected + own.reshape(projected.shape)) * jnp.asarray(2**-0.5, x.dtype)


class PerLayerMix(nnx.Module):
    """One layer's use of the per-layer embedding: norm(project(act(gate(x)) · own))."""

    def __init__(self, config: PerLayerInput, norm: Norm, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        self.gate = zeros(d_model, config.dim, dtype=dtype)
        self.project = zeros(config.dim, d_model, dtype=dtype)
        self.norm = Normalize(norm, d_model, dtype)

    def __call__(self, x: Float[Array, "T M"], own: Float[Array, "T P"]) -> Float[Array, "T M"]:
        """Return the summand of the residual stream x; `own` is this layer's per-layer embedding."""
        gated = activate(self.config.activation, linear(x, self.gate, None)) * own
        return self.norm(linear(gated, self.project, None))


class Streams(nnx.Module):
    """First and last step of AltUp: one stream becomes S streams and back, by S - 1 matrices [M, M] each way.

    Attributes:
        sums: the implementation of sums along rows, and over streams.
    """

    sums: Sums = "xla"

    def __init__(self, config: AltUp, d_model: int, dtype: jnp.dtype) -> None:
        self.others = config.streams - 1
        self.begin = zeros(self.others, d_model, d_model, dtype=dtype)
        self.end = zeros(self.others, d_model, d_model, dtype=dtype)

    def split(self, x: Float[Array, "T M"]) -> Float[Array, "T S M"]:
        """Return x as the first stream, and projections of x, scaled to its magnitude, as the others."""
        others = _as_large_as(x[:, None], self._project(x[:, None], self.begin), self.sums)
        return jnp.concatenate([x[:, None], others], axis=1)

    def join(self, x: Float[Array, "T S M"]) -> Float[Array, "T M"]:
        """Return the mean of the first stream and of projections of the others, scaled to its magnitude."""
        others = _as_large_as(x[:, :1], self._project(x[:, 1:], self.end), self.sums)
        streams = jnp.concatenate([x[:, :1], others], axis=1)
        if self.sums == "xla":
            return streams.mean(axis=1)
        wide = streams.astype(jnp.float32)
        total: Array = reduce(add, (wide[:, stream] for stream in range(wide.shape[1])))
        return (total / wide.shape[1]).astype(x.dtype)

    def _project(self, x: Float[Array, "T n M"], weight: nnx.Param[Array]) -> Float[Array, "T s M"]:
        held: Any = weight.get_value()
        matrices = plain_of(held)
        if matrices is not None:
            wide = jnp.broadcast_to(x, (len(x), len(matrices), x.shape[2]))
            return jnp.einsum("tsm,smn->tsn", wide, matrices)
        tokens, count = len(x), self.others
        rows = jnp.broadcast_to(x, (tokens, count, x.shape[2])).swapaxes(0, 1).reshape(count * tokens, -1)
        groups = Groups(tokens * jnp.arange(count, dtype=jnp.int32), jnp.full(count, tokens, jnp.int32))
        return grouped_products(rows, held, groups, None).reshape(count, tokens, -1).swapaxes(0, 1)


class StreamLayer(nnx.Module):
    """One layer's prediction and correction of the streams, and its low-rank branch (LAuReL, arXiv 2411.07501).

    Attributes:
        sums: the implementation of sums over streams.
    """

    sums: Sums = "xla"

    def __init__(self, config: AltUp, norm: Norm, d_model: int, dtype: jnp.dtype) -> None:
        self.config = config
        n, rank = config.streams, config.laurel_rank
        self.router = zeros(d_model, n, dtype=dtype)
        self.router_norm = Normalize(norm, d_model, dtype)
        self.predict_by = zeros(n, n * n, dtype=dtype)
        self.correct_by = zeros(n, n, dtype=dtype)
        self.output_scale = zeros(d_model, dtype=dtype)
        self.laurel_left = zeros(d_model, rank, dtype=dtype)
        self.laurel_right = zeros(rank, d_model, dtype=dtype)
        self.laurel_norm = Normalize(norm, d_model, dtype)

    def predict(self, x: Float[Array, "T S M"]) -> Float[Array, "T S M"]:
        """Return every stream plus a mix of all streams, with weights computed from the active stream."""
        n = self.config.streams
        mix = linear(self._modalities(x[:, self.config.active]), self.predict_by, None).reshape(-1, n, n)
        if self.sums == "xla":
            return x + jnp.einsum("tjk,tkm->tjm", mix, x)
        # Each product is rounded before it is added: XLA does both at once in some loops.
        wide, shares = x.astype(jnp.float32), mix.astype(jnp.float32)
        products = (apart(shares[:, :, stream, None] * wide[:, None, stream], self.sums) for stream in range(n))
        mixed: Array = reduce(add, products)
        return apart(x + mixed.astype(x.dtype), self.sums)

    def correct(self, predicted: Float[Array, "T S M"], result: Float[Array, "T M"]) -> Float[Array, "T S M"]:
        """Return the streams, each corrected by its share of the active stream's prediction error."""
        share = linear(self._modalities(result), self.correct_by, None) + 1
        error = (result - predicted[:, self.config.active])[:, None]
        return apart(predicted + apart(share[:, :, None] * error, self.sums), self.sums)

    def mix(self, x: Float[Array, "T S M"], per_layer: PerLayerMix, own: Float[Array, "T P"]) -> Float[Array, "T S M"]:
        """Add the per-layer embedding, gated by the active stream, to all streams but the first."""
        first = x[:, self.config.active]
        if self.config.corrects_scale:
            first = apart(first * self.output_scale[...][None], self.sums)
        mixed = apart(x[:, 1:] + apart(per_layer(first, own), self.sums)[:, None], self.sums)
        return jnp.concatenate([x[:, :1], mixed], axis=1)

    def laurel(self, x: Float[Array, "T M"]) -> Float[Array, "T M"]:
        """Return x plus a low-rank projection of x."""
        return x + self.laurel_norm(linear(linear(x, self.laurel_left, None), self.laurel_right, None))

    def _modalities(self, x: Float[Array, "T M"]) -> Float[Array, "T S"]:
        scaled = self.router_norm(x) * jnp.asarray(1 / x.shape[-1], x.dtype)
        return jnp.tanh(linear(scaled, self.router, None).astype(jnp.float32)).astype(x.dtype)


def _as_large_as(target: Float[Array, "T 1 M"], x: Float[Array, "T s M"], sums: Sums) -> Float[Array, "T s M"]:
    """Return x scaled to the root mean square of the target."""
    wide = row_means(jnp.square(x.astype(jnp.float32)), sums)
    goal = apart(jnp.sqrt(row_means(jnp.square(target.astype(jnp.float32)), sums)), sums)
    return apart(x * (goal / apart(jnp.sqrt(jnp.maximum(wide, _LEAST_MAGNITUDE)), sums)).astype(x.dtype), sums)
