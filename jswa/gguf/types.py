"""The types of GGUF tensors: their blocks, and the numbers that these stand for, as the gguf package has them."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Shaped, UInt8


class Block(NamedTuple):
    """The name of a type, and its unit: so many numbers in so many bytes."""

    name: str
    numbers: int
    size: int


# By llama.cpp's number of the type.
BLOCKS = {int(kind): Block(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
_BY_NAME = {block.name: block for block in BLOCKS.values()}
# Types whose numbers NumPy has, by safetensors' name.
PLAIN = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Q8_1 and Q8_K are llama.cpp's activations, and the integers belong to models that are no text decoders.
_NO_WEIGHTS = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64")
WEIGHTS = tuple(block.name for block in BLOCKS.values() if block.name not in _NO_WEIGHTS)


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a row of `columns` numbers."""
    block = _BY_NAME[kind]
    return columns // block.numbers * block.size


def numbers(kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> Shaped[np.ndarray, "rows columns"]:
    """Return rows as numbers: in their own type if it is one of `PLAIN`, else dequantized exactly, in float32."""
    if kind in PLAIN:
        return data.view(PLAIN[kind])
    with np.errstate(all="ignore"):  # scales that are not finite stay so, and the engine's checks see the numbers
        found: Shaped[np.ndarray, "rows columns"] = dequantize(data, GGMLQuantizationType[kind])
    return found
