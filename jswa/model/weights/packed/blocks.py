"""Matrices in e4m3 with a scale per block: N.values and N.block_scales, or for Hopper N.tiles and N.block_scales.

The numbers are those of the checkpoint: its bytes, and its scales in float32. `QuantizedBlocks` and `BlockTiles8` say
what they look like.
"""

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped

from jswa.forms.base.names import BLOCK_SCALES
from jswa.forms.blocks import BLOCKS
from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import Source, TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Scaled, Weight, read_scales
from jswa.model.weights.packed.reading import Arrays, Reading, StoredMatrix
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.quantize import load_quantized, of_outputs
from jswa.model.weights.safetensors_files import TensorReader
from pallas_kernels import Linear

# Whose outputs are rows on disk, and their inputs in the same order.
_LAYOUTS = "experts", "transposed", "matrix", "rank_slices"
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Blocks(NamedTuple):
    """Neighbouring inputs and outputs of a matrix that share a scale."""

    inputs: int
    outputs: int


def _stored(matrix: StoredMatrix) -> Blocks | None:
    """Return the blocks of a matrix, or of each of a stack, that is stored in e4m3 with a scale for each, else None.

    Where the checkpoint's own blocks divide no matrix, or end at other outputs in gates than in ups, they are cut into
    equal ones.
    """
    source, weights = matrix.source, matrix.weights
    if source.layout not in _LAYOUTS or source.folds:
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
    if source.layout == "rank_slices":  # a slice has q, k and v one behind the other, and all slices' q come first
        outputs = gcd(outputs, *(rows // source.slices for rows in source.rows))
    return None if wide else Blocks(inputs, outputs)


def _load(matrix: StoredMatrix, blocks: Blocks, placement: Placement) -> Params:
    """Read a matrix, or a stack of experts, as the checkpoint stores it, and return its parameters."""
    name, source, reader, weights, shape, _ = matrix
    *lead, inputs, outputs = shape.shape
    groups = inputs // blocks.inputs
    # One per output while they are put in order, as only then gates and ups are in one matrix.
    scales = empty((*lead, groups, outputs), np.dtype(np.float32))

    def factors(part: TensorPart, begin: int, end: int) -> Float32[np.ndarray, "rows groups"]:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        found = read_scales(weight, reader, begin, end)
        of_groups = np.arange(groups) * blocks.inputs // min(weight.block[1], inputs)
        out: Float32[np.ndarray, "rows groups"] = found[:, of_groups]
        return out

    assemble(of_outputs(source, groups), scales, factors)
    values = stored_values(source, reader, weights, shape, np.dtype(np.uint8))
    arrays = dict(zip(_names(name), (values, scales[..., :: blocks.outputs]), strict=True))
    return {field: placement.put(field, array) for field, array in _cut(name, arrays, placement).items()}


def _fitted(name: str, arrays: Arrays, shape: jax.ShapeDtypeStruct, placement: Placement, linear: Linear) -> Arrays:
    """Return a matrix whose blocks no devices share; or rounded again, for kernels that read no scales of blocks."""
    kept = len(shape.shape) == 3 or linear in BLOCKS.linear
    return _cut(name, arrays, placement) if kept else _rounded(name, arrays, shape)


def _cut(name: str, arrays: Arrays, placement: Placement) -> Arrays:
    """Return a matrix with its blocks cut into smaller equal ones where devices would share a block."""
    values, scales = (arrays[field] for field in _names(name))
    (inputs, outputs), (groups, shares) = values.shape[-2:], scales.shape[-2:]
    cut = placement.cut(f"{name}.values", values.shape)
    edges = [] if cut is None else [edge for ranges in cut.ranges for one in ranges for edge in one]
    if cut is not None and cut.axis == -2:
        scales = scales.repeat(inputs // groups // gcd(inputs // groups, *edges), axis=-2)
    if cut is not None and cut.axis == -1:
        scales = scales.repeat(outputs // shares // gcd(outputs // shares, *edges), axis=-1)
    return dict(zip(_names(name), (values, np.ascontiguousarray(scales)), strict=True))


def _rounded(name: str, arrays: Arrays, shape: jax.ShapeDtypeStruct) -> Arrays:
    """Return a matrix rounded again, with a scale per output: what loading its checkpoint gives other kernels.

    Args:
        shape: shape and type of the matrix if it is not quantized.
    """
    values, scales = (arrays[field] for field in _names(name))
    (inputs, outputs), (groups, shares) = values.shape, scales.shape

    def read(_: TensorPart, begin: int, end: int) -> Float32[np.ndarray, "rows inputs"]:
        own = scales[:, np.arange(begin, end) * shares // outputs].repeat(inputs // groups, axis=0)
        wide = values[:, begin:end].view(_FLOAT8).astype(np.float32) * own
        return np.ascontiguousarray(wide.T)

    source = Source((TensorPart(name, (outputs, inputs)),), "matrix")
    return dict(zip((f"{name}.values", f"{name}.scales"), load_quantized("fp8", source, shape, read), strict=True))


def _names(name: str) -> tuple[str, str]:
    return f"{name}.values", f"{name}.{BLOCK_SCALES}"


def stored_values(
    source: Source, reader: TensorReader, weights: Mapping[str, Weight], shape: jax.ShapeDtypeStruct, dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
    """Return the bytes of a matrix that the checkpoint has in 8 bits, in the order of the parameter."""
    values = empty(shape.shape, dtype)

    def codes(part: TensorPart, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        return reader.rows(weight.values, begin, end).view(dtype)

    assemble(source, values, codes)
    return values


READING = Reading(BLOCKS, _stored, _load, modes=("fp8",), fitted=_fitted)
