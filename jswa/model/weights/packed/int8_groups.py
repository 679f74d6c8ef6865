"""Matrices in int8 with a scale per group of inputs: the checkpoint's numbers and scales, as they are."""

from math import gcd

import jax
import numpy as np
from jaxtyping import Float32

from jswa.forms.base.names import SCALES
from jswa.forms.int8_groups import INT8_GROUPS
from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Scaled, read_scales
from jswa.model.weights.packed.blocks import stored_values
from jswa.model.weights.packed.reading import Arrays, Reading, StoredMatrix
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.quantize import OUTPUTS_ARE_ROWS, of_outputs
from jswa.model.weights.safetensors_files import TYPES
from pallas_kernels import Linear
from pallas_kernels.cpu.products import BLOCK

_SCALES_AS_STORED = ("F16", "BF16")


def _stored(matrix: StoredMatrix) -> int | None:
    """Return the inputs that share a scale, if all tensors of a matrix are in int8 with a scale per group; else None.

    Tensors with groups of different sizes have those that divide all of them. Groups of an embedding are whole blocks.
    """
    source, group = matrix.source, 0
    is_embedding = matrix.name == "embed"
    if len(matrix.shape.shape) != 2 or source.layout == "columns":
        return None
    if source.layout not in OUTPUTS_ARE_ROWS and not is_embedding:
        return None
    for part in source.parts:
        weight, inputs = matrix.weights[part.key], part.shape[-1]
        if not isinstance(weight, Scaled) or weight.zero is not None or weight.values.dtype != "I8":
            return None
        if weight.block[0] != 1 or weight.block[1] >= inputs or inputs % weight.block[1]:
            return None
        group = gcd(group, weight.block[1])
    return None if is_embedding and group % BLOCK else group


def _load(matrix: StoredMatrix, group: int, placement: Placement) -> Params:
    """Read a matrix as the checkpoint stores it, and return its parameters."""
    name, source, reader, weights, shape, _ = matrix
    is_embedding = name == "embed"
    outputs, inputs = shape.shape if is_embedding else shape.shape[::-1]

    def weight(part: TensorPart) -> Scaled:
        found = weights[part.key]
        assert isinstance(found, Scaled)
        return found

    def factors(part: TensorPart, begin: int, end: int) -> Float32[np.ndarray, "rows groups"]:
        own = read_scales(weight(part), reader, begin, end)
        out: Float32[np.ndarray, "rows groups"] = np.repeat(own, weight(part).block[1] // group, axis=1)
        return out

    kinds = {weight(part).scale.dtype for part in source.parts}
    kind = TYPES[kinds.pop()] if len(kinds) == 1 and kinds <= set(_SCALES_AS_STORED) else np.dtype(np.float32)
    scales = empty((outputs, inputs // group) if is_embedding else (inputs // group, outputs), kind)
    assemble(of_outputs(source, inputs // group), scales, factors)
    values = stored_values(source, reader, weights, shape, np.dtype(np.int8))
    arrays = {f"{name}.values": values, f"{name}.{SCALES}": scales}
    return {field: placement.put(field, array) for field, array in _fitted(name, arrays, shape, placement).items()}


def _fitted(name: str, arrays: Arrays, _: jax.ShapeDtypeStruct, placement: Placement, __: Linear = "xla") -> Arrays:
    if name == "embed":  # devices share its rows
        return arrays
    values = arrays[f"{name}.values"]
    return for_devices(name, arrays, placement.input_shards(f"{name}.values", values.shape))


def for_devices(name: str, arrays: Arrays, devices: int) -> Arrays:
    """Return a matrix whose inputs are split over so many devices, with smaller groups if one would cross devices."""
    values, scales = arrays[f"{name}.values"], arrays[f"{name}.{SCALES}"]
    inputs, group = len(values), len(values) // len(scales)
    smaller = gcd(group, inputs // devices)
    return {f"{name}.values": values, f"{name}.{SCALES}": scales.repeat(group // smaller, axis=0)}


READING = Reading(INT8_GROUPS, _stored, _load, fitted=_fitted)
