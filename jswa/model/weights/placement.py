"""Placement of parameters on devices: threads fill host arrays, which go to the device without another host copy.

With tensor parallelism, each device gets its shard of a parameter directly from the host (`jswa.model.partition`).
Later conversions run on each shard on its own device, so no device ever stores a whole matrix, and no program runs on
several devices while threads load.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Shaped

from jswa.architecture import ModelConfig
from jswa.model.collectives import AXIS
from jswa.model.partition import ShardCut, cut_of
from jswa.model.transformer import Params
from jswa.stages import stage

_THREADS = 8
_ALIGNMENT = 64  # bytes; XLA on CPU uses such an array without a copy


def empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Return an uninitialized aligned host array, to be filled and passed to `Placement.put`."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Placement:
    """Placement of a model's parameters by name: on the one device, or in shards on the devices of a mesh.

    Attributes:
        model: config of the whole model, not of a shard.
    """

    model: ModelConfig
    mesh: Mesh | None = None

    def put(self, name: str, array: Shaped[np.ndarray, "..."]) -> jax.Array:
        """Put a whole parameter from the host on the devices; the caller must not change the array afterwards."""
        if self.mesh is None:
            out: jax.Array = jax.device_put(array, may_alias=True)
            return out
        cut = self.cut(name, array.shape)
        local = [pair for pair in enumerate(self.mesh.devices.flat) if pair[1] in self.mesh.local_devices]
        shards = [(array if cut is None else _shard(array, cut, number), device) for number, device in local]
        return self.from_shards(name, [jax.device_put(shard, device) for shard, device in shards])

    def spread(self, name: str, whole: jax.Array) -> jax.Array:
        """Return a parameter that is whole on each device of the mesh in shards; nothing passes through the host."""
        if self.mesh is None:
            return whole
        cut = self.cut(name, whole.shape)
        local = [pair for pair in enumerate(self.mesh.devices.flat) if pair[1] in self.mesh.local_devices]
        copies = self.shards(whole)
        parts = [one if cut is None else _shard(one, cut, n) for (n, _), one in zip(local, copies, strict=True)]
        return self.from_shards(name, [jax.device_put(part, at) for part, (_, at) in zip(parts, local, strict=True)])

    def shards(self, array: jax.Array) -> list[jax.Array]:
        """Return the shards of a parameter on the devices of this host, in the mesh's order."""
        if self.mesh is None:
            return [array]
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return [by_device[device] for device in self.mesh.local_devices]

    def from_shards(self, name: str, shards: list[jax.Array]) -> jax.Array:
        """Return the parameter that is made of these shards on the devices of this host."""
        if self.mesh is None:
            return shards[0]
        shape, axis = list(shards[0].shape), self._axis(name, shards[0].shape)
        if axis is not None:
            shape[axis] *= self.mesh.size
        return jax.make_array_from_single_device_arrays(tuple(shape), self._sharding(axis), shards)

    def from_each(self, names: tuple[str, ...], shards: Sequence[tuple[jax.Array, ...]]) -> Params:
        """Return the parameters that each device's arrays, one for each name, are the shards of."""
        by_name = zip(names, zip(*shards, strict=True), strict=True)
        return {name: self.from_shards(name, list(arrays)) for name, arrays in by_name}

    def shape(self, name: str, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of the array that `put` returns for a parameter of shape `whole`."""
        if self.mesh is None:
            return whole
        shape, cut = list(whole.shape), self.cut(name, whole.shape)
        axis = self._axis(name, whole.shape)
        if cut is not None and axis is not None:
            shape[axis] = cut.size * self.mesh.size
        return jax.ShapeDtypeStruct(tuple(shape), whole.dtype, sharding=self._sharding(axis))  # type: ignore[no-untyped-call]

    def input_shards(self, name: str, shape: tuple[int, ...]) -> int:
        """Return over how many devices the inputs of a matrix [..., inputs, outputs] are split."""
        cut = self.cut(name, shape)
        return len(cut.ranges) if cut is not None and cut.axis == -2 else 1

    def cut(self, name: str, shape: tuple[int, ...]) -> ShardCut | None:
        """Return how a parameter is split, of its whole shape; None if it is whole on each device."""
        return None if self.mesh is None else cut_of(name, shape, self.model, self.mesh.size)

    def _axis(self, name: str, shape: tuple[int, ...]) -> int | None:
        cut = self.cut(name, shape)
        return None if cut is None else cut.axis % len(shape)

    def _sharding(self, axis: int | None) -> NamedSharding:
        assert self.mesh is not None
        axes = [] if axis is None else [*[None] * axis, AXIS]
        return NamedSharding(self.mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]


def _shard[A: (np.ndarray, jax.Array)](array: A, cut: ShardCut, device: int) -> A:
    """Return a device's shard."""
    axis: int = cut.axis % array.ndim
    slices: list[A] = [array[(slice(None),) * axis + (slice(*one),)] for one in cut.ranges[device]]
    module: Any = np if isinstance(array, np.ndarray) else jnp
    if not slices:
        slices = [module.zeros((*array.shape[:axis], cut.size, *array.shape[axis + 1 :]), array.dtype)]
    joined: A = slices[0] if len(slices) == 1 else module.concatenate(slices, axis=axis)
    return joined


def load_all(load: Callable[[str], Params], shapes: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
    """Load all parameters on a few threads, as a stage of the start. Raises what `load` raises.

    `load` returns the parameters of one matrix by name; a quantized matrix has several.
    """
    params: Params = {}
    sizes = {name: math.prod(shape.shape) * np.dtype(shape.dtype).itemsize for name, shape in shapes.items()}
    total = sum(sizes.values())
    size = f"{total / 2**30:.2f} GiB" if total >= 2**30 else f"{total / 2**20:.1f} MiB"
    with (
        stage("weights", total, size, unit="B") as loaded,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool,
    ):
        jobs = {name: pool.submit(load, name) for name in shapes}
        try:
            for name, job in jobs.items():
                params |= job.result()
                loaded(sizes[name])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return params
