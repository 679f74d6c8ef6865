"""Split keys: how many thread blocks share a row's keys, and how their results become one."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def splits(blocks: int, units: int, capacity: int) -> int:
    """Return the number of thread blocks that share each unit of work: 1 for small windows, else enough for the GPU.

    The rule of FlashAttention 3 (hopper/heuristics.h): do not split units of at most four blocks of keys, nor units
    that fill most of the GPU anyway. Otherwise take the smallest number within 85 % of the best use of whole waves. It
    depends on shapes alone, so a row's result does not depend on the load.

    Args:
        blocks: blocks of keys that a unit touches at most.
        units: units of work; each needs one thread block or more.
        capacity: thread blocks that the GPU runs at once.
    """
    if blocks <= 4 or units >= 0.8 * capacity:
        return 1

    def use(count: int) -> float:
        waves = units * count / capacity
        return waves / -(-units * count // capacity)

    choices = range(1, min(blocks // 2, 64) + 1)
    best = max(use(count) for count in choices)
    return next(count for count in choices if use(count) >= 0.85 * best)


def combine(parts: Float[Array, "splits ... V"], lse: Float[Array, "splits ..."]) -> Float[Array, "... V"]:
    """Return the softmax over all splits, from the softmax over each and the base-2 logarithm of its sum."""
    weights = jnp.exp2(lse - lse.max(axis=0, keepdims=True))
    out: Array = (parts * weights[..., None]).sum(axis=0) / weights.sum(axis=0)[..., None]
    return out
