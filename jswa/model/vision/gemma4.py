"""The vision tower of Gemma 4: patches of an image to soft tokens in the width of the text model.

Each patch sees all others of its image, and none of the padding. Positions are learned numbers of each axis, added at
the start, and angles by which each layer turns queries and keys: half of a head by x, the other half by y. Attention is
not scaled. At the end, squares of pooling² patches become one soft token.

Shape letters: N patches with padding, H query heads, K key heads, D numbers of a head, W the width, S soft tokens with
padding, M the text model's width.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8

from jswa.architecture import Norm, Rope
from jswa.model.layers import Normalize, linear, rope_tables, rotate, zeros
from jswa.model.vision.config import VisionConfig
from pallas_kernels.experts.glu import Glu, glu

PADDING = -1  # both positions of a patch that does not belong to the image
QUERIES = 512  # patches whose scores are computed together, at most: those of 1,120 soft tokens would need 5 GB
_Turn = Callable[[Float[Array, "N n D"]], Float[Array, "N n D"]]


class ClippedLinear(nnx.Module):
    """A linear layer; its inputs and outputs are cut to learned bounds if the checkpoint has them."""

    def __init__(self, config: VisionConfig, inputs: int, outputs: int, dtype: jnp.dtype) -> None:
        self.weight = zeros(inputs, outputs, dtype=dtype)
        self.bounds = zeros(4, dtype=dtype) if config.clipped else None  # of inputs, then of outputs

    def __call__(self, x: Float[Array, "N n"]) -> Float[Array, "N m"]:
        """Return x · weight, both cut to their bounds."""
        if self.bounds is None:
            return linear(x, self.weight, None)
        low, high, least, most = self.bounds[...]
        return jnp.clip(linear(jnp.clip(x, low, high), self.weight, None), least, most)


class Attention(nnx.Module):
    """Attention of all patches to all patches; queries, keys and values are normed."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.config = config
        norm, size = _norm(config), config.head_dim
        self.q = ClippedLinear(config, config.width, config.heads * size, dtype)
        self.k = ClippedLinear(config, config.width, config.kv_heads * size, dtype)
        self.v = ClippedLinear(config, config.width, config.kv_heads * size, dtype)
        self.out = ClippedLinear(config, config.heads * size, config.width, dtype)
        self.q_norm, self.k_norm = Normalize(norm, size, dtype), Normalize(norm, size, dtype)
        self.v_norm = Normalize(_norm(config, weighted=False), size, dtype)

    def __call__(self, x: Float[Array, "N W"], turn: _Turn, seen: Bool[Array, " N"]) -> Float[Array, "N W"]:
        """Return the attention output of each patch; `seen` are the patches of the image."""
        heads = partial(jnp.reshape, shape=(len(x), -1, self.config.head_dim))
        q, k = turn(self.q_norm(heads(self.q(x)))), turn(self.k_norm(heads(self.k(x))))
        return self.out(_attended(q, k, self.v_norm(heads(self.v(x))), seen))


def _attended(
    q: Float[Array, "N H D"], k: Float[Array, "N K D"], v: Float[Array, "N K D"], seen: Bool[Array, " N"]
) -> Float[Array, "N n"]:
    """Return the values of the patches that are seen, weighted by each query's scores: H heads of a patch in a row.

    Keys and values are laid out for the products once, not for each part of the queries.
    """
    (count, heads, size), groups = q.shape, k.shape[1]
    parts = -(-count // QUERIES)
    each = -(-count // parts)
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)

    def part(q: Float[Array, "K n D"]) -> Float[Array, "K n D"]:
        scores = jnp.matmul(q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
        return jnp.matmul(weights.astype(v.dtype), values)

    q = jnp.pad(q, ((0, parts * each - count), (0, 0), (0, 0))).reshape(parts, each, groups, -1, size)
    out = lax.map(part, q.swapaxes(1, 2).reshape(parts, groups, -1, size)).reshape(parts, groups, each, -1, size)
    rows: Float[Array, "N n"] = out.swapaxes(1, 2).reshape(parts * each, heads * size)[:count]
    return rows


class Layer(nnx.Module):
    """A layer, with norms before and after attention and feed-forward."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.unit = Glu(config.activation)
        norm, width = _norm(config), config.width
        self.pre_attn, self.post_attn = Normalize(norm, width, dtype), Normalize(norm, width, dtype)
        self.pre_mlp, self.post_mlp = Normalize(norm, width, dtype), Normalize(norm, width, dtype)
        self.attention = Attention(config, dtype)
        self.gate = ClippedLinear(config, config.width, config.mlp, dtype)
        self.up = ClippedLinear(config, config.width, config.mlp, dtype)
        self.down = ClippedLinear(config, config.mlp, config.width, dtype)

    def __call__(self, x: Float[Array, "N W"], positions: Int[Array, "N 2"]) -> Float[Array, "N W"]:
        """Return the hidden states after the layer; positions as of `Tower`."""
        turn, seen = _turning(self.attention.config, positions), positions[:, 0] != PADDING
        x = x + self.post_attn(self.attention(self.pre_attn(x), turn, seen))
        read = self.pre_mlp(x)
        return x + self.post_mlp(self.down(glu(self.unit, self.gate(read), self.up(read))))


class Tower(nnx.Module):
    """The tower, and the projection of its soft tokens to the width of the text model.

    It is called in parts, between which others may use the device: `enter`, each of `blocks`, `leave`.

    Shapes: patches [N, P], the numbers of each patch's pixels; positions [N, 2], x and y of each patch, `PADDING` of
    padding, whose patches do not matter. The patches of an image are a whole rectangle, whose sides are multiples of
    `pooling`, in any order.
    """

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.config, self.dtype, width = config, dtype, config.width
        self.pixels = zeros(3 * config.patch**2, width, dtype=dtype)
        self.places = zeros(2, config.positions, width, dtype=dtype)  # of x and of y
        self.blocks = nnx.List([Layer(config, dtype) for _ in range(config.layers)])
        self.shift = zeros(width, dtype=dtype) if config.standardize else None
        self.factor = zeros(width, dtype=dtype) if config.standardize else None
        self.norm = Normalize(_norm(config, weighted=False), width, dtype)
        self.project = zeros(width, config.out, dtype=dtype)

    def enter(self, patches: UInt8[Array, "N P"], positions: Int[Array, "N 2"]) -> Float[Array, "N W"]:
        """Return the hidden states before the first layer."""
        places = jnp.maximum(positions, 0)
        numbers = 2 * (patches.astype(jnp.float32) / 255) - 1
        x = linear(numbers.astype(self.dtype), self.pixels, None)
        return x + self.places[0, places[:, 0]] + self.places[1, places[:, 1]]

    def leave(self, x: Float[Array, "N W"], positions: Int[Array, "N 2"]) -> Float[Array, "S M"]:
        """Return the soft tokens of an image, row by row from its top left; S = N / pooling².

        Those after the image's last are of no use.
        """
        seen, places = positions[:, 0] != PADDING, jnp.maximum(positions, 0)
        pooled = _pooled(jnp.where(seen[:, None], x.astype(jnp.float32), 0), places, self.config.pooling)
        pooled = pooled * math.sqrt(self.config.width)
        if self.shift is not None and self.factor is not None:
            shift, factor = (one[...].astype(jnp.float32)[None] for one in (self.shift, self.factor))
            pooled = (pooled - shift) * factor
        return linear(self.norm(pooled.astype(self.dtype)), self.project, None)


def _norm(config: VisionConfig, *, weighted: bool = True) -> Norm:
    return Norm(config.eps, cast_first=False, weighted=weighted)


def _turning(config: VisionConfig, positions: Int[Array, "N 2"]) -> _Turn:
    """Return a function that turns the first half of each head by x, the second by y."""
    half = config.head_dim // 2
    rope = Rope(tuple((config.theta ** -(np.arange(0, half, 2) / half)).tolist()))
    of_x, of_y = (rope_tables({rope}, positions[:, axis]) for axis in (0, 1))

    def turn(x: Float[Array, "N n D"]) -> Float[Array, "N n D"]:
        return jnp.concatenate([rotate(x[..., :half], rope, of_x), rotate(x[..., half:], rope, of_y)], axis=-1)

    return turn


def _pooled(x: Float32[Array, "N W"], places: Int[Array, "N 2"], pooling: int) -> Float32[Array, "S W"]:
    """Return the mean of each square of pooling² patches. Rows of padding must be 0.

    A product in whole float32, because sums of scattered rows have no fixed order on a GPU.
    """
    across = (places[:, 0].max() + 1) // pooling
    square = places // pooling
    of_token = square[:, 0] + across * square[:, 1]
    shares = jax.nn.one_hot(of_token, len(x) // pooling**2, axis=0, dtype=jnp.float32) / pooling**2
    return jnp.matmul(shares, x, precision=lax.Precision.HIGHEST)
