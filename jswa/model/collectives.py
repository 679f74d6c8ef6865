"""Collectives over the tensor parallel devices; with one device they are no-ops.

They run inside `jax.shard_map` over a mesh with the axis `AXIS`; `devices` is the size of that axis.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

AXIS = "tp"


def psum(x: Shaped[Array, "..."], devices: int) -> Shaped[Array, "..."]:
    """Return the sum over devices."""
    return x if devices == 1 else lax.psum(x, AXIS)  # type: ignore[no-untyped-call]


def pmax(x: Shaped[Array, "..."], devices: int) -> Shaped[Array, "..."]:
    """Return the elementwise maximum over devices."""
    return x if devices == 1 else lax.pmax(x, AXIS)  # type: ignore[no-untyped-call]


def sum_before(x: Shaped[Array, "..."], devices: int) -> Shaped[Array, "..."]:
    """Return the sum over the devices before this one."""
    if devices == 1:
        return jnp.zeros_like(x)
    of_all: Array = lax.all_gather(x, AXIS)
    earlier = jnp.arange(devices, dtype=jnp.int32) < lax.axis_index(AXIS)
    return jnp.where(earlier.reshape(-1, *[1] * x.ndim), of_all, 0).sum(axis=0, dtype=x.dtype)


def true_on_all(x: Bool[Array, "..."], devices: int) -> Bool[Array, "..."]:
    """Return whether x is true on all devices."""
    return x if devices == 1 else psum((~x).astype(jnp.int32), devices) == 0


def true_on_any(x: Bool[Array, "..."], devices: int) -> Bool[Array, "..."]:
    """Return whether x is true on some device."""
    return x if devices == 1 else psum(x.astype(jnp.int32), devices) > 0


def shard_start(size: int, devices: int) -> Int[Array, ""] | int:
    """Return the index at which this device's shard begins, in an axis of which each device stores `size` entries."""
    return 0 if devices == 1 else lax.axis_index(AXIS) * size


def shard_columns(x: Shaped[Array, "R V"], devices: int) -> Shaped[Array, "R v"]:
    """Return this device's shard of the columns of an array that is replicated."""
    size = x.shape[1] // devices
    return x if devices == 1 else lax.dynamic_slice_in_dim(x, shard_start(size, devices), size, axis=1)


def context_part(parts: int, devices: int) -> Int[Array, ""] | int:
    """Return which of the `parts` neighbouring devices that share a text's keys this one is."""
    return 0 if devices == 1 else lax.rem(lax.axis_index(AXIS), parts)


def gather_heads(q: Shaped[Array, "T H D"], parts: int, devices: int) -> Shaped[Array, "T n D"]:
    """Return the query heads of all devices that share keys, in their order.

    One device alone, on which kernels are checked, repeats its own heads.
    """
    if devices == 1:
        return jnp.tile(q, (1, parts, 1))
    groups = _neighbours(parts, devices)
    gathered: Array = lax.all_gather(q, AXIS, axis=1, tiled=True, axis_index_groups=groups)
    return gathered


def exchange_heads(x: Shaped[Array, "T n V"], parts: int, devices: int) -> Shaped[Array, "parts T H V"]:
    """Return the results of this device's heads from each device that shares keys; on one device only its own."""
    by_owner = x.reshape(len(x), parts, -1, x.shape[2]).transpose(1, 0, 2, 3)
    if devices == 1:
        return by_owner[:1]
    groups = _neighbours(parts, devices)
    own: Array = lax.all_to_all(by_owner, AXIS, 0, 0, tiled=True, axis_index_groups=groups)  # type: ignore[no-untyped-call]
    return own


def _neighbours(parts: int, devices: int) -> list[list[int]]:
    return [list(range(first, first + parts)) for first in range(0, devices, parts)]


def argmax_columns(x: Shaped[Array, "R v"], devices: int) -> Int[Array, " R"]:
    """Return `argmax` over the columns of all devices; ties go to the first column.

    The result is undefined for rows with NaN.
    """
    index: Int[Array, " R"] = lax.platform_dependent(x, cpu=_first_largest, default=_argmax)
    if devices == 1:
        return index
    most, size = x.max(axis=-1), x.shape[1]
    found = jnp.where(most == pmax(most, devices), index + shard_start(size, devices), size * devices)
    first: Int[Array, " R"] = lax.pmin(found, AXIS)  # type: ignore[no-untyped-call]
    return first


def _argmax(x: Shaped[Array, "R v"]) -> Int[Array, " R"]:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _first_largest(x: Shaped[Array, "R v"]) -> Int[Array, " R"]:
    """Return `argmax` in two readings: a CPU takes a number at a time for `argmax`, and several for these."""
    columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first: Int[Array, " R"] = jnp.where(x == x.max(axis=-1, keepdims=True), columns, x.shape[1] - 1).min(axis=-1)
    return first


def gather_column(x: Shaped[Array, "N v"], ids: Int[Array, " N"], devices: int) -> Shaped[Array, "N 1"]:
    """Return one column of each row; `ids` are column numbers over all devices."""
    if devices == 1:
        return jnp.take_along_axis(x, ids[:, None], axis=-1)
    index = ids - shard_start(x.shape[1], devices)
    mine = (index >= 0) & (index < x.shape[1])
    own = jnp.take_along_axis(x, jnp.where(mine, index, 0)[:, None], axis=-1)
    return psum(jnp.where(mine[:, None], own, 0), devices)


def lookup_rows(
    look_up: Callable[[Int[Array, " T"]], Shaped[Array, "T M"]], size: int, ids: Int[Array, " T"], devices: int
) -> Shaped[Array, "T M"]:
    """Return rows by number from a table of which each device stores `size` rows; `look_up` reads local rows."""
    if devices == 1:
        return look_up(ids)
    index = ids - shard_start(size, devices)
    mine = (index >= 0) & (index < size)
    return psum(jnp.where(mine[:, None], look_up(jnp.where(mine, index, 0)), 0), devices)


def top_columns(
    x: Shaped[Array, "N v"], count: int, devices: int
) -> tuple[Shaped[Array, "N top"], Int[Array, "N top"]]:
    """Return the largest values over the columns of all devices, largest first, with their columns.

    Ties go to the first column.
    """
    size = x.shape[1]
    values, ids = lax.top_k(x, min(count, size))
    if devices == 1:
        return values, ids
    values, ids = (
        lax.all_gather(part, AXIS, axis=1, tiled=True) for part in (values, ids + shard_start(size, devices))
    )
    values, columns = lax.top_k(values, count)
    return values, jnp.take_along_axis(ids, columns, axis=1)
