"""Checkpoints of integers packed in int32 (compressed-tensors, GPTQ, AWQ), and their numbers in float64.

Everything follows the definitions of the formats, number by number; no code of the engine is used.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.support.checkpoints.quantized import Tensors, plain_tensors, write

LINEAR = re.compile(r"(_proj|\.w[123])\.weight$")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # column of each 4 bits of a word, the lowest first (AutoAWQ's gemm kernel)


class Case(NamedTuple):
    """How a matrix is quantized. `group`: inputs that share a scale; 0: all."""

    form: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    dtype: Any = np.float16

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config."""
        if self.form == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group or -1,
                "zero_point": True,
                "version": "gemm",
            }
        if self.form != "compressed":
            size = {
                "bits": self.bits,
                "group_size": self.group or -1,
                "desc_act": self.act_order,
                "sym": self.symmetric,
            }
            return {"quant_method": "gptq", "checkpoint_format": self.form, **size}
        weights = {"type": "int", "num_bits": self.bits, "symmetric": self.symmetric, "strategy": "channel"}
        if self.group:
            weights |= {"strategy": "group", "group_size": self.group}
        if self.act_order:
            weights["actorder"] = "group"
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


CASES = {
    "compressed": Case("compressed"),
    "compressed symmetric bf16": Case("compressed", symmetric=True, dtype=ml_dtypes.bfloat16),
    "compressed channel": Case("compressed", group=0, symmetric=True, dtype=np.float32),
    "compressed channel asymmetric": Case("compressed", group=0),
    "compressed act-order": Case("compressed", act_order=True),
    "compressed 8 bits": Case("compressed", bits=8, group=64),
    "gptq": Case("gptq"),
    "gptq symmetric": Case("gptq", symmetric=True),
    "gptq act-order": Case("gptq", act_order=True),
    "gptq 8 bits, one group": Case("gptq", bits=8, group=0),
    "gptq_v2": Case("gptq_v2"),
    "awq": Case("awq"),
    "awq one group": Case("awq", group=0),
}


def packed(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Return rows of numbers in rows of int32; number `order[i]` of a word is in its i-th bits."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            word, place = divmod(column, per_word)
            words[row, word] |= np.uint32(int(numbers[row, column]) << (bits * order.index(place)))
    return words.view(np.int32)


def quantized(
    case: Case, key: str, shape: tuple[int, int], seed: int, order: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a random matrix [out, in], and its numbers in float64; `order` is the seed of act-order."""
    rng, (outputs, inputs) = np.random.default_rng(seed), shape
    group = case.group or inputs
    groups, most, middle = inputs // group, 2**case.bits - 1, 2 ** (case.bits - 1)
    codes = rng.integers(0, most + 1, shape)
    zeros = np.full((outputs, groups), middle) if case.symmetric else rng.integers(0, most + 1, (outputs, groups))
    scales = rng.uniform(0.01, 0.1, (outputs, groups)).astype(case.dtype)
    group_of = np.arange(inputs) // group
    if case.act_order:
        group_of = np.random.default_rng(order).permutation(group_of)
    exact = (codes - zeros[:, group_of]).astype(np.float64) * scales[:, group_of].astype(np.float64)
    stem = key.removesuffix("weight")
    if case.form == "compressed":
        tensors = {f"{key}_packed": packed(codes, case.bits), f"{key}_scale": scales}
        if not case.symmetric:
            tensors[f"{key}_zero_point"] = np.ascontiguousarray(packed(zeros.T, case.bits).T)
        if case.act_order:
            tensors[f"{key}_g_idx"] = group_of.astype(np.int32)
        return tensors | {f"{key}_shape": np.array(shape, np.int32)}, exact
    scales_in = {f"{stem}scales": np.ascontiguousarray(scales.T)}
    if case.form == "awq":
        words = {"qweight": packed(codes.T, 4, AWQ_ORDER), "qzeros": packed(zeros.T, 4, AWQ_ORDER)}
        return scales_in | {f"{stem}{name}": value for name, value in words.items()}, exact
    stored = packed(zeros.T, case.bits).view(np.uint32)
    if case.form == "gptq":  # the first format takes 1 off each zero point, in whole words: a 0 borrows from the next
        stored -= np.uint32((2**32 - 1) // (2**case.bits - 1))
    words = {
        "qweight": np.ascontiguousarray(packed(codes, case.bits).T),
        "qzeros": stored.view(np.int32),
        "g_idx": group_of.astype(np.int32),
    }
    return scales_in | {f"{stem}{name}": value for name, value in words.items()}, exact


def pack_model(case: Case, tensors: Tensors) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return a model's tensors with random packed linear layers, and their config. Numbers are about 1 / √inputs."""
    stored = dict(tensors)
    for seed, key in enumerate(key for key in tensors if LINEAR.search(key) and tensors[key].ndim == 2):
        outputs, inputs = tensors[key].shape
        parts, _ = quantized(case, key, (outputs, inputs), seed, inputs)
        for name, value in parts.items():
            if name.endswith(("scale", "scales")):  # a number is 4 scales large
                parts[name] = (value.astype(np.float32) * 5 / inputs**0.5).astype(value.dtype)
        stored = {name: value for name, value in stored.items() if name != key} | parts
    return stored, case.config


def write_both(
    folder: Path,
    case: Case,
    fixture: str,
    *,
    others: Mapping[str, Case | None] | None = None,
    one_order: bool = True,
    **changes: Any,
) -> tuple[Path, Path]:
    """Write a random model twice, packed and as its numbers in float32, and return both folders.

    Args:
        others: cases, of compressed-tensors, of tensors with these words in their names; None: not packed.
        one_order: whether matrices with equal inputs have the same act-order, as q, k and v have.
    """
    config, tensors = plain_tensors(fixture, **changes)
    plain, stored = dict(tensors), dict(tensors)
    linear = [key for key in tensors if LINEAR.search(key) and tensors[key].ndim == 2]
    for seed, key in enumerate(linear):
        own = next((other for word, other in (others or {}).items() if word in key), case)
        if own is None:
            continue
        shape = tensors[key].shape
        parts, exact = quantized(own, key, (shape[0], shape[1]), seed, shape[1] if one_order else seed)
        plain[key] = exact.astype(np.float32)
        del stored[key]
        stored |= parts
        if own.form == "gptq":
            stored[key.removesuffix("weight") + "bias"] = np.zeros(shape[0], np.float16)
    write(folder / "plain", config, plain)
    label = case.config
    for word, other in (others or {}).items():
        if other is not None:
            group = {**other.config["config_groups"]["group_0"], "targets": [f"re:.*{word}.*"]}
            label["config_groups"] = {word: group, **label["config_groups"]}
    write(folder / "packed", {**config, "quantization_config": label}, stored)
    return folder / "packed", folder / "plain"


def held_numbers(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, table: np.ndarray | None) -> np.ndarray:
    """Return the numbers [.., inputs, outputs] of a matrix or a stack that the engine holds in 4 bits."""
    if codes.ndim == 3:
        tables = [None] * len(codes) if table is None else table
        return np.stack([held_numbers(*one) for one in zip(codes, scales, zeros, tables, strict=True)])
    inputs = 2 * len(codes)
    table = np.arange(inputs) // (inputs // len(scales)) if table is None else table
    out = np.zeros((inputs, codes.shape[1]), np.float32)
    for index in range(inputs):
        code = codes[index // 2] >> 4 if index % 2 else codes[index // 2] & 15
        group = table[index]
        out[index] = (code.astype(np.float32) - zeros[group].astype(np.float32)) * scales[group].astype(np.float32)
    return out
