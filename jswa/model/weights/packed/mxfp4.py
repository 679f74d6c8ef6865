"""Experts in MXFP4: blocks and exponents as checkpoints have them."""

import numpy as np

from jswa.forms.mxfp4 import MXFP4
from jswa.model.hf.assemble import assemble
from jswa.model.hf.source import TensorPart
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import PackedTensor
from jswa.model.weights.packed.reading import Reading, StoredMatrix
from jswa.model.weights.placement import Placement, empty
from pallas_kernels.experts.mxfp4 import BLOCK


def _stored(matrix: StoredMatrix) -> bool | None:
    return all(isinstance(matrix.weights[part.key], PackedTensor) for part in matrix.source.parts) or None


def _load(matrix: StoredMatrix, _: bool, placement: Placement) -> Params:
    """Read blocks and exponents [E, C, ...], gates before ups."""
    name, source, reader, weights, shape = matrix[:5]
    count, inputs, outputs = shape.shape

    def read_all(columns: int, field: str) -> np.ndarray:
        out = empty((count, outputs, columns), np.dtype(np.uint8))

        def read(part: TensorPart, begin: int, end: int) -> np.ndarray:
            weight = weights[part.key]
            assert isinstance(weight, PackedTensor)
            return reader.rows(getattr(weight, field), begin, end, columns=columns)

        assemble(source, np.swapaxes(out, 1, 2), read)
        return out

    arrays = {f"{name}.blocks": read_all(inputs // 2, "values"), f"{name}.scales": read_all(inputs // BLOCK, "scale")}
    return {field: placement.put(field, array) for field, array in arrays.items()}


READING = Reading(MXFP4, _stored, _load, modes=("int8", "fp8"))
