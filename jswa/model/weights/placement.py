"""Parameters in memory: filled on threads, and handed to the device without another copy on the host.

Where several devices share the model, each gets its part of a parameter straight from the host
(`jswa.model.partition`). What is done to parameters then is done to each part on its own device: no device ever has a
whole matrix, and no program runs on several devices while threads load.
"""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped
from tqdm import tqdm

from jswa.architecture import ModelConfig
from jswa.model.collectives import AXIS
from jswa.model.partition import Cut, cut_of
from jswa.model.transformer import Params

_THREADS = 8
_ALIGNMENT = 64  # bytes; XLA on CPU takes such an array as it lies


def empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """An array to fill and to give to `placed`."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


def placed(array: Shaped[np.ndarray, "..."]) -> jax.Array:
    """On the device; the array must not change any more."""
    out: jax.Array = jax.device_put(array, may_alias=True)
    return out


@dataclass(frozen=True)
class Placement:
    """Where the parameters of a model go, by their names: to the one device, or each device's part to it."""

    model: ModelConfig
    mesh: Mesh | None = None

    def put(self, name: str, array: Shaped[np.ndarray, "..."]) -> jax.Array:
        """A whole parameter from the host; it must not change any more."""
        if self.mesh is None:
            return placed(array)
        cut = self._cut(name, array.shape)
        here = [pair for pair in enumerate(self.mesh.devices.flat) if pair[1] in self.mesh.local_devices]
        own = [(array if cut is None else _own(array, cut, number), device) for number, device in here]
        return self.join(name, [jax.device_put(part, device) for part, device in own])

    def parts(self, array: jax.Array) -> list[jax.Array]:
        """What each device of this host has of a parameter, in the mesh's order."""
        if self.mesh is None:
            return [array]
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return [by_device[device] for device in self.mesh.local_devices]

    def join(self, name: str, parts: list[jax.Array]) -> jax.Array:
        """The parameter that the devices of this host have these parts of."""
        if self.mesh is None:
            return parts[0]
        shape, axis = list(parts[0].shape), self._axis(name, parts[0].shape)
        if axis is not None:
            shape[axis] *= self.mesh.size
        return jax.make_array_from_single_device_arrays(tuple(shape), self._sharding(axis), parts)

    def shape(self, name: str, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """What `put` makes of a parameter, without its numbers."""
        if self.mesh is None:
            return whole
        shape, cut = list(whole.shape), self._cut(name, whole.shape)
        axis = self._axis(name, whole.shape)
        if cut is not None and axis is not None:
            shape[axis] = cut.size * self.mesh.size
        return jax.ShapeDtypeStruct(tuple(shape), whole.dtype, sharding=self._sharding(axis))  # type: ignore[no-untyped-call]

    def is_cut(self, name: str, array: jax.Array) -> bool:
        """Whether devices have different parts of a parameter."""
        return self._axis(name, array.shape) is not None

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        return None if self.mesh is None else cut_of(name, shape, self.model, self.mesh.size)

    def _axis(self, name: str, shape: tuple[int, ...]) -> int | None:
        cut = self._cut(name, shape)
        return None if cut is None else cut.axis % len(shape)

    def _sharding(self, axis: int | None) -> NamedSharding:
        assert self.mesh is not None
        axes = [] if axis is None else [*[None] * axis, AXIS]
        return NamedSharding(self.mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]


def _own(array: Shaped[np.ndarray, "..."], cut: Cut, device: int) -> Shaped[np.ndarray, "..."]:
    """A device's part."""
    axis = cut.axis % array.ndim
    runs = [array[(slice(None),) * axis + (slice(*run),)] for run in cut.ranges[device]]
    if not runs:
        return np.zeros((*array.shape[:axis], cut.size, *array.shape[axis + 1 :]), array.dtype)
    return runs[0] if len(runs) == 1 else np.concatenate(runs, axis=axis)


def load_all(load: Callable[[str], Params], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
    """All parameters, on a few threads, with a progress bar where a person looks. Raises what `load` raises.

    One matrix may be several parameters, which `load` gives by their names.
    """
    params: Params = {}
    sizes = {name: math.prod(shape.shape) * np.dtype(shape.dtype).itemsize for name, shape in shapes.items()}
    total = sum(sizes.values())
    with (
        tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="weights", disable=None) as bar,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool,
    ):
        jobs = {name: pool.submit(load, name) for name in shapes}
        try:
            for name, job in jobs.items():
                params |= job.result()
                bar.update(sizes[name])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return params
