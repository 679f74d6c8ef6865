"""What lives on the device between steps, and is donated to each."""

from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jswa.cache.layout import KVLayout
from jswa.config import Limits
from jswa.exec.extras import Extras, init_extras


class DeviceState(TypedDict):
    """Donated to every step; the runner alone holds it. Indexed by row slot where it says [max_rows].

    Attributes:
        lanes: KV arena, one array `[1, num_blocks, block_elems]` per lane; block 0 stays zero.
        full_table, local_table: page id by absolute page position; entries of pages no longer held are stale.
        last_token: the token sampled last.
        extras: counts, biases and masks of the rows that need them.
    """

    lanes: list[Float[Array, "1 blocks elems"]]
    full_table: Int[Array, "max_rows N"]
    local_table: Int[Array, "max_rows N"]
    last_token: Int[Array, " max_rows"]
    extras: Extras


def init_state(layout: KVLayout, limits: Limits, vocab: int, dtype: jnp.dtype) -> DeviceState:
    """The state of an engine that has run nothing yet."""
    lane, table = (1, limits.num_blocks, layout.block_elems), (limits.max_rows, limits.pages_per_row)
    return DeviceState(
        lanes=[jnp.zeros(lane, dtype) for _ in range(layout.num_lanes)],
        full_table=jnp.zeros(table, jnp.int32),
        local_table=jnp.zeros(table, jnp.int32),
        last_token=jnp.zeros(limits.max_rows, jnp.int32),
        extras=init_extras(limits.extras_places, vocab),
    )


def state_shapes(layout: KVLayout, limits: Limits, vocab: int, dtype: jnp.dtype) -> DeviceState:
    """The same with a `jax.ShapeDtypeStruct` for each array; nothing is allocated."""
    shapes: DeviceState = jax.eval_shape(lambda: init_state(layout, limits, vocab, dtype))
    return shapes


def state_bytes(state: DeviceState) -> int:
    """Bytes of all arrays of the state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
