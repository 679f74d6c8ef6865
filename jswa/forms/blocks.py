"""Matrices in e4m3 with a scale for each block of inputs and outputs: N.values and N.block_scales.

For Hopper's kernels N.tiles takes the place of N.values, and a scale is that of a tile's outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jswa.forms.base.form import Form, MatrixPlace, ScaleCounts, Spec
from jswa.forms.base.names import BLOCK_SCALES, LINEAR, TILES
from jswa.forms.base.tiles import Shards, expert_by_expert, joined, on_devices, own_sides, refuse_linear, refuse_stack
from jswa.kernels import refused
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.api import HOPPER
from pallas_kernels.experts.dense import DenseTiles
from pallas_kernels.experts.eight_bits import DEEP, TILE, BlockTiles8
from pallas_kernels.quantized import Quantized, QuantizedBlocks, dequantized_blocks, quantize


def _bound_tiles(place: MatrixPlace, arrays: Mapping[str, Array]) -> Any:
    tiles = BlockTiles8(arrays[TILES], arrays[BLOCK_SCALES])
    return tiles if place.is_stack else DenseTiles(tiles, place.sms)


def _specs(name: str, shape: tuple[int, ...], counts: ScaleCounts) -> dict[str, Spec] | None:
    *lead, inputs, outputs = shape
    values, told = {"values": Spec(shape, ("uint8",))}, counts.groups and counts.shares
    if not told:
        return values
    sides = (inputs, counts.groups), (outputs, counts.shares)
    if not LINEAR.search(name) or any(not 0 < count <= side or side % count for side, count in sides):
        return None
    return values | {BLOCK_SCALES: Spec((*lead, counts.groups, counts.shares), ("float32",))}


def _stacked(name: str, arrays: Mapping[str, Array], experts: str, place: Shards) -> dict[str, Array]:
    """Lay a stack out: in tiles for Hopper; for a CPU, whose library reads no scales of blocks, rounded again."""
    values, scales = arrays["values"], arrays[BLOCK_SCALES]
    made: tuple[str, ...] = f"{name}.values", f"{name}.{BLOCK_SCALES}"
    convert: Callable[[QuantizedBlocks], Quantized | BlockTiles8]
    if experts == "cpu":
        made, convert = (made[0], f"{name}.scales"), _per_output
    elif experts == "triton":
        raise refused("experts", experts, f"{name} is held in 8 bits: must be xla or mosaic")
    elif experts in HOPPER:
        refuse_stack(name, experts, _limit(values.shape[1:], scales.shape[1:]))
        made, convert = (f"{name}.{TILES}", made[1]), eight_bits.block_tiles
    else:
        return dict(zip(made, (values, scales), strict=True))
    shards = zip(*map(place.shards, (values, scales)), strict=True)
    return place.from_each(made, [expert_by_expert(convert, QuantizedBlocks(*shard)) for shard in shards])


def _per_output(matrix: QuantizedBlocks) -> Quantized:
    """Return a matrix rounded again to e4m3, with a scale per output."""
    return quantize(dequantized_blocks(matrix, jnp.dtype("float32")), "fp8")


def _tiled(name: str, params: dict[str, Array]) -> None:
    values, scales = params[f"{name}.values"], params[f"{name}.{BLOCK_SCALES}"]
    refuse_linear(name, _limit(own_sides(values), own_sides(scales)))
    tiled: list[BlockTiles8] = [_in_tiles(part) for part in map(QuantizedBlocks, *map(on_devices, (values, scales)))]
    params[f"{name}.{TILES}"] = joined(values, [one.codes for one in tiled])
    params[f"{name}.{BLOCK_SCALES}"] = joined(values, [one.scales for one in tiled])
    del params[f"{name}.values"]


def _limit(sides: tuple[int, ...], counts: tuple[int, ...]) -> str | None:
    """Return why a matrix, or each of a stack, has no tiles; None if it has.

    Args:
        sides: inputs and outputs.
        counts: of blocks along both.
    """
    (inputs, outputs), (groups, shares) = sides, counts
    if eight_bits.blocks_fit(inputs, outputs, groups, shares):
        return None
    block = f"blocks of {inputs // groups} inputs by {outputs // shares} outputs"
    return f"has {block} and needs multiples of {DEEP} by {TILE}"


_in_tiles = jax.jit(eight_bits.block_tiles)
BLOCKS = Form(
    ("values", BLOCK_SCALES),
    lambda _, arrays: QuantizedBlocks(arrays["values"], arrays[BLOCK_SCALES]),
    specs=_specs,
    scheme="blocks",
    counted=BLOCK_SCALES,
    linear=("mosaic",),
    experts=("mosaic_overlap",),
    named=("reference", "xla", "mosaic", "mosaic_overlap"),
    modes=lambda _: ("fp8",),
    rounded_for=("cpu",),
    stacked=_stacked,
    tiled=_tiled,
)
BLOCK_TILES = Form((TILES, BLOCK_SCALES), _bound_tiles, in_tiles=True)
