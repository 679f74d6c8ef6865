"""What lives on the device between steps, and is donated to each."""

from typing import TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jswa.cache.layout import KVLayout
from jswa.config import Limits


class DeviceState(TypedDict):
    """Donated to every step; the runner alone holds it. Indexed by row slot where it says [max_rows].

    Attributes:
        lanes: KV arena, one array `[1, num_blocks, block_elems]` per lane; block 0 stays zero.
        full_table, local_table: page id by absolute page position. Entries of pages that a row no longer holds are stale.
        last_token: the token sampled last.
    """

    lanes: list[Float[Array, "1 blocks elems"]]
    full_table: Int[Array, "max_rows N"]
    local_table: Int[Array, "max_rows N"]
    last_token: Int[Array, " max_rows"]


def state_shapes(layout: KVLayout, limits: Limits, dtype: jnp.dtype) -> DeviceState:
    """Shapes of the state, as `jax.ShapeDtypeStruct`s."""
    lane = jax.ShapeDtypeStruct((1, limits.num_blocks, layout.block_elems), dtype)
    table = jax.ShapeDtypeStruct((limits.max_rows, limits.pages_per_row), jnp.int32)
    return DeviceState(
        lanes=[lane] * layout.num_lanes,  # type: ignore[list-item]  # a shape stands for its array
        full_table=table,  # type: ignore[typeddict-item]
        local_table=table,  # type: ignore[typeddict-item]
        last_token=jax.ShapeDtypeStruct((limits.max_rows,), jnp.int32),  # type: ignore[typeddict-item]
    )


def init_state(layout: KVLayout, limits: Limits, dtype: jnp.dtype) -> DeviceState:
    """The state of an engine that has run nothing yet."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), state_shapes(layout, limits, dtype))


def state_bytes(state: DeviceState) -> int:
    """Bytes of all arrays of the state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
