"""Elementwise operations as XLA compiles them: the reference of the kernels, in the activations' type or in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.attention.api import write_kv
from pallas_kernels.elementwise.arguments import Heads, HeadWeights, Join, KVCells, Pairs, Parts, Rms, scaled
from pallas_kernels.quantized import cut


def total(values: Float[Array, "S T N"], bias: Float[Array, " N"] | None, dtype: jnp.dtype) -> Float[Array, "T N"]:
    """Return the result of a product from its parts."""
    out = (values[0] if len(values) == 1 else values.astype(jnp.float32).sum(axis=0)).astype(dtype)
    return out if bias is None else out + bias[None]


def normed(norm: Rms | None, x: Float[Array, "... D"], weight: Float[Array, " D"] | None) -> Float[Array, "... D"]:
    """Return the norm of the last axis, or x if there is none."""
    if norm is None:
        return x
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + norm.eps)
    spread = None if weight is None else weight.reshape(*[1] * (x.ndim - 1), -1)
    return scaled(norm, wide, inverse, spread, x.dtype)


def summed(branch: Parts | Pairs, dtype: jnp.dtype) -> Float[Array, "T N"]:
    """Return a branch from its parts, or from the results of its experts."""
    if isinstance(branch, Parts):
        return total(branch.values, branch.bias, dtype)
    rows = branch.values.at[branch.rows].get(mode="promise_in_bounds").astype(jnp.float32)
    total_of = (rows if branch.weights is None else rows * branch.weights[:, :, None]).sum(axis=1)
    return (total_of if branch.shared is None else total_of + branch.shared.astype(jnp.float32).sum(axis=0)).astype(
        dtype
    )


def residual_norms(
    branch: Parts | Pairs,
    x: Float[Array, "T M"],
    join: Join,
    post_weight: Float[Array, " M"] | None,
    pre_weight: Float[Array, " M"] | None,
) -> tuple[Float[Array, "T M"], Float[Array, "T M"]]:
    """See `api.residual_norms`."""
    added = normed(join.post, summed(branch, x.dtype), post_weight)
    kept = x if join.keep == 1.0 else x * jnp.asarray(join.keep, x.dtype)
    y = kept + (added if join.add == 1.0 else added * jnp.asarray(join.add, x.dtype))
    return y, normed(join.pre, y, pre_weight)


def rotate_and_write(
    values: Float[Array, "S T N"],
    bias: Float[Array, " N"] | None,
    kv: Shaped[Array, "P L K p E"],
    heads: Heads,
    weights: HeadWeights,
    rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None,
    cells: KVCells,
    dtype: jnp.dtype,
    temperature: Float[Array, " T"] | None,
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "P L K p E"]]:
    """See `api.rotate_and_write`."""
    tokens, k = values.shape[1], heads.kv_heads
    keys_from, values_from = heads.heads * heads.head_dim, (heads.heads + k) * heads.head_dim
    rows = total(values, bias, dtype)
    q = rows[:, :keys_from].reshape(tokens, heads.heads, heads.head_dim)
    q = _rotated(normed(heads.q_norm, q, weights.q), rope, interleaved=heads.interleaved)
    if temperature is not None:
        q = (q.astype(jnp.float32) * temperature[:, None, None]).astype(dtype)
    keys = normed(heads.k_norm, rows[:, keys_from:values_from].reshape(tokens, k, heads.head_dim), weights.k)
    keys = _rotated(keys, rope, interleaved=heads.interleaved)
    own = normed(heads.v_norm, rows[:, values_from:].reshape(tokens, k, heads.v_size), weights.v)
    own = own if heads.v_scale == 1.0 else own * jnp.asarray(heads.v_scale, dtype)
    both = jnp.concatenate([keys, own], axis=-1)
    pages = write_kv(
        kv,
        both,
        pages=cells.pages,
        offsets=cells.offsets,
        layer_index=cells.layer_index,
        kv_scales=cells.scales,
        v_dim=heads.v_size,
    )
    q = q.reshape(len(q), k, heads.group, heads.head_dim)
    if heads.query_dtype is not None:
        wide = q.astype(jnp.float32)
        q = cut(wide if cells.scales is None else wide * cells.scales[0][None, :, None, None], heads.query_dtype)
    return jnp.pad(q, ((0, 0), (0, 0), (0, heads.rows - heads.group), (0, 0))), pages


def _rotated(
    x: Float[Array, "T N D"], rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None, *, interleaved: bool
) -> Float[Array, "T N D"]:
    """Rotate the pairs of the first 2n numbers of each head in float32."""
    if rope is None:
        return x
    cos, sin = (table[:, None] for table in rope)
    size = 2 * cos.shape[-1]
    wide = x[..., :size].astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(wide.shape)
    else:
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., size:]], axis=-1)
