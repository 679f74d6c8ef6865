"""Matrices in NVFP4: N.nvfp4_codes, N.nvfp4_scales and N.nvfp4_output_scales.

The numbers are those of the checkpoint: its bytes, its scales, and the factor of its tensor at each output.
"""

import jax
import numpy as np

from jswa.errors import CheckpointError, ConfigError
from jswa.forms.nvfp4 import CODES, FACTORS, NVFP4, SCALES
from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.packed.float4 import GROUP, Float4, read_factors, read_scale_bits
from jswa.model.weights.packed.reading import Arrays, Reading, StoredMatrix
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.quantize import OUTPUTS_ARE_ROWS, of_outputs
from pallas_kernels import Linear


def _stored(matrix: StoredMatrix) -> bool | None:
    """Return True if all tensors of a matrix are in NVFP4, and none has its inputs in another order; else None."""
    stored = all(isinstance(matrix.weights[part.key], Float4) for part in matrix.source.parts)
    layout = matrix.source.layout
    return (stored and layout in OUTPUTS_ARE_ROWS and layout != "columns") or None


def _load(matrix: StoredMatrix, _: bool, placement: Placement) -> Params:
    """Read a matrix, or a stack of experts, as the checkpoint stores it, and return its parameters."""
    name, source, reader, weights, shape = matrix[:5]
    *lead, inputs, outputs = shape.shape
    half, groups = inputs // 2, inputs // GROUP

    def weight(part: TensorPart) -> Float4:
        found = weights[part.key]
        assert isinstance(found, Float4)
        return found

    codes = empty((*lead, half, outputs), np.dtype(np.uint8))
    scales = empty((*lead, groups, outputs), np.dtype(np.uint8))
    factors = empty((*lead, 1, outputs), np.dtype(np.float32))
    assemble(of_outputs(source, half), codes, lambda part, *at: reader.rows(weight(part).values, *at))
    assemble(of_outputs(source, groups), scales, lambda part, *at: read_scale_bits(weight(part), reader, *at))
    assemble(of_outputs(source), factors, lambda part, *at: read_factors(weight(part), reader, *at))
    arrays = {f"{name}.{CODES}": codes, f"{name}.{SCALES}": scales, f"{name}.{FACTORS}": factors[..., 0, :]}
    _require_whole_groups(name, codes.shape, placement)
    return {field: placement.put(field, array) for field, array in arrays.items()}


def _fitted(name: str, arrays: Arrays, shape: jax.ShapeDtypeStruct, placement: Placement, _: Linear) -> Arrays:
    """Return a matrix as it is. Raises CheckpointError or ConfigError if its inputs cannot be divided into groups."""
    if shape.shape[-2] % GROUP:
        raise CheckpointError(f"{name} in NVFP4 has {shape.shape[-2]} inputs: must be a multiple of {GROUP}")
    _require_whole_groups(name, arrays[f"{name}.{CODES}"].shape, placement)
    return arrays


def _require_whole_groups(name: str, codes: tuple[int, ...], placement: Placement) -> None:
    """Raise ConfigError if devices would share a group of inputs. `codes`: shape of the matrix's codes."""
    devices, groups = placement.input_shards(f"{name}.{CODES}", codes), 2 * codes[-2] // GROUP
    if groups % devices:
        limit = f"must divide {groups}, the groups of {GROUP} inputs of {name} in NVFP4"
        raise ConfigError("tensor_parallel_size", devices, limit)


READING = Reading(NVFP4, _stored, _load, fitted=_fitted)
