"""Programs on several devices: one mesh axis and explicit collectives; on one device there is no mesh.

Each array, or shape of one, has its own `NamedSharding`; a program takes its arguments as they are sharded.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jswa.errors import ConfigError
from jswa.model.collectives import AXIS

REPLICATED = PartitionSpec()  # type: ignore[no-untyped-call]
BY_DEVICE = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
COLUMNS = PartitionSpec(None, AXIS)  # type: ignore[no-untyped-call]


def make_mesh(devices: int, hosts: int = 1) -> Mesh | None:
    """Return a mesh of the first devices of each host, in the order of the hosts; None for one device.

    Raises ConfigError if a host has too few devices.
    """
    each, chosen = devices // hosts, []
    for host in range(hosts):
        there = [device for device in jax.devices() if device.process_index == host]
        if each > len(there):
            where = "this machine" if hosts == 1 else f"host {host}"
            limit = f"{where} has {len(there)}: choose at most --tensor-parallel-size {len(there) * hosts}"
            raise ConfigError("tensor_parallel_size", devices, limit)
        chosen += there[:each]
    return Mesh(np.array(chosen), (AXIS,)) if devices > 1 else None


def mesh_of(array: Any) -> Mesh | None:
    """Return the mesh over which an array, or the shape of one, is sharded; None if it is on one device."""
    sharding = getattr(array, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def on_mesh(function: Callable[..., Any], mesh: Mesh | None, arguments: Any, outputs: Any) -> Callable[..., Any]:
    """Return a function that each device of a mesh runs on its shards; without a mesh, the function itself.

    Args:
        arguments: a tuple of trees of arrays or shapes; an array without a `NamedSharding` is on all devices.
        outputs: trees of `PartitionSpec`.
    """
    if mesh is None:
        return function
    specs = jax.tree.map(_spec, arguments)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)


def specs_of(tree: Any) -> Any:
    """Return how the arrays of a tree are sharded."""
    return jax.tree.map(_spec, tree)


def put(tree: Any, mesh: Mesh | None) -> Any:
    """Put arrays on the device, or on all devices of a mesh that this host has."""
    if mesh is None:
        return jax.device_put(tree)
    everywhere = NamedSharding(mesh, REPLICATED)
    if not mesh.is_multi_process:
        return jax.device_put(tree, everywhere)

    def place(array: Any) -> jax.Array:
        # `device_put` would make all hosts compare the values, by a collective.
        copies = [jax.device_put(array, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(np.shape(array), everywhere, copies)

    return jax.tree.map(place, tree)


def shard_elems(array: Any) -> int:
    """Return the elements of an array, or of the shape of one, on each device."""
    sharding = getattr(array, "sharding", None)
    return math.prod(array.shape if sharding is None else sharding.shard_shape(array.shape))


def _spec(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else REPLICATED
