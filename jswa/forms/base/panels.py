"""Panels, as the CPU's products read matrices, in memory of huge pages."""

import math
import mmap

import jax
import numpy as np
from jaxtyping import Array, Int8, Shaped

from pallas_kernels.cpu.products import PANEL, QUAD, panel_count, to_byte_quads, to_panels

_ALIGNMENT = 64  # bytes; XLA uses such an array without a copy
_HUGE = 2 * 2**20  # bytes of a huge page
_ROOM = 64 * 2**20  # bytes that are reserved at a time


class Room:
    """Memory in huge pages, where the system has them.

    A step of few rows reads all weights once. In pages of 4 KB its products wait for the page tables, most of all in a
    virtual machine: two threads read 22 to 33 GB/s there, and 40 to 54 GB/s in huge pages in the same minutes.

    Args:
        expected: bytes that are asked for in total; it may become more.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._free = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
        """Return an array in this memory, which lives as long as an array in it."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._free):
            self._free = _reserved(max(min(_ROOM, self._expected), size))
            self._expected -= len(self._free)
        out, self._free = self._free[:size], self._free[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return out.view(dtype).reshape(shape)


def in_panels(matrix: Shaped[Array, "*E K C"], room: Room) -> Shaped[Array, "*E P K 32"]:
    """Return a matrix in panels."""
    *lead, rows, outputs = matrix.shape
    out = room.empty((*lead, panel_count(outputs), rows, PANEL), np.dtype(matrix.dtype))
    to_panels(np.asarray(matrix), out)
    return placed(out, matrix)


def in_byte_quads(matrix: Int8[Array, "*E K C"], room: Room) -> Int8[Array, "*E P Q 128"]:
    """Return a matrix in panels with four inputs of an output side by side."""
    *lead, rows, outputs = matrix.shape
    out = room.empty((*lead, panel_count(outputs), rows // QUAD, QUAD * PANEL), np.dtype(np.int8))
    to_byte_quads(np.asarray(matrix), out)
    return placed(out, matrix)


def moved(array: Shaped[Array, "..."], room: Room) -> Shaped[Array, "..."]:
    """Return the same array in this memory."""
    out = room.empty(array.shape, np.dtype(array.dtype))
    out[...] = np.asarray(array)
    return placed(out, array)


def placed(array: Shaped[np.ndarray, "..."], like: Array) -> Array:
    """Return an array of this memory as one of the device on which another is."""
    found: Array = jax.device_put(array, like.sharding, may_alias=True)
    return found


def _reserved(size: int) -> Shaped[np.ndarray, " size"]:
    """Return memory that the system hands out as it is written, from the beginning of a huge page on."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    start = -buffer.ctypes.data % _HUGE
    return buffer[start : start + size]
