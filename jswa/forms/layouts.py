"""Lays the matrices of a model out as the products of a backend read them: in panels, in tiles, or outputs first."""

import math
import mmap
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt8

from jswa.errors import ConfigError
from jswa.forms.base.names import OUTPUTS_FIRST, Linear, fp8_names, linear_in_16_bits
from jswa.forms.tiles import lay_out_tiles
from pallas_kernels.cpu.products import PANEL, QUAD, fits_quads, panel_count, to_panels, to_quads
from pallas_kernels.experts.dense import fits
from pallas_kernels.experts.eight_bits import TILE
from pallas_kernels.fp8 import UNIT

# The names from eh_proj on are those of drafters.
_MATRIX = re.compile(
    r"(\.(attention\.(qkv|out|gate)|(mlp|moe)\.(router|shared_gate)|per_layer\.(gate|project)|gate_up|down|eh_proj"
    r"|streams\.(router|predict_by|correct_by|laurel_left|laurel_right))"
    r"|^(lm_head|fc|pre|post|per_layer\.project|streams\.(begin|end)))(\.values|\.codes)?$"
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


def lay_out(params: dict[str, Array], *, linear: Linear, experts: bool) -> None:
    """Replace matrices by what their products read, one after the other.

    For "fp8", N.values [K, C] of linear layers in e4m3 becomes N.rows [C, K]; `transformer.bind` sees from the name
    that activations are rounded too. For "mosaic", those in 8 bits and in integers of 4 bits become tiles
    (`tiles`), and those in 16 bits stay as they are. Raises ConfigError if such products cannot have a matrix
    of that size.

    Panels are of numbers, values of 8 bits or codes of 4 bits. A matrix [*E, K, C] becomes [*E, P, K, 32];
    `transformer.bind` sees it from the number of axes. Where the processor multiplies bytes, codes become quads
    [*E, P, K / 8, 128], and the scales and zeros of groups [*E, P, G, 32]. All large arrays of `params` are moved to
    huge pages.

    Args:
        params: of one device, if it gets panels.
        linear: the backend of linear layers. For "cpu" their matrices become panels, and the head, if it is not the
            embedding.
        experts: make panels of the stacked matrices of experts. Those in MXFP4 keep their form, since their outputs
            are rows.
    """
    if linear == "fp8":
        _lay_out_fp8(params)
    if linear == "mosaic":
        lay_out_tiles(params)
    if linear != "cpu" and not experts:
        return
    room, placed = Room(sum(array.nbytes for array in params.values())), set[str]()
    for name in [name for name in params if _MATRIX.search(name)]:
        stacked = _EXPERTS.search(name) is not None and params[name].ndim == 3
        if not (experts if stacked else linear == "cpu"):
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


def require_form(params: Mapping[str, Array], linear: Linear) -> None:
    """Raise ConfigError if a backend of linear layers is named for forms of weights that a matrix does not have.

    All matrices must be of those that "mosaic" takes, and some for "fp8".
    """
    if linear == "mosaic":
        for name in linear_in_16_bits(params):
            sides = params[name].sharding.shard_shape(params[name].shape)
            if not fits(*sides):
                limit = (
                    f"{name} is {list(sides)} on each device: both must be multiples of {TILE}, or linear_backend xla"
                )
                raise ConfigError("linear_backend", "mosaic", limit)
    if linear == "fp8" and not any(name.endswith(OUTPUTS_FIRST) for name in params):
        limit = "no linear layer is held in float8 with a scale per output: set quantization to fp8, which rounds them"
        raise ConfigError("linear_backend", "fp8", limit)


def _lay_out_fp8(params: dict[str, Array]) -> None:
    for name in fp8_names(params):
        sides = params[f"{name}.values"].sharding.shard_shape(params[f"{name}.values"].shape)
        if any(side % UNIT for side in sides):
            limit = f"{name} is {list(sides)} on each device: both must be multiples of {UNIT}"
            raise ConfigError("linear_backend", "fp8", limit)
        params[f"{name}{OUTPUTS_FIRST}"] = _outputs_first(params.pop(f"{name}.values"))


def _outputs_first(matrix: UInt8[Array, "K C"]) -> UInt8[Array, "C K"]:
    """Return the transposed matrix, each device's part transposed where it is."""
    sharding = matrix.sharding
    if isinstance(sharding, NamedSharding):
        inputs, outputs = (*sharding.spec, None, None)[:2]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(outputs, inputs))  # type: ignore[no-untyped-call]
    turned: Array = jax.jit(jnp.transpose, out_shardings=sharding)(matrix)
    return turned


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
