"""`residual_norms` and `rotate_and_write`: what lies between products and attention, in one call each.

A result of a product may come as partial sums, which the calls add: a product of few tokens is split along its inputs
so that it occupies all multiprocessors, and adding the parts would be one more kernel.

Shape letters: S parts, T tokens, M the model's width, N columns, H query heads, K KV heads, D head size of Q and K, V
head size of V, n = half of the rotated dimensions, G query heads per KV head, P pages, L layers that share a page, p
tokens per page, E = D + V.
"""

from typing import get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels import Elementwise
from pallas_kernels.elementwise import xla
from pallas_kernels.elementwise.arguments import Heads, HeadWeights, Join, KVCells, Pairs, Parts
from pallas_kernels.errors import NoElementwiseKernel

Implementation = Elementwise


def residual_norms(
    branch: Parts | Pairs,
    x: Float[Array, "T M"],
    join: Join,
    *,
    post_weight: Float[Array, " M"] | None = None,
    pre_weight: Float[Array, " M"] | None = None,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T M"], Float[Array, "T M"]]:
    """Return y = keep · x + add · post(branch), and pre(y), which is y if there is no such norm.

    Raises:
        NoElementwiseKernel: the implementation cannot serve these shapes or types.
        ValueError: there is no such implementation.
    """
    if _checked(implementation) == "xla":
        return xla.residual_norms(branch, x, join, post_weight, pre_weight)
    if implementation == "cpu":
        from pallas_kernels.cpu import elementwise as cpu

        whole = branch if isinstance(branch, Parts) else Parts(xla.summed(branch, x.dtype)[None])
        return cpu.residual_norms(whole.values, whole.bias, x, join, post_weight, pre_weight)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NoElementwiseKernel(f"{x.dtype}: must be bfloat16 or float16 for elementwise=mosaic")
    from pallas_kernels.elementwise.hopper import norms  # loads Mosaic's compiler

    out: tuple[Array, Array] = norms.residual_norms(branch, x, join, post_weight, pre_weight)
    return out


def rotate_and_write(
    qkv: Parts,
    kv: Shaped[Array, "..."],
    heads: Heads,
    weights: HeadWeights,
    rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None,
    cells: KVCells,
    dtype: jnp.dtype,
    *,
    temperature: Float[Array, " T"] | None = None,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "..."]]:
    """Norm and rotate a projection's heads, write K and V to their cells, and return the queries and the pages.

    The queries are those of each KV head side by side; rows beyond G may hold anything, NaN too. The pages are
    updated in place if the caller donates them.

    Args:
        kv: the pages [P, L, K, p, E], or an array of another shape that holds the same numbers, as a lane does. In
            pages of 8 bits numbers are stored as `KVCells.scales` says.
        rope: cos and sin of each token's angles, or None: nothing is rotated.
        dtype: of the activations.
        temperature: factor of each token's queries, applied in float32.

    Raises:
        NoElementwiseKernel: the implementation cannot serve these shapes or types.
        ValueError: there is no such implementation, or pages that have not 8 bits have scales.
    """
    if cells.scales is not None and kv.dtype.itemsize > 1:
        raise ValueError(f"scales are for pages of 8 bits, and these are {kv.dtype}")
    if _checked(implementation) == "cpu":
        from pallas_kernels.cpu import elementwise as cpu

        given = qkv.values, qkv.bias, kv, heads, weights, rope, cells, jnp.dtype(dtype), temperature
        return cpu.rotate_and_write(*given)
    q, pages = _in_pages(implementation, qkv, kv.reshape(cells.shape), heads, weights, rope, cells, dtype, temperature)
    return q, pages.reshape(kv.shape)


def _in_pages(
    implementation: Implementation,
    qkv: Parts,
    kv: Shaped[Array, "P L K p E"],
    heads: Heads,
    weights: HeadWeights,
    rope: tuple[Float[Array, "T n"], Float[Array, "T n"]] | None,
    cells: KVCells,
    dtype: jnp.dtype,
    temperature: Float[Array, " T"] | None,
) -> tuple[Float[Array, "T K R D"], Shaped[Array, "P L K p E"]]:
    given = (qkv.values, qkv.bias, kv, heads, weights, rope, cells, jnp.dtype(dtype), temperature)
    if implementation == "xla":
        return xla.rotate_and_write(*given)
    if dtype not in (jnp.bfloat16, jnp.float16) or kv.dtype not in (dtype, jnp.float8_e4m3fn):
        limit = "must be bfloat16 or float16 for elementwise=mosaic, and pages the same or float8_e4m3fn"
        raise NoElementwiseKernel(f"{dtype}, pages of {kv.dtype}: {limit}")
    if kv.shape[-1] != heads.row:
        raise NoElementwiseKernel(f"{kv.shape[-1]} numbers per token in pages: must be {heads.row} for mosaic")
    from pallas_kernels.elementwise.hopper import rope as hopper  # loads Mosaic's compiler

    return hopper.rotate_and_write(*given)


def _checked(implementation: Implementation) -> Implementation:
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation = {implementation!r}: must be one of {sorted(get_args(Implementation))}")
    return implementation
