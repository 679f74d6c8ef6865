"""Dequantization of checkpoint weights: rows of plain, fp8, int8, MXFP4 and NVFP4 tensors as floating-point numbers.

    K (F8_E4M3, I8), K_scale or K_scale_inv    (K - zero point) · scale, with one scale per tensor, row or block of rows
      (, K_zero_point of I8)                   and columns; the last blocks may be smaller
    K_blocks (U8 [.., G, 16]), K_scales        MXFP4 (OCP Microscaling Formats 1.0): two numbers per byte, the low half
      or K or K_packed (U8 [.., 16 G]),        first; 32 numbers of a row share an exponent [.., G]
      K_scale
    K_packed, K_scale, K_global_scale; or         NVFP4: `packed.float4`
      K, K_scale, K_scale_2
    integers of 4 or 8 bits in int32, whose       (number - zero point) · scale of the output and the input's group
      groups of inputs have scales: `Grouped`

Scales of type U8 or F8_E8M0 are exponents: 2^(byte - 127). Products are float32. Every tensor is read as a matrix whose
rows include the leading axes.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from jswa.errors import CheckpointError
from jswa.model.hf.assemble import Read
from jswa.model.hf.quantization import Quantization
from jswa.model.hf.source import TensorPart
from jswa.model.weights.packed.float4 import Float4, float4_names, read_float4, resolve_float4
from jswa.model.weights.packed.integers import Grouped, Unpacked, resolve_grouped, unpack
from jswa.model.weights.safetensors_files import FLOATS, Tensor, TensorReader

MX_BLOCK = 32
_EXPONENTS = ("U8", "F8_E8M0")
# Parameters of activation quantization, which jswa does not use. `kv_scales` reads the scales of KV.
_ACTIVATIONS = re.compile(
    r"(\.|_)(input_scale|input_global_scale|input_scale_ub|input_zero_point|activation_scale)$|\.(q|output)_scale$"
)
_KV = re.compile(r"\.(k|v)_proj\.output_scale$")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor of floating-point numbers."""

    tensor: Tensor


@dataclass(frozen=True)
class Scaled:
    """A tensor of 8-bit numbers with scales.

    Attributes:
        height: rows per matrix of the stack.
        group: rows, within a matrix, whose blocks of scales are counted separately (`TensorPart.row_groups`).
        block: rows and columns that share a scale.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    height: int
    group: int
    block: tuple[int, int]


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of MXFP4 numbers with scales."""

    values: Tensor
    scale: Tensor


Weight = PlainTensor | Scaled | PackedTensor | Float4 | Grouped


def companions(key: str, tensors: Collection[str], quantization: Quantization | None) -> tuple[str, ...]:
    """Return the names of the tensors that a weight consists of, judged by the names present; some may be missing."""
    if quantization is None:
        return (key,)
    if key not in tensors and f"{key}_blocks" in tensors:
        return f"{key}_blocks", f"{key}_scales"
    if key not in tensors and f"{key}_packed" in tensors:
        more = (f"{key}_{suffix}" for suffix in ("global_scale", "zero_point", "g_idx", "shape"))
        return f"{key}_packed", f"{key}_scale", *(name for name in more if name in tensors)
    stem = key.removesuffix("weight")
    if key not in tensors and f"{stem}qweight" in tensors:
        more = (f"{stem}{suffix}" for suffix in ("qzeros", "g_idx"))
        return f"{stem}qweight", f"{stem}scales", *(name for name in more if name in tensors)
    others = [f"{key}_{suffix}" for suffix in ("scale", "scale_inv", "scale_2", "zero_point")]
    return key, *(name for name in others if name in tensors)


def is_activation_scale(key: str) -> bool:
    """Return whether a tensor of a quantized checkpoint concerns only the quantization of activations."""
    return _ACTIVATIONS.search(key) is not None and _KV.search(key) is None


def resolve(part: TensorPart, tensors: Mapping[str, Tensor], quantization: Quantization | None) -> Weight:
    """Return the weight of a checkpoint tensor and its companions.

    Raises CheckpointError that names file and key if types or shapes do not fit.
    """
    names = companions(part.key, tensors, quantization)
    first = tensors[names[0]]
    if quantization is not None and first.dtype == "I32" and len(part.shape) == 2:
        return resolve_grouped(part, names, tensors, quantization)
    if quantization is None or len(part.shape) < 2 or first.dtype in FLOATS:
        if first.dtype in FLOATS and len(names) > 1:
            raise CheckpointError(f"{first.where} has type {first.dtype}: must not have {names[1]}")
        first.require_shape(part.shape)
        first.require_type(*FLOATS)
        return PlainTensor(first)
    if float4_names(part.key, names) is not None:
        return resolve_float4(part, names, tensors)
    if first.dtype == "U8":
        return _packed(part, first, names, tensors)
    first.require_type(*FLOATS, "F8_E4M3", "I8", "U8")
    first.require_shape(part.shape)
    zeros = [tensors[name] for name in names[1:] if name.endswith("zero_point")]
    scales = [tensors[name] for name in names[1:] if not name.endswith("zero_point")]
    if len(scales) != 1:
        one = f"{part.key}_scale or {part.key}_scale_inv"
        raise CheckpointError(f"{first.where} has type {first.dtype}: must have exactly one of {one}")
    return _scaled(part, first, scales[0], zeros[0] if zeros else None, quantization)


def row_reader(weights: Mapping[str, Weight], reader: TensorReader) -> Read:
    """Return a function that reads rows of weights. It keeps `Grouped` weights unpacked, one byte a number."""
    unpacked: dict[str, Unpacked] = {}

    def read(part: TensorPart, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
        weight = weights[part.key]
        if not isinstance(weight, Grouped):
            return read_rows(weight, reader, begin, end)
        if part.key not in unpacked:
            unpacked[part.key] = unpack(weight, reader)
        return unpacked[part.key].rows(begin, end)

    return read


def read_rows(weight: Weight, reader: TensorReader, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
    """Return rows [begin, end) of a weight, in float32, or in the stored type if the weight is plain."""
    match weight:
        case Grouped():
            return unpack(weight, reader).rows(begin, end)
        case PlainTensor(tensor):
            return reader.rows(tensor, begin, end)
        case PackedTensor(values, scale):
            columns = values.shape[-1] if values.shape[:-1] == scale.shape[:-1] else math.prod(values.shape[-2:])
            packed = reader.rows(values, begin, end, columns=columns)
            return unpack_mxfp4(packed, reader.rows(scale, begin, end))
        case Float4():
            return read_float4(weight, reader, begin, end)
        case Scaled():
            return _read_scaled(weight, reader, begin, end)


def unpack_mxfp4(
    packed: Shaped[np.ndarray, "rows half"], exponents: Shaped[np.ndarray, "rows groups"]
) -> Float[np.ndarray, "rows columns"]:
    """Return rows of MXFP4 as float32, with the same numbers as transformers' `convert_moe_packed_tensors`."""
    pairs: Float[np.ndarray, "rows columns"] = np.take(_PAIRS, packed).view(
        np.float32
    )  # the table has two float32 per uint64
    grouped = pairs.reshape(*exponents.shape, MX_BLOCK)
    with np.errstate(over="ignore"):
        grouped *= _QUARTER_POWERS[exponents][..., None]
    return pairs


def _packed(part: TensorPart, first: Tensor, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> PackedTensor:
    *lead, columns = part.shape
    if columns % MX_BLOCK:
        raise CheckpointError(f"{first.where} has MXFP4 rows of {columns} numbers: must be a multiple of {MX_BLOCK}")
    groups = columns // MX_BLOCK
    if names[0].endswith("_blocks"):
        first.require_shape((*lead, groups, MX_BLOCK // 2))
    else:
        first.require_shape((*lead, columns // 2))
    first.require_type("U8")
    if len(names) != 2:
        raise CheckpointError(f"{first.where} has type U8: must have {part.key}_scale and no zero points")
    scale = tensors[names[1]]
    scale.require_shape((*lead, groups), by=f"{part.key} asks for")
    scale.require_type(*_EXPONENTS)
    return PackedTensor(first, scale)


def _scaled(part: TensorPart, values: Tensor, scale: Tensor, zero: Tensor | None, quantization: Quantization) -> Scaled:
    *lead, height, columns = part.shape
    group = height // part.row_groups
    # The slices of a tensor parallel group may have been quantized separately.
    found = [
        ((*lead, height // size * -(-size // rows), -(-columns // width)), size, (rows, width))
        for rows, width in quantization.blocks
        for size in dict.fromkeys((group, height))
    ]
    if len({block for shape, _, block in found if shape == scale.shape}) > 1:
        raise CheckpointError(f"{scale.where} fits several block sizes: {list(quantization.blocks)}")
    found += [(shape, height, (1, columns)) for shape in ((*lead, height, 1), (*lead, height))]
    found += [(shape, height, (height, columns)) for shape in ((*lead, 1, 1), (*lead, 1), tuple(lead))]
    scale.require_shape(*(shape for shape, _, _ in found), by=f"{part.key} asks for")
    scale.require_type(*FLOATS, *_EXPONENTS)
    if zero is not None:
        values.require_type("I8")
        zero.require_shape(scale.shape, by="its scales ask for")
        zero.require_type("I8")
    size, block = next((size, block) for shape, size, block in found if shape == scale.shape)
    return Scaled(values, scale, zero, height, size, block)


def _read_scaled(weight: Scaled, reader: TensorReader, begin: int, end: int) -> Float[np.ndarray, "rows columns"]:
    raw = reader.rows(weight.values, begin, end)
    float8 = weight.values.dtype == "F8_E4M3"
    out: Float[np.ndarray, "rows columns"] = np.take(_FLOAT8, raw.view(np.uint8)) if float8 else raw.astype(np.float32)
    width = weight.block[1]

    def expanded(tensor: Tensor) -> Float[np.ndarray, "R C"]:
        found = _read_grid(weight, tensor, reader, begin, end)
        return found if found.shape[1] == 1 else np.repeat(found, width, axis=1)[:, : out.shape[1]]

    if weight.zero is not None:
        out -= expanded(weight.zero)
    out *= expanded(weight.scale)
    return out


def read_scales(weight: Scaled, reader: TensorReader, begin: int, end: int) -> Float[np.ndarray, "rows blocks"]:
    """Return the scales of rows [begin, end), one for each block of columns."""
    return _read_grid(weight, weight.scale, reader, begin, end)


def _read_grid(
    weight: Scaled, tensor: Tensor, reader: TensorReader, begin: int, end: int
) -> Float[np.ndarray, "rows blocks"]:
    rows, width = weight.block
    per_group = -(-weight.group // rows)
    row = np.arange(begin, end)
    matrix, within = row // weight.height, row % weight.height
    group = matrix * (weight.height // weight.group) + within // weight.group
    line = group * per_group + within % weight.group // rows
    blocks = -(-weight.values.shape[-1] // width)
    found = reader.rows(tensor, int(line[0]), int(line[-1]) + 1, columns=blocks)
    table = _POWERS[found] if tensor.dtype in _EXPONENTS else found.astype(np.float32)
    scales: Float[np.ndarray, "rows blocks"] = table[line - line[0]]
    return scales


def _pairs() -> Shaped[np.ndarray, " 256"]:
    """Return the two numbers of each byte, times 4, as the bits of two float32."""
    table = 4 * np.concatenate([_E2M1, -_E2M1])
    byte = np.arange(256)
    return np.ascontiguousarray(np.stack([table[byte & 15], table[byte >> 4]], axis=1)).view(np.uint64)[:, 0]


def _powers(bias: int) -> Float[np.ndarray, " 256"]:
    with np.errstate(over="ignore"):
        powers: Float[np.ndarray, " 256"] = np.ldexp(np.float32(1), np.arange(256) - bias)
    return powers


_PAIRS, _POWERS = _pairs(), _powers(127)
_QUARTER_POWERS = _powers(129)  # 2^128 is inf, but 0 · 2^128 must be 0, and 0.5 · 2^128 is finite
_FLOAT8: Float[np.ndarray, " 256"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
