"""Matrices in 8 bits with a scale per output: as a checkpoint has them, or rounded, also on their devices."""

import jax
import numpy as np

from jswa.errors import ConfigError
from jswa.forms.eight_bits import EIGHT_BITS
from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import Scaled, read_scales
from jswa.model.weights.packed.blocks import stored_values
from jswa.model.weights.packed.reading import Reading, StoredMatrix
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.quantize import OUTPUTS_ARE_ROWS, load_quantized, of_outputs
from pallas_kernels.quantized import Kind, magnitudes, quantize, quantize_rows

_KINDS: dict[str, Kind] = {"I8": "int8", "F8_E4M3": "fp8"}


def quantize_on_devices(name: str, weights: jax.Array, kind: Kind, placement: Placement) -> Params:
    """Quantize a matrix to 8 bits on its devices, with one scale per output of the whole matrix.

    Raises ConfigError if its inputs are split over several hosts.
    """
    shards, (values, scales) = placement.shards(weights), _names(name)
    if name == "embed":
        quantized = [_quantize_rows(shard, kind=kind) for shard in shards]
    elif placement.input_shards(name, weights.shape) > 1:
        # So an output's scale needs the magnitudes of all devices.
        if placement.mesh is not None and placement.mesh.is_multi_process:
            limit = "weights that are loaded already cannot be quantized on several hosts: convert the checkpoint so"
            raise ConfigError("quantization", kind, limit)
        most = np.max([np.asarray(_magnitudes(shard)) for shard in shards], axis=0)
        quantized = [_quantize(shard, kind=kind, largest=jax.device_put(most, shard.sharding)) for shard in shards]
    else:
        quantized = [_quantize(shard, kind=kind) for shard in shards]
    return {
        values: placement.from_shards(values, [one.values for one in quantized]),
        scales: placement.from_shards(scales, [one.scales for one in quantized]),
    }


def _stored(matrix: StoredMatrix) -> Kind | None:
    """Return the 8-bit type of a matrix that the checkpoint stores with one scale per output, else None."""
    kinds = set()
    for part in matrix.source.parts:
        weight = matrix.weights[part.key]
        if not isinstance(weight, Scaled) or weight.zero is not None or weight.block[1] < part.shape[-1]:
            return None
        kinds.add(_KINDS[weight.values.dtype])
    return kinds.pop() if len(kinds) == 1 and matrix.source.layout in OUTPUTS_ARE_ROWS else None


def _load(matrix: StoredMatrix, kind: Kind, placement: Placement) -> Params:
    """Read a matrix in 8 bits: its bytes unchanged if the checkpoint has them so, else rounded."""
    stored = _stored(matrix) == kind
    arrays = _codes(matrix, kind) if stored else load_quantized(kind, matrix.source, matrix.shape, matrix.read)
    return {field: placement.put(field, array) for field, array in zip(_names(matrix.name), arrays, strict=True)}


def _codes(matrix: StoredMatrix, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Read a matrix that the checkpoint has in 8 bits: its bytes, and its scales in the order of outputs."""
    _, source, reader, weights, shape, _ = matrix

    def factors(part: TensorPart, begin: int, end: int) -> np.ndarray:
        weight = weights[part.key]
        assert isinstance(weight, Scaled)
        return read_scales(weight, reader, begin, end)

    values = stored_values(source, reader, weights, shape, np.dtype(np.int8 if kind == "int8" else np.uint8))
    scales = empty((*shape.shape[:-2], 1, shape.shape[-1]), np.dtype(np.float32))
    assemble(of_outputs(source), scales, factors)
    return values, scales[..., 0, :]


def _names(name: str) -> tuple[str, str]:
    """Return the names of the two parameters of a matrix in 8 bits."""
    return f"{name}.values", f"{name}.scales"


_quantize, _quantize_rows = (jax.jit(function, static_argnames="kind") for function in (quantize, quantize_rows))
_magnitudes = jax.jit(magnitudes)
READING = Reading(EIGHT_BITS, _stored, _load)
