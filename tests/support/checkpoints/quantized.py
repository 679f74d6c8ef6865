"""Quantized checkpoints for tests, and their numbers by the formats' definitions, computed in simple loops."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jswa.architecture import ModelConfig
from jswa.model.hf.config import parse_config
from jswa.model.hf.tensor_map import sources
from tests.parity.load import load_fixture
from tests.support.checkpoints.hostile import FILE, Header, pack

NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
Tensors = Mapping[str, np.ndarray]
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": False}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8}},
}


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Write a checkpoint of one file. safetensors' NumPy writer does not support float8."""
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
    """Return float8 [.., out, in], a scale per block of rows and columns, and the dequantized numbers."""
    scale = np.zeros((*x.shape[:-2], math.ceil(x.shape[-2] / block[0]), math.ceil(x.shape[-1] / block[1])), np.float32)
    codes, exact = np.zeros(x.shape, FLOAT8), np.zeros(x.shape, np.float32)
    for index in np.ndindex(scale.shape):
        *lead, row, column = index
        rows = slice(row * block[0], (row + 1) * block[0])
        columns = slice(column * block[1], (column + 1) * block[1])
        where = (*lead, rows, columns)
        scale[index] = np.abs(x[where]).max() / 448
        codes[where] = (x[where] / scale[index]).astype(FLOAT8)
        exact[where] = codes[where].astype(np.float32) * scale[index]
    return codes, scale, exact


def in_blocks(
    tensors: Tensors, block: tuple[int, int], kind: str = "float32", named: str = r"_proj\.weight$"
) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors, those that are named in float8 with scales per block in the type `kind`."""
    out = dict(tensors)
    for key, value in tensors.items():
        if re.search(named, key):
            out[key], scales, _ = fp8_block(value, block)
            out[f"{key}_scale_inv"] = scales.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    return out


def experts_in_blocks(tensors: Tensors, block: tuple[int, int], kind: str = "float32") -> dict[str, np.ndarray]:
    """Return the same with the experts in float8."""
    return in_blocks(tensors, block, kind, r"\.(experts|moe)\..*(proj|w\d)")


def int8_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return int8 [out, in], a scale and a zero point [out, 1] per row, and the dequantized numbers."""
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    scale = ((high - low) / 255).astype(np.float32)
    zero = np.round(-128 - low / scale).clip(-128, 127).astype(np.int8)
    codes = np.round(x / scale + zero).clip(-128, 127).astype(np.int8)
    return codes, scale, zero, (codes.astype(np.float32) - zero.astype(np.float32)) * scale


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes [.., in / 2], exponents [.., in / 32], and the dequantized numbers."""
    packed = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    exponents = rng.integers(119, 125, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    exact = np.zeros(shape, np.float32)
    for index in np.ndindex(shape):
        byte = int(packed[*index[:-1], index[-1] // 2])
        code = byte >> 4 if index[-1] % 2 else byte & 15
        sign = -1 if code & 8 else 1
        exact[index] = sign * E2M1[code & 7] * 2.0 ** (int(exponents[*index[:-1], index[-1] // 32]) - 127)
    return packed, exponents, exact


def plain_tensors(name: str, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a fixture's config with changes, and random float32 tensors of a plain checkpoint for it."""
    config = {**load_fixture(name).config, **changes}
    return config, random_tensors(parse_config(config))


def random_tensors(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return random float32 tensors by a model's tensor names."""
    rng = np.random.default_rng(0)
    parts = [part for source in sources(model).values() for part in source.parts]
    return {part.key: rng.standard_normal(part.shape).astype(np.float32) for part in parts}


def write_gpt_oss_mxfp4(folder: Path, scale: int | None = None, *, zeros: bool = False) -> None:
    """Write gpt-oss with MXFP4 experts; all have this scale, or are zeros of either sign."""
    config, exact = plain_tensors("gpt_oss_base", intermediate_size=64)
    tensors, rng = dict(exact), np.random.default_rng(1)
    for key in [key for key in exact if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(key).shape
        packed, exponents, _ = mxfp4(rng, (experts, out, inner))
        packed &= 0x88 if zeros else 0xFF
        tensors[f"{key}_blocks"] = packed.reshape(experts, out, inner // 32, 16)
        tensors[f"{key}_scales"] = exponents if scale is None else np.full_like(exponents, scale)
    write(folder, {**config, "quantization_config": {"quant_method": "mxfp4"}}, tensors)
