"""Writing quantised checkpoints, and what they hold by the formats' definitions: slow and plain."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.hostile import FILE, Header, pack

NAMES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int8": "I8", "uint8": "U8", "int32": "I32"}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
Tensors = Mapping[str, np.ndarray]


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """A checkpoint of one file; safetensors' NumPy writer does not know float8."""
    header: Header = {}
    data = b""
    for key, value in tensors.items():
        end = len(data) + value.nbytes
        header[key] = {"dtype": NAMES[value.dtype.name], "shape": list(value.shape), "data_offsets": [len(data), end]}
        data += value.tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    pack(folder / FILE, header, data)
    (folder / "config.json").write_text(json.dumps(config))


def fp8_block(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float8 [.., out, in], a scale per block of rows and columns, and the numbers that they stand for."""
    scale = np.zeros((*x.shape[:-2], math.ceil(x.shape[-2] / block[0]), math.ceil(x.shape[-1] / block[1])), np.float32)
    codes, exact = np.zeros(x.shape, FLOAT8), np.zeros(x.shape, np.float32)
    for place in np.ndindex(scale.shape):
        *lead, row, column = place
        rows = slice(row * block[0], (row + 1) * block[0])
        columns = slice(column * block[1], (column + 1) * block[1])
        where = (*lead, rows, columns)
        scale[place] = np.abs(x[where]).max() / 448
        codes[where] = (x[where] / scale[place]).astype(FLOAT8)
        exact[where] = codes[where].astype(np.float32) * scale[place]
    return codes, scale, exact


def int8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """int8 [out, in], a scale [out, 1] and a zero point [out, 1] per row, and the numbers that they stand for."""
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    scale = ((high - low) / 255).astype(np.float32)
    zero = np.round(-128 - low / scale).clip(-128, 127).astype(np.int8)
    codes = np.round(x / scale + zero).clip(-128, 127).astype(np.int8)
    return codes, scale, zero, (codes.astype(np.float32) - zero.astype(np.float32)) * scale


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes [.., in / 2], exponents [.., in / 32], and the numbers that they stand for."""
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    exponents = rng.integers(119, 125, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    exact = np.zeros(shape, np.float32)
    for place in np.ndindex(shape):
        byte = int(packed[*place[:-1], place[-1] // 2])
        code = byte >> 4 if place[-1] % 2 else byte & 15
        sign = -1 if code & 8 else 1
        exact[place] = sign * E2M1[code & 7] * 2.0 ** (int(exponents[*place[:-1], place[-1] // 32]) - 127)
    return packed, exponents, exact
