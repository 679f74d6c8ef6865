"""NVFP4 in checkpoints: numbers of 4 bits, a scale of e4m3 per 16 inputs, and one of float32 per tensor.

    compressed-tensors   K_packed (U8 [.., K / 2]), K_scale (F8_E4M3 [.., K / 16]), K_global_scale (F32 [1]):
                         number · scale / global scale
    ModelOpt             K (U8), K_scale (the same), K_scale_2 (F32 []): number · scale · scale_2

The low half of a byte is the first number. This is how vLLM and compressed-tensors read both: compressed-tensors'
compressors/nvfp4 and entrypoints/convert/converters/modelopt_nvfp4.py (global scale = 1 / scale_2), vLLM's
model_executor/layers/quantization/modelopt.py. A division by the global scale is a product with its inverse, rounded to
float32 once. Scales of activations (input_global_scale, input_scale) are not read: activations stay as they are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8

from jswa.errors import CheckpointError
from jswa.model.hf.source import TensorPart
from jswa.model.weights.safetensors_files import Tensor, TensorReader

GROUP = 16  # inputs that share a scale
_GLOBAL, _SECOND = "_global_scale", "_scale_2"
_NAN = 0x7F  # of e4m3, without its sign
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS = np.concatenate([_E2M1, -_E2M1])[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1)]  # of each byte
_E4M3: Float32[np.ndarray, " 256"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class Float4:
    """A tensor in NVFP4.

    Attributes:
        inverse: whether factors are stored as their inverses.
        height: rows that share a factor: those of a matrix, or of the whole stack.
        factors: their number.
    """

    values: Tensor
    scale: Tensor
    factor: Tensor
    inverse: bool
    height: int
    factors: int


def float4_names(key: str, names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the names of the scales of a weight and of its factor, or None if it is not in NVFP4.

    `names`: of the tensors that the weight consists of.
    """
    factor = next((name for end in (_GLOBAL, _SECOND) if (name := f"{key}{end}") in names), None)
    return None if factor is None else (f"{key}_scale", factor)


def resolve_float4(part: TensorPart, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> Float4:
    """Return a weight in NVFP4. Raises CheckpointError that names the tensor whose shape or type does not fit."""
    found = float4_names(part.key, names)
    assert found is not None
    values = tensors[names[0]]
    *lead, height, columns = part.shape
    if columns % GROUP:
        raise CheckpointError(f"{values.where} has NVFP4 rows of {columns} numbers: must be a multiple of {GROUP}")
    if len(names) != 3 or found[0] not in names:
        raise CheckpointError(f"{values.where} in NVFP4 must have {found[0]} and {found[1]}, and nothing else")
    scale, factor = tensors[found[0]], tensors[found[1]]
    values.require_type("U8")
    values.require_shape((*lead, height, columns // 2))
    scale.require_type("F8_E4M3")
    scale.require_shape((*lead, height, columns // GROUP), by=f"{part.key} asks for")
    factor.require_type("F32")
    of_each = [(*lead, *rest) for rest in ((), (1,), (1, 1))]  # () if there is one matrix
    factor.require_shape((), (1,), *of_each, by=f"{part.key} asks for")
    count, matrices = math.prod(factor.shape), math.prod(lead)
    return Float4(values, scale, factor, found[1].endswith(_GLOBAL), height * matrices // count, count)


def read_factors(weight: Float4, reader: TensorReader, begin: int, end: int) -> Float32[np.ndarray, "rows 1"]:
    """Return the factor of each of these rows. Raises CheckpointError unless it is a finite number above 0."""
    stored = reader.rows(weight.factor, 0, weight.factors, columns=1)
    with np.errstate(over="ignore", divide="ignore"):
        factors = np.float32(1) / stored if weight.inverse else stored
    wrong = stored[~((factors > 0) & np.isfinite(factors) & np.isfinite(stored))]  # NaN too
    if len(wrong):
        limit = "must be a finite number above 0, and so must its inverse"
        raise CheckpointError(f"{weight.factor.where} has the factor {wrong[0]}: {limit}")
    out: Float32[np.ndarray, "rows 1"] = factors[np.arange(begin, end) // weight.height]
    return out


def read_scale_bits(weight: Float4, reader: TensorReader, begin: int, end: int) -> UInt8[np.ndarray, "rows G"]:
    """Return the bits of the scales of these rows. Raises CheckpointError if one is NaN."""
    found: UInt8[np.ndarray, "rows G"] = reader.rows(weight.scale, begin, end).view(np.uint8)
    wrong = np.argwhere((found & _NAN) == _NAN)
    if len(wrong):
        raise CheckpointError(f"{weight.scale.where} has the scale NaN in row {begin + wrong[0][0]}: must be a number")
    return found


def read_float4(weight: Float4, reader: TensorReader, begin: int, end: int) -> Float32[np.ndarray, "rows K"]:
    """Return rows of a weight: number · scale, exactly, times the factor, rounded once to float32."""
    scales = _E4M3[read_scale_bits(weight, reader, begin, end)]
    out: Float32[np.ndarray, "rows K"] = _PAIRS[reader.rows(weight.values, begin, end)].reshape(end - begin, -1)
    out.reshape(*scales.shape, GROUP)[...] *= scales[..., None]
    out *= read_factors(weight, reader, begin, end)
    return out
