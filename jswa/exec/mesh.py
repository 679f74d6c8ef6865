"""Programs on several devices: one mesh axis, explicit collectives, and on one device nothing of it.

How an array is spread is its own `NamedSharding`, of shapes too; a program takes its arguments as they are spread.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jswa.errors import ConfigError
from jswa.model.across import AXIS

REPLICATED = PartitionSpec()  # type: ignore[no-untyped-call]
BY_DEVICE = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
COLUMNS = PartitionSpec(None, AXIS)  # type: ignore[no-untyped-call]


def make_mesh(devices: int) -> Mesh | None:
    """A mesh of this process's first devices; None for one device. Raises ConfigError where there are too few."""
    there = jax.local_devices()
    if devices > len(there):
        raise ConfigError("tensor_parallel_size", devices, f"this process has {len(there)} devices: at most that many")
    return Mesh(np.array(there[:devices]), (AXIS,)) if devices > 1 else None


def mesh_of(array: Any) -> Mesh | None:
    """The mesh over which an array, or the shape of one, is spread; None where it is on one device."""
    sharding = getattr(array, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def on_mesh(function: Callable[..., Any], mesh: Mesh | None, arguments: Any, outputs: Any) -> Callable[..., Any]:
    """What each device of a mesh runs on its shards of the arguments; without a mesh the function as it is.

    Args:
        arguments: a tuple of trees of arrays or shapes; what has no `NamedSharding` is on all devices.
        outputs: trees of `PartitionSpec`.
    """
    if mesh is None:
        return function
    specs = jax.tree.map(_spec, arguments)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)


def specs_of(tree: Any) -> Any:
    """How the arrays of a tree are spread."""
    return jax.tree.map(_spec, tree)


def put(tree: Any, mesh: Mesh | None) -> Any:
    """Put arrays on the device, or on all of a mesh."""
    return jax.device_put(tree) if mesh is None else jax.device_put(tree, NamedSharding(mesh, REPLICATED))


def shard_elems(array: Any) -> int:
    """Elements of an array, or of the shape of one, that each device has."""
    sharding = getattr(array, "sharding", None)
    return math.prod(array.shape if sharding is None else sharding.shard_shape(array.shape))


def _spec(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else REPLICATED
