"""Matrices of 4 and 8 bits in the tiles that the Hopper kernels read: what fits, and how linear layers get there.

Checkpoints, converted or not, keep their own form. Linear layers become N.int4_tiles, or N.tiles beside N.scales or
N.block_scales, once they are on the devices; each device's part is laid out where it is.
"""

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jswa.errors import ConfigError
from jswa.forms.base.names import BLOCK_SCALES, CODES, GROUP_OF, INT4_TILES, LINEAR, SCALES, TILES, ZEROS
from pallas_kernels.experts import eight_bits, int4_tiles
from pallas_kernels.experts.eight_bits import DEEP, BlockTiles8, Tiles8
from pallas_kernels.experts.int4_tiles import Int4Tiles
from pallas_kernels.experts.mxfp4 import BLOCK, TILE
from pallas_kernels.int4 import Int4
from pallas_kernels.quantized import Quantized, QuantizedBlocks


def int4_limit(sides: tuple[int, int], groups: int, scales: list[Array], *, act_order: bool) -> str | None:
    """Return why a matrix, or each of a stack, in integers of 4 bits has no tiles; None if it has.

    Args:
        sides: inputs and outputs.
        groups: of inputs that share a scale.
        scales: on each device of this host.
    """
    if act_order:
        return "orders its groups by act-order"
    if not int4_tiles.fits(*sides, groups):
        return f"{list(sides)} in {groups} groups does not fit multiples of {TILE} and of {BLOCK} inputs a group"
    if not all(bool(_scales_fit(shard)) for shard in scales):
        return f"has scales in {scales[0].dtype} that are no sums of two numbers of bfloat16"
    return None


def eight_bits_limit(sides: tuple[int, int]) -> str | None:
    """Return why a matrix, or each of a stack, in 8 bits has no tiles; None if it has."""
    return f"{list(sides)} in 8 bits does not fit multiples of {TILE}" if any(side % TILE for side in sides) else None


def blocks_limit(sides: tuple[int, int], counts: tuple[int, int]) -> str | None:
    """Return why a matrix, or each of a stack, with scales of blocks has no tiles; None if it has.

    Args:
        sides: inputs and outputs.
        counts: of blocks along both.
    """
    if eight_bits.blocks_fit(*sides, *counts):
        return None
    inputs, outputs = (side // count for side, count in zip(sides, counts, strict=True))
    return f"has blocks of {inputs} inputs by {outputs} outputs and needs multiples of {DEEP} by {TILE}"


def lay_out_tiles(params: dict[str, Array]) -> None:
    """Replace the matrices of linear layers in integers of 4 bits and in 8 bits by tiles, one after the other.

    On the way a matrix takes two or three times its bytes (compiled for an H200).

    Raises ConfigError if a device's part of a matrix does not fit.
    """
    for name in [name for name in params if name.endswith((f".{CODES}", ".values")) and params[name].ndim == 2]:
        base, _, form = name.rpartition(".")
        if LINEAR.search(base):
            of_8_bits = _lay_out_blocks if f"{base}.{BLOCK_SCALES}" in params else _lay_out_8_bits
            (_lay_out_int4 if form == CODES else of_8_bits)(base, params)


def _lay_out_int4(name: str, params: dict[str, Array]) -> None:
    codes, scales, zeros = (params[f"{name}.{field}"] for field in (CODES, SCALES, ZEROS))
    (half, outputs), (groups, _) = _own_sides(codes), _own_sides(scales)
    act_order = f"{name}.{GROUP_OF}" in params
    _refuse(name, int4_limit((2 * half, outputs), groups, _on_devices(scales), act_order=act_order))
    parts = map(Int4, *map(_on_devices, (codes, scales, zeros)))
    tiled: list[Int4Tiles] = [_int4_tiled(part) for part in parts]
    params[f"{name}.{INT4_TILES}"] = _joined(codes, [one.tiles for one in tiled])
    for field in (CODES, SCALES, ZEROS):
        del params[f"{name}.{field}"]


def _lay_out_8_bits(name: str, params: dict[str, Array]) -> None:
    values, scales = params[f"{name}.values"], params[f"{name}.scales"]
    _refuse(name, eight_bits_limit(_own_sides(values)))
    parts = map(Quantized, *map(_on_devices, (values, scales)))
    tiled: list[Tiles8] = [_8_bits_tiled(part) for part in parts]
    params[f"{name}.{TILES}"] = _joined(values, [one.codes for one in tiled])
    by_device = jax.make_array_from_single_device_arrays
    params[f"{name}.scales"] = by_device(scales.shape, scales.sharding, [one.scales for one in tiled])
    del params[f"{name}.values"]


def _lay_out_blocks(name: str, params: dict[str, Array]) -> None:
    values, scales = params[f"{name}.values"], params[f"{name}.{BLOCK_SCALES}"]
    _refuse(name, blocks_limit(_own_sides(values), _own_sides(scales)))
    parts = map(QuantizedBlocks, *map(_on_devices, (values, scales)))
    tiled: list[BlockTiles8] = [_blocks_tiled(part) for part in parts]
    params[f"{name}.{TILES}"] = _joined(values, [one.codes for one in tiled])
    params[f"{name}.{BLOCK_SCALES}"] = _joined(values, [one.scales for one in tiled])
    del params[f"{name}.values"]


def _refuse(name: str, limit: str | None) -> None:
    if limit is not None:
        raise ConfigError("linear_backend", "mosaic", f"{name} {limit}: must be xla")


def _own_sides(matrix: Array) -> tuple[int, int]:
    """Return the sides of each device's part of a matrix."""
    first, second = matrix.sharding.shard_shape(matrix.shape)
    return first, second


def _on_devices(array: Array) -> list[Array]:
    """Return the parts of an array on the devices of this host."""
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda shard: shard.device.id)]


def _joined(matrix: Array, parts: list[Array]) -> Array:
    """Return the tiles [across, along, ...] of all devices, or their scales, sharded as `matrix` [K, C] is."""
    sharding = matrix.sharding
    if not isinstance(sharding, NamedSharding):
        return parts[0]
    along, across = (*sharding.spec, None, None)[:2]
    spread = NamedSharding(sharding.mesh, PartitionSpec(across, along))  # type: ignore[no-untyped-call]
    tall, wide, *rest = parts[0].shape
    shape = tall * (1 if across is None else sharding.mesh.size), wide * (1 if along is None else sharding.mesh.size)
    return jax.make_array_from_single_device_arrays((*shape, *rest), spread, parts)


_int4_tiled, _8_bits_tiled = jax.jit(int4_tiles.tiles), jax.jit(eight_bits.tiles)
_blocks_tiled = jax.jit(eight_bits.block_tiles)
_scales_fit = jax.jit(int4_tiles.scales_fit)
