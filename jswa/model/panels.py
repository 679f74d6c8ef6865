"""Lays the matrices of a model out in the panels that the CPU's products read."""

import math
import mmap
import re
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jswa.model.transformer import Linear
from pallas_kernels.cpu.products import PANEL, QUAD, fits_quads, panel_count, to_panels, to_quads

# The names from eh_proj on are those of drafters.
_MATRIX = re.compile(
    r"(\.(attention\.(qkv|out|gate)|(mlp|moe)\.router|gate_up|down|eh_proj)|^(lm_head|fc|pre|post))(\.values|\.codes)?$"
)
_EXPERTS = re.compile(r"\.(gate_up|down)(\.values|\.codes)?$")
_ALIGNMENT = 64  # bytes; XLA uses such an array without a copy
_HUGE = 2 * 2**20  # bytes of a huge page
_ROOM = 64 * 2**20  # bytes that are reserved at a time
_SMALL = 64 * 2**10  # bytes; arrays below stay where they are


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


def lay_out(params: dict[str, Array], *, linear: bool, experts: bool) -> None:
    """Replace matrices by their panels, one after the other: numbers, values of 8 bits or codes of 4 bits.

    A matrix [*E, K, C] becomes [*E, P, K, 32]; `transformer.bind` sees it from the number of axes. Where the processor
    multiplies bytes, codes become quads [*E, P, K / 8, 128], and the scales and zeros of groups [*E, P, G, 32]. All
    large arrays of `params` are moved to huge pages.

    Args:
        params: of one device.
        linear: the matrices of linear layers and the head, if it is not the embedding.
        experts: the stacked matrices of experts. Those in MXFP4 keep their form, since their outputs are rows.
    """
    if not (linear or experts):
        return
    room, placed = Room(sum(array.nbytes for array in params.values())), set[str]()
    for name in [name for name in params if _MATRIX.search(name)]:
        stacked = _EXPERTS.search(name) is not None and params[name].ndim == 3
        if not (experts if stacked else linear):
            continue
        base = name.removesuffix(".codes")
        quads = base != name and _fits_quads(params, base)
        params[name] = _panels(params.pop(name), quads, room)
        fields = (f"{base}.group_scales", f"{base}.group_zeros") if quads else ()
        for field in fields:
            params[field] = _panels(params.pop(field), False, room)
        placed.update((name, *fields))
    for name in [name for name, array in params.items() if name not in placed and array.nbytes >= _SMALL]:
        params[name] = _moved(params.pop(name), room)


def has_other_products(params: Mapping[str, Array], linear: Linear) -> bool:
    """Return whether XLA runs products with some of the matrices: of adapters and the like, or with all."""
    plain = {name for name, value in params.items() if value.ndim == 2 and value.dtype.itemsize == 2}
    return any(name != "embed" and not name.endswith("_bias") for name in plain) or linear == "xla"


def _fits_quads(params: Mapping[str, Array], name: str) -> bool:
    inputs, groups = 2 * params[f"{name}.codes"].shape[-2], params[f"{name}.group_scales"].shape[-2]
    return fits_quads(inputs, groups, table=f"{name}.group_of" in params)


def _panels(matrix: Array, quads: bool, room: Room) -> Array:
    *lead, rows, outputs = matrix.shape
    shape = (rows // QUAD, QUAD * PANEL) if quads else (rows, PANEL)
    out = room.empty((*lead, panel_count(outputs), *shape), np.dtype(matrix.dtype))
    (to_quads if quads else to_panels)(np.asarray(matrix), out)
    panels: Array = jax.device_put(out, matrix.sharding, may_alias=True)
    return panels


def _moved(array: Array, room: Room) -> Array:
    out = room.empty(array.shape, np.dtype(array.dtype))
    out[...] = np.asarray(array)
    moved: Array = jax.device_put(out, array.sharding, may_alias=True)
    return moved


def _reserved(size: int) -> Shaped[np.ndarray, " size"]:
    """Return memory that the system hands out as it is written, from the beginning of a huge page on."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    start = -buffer.ctypes.data % _HUGE
    return buffer[start : start + size]
