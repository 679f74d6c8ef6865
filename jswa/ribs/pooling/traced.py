"""Pooled hidden states in the jitted step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jswa.ribs.hooks import Hooks, TokenRows
from jswa.ribs.pooling.host import NAME, POOLED
from pallas_kernels.elementwise.sums import Implementation as Sums


class PooledRows(NamedTuple):
    """The final hidden states, after the last norm, of each row: of its last token, and the sum over its tokens."""

    last: Float[Array, "R M"]
    total: Float[Array, "R M"]


def forwarded(
    logits: Callable[[Float[Array, "B M"]], Float[Array, "B V"]],
    hidden: Float[Array, "T M"],
    section: Int[Array, " T"],
    rows: Callable[[], TokenRows],
    block: int,
    devices: int,
    sums: Sums = "xla",
) -> PooledRows:
    """Return the pooled hidden states of each row in float32; arguments as of `hooks.Forwarded`.

    The sum is a product with zeros and ones: it adds in one order on every device, and needs no copy of all hidden
    states in float32. A number that is not finite counts as zero, so that it stays out of other rows; its own row ends
    with an error.
    """
    with jax.named_scope("pooling"):
        owner, last = rows()
        own = owner[None] == jnp.arange(len(last), dtype=jnp.int32)[:, None]
        whole = jnp.where(jnp.isfinite(hidden), hidden, 0)
        total = jnp.dot(own.astype(hidden.dtype), whole, preferred_element_type=jnp.float32)
        return PooledRows(hidden[last].astype(jnp.float32), total)


HOOKS = {POOLED: Hooks({NAME: forwarded})}
