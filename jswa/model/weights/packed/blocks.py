"""Experts in e4m3 with a scale per block: N.values and N.block_scales, or for Hopper N.tiles and N.block_scales.

The numbers are those of the checkpoint: its bytes, and its scales in float32. `QuantizedBlocks` and `BlockTiles8` say
what they look like.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Shaped

from jswa.errors import ConfigError
from jswa.model.hf.assemble import assemble
from jswa.model.hf.tensor_map import Part, Source
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Scaled, Weight, read_scales
from jswa.model.weights.placement import Placement, empty, expert_by_expert
from jswa.model.weights.quantize import of_outputs
from jswa.model.weights.safetensors_files import Reader
from pallas_kernels.experts import eight_bits
from pallas_kernels.experts.api import HOPPER, Implementation
from pallas_kernels.experts.eight_bits import DEEP, TILE, BlockTiles8
from pallas_kernels.quantized import Quantized, QuantizedBlocks, dequantized_blocks, quantize

BLOCK_SCALES = "block_scales"
_STACKS = "experts", "transposed"  # layouts of experts whose outputs are rows on disk, in the same order


class Blocks(NamedTuple):
    """Neighbouring inputs and outputs of a matrix that share a scale."""

    inputs: int
    outputs: int


def blocks_of(source: Source, weights: Mapping[str, Weight]) -> Blocks | None:
    """Return the blocks of a stack of experts that the checkpoint has in e4m3 with a scale for each, else None.

    Where the checkpoint's own blocks divide no matrix, or end at other outputs in gates than in ups, they are cut into
    equal ones.
    """
    if source.layout not in _STACKS:
        return None
    inputs, outputs, wide = source.parts[0].shape[-1], 0, True
    for part in source.parts:
        weight = weights[part.key]
        if not isinstance(weight, Scaled) or weight.zero is not None or weight.values.dtype != "F8_E4M3":
            return None
        rows, columns = weight.block
        wide = wide and columns >= part.shape[-1]
        inputs = gcd(inputs, min(columns, part.shape[-1]))
        outputs = gcd(outputs, min(rows, weight.group), weight.group)
    return None if wide else Blocks(inputs, outputs)


def load_blocks(
    name: str, blocks: Blocks, source: Source, reader: Reader, weights: Mapping[str, Weight],
    shape: jax.ShapeDtypeStruct, placement: Placement,
) -> Params:  # fmt: skip
    """Read a stack of experts as the checkpoint stores it, and return its parameters."""
    *lead, inputs, outputs = shape.shape
    groups = inputs // blocks.inputs
    # One per output while they are put in order, as only then gates and ups are in one matrix.
    scales = empty((*lead, groups, outputs), np.dtype(np.float32))

    def factors(part: Part, begin: int, end: int) -> Float32[np.ndarray, "rows groups"]:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        found = read_scales(weight, reader, begin, end)
        of_groups = np.arange(groups) * blocks.inputs // min(weight.block[1], inputs)
        out: Float32[np.ndarray, "rows groups"] = found[:, of_groups]
        return out

    assemble(of_outputs(source, groups), scales, factors)
    values = stored_values(source, reader, weights, shape, np.dtype(np.uint8))
    names = f"{name}.values", f"{name}.{BLOCK_SCALES}"
    arrays = values, np.ascontiguousarray(scales[..., :: blocks.outputs])
    return {field: placement.put(field, array) for field, array in zip(names, arrays, strict=True)}


def stored_values(
    source: Source, reader: Reader, weights: Mapping[str, Weight], shape: jax.ShapeDtypeStruct, dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
    """Return the bytes of a matrix that the checkpoint has in 8 bits, in the order of the parameter."""
    values = empty(shape.shape, dtype)

    def codes(part: Part, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        return reader.rows(weight.values, begin, end).view(dtype)

    assemble(source, values, codes)
    return values


def blocks_for_kernel(name: str, found: Params, experts: Implementation, placement: Placement) -> Params:
    """Return experts with scales of blocks as their kernel reads them: in tiles for Hopper, per output for a CPU.

    A CPU's library reads no scales of blocks, so for it the numbers are rounded a second time. Raises ConfigError if
    blocks do not fit tiles.
    """
    fields = f"{name}.values", f"{name}.{BLOCK_SCALES}"
    values, scales = (found[field] for field in fields)
    made: tuple[str, ...]
    convert: Callable[[QuantizedBlocks], Quantized | BlockTiles8]
    if experts == "cpu":
        made, convert = (fields[0], f"{name}.scales"), _per_output
    elif experts in HOPPER:
        (_, inputs, outputs), (_, groups, shares) = values.shape, scales.shape
        if not eight_bits.blocks_fit(inputs, outputs, groups, shares):
            block = f"blocks of {inputs // groups} inputs by {outputs // shares} outputs"
            limit = f"{name} has {block} and needs multiples of {DEEP} by {TILE}: must be xla"
            raise ConfigError("moe_backend", experts, limit)
        made, convert = (f"{name}.tiles", fields[1]), eight_bits.block_tiles
    else:
        return found
    shards = zip(*map(placement.shards, (values, scales)), strict=True)
    return placement.from_each(made, [expert_by_expert(convert, QuantizedBlocks(*shard)) for shard in shards])


def _per_output(matrix: QuantizedBlocks) -> Quantized:
    """Return a matrix rounded again to e4m3, with a scale per output."""
    return quantize(dequantized_blocks(matrix, jax.numpy.dtype("float32")), "fp8")
