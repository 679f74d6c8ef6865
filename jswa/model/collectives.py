"""Reductions over the devices that share a model; on one device they are nothing at all.

Inside of `jax.shard_map` over a mesh with the axis `AXIS` only, where `devices` says its size.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

AXIS = "tp"


def total(x: Shaped[Array, "..."], devices: int) -> Shaped[Array, "..."]:
    """The sum over devices."""
    return x if devices == 1 else lax.psum(x, AXIS)  # type: ignore[no-untyped-call]


def largest(x: Shaped[Array, "..."], devices: int) -> Shaped[Array, "..."]:
    """The largest of all devices."""
    return x if devices == 1 else lax.pmax(x, AXIS)  # type: ignore[no-untyped-call]


def everywhere(x: Bool[Array, "..."], devices: int) -> Bool[Array, "..."]:
    """Whether it is so on all devices."""
    return x if devices == 1 else total((~x).astype(jnp.int32), devices) == 0


def anywhere(x: Bool[Array, "..."], devices: int) -> Bool[Array, "..."]:
    """Whether it is so on some device."""
    return x if devices == 1 else total(x.astype(jnp.int32), devices) > 0


def first_of(size: int, devices: int) -> Int[Array, ""] | int:
    """Where this device's share begins of what all hold, `size` each."""
    return 0 if devices == 1 else lax.axis_index(AXIS) * size


def own_columns(x: Shaped[Array, "R V"], devices: int) -> Shaped[Array, "R v"]:
    """This device's share of what it has all of."""
    size = x.shape[1] // devices
    return x if devices == 1 else lax.dynamic_slice_in_dim(x, first_of(size, devices), size, axis=1)


def index_of_largest(x: Shaped[Array, "R v"], devices: int) -> Int[Array, " R"]:
    """`argmax` over the columns of all devices; ties go to the first. Anything where there is NaN."""
    index = jnp.argmax(x, axis=-1).astype(jnp.int32)
    if devices == 1:
        return index
    most, size = x.max(axis=-1), x.shape[1]
    found = jnp.where(most == largest(most, devices), index + first_of(size, devices), size * devices)
    first: Int[Array, " R"] = lax.pmin(found, AXIS)  # type: ignore[no-untyped-call]
    return first


def picked(x: Shaped[Array, "N v"], ids: Int[Array, " N"], devices: int) -> Shaped[Array, "N 1"]:
    """A column of each row, by its number among the columns of all devices."""
    if devices == 1:
        return jnp.take_along_axis(x, ids[:, None], axis=-1)
    index = ids - first_of(x.shape[1], devices)
    mine = (index >= 0) & (index < x.shape[1])
    own = jnp.take_along_axis(x, jnp.where(mine, index, 0)[:, None], axis=-1)
    return total(jnp.where(mine[:, None], own, 0), devices)


def own_rows(
    look_up: Callable[[Int[Array, " T"]], Shaped[Array, "T M"]], size: int, ids: Int[Array, " T"], devices: int
) -> Shaped[Array, "T M"]:
    """Rows by number, of a table of which each device has so many, and looks them up itself."""
    if devices == 1:
        return look_up(ids)
    index = ids - first_of(size, devices)
    mine = (index >= 0) & (index < size)
    return total(jnp.where(mine[:, None], look_up(jnp.where(mine, index, 0)), 0), devices)
