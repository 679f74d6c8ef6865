"""Products with weights of few bits on XLA, without a copy of all of them in the type of the product."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_BLOCK = 512  # outputs


def blocked[W](
    x: Float[Array, "T K"],
    weights: W,
    dequantized: Callable[[W, jnp.dtype], Float[Array, "_ _"]],
    dtype: jnp.dtype | None = None,
    *,
    by_row: bool = False,
) -> Float[Array, "T C"]:
    """Return x · weights in `dtype`, or x's. XLA on CPU gets a block of outputs at a time: it never holds all weights.

    Args:
        weights: the arrays of a matrix. The last axis of each that has two is the outputs'.
        dequantized: returns them in a type: [K, C].
        by_row: the first axis is the outputs' instead, also of what `dequantized` returns.
    """
    axis = 0 if by_row else 1

    def product(x: Float[Array, "T K"], weights: W) -> Float[Array, "T C"]:
        wide = dequantized(weights, x.dtype)
        if dtype is None and not by_row:
            return x @ wide
        return lax.dot_general(x, wide, (((1,), (1 - axis,)), ((), ())), preferred_element_type=dtype)

    def in_blocks(x: Float[Array, "T K"], weights: W) -> Float[Array, "T C"]:
        outputs = next(part.shape[axis] for part in jax.tree.leaves(weights) if part.ndim == 2)
        size = min(_BLOCK, outputs)

        def block(index: Array, out: Float[Array, "T C"]) -> Float[Array, "T C"]:
            # If the outputs are no multiple, the last block overlaps the one before, and writes the same numbers again.
            start = jnp.minimum(index * size, outputs - size)

            def cut(part: Array) -> Array:
                return part if part.ndim == 1 else lax.dynamic_slice_in_dim(part, start, size, axis=axis)

            return lax.dynamic_update_slice_in_dim(out, product(x, jax.tree.map(cut, weights)), start, axis=1)

        empty = jnp.zeros((len(x), outputs), dtype or x.dtype)
        out: Array = lax.fori_loop(0, -(-outputs // size), block, empty)
        return out

    out: Array = lax.platform_dependent(x, weights, cpu=in_blocks, default=product)
    return out
