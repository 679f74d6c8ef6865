"""Gemma 3n's parallel residual streams (AltUp, arXiv 2301.13310); the per-layer embedding of Gemma 3n and Gemma 4."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jswa.architecture import AltUp, Norm, PerLayerInput
from jswa.model.layers import Normalize, linear, zeros
from pallas_kernels.experts.glu import activate

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
    """First and last step of AltUp: one stream becomes S streams and back, by S - 1 matrices [M, M] each way."""

    def __init__(self, config: AltUp, d_model: int, dtype: jnp.dtype) -> None:
        self.begin = zeros(config.streams - 1, d_model, d_model, dtype=dtype)
        self.end = zeros(config.streams - 1, d_model, d_model, dtype=dtype)

    def split(self, x: Float[Array, "T M"]) -> Float[Array, "T S M"]:
        """Return x as the first stream, and projections of x, scaled to its magnitude, as the others."""
        return jnp.concatenate([x[:, None], _as_large_as(x[:, None], self._project(x[:, None], self.begin))], axis=1)

    def join(self, x: Float[Array, "T S M"]) -> Float[Array, "T M"]:
        """Return the mean of the first stream and of projections of the others, scaled to its magnitude."""
        others = _as_large_as(x[:, :1], self._project(x[:, 1:], self.end))
        return jnp.concatenate([x[:, :1], others], axis=1).mean(axis=1)

    def _project(self, x: Float[Array, "T n M"], weight: nnx.Param[Array]) -> Float[Array, "T s M"]:
        wide = jnp.broadcast_to(x, (len(x), weight.shape[0], x.shape[2]))
        return jnp.einsum("tsm,smn->tsn", wide, weight[...])


class StreamLayer(nnx.Module):
    """One layer's prediction and correction of the streams, and its low-rank branch (LAuReL, arXiv 2411.07501)."""

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
        mix = (self._modalities(x[:, self.config.active]) @ self.predict_by[...]).reshape(-1, n, n)
        return x + jnp.einsum("tjk,tkm->tjm", mix, x)

    def correct(self, predicted: Float[Array, "T S M"], result: Float[Array, "T M"]) -> Float[Array, "T S M"]:
        """Return the streams, each corrected by its share of the active stream's prediction error."""
        share = self._modalities(result) @ self.correct_by[...] + 1
        return predicted + share[:, :, None] * (result - predicted[:, self.config.active])[:, None]

    def mix(self, x: Float[Array, "T S M"], per_layer: PerLayerMix, own: Float[Array, "T P"]) -> Float[Array, "T S M"]:
        """Add the per-layer embedding, gated by the active stream, to all streams but the first."""
        first = x[:, self.config.active]
        if self.config.corrects_scale:
            first = first * self.output_scale[...][None]
        return jnp.concatenate([x[:, :1], x[:, 1:] + per_layer(first, own)[:, None]], axis=1)

    def laurel(self, x: Float[Array, "T M"]) -> Float[Array, "T M"]:
        """Return x plus a low-rank projection of x."""
        return x + self.laurel_norm((x @ self.laurel_left[...]) @ self.laurel_right[...])

    def _modalities(self, x: Float[Array, "T M"]) -> Float[Array, "T S"]:
        scaled = self.router_norm(x) * jnp.asarray(1 / x.shape[-1], x.dtype)
        return jnp.tanh((scaled @ self.router[...]).astype(jnp.float32)).astype(x.dtype)


def _as_large_as(target: Float[Array, "T 1 M"], x: Float[Array, "T s M"]) -> Float[Array, "T s M"]:
    """Return x scaled to the root mean square of the target."""
    wide = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
    goal = jnp.sqrt(jnp.square(target.astype(jnp.float32)).mean(axis=-1, keepdims=True))
    return x * (goal / jnp.sqrt(jnp.maximum(wide, _LEAST_MAGNITUDE))).astype(x.dtype)
