"""Weights as they lie in a checkpoint, plain or quantised, and their rows as floating-point numbers.

    K (F8_E4M3, I8), K_scale or K_scale_inv    (K - zero) · scale: one scale for all, one a row, or one a block of rows
      (, K_zero_point of I8)                   and columns, where the last blocks may be smaller
    K_blocks (U8 [.., G, 16]), K_scales        MXFP4 (OCP Microscaling Formats 1.0): two numbers a byte, the low half
      or K or K_packed (U8 [.., 16 G]),        first; 32 in a row share an exponent [.., G]
      K_scale

Scales that are bytes are exponents: 2^(byte - 127). Products are float32. Everything is a matrix here: leading axes are
rows.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from jswa.errors import CheckpointError
from jswa.model.hf.quantization import Quantization
from jswa.model.hf.tensor_map import Part
from jswa.model.weights.safetensors_files import Reader, Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
MX_BLOCK = 32
_EXPONENTS = ("U8", "F8_E8M0")
# Of how activations were to be quantised, which nothing here asks for. Scales of KV: see `kv_scales`.
_IDLE = re.compile(r"(\.|_)(input_scale|input_scale_ub|input_zero_point|activation_scale)$|\.(q|output)_scale$")
_KV = re.compile(r"\.(k|v)_proj\.output_scale$")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True)
class Plain:
    """A tensor of floating-point numbers."""

    tensor: Tensor


@dataclass(frozen=True)
class Scaled:
    """A tensor of 8-bit numbers, and what they are multiplied by.

    Attributes:
        height: rows of one matrix; further ones are those of the next.
        run: rows, within a matrix, after which blocks begin anew.
        block: rows and columns that share a scale.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    height: int
    run: int
    block: tuple[int, int]


@dataclass(frozen=True)
class Packed:
    """A tensor of MXFP4."""

    values: Tensor
    scale: Tensor


Weight = Plain | Scaled | Packed


def companions(key: str, tensors: Collection[str], quantization: Quantization | None) -> tuple[str, ...]:
    """The tensors that make a weight, by what is there; it may be that some are not."""
    if quantization is None:
        return (key,)
    if key not in tensors and f"{key}_blocks" in tensors:
        return f"{key}_blocks", f"{key}_scales"
    if key not in tensors and f"{key}_packed" in tensors:
        return f"{key}_packed", f"{key}_scale"
    others = [f"{key}_{what}" for what in ("scale", "scale_inv", "zero_point")]
    return key, *(name for name in others if name in tensors)


def is_idle(key: str) -> bool:
    """Whether a tensor of a quantised checkpoint says nothing about weights."""
    return _IDLE.search(key) is not None and _KV.search(key) is None


def resolve(part: Part, tensors: Mapping[str, Tensor], quantization: Quantization | None) -> Weight:
    """The weight that a part is. Raises CheckpointError, naming file and key, where types and shapes do not fit."""
    names = companions(part.key, tensors, quantization)
    first = tensors[names[0]]
    if quantization is None or len(part.shape) < 2 or first.dtype in FLOATS:
        if first.dtype in FLOATS and len(names) > 1:
            raise CheckpointError(f"{first.where} has type {first.dtype}, and {names[1]} beside it: must have no scale")
        first.require_shape(part.shape)
        first.require_type(*FLOATS)
        return Plain(first)
    if first.dtype == "U8":
        return _packed(part, first, names, tensors)
    first.require_type(*FLOATS, "F8_E4M3", "I8", "U8")
    first.require_shape(part.shape)
    zeros = [tensors[name] for name in names[1:] if name.endswith("zero_point")]
    scales = [tensors[name] for name in names[1:] if not name.endswith("zero_point")]
    if len(scales) != 1:
        beside = f"{part.key}_scale or {part.key}_scale_inv"
        raise CheckpointError(f"{first.where} has type {first.dtype}: must have one of {beside} beside it")
    return _scaled(part, first, scales[0], zeros[0] if zeros else None, quantization)


def read_rows(weight: Weight, reader: Reader, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
    """Rows [begin, end) of a weight; float32, or as they are stored where they are plain."""
    match weight:
        case Plain(tensor):
            return reader.rows(tensor, begin, end)
        case Packed(values, scale):
            columns = values.shape[-1] if values.shape[:-1] == scale.shape[:-1] else math.prod(values.shape[-2:])
            packed = reader.rows(values, begin, end, columns=columns)
            return unpack_mxfp4(packed, reader.rows(scale, begin, end))
        case Scaled():
            return _read_scaled(weight, reader, begin, end)


def unpack_mxfp4(
    packed: Shaped[np.ndarray, "rows half"], exponents: Shaped[np.ndarray, "rows groups"]
) -> Float[np.ndarray, "rows columns"]:
    """The float32 numbers of rows of MXFP4, as transformers' `convert_moe_packed_tensors` has them."""
    pairs: Float[np.ndarray, "rows columns"] = np.take(_PAIRS, packed).view(np.float32)  # two numbers as one 64-bit one
    grouped = pairs.reshape(*exponents.shape, MX_BLOCK)
    with np.errstate(over="ignore"):
        grouped *= _QUARTER_POWERS[exponents][..., None]
    return pairs


def _packed(part: Part, first: Tensor, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> Packed:
    *lead, columns = part.shape
    if columns % MX_BLOCK:
        raise CheckpointError(f"{first.where} has MXFP4 rows of {columns}: must be a multiple of {MX_BLOCK}")
    groups = columns // MX_BLOCK
    if names[0].endswith("_blocks"):
        first.require_shape((*lead, groups, MX_BLOCK // 2))
    else:
        first.require_shape((*lead, columns // 2))
    first.require_type("U8")
    if len(names) != 2:
        raise CheckpointError(f"{first.where} has type U8: must have {part.key}_scale beside it, and no zero points")
    scale = tensors[names[1]]
    scale.require_shape((*lead, groups), by=f"{part.key} asks for")
    scale.require_type(*_EXPONENTS)
    return Packed(first, scale)


def _scaled(part: Part, values: Tensor, scale: Tensor, zero: Tensor | None, quantization: Quantization) -> Scaled:
    *lead, height, columns = part.shape
    run = height // part.runs
    # Slices of a tensor-parallel group have blocks of their own.
    found = [
        ((*lead, height // size * -(-size // rows), -(-columns // width)), size, (rows, width))
        for rows, width in quantization.blocks
        for size in dict.fromkeys((run, height))
    ]
    if len({block for shape, _, block in found if shape == scale.shape}) > 1:
        raise CheckpointError(f"{scale.where} may be of blocks of several sizes: {list(quantization.blocks)}")
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


def _read_scaled(weight: Scaled, reader: Reader, begin: int, end: int) -> Float[np.ndarray, "rows columns"]:
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


def read_scales(weight: Scaled, reader: Reader, begin: int, end: int) -> Float[np.ndarray, "rows blocks"]:
    """What rows [begin, end) are multiplied by, for each of the blocks that a row has."""
    return _read_grid(weight, weight.scale, reader, begin, end)


def _read_grid(
    weight: Scaled, tensor: Tensor, reader: Reader, begin: int, end: int
) -> Float[np.ndarray, "rows blocks"]:
    rows, width = weight.block
    per_run = -(-weight.run // rows)
    row = np.arange(begin, end)
    matrix, within = row // weight.height, row % weight.height
    line = (matrix * (weight.height // weight.run) + within // weight.run) * per_run + within % weight.run // rows
    blocks = -(-weight.values.shape[-1] // width)
    found = reader.rows(tensor, int(line[0]), int(line[-1]) + 1, columns=blocks)
    table = _POWERS[found] if tensor.dtype in _EXPONENTS else found.astype(np.float32)
    scales: Float[np.ndarray, "rows blocks"] = table[line - line[0]]
    return scales


def _pairs() -> Shaped[np.ndarray, " 256"]:
    """The two numbers of each byte times 4, as the bits of two float32."""
    table = 4 * np.concatenate([_E2M1, -_E2M1])
    byte = np.arange(256)
    return np.ascontiguousarray(np.stack([table[byte & 15], table[byte >> 4]], axis=1)).view(np.uint64)[:, 0]


def _powers(bias: int) -> Float[np.ndarray, " 256"]:
    with np.errstate(over="ignore"):
        powers: Float[np.ndarray, " 256"] = np.ldexp(np.float32(1), np.arange(256) - bias)
    return powers


_PAIRS, _POWERS = _pairs(), _powers(127)
_QUARTER_POWERS = _powers(129)  # 2^128 is infinite, but 0 · 2^128 is 0, and half of it a number
_FLOAT8: Float[np.ndarray, " 256"] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
