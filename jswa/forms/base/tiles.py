"""What the forms share that are laid out in tiles for Hopper's kernels: each device's part where it is.

Checkpoints, converted or not, keep their own form. Stacks of experts become tiles while they are loaded, linear layers
once they are on the devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jswa.kernels import refused


@runtime_checkable
class Shards(Protocol):
    """Where parameters are: `jswa.model.weights.placement.Placement`."""

    def shards(self, array: Array) -> list[Array]:
        """Return the shards of a parameter on the devices of this host."""
        ...

    def from_each(self, names: tuple[str, ...], shards: Sequence[tuple[Array, ...]]) -> dict[str, Array]:
        """Return the parameters that each device's arrays, one for each name, are the shards of."""
        ...


@partial(jax.jit, static_argnums=0)
def expert_by_expert[Given, Made](convert: Callable[[Given], Made], matrices: Given) -> Made:
    """Convert the matrices of all experts [E, ...], one after the other.

    On the way there are up to 16 times the bytes of one expert. As many times the bytes of all, between weights that
    stay, would leave holes that the KV arena cannot use.
    """
    made: Made = jax.lax.map(convert, matrices)
    return made


def refuse_stack(name: str, experts: str, limit: str | None) -> None:
    """Raise ConfigError with what a stack of experts lacks for its kernel, if it lacks anything."""
    if limit is not None:
        raise refused("experts", experts, f"{name} {limit}: must be xla")


def refuse_linear(name: str, limit: str | None) -> None:
    """Raise ConfigError with what a linear layer's matrix lacks for Hopper's kernel, if it lacks anything."""
    if limit is not None:
        raise refused("linear", "mosaic", f"{name} {limit}: must be xla")


def own_sides(matrix: Array) -> tuple[int, int]:
    """Return the sides of each device's part of a matrix."""
    first, second = matrix.sharding.shard_shape(matrix.shape)
    return first, second


def on_devices(array: Array) -> list[Array]:
    """Return the parts of an array on the devices of this host."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id)]


def joined(matrix: Array, parts: list[Array]) -> Array:
    """Return the tiles [across, along, ...] of all devices, or their scales, sharded as `matrix` [K, C] is."""
    sharding = matrix.sharding
    if not isinstance(sharding, NamedSharding):
        return parts[0]
    along, across = (*sharding.spec, None, None)[:2]
    spread = NamedSharding(sharding.mesh, PartitionSpec(across, along))  # type: ignore[no-untyped-call]
    tall, wide, *rest = parts[0].shape
    shape = tall * (1 if across is None else sharding.mesh.size), wide * (1 if along is None else sharding.mesh.size)
    return jax.make_array_from_single_device_arrays((*shape, *rest), spread, parts)
