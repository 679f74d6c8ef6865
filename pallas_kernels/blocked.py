"""Products with weights of few bits on XLA, without a copy of all of them in the type of the product."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_BLOCK = 512  # columns


def blocked[W](
    x: Float[Array, "T K"], weights: W, dequantized: Callable[[W, jnp.dtype], Float[Array, "K C"]]
) -> Float[Array, "T C"]:
    """Return x · weights in x's type. XLA on CPU gets a block of columns at a time, so it never holds all weights.

    Args:
        weights: the arrays of a matrix. The last axis of each that has two is the outputs'.
        dequantized: returns them in a type.
    """

    def product(x: Float[Array, "T K"], weights: W) -> Float[Array, "T C"]:
        return x @ dequantized(weights, x.dtype)

    def in_blocks(x: Float[Array, "T K"], weights: W) -> Float[Array, "T C"]:
        columns = next(part.shape[1] for part in jax.tree.leaves(weights) if part.ndim == 2)
        size = min(_BLOCK, columns)

        def block(index: Array, out: Float[Array, "T C"]) -> Float[Array, "T C"]:
            # If the columns are no multiple, the last block overlaps the one before, and writes the same numbers again.
            start = jnp.minimum(index * size, columns - size)

            def cut(part: Array) -> Array:
                return part if part.ndim == 1 else lax.dynamic_slice_in_dim(part, start, size, axis=1)

            return lax.dynamic_update_slice_in_dim(out, product(x, jax.tree.map(cut, weights)), start, axis=1)

        out: Array = lax.fori_loop(0, -(-columns // size), block, jnp.zeros((len(x), columns), x.dtype))
        return out

    out: Array = lax.platform_dependent(x, weights, cpu=in_blocks, default=product)
    return out
