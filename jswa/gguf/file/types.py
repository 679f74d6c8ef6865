"""The types of GGUF tensors: their blocks, and the numbers that these stand for, as the gguf package has them."""

from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float16, Int8, Int32, Shaped, UInt8


class Block(NamedTuple):
    """The name of a type, and its unit: so many numbers in so many bytes."""

    name: str
    numbers: int
    size: int


# Types whose numbers NumPy has, by safetensors' name.
PLAIN: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Q8_1 and Q8_K are llama.cpp's activations, and the integers belong to models that are no text decoders.
_NO_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64")


@cache
def blocks() -> dict[int, Block]:
    """Return all types by llama.cpp's number."""
    from gguf.constants import GGML_QUANT_SIZES  # takes a fifth of a second, which other checkpoints need not wait

    return {int(kind): Block(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


@cache
def weight_types() -> tuple[str, ...]:
    """Return the types that matrices of a decoder may have."""
    return tuple(block.name for block in blocks().values() if block.name not in _NO_WEIGHTS)


@cache
def _named() -> dict[str, Block]:
    return {block.name: block for block in blocks().values()}


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a row of `columns` numbers."""
    block = _named()[kind]
    return columns // block.numbers * block.size


def numbers(kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Shaped[np.ndarray, "rows columns"]:
    """Return rows as numbers: in their own type if it is one of `PLAIN`, else dequantized exactly, in float32."""
    if kind in PLAIN:
        return data.view(PLAIN[kind])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # scales that are not finite stay so, and the engine's checks see the numbers
        found: Shaped[np.ndarray, "rows columns"] = dequantize(data, GGMLQuantizationType[kind])
    return found


def _numbers(dtype: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Shaped[np.ndarray, "rows columns"]:
    found: Shaped[np.ndarray, "rows columns"] = numbers(kind, data).astype(PLAIN[dtype], copy=False)
    return found


def _mxfp4_codes(_: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> UInt8[np.ndarray, "rows codes"]:
    """Return the codes of MXFP4, two neighbours a byte, the first in the low half: GGUF has halves of a block so."""
    assert kind == "MXFP4"
    bytes_ = data.reshape(len(data), -1, 17)[..., 1:]
    first, second = bytes_ & 15, bytes_ >> 4  # numbers 0 to 15 of the block, and 16 to 31
    codes = np.concatenate([first, second], axis=-1)
    pairs: UInt8[np.ndarray, "rows codes"] = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(len(data), -1)
    return pairs


def _mxfp4_scales(_: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> UInt8[np.ndarray, "rows groups"]:
    assert kind == "MXFP4"
    return data.reshape(len(data), -1, 17)[..., 0]


def _q4_words(_: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Int32[np.ndarray, "rows words"]:
    """Return the numbers of Q4_0, with 8 added, eight in a word, as compressed-tensors packs them."""
    assert kind == "Q4_0"
    bytes_ = data.reshape(len(data), -1, 18)[..., 2:]
    codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)
    pairs = np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4)
    words: Int32[np.ndarray, "rows words"] = pairs.reshape(len(data), -1).view(np.int32)
    return words


def _q4_scales(_: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Float16[np.ndarray, "rows groups"]:
    assert kind == "Q4_0"
    scales = np.ascontiguousarray(data.reshape(len(data), -1, 18)[..., :2])
    found: Float16[np.ndarray, "rows groups"] = scales.reshape(len(data), -1).view(np.float16)
    return found


def _q8_values(_: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Int8[np.ndarray, "rows columns"]:
    assert kind == "Q8_0"
    values: Int8[np.ndarray, "rows columns"] = _q8_blocks(data)[..., 2:].reshape(len(data), -1).view(np.int8)
    return values


def _q8_scales(_: str, kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Float16[np.ndarray, "rows groups"]:
    assert kind == "Q8_0"
    scales = np.ascontiguousarray(_q8_blocks(data)[..., :2])
    found: Float16[np.ndarray, "rows groups"] = scales.reshape(len(data), -1).view(np.float16)
    return found


def _q8_blocks(data: UInt8[np.ndarray, "rows bytes"]) -> UInt8[np.ndarray, "rows groups 34"]:
    return data.reshape(len(data), -1, 34)


# What a tensor takes of the bytes of rows, given its own type and the rows' type.
PARTS = {
    "numbers": _numbers,
    "codes": _mxfp4_codes,
    "scales": _mxfp4_scales,
    "words": _q4_words,
    "word_scales": _q4_scales,
    "values": _q8_values,
    "value_scales": _q8_scales,
}
