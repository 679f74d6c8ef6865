"""Parameters in memory: filled on threads, and handed to the device without another copy on the host."""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

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
