"""Checkpoints in NVFP4 as compressed-tensors and ModelOpt write them, and their numbers by the formats' definitions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.support.checkpoints.packed_integers import LINEAR
from tests.support.checkpoints.quantized import E2M1, FLOAT8, Tensors, fp8_block, plain_tensors, write

Layout = Literal["compressed-tensors", "modelopt", "hf_quant_config"]
LAYOUTS: tuple[Layout, ...] = ("compressed-tensors", "modelopt", "hf_quant_config")
_FOUR_BITS = {"type": "float", "num_bits": 4, "group_size": 16, "strategy": "tensor_group", "symmetric": True}
_GROUP = {"targets": ["Linear"], "weights": _FOUR_BITS, "input_activations": {**_FOUR_BITS, "dynamic": "local"}}
CONFIGS: dict[Layout, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": _GROUP},
        "ignore": ["lm_head"],
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "config_groups": {}},
    "hf_quant_config": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}


def float4(layout: Layout, key: str, shape: tuple[int, ...], seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a random matrix [.., out, in] in NVFP4, and its numbers, rounded once to float32.

    Numbers are about 1 / √in; scales have both signs, and the factor any fraction.
    """
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape)
    scales = (rng.uniform(0.25, 2, (*shape[:-1], shape[-1] // 16)) * rng.choice([-1, 1], shape[-1] // 16)).astype(
        FLOAT8
    )
    factor = np.float32(rng.uniform(0.2, 0.4) / shape[-1] ** 0.5)
    stored = np.float32(1) / factor if layout == "compressed-tensors" else factor
    factor = np.float32(1) / stored if layout == "compressed-tensors" else factor
    numbers = np.array([*E2M1, *(-number for number in E2M1)])[codes]
    exact = numbers * np.repeat(scales.astype(np.float64), 16, axis=-1) * np.float64(factor)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    stem, one = key.removesuffix("weight"), np.array([stored])
    if layout == "compressed-tensors":
        names = {f"{key}_packed": packed, f"{key}_scale": scales, f"{key}_global_scale": one}
        return names | {f"{stem}input_global_scale": np.ones(1, np.float32)}, exact.astype(np.float32)
    names = {key: packed, f"{key}_scale": scales, f"{key}_scale_2": one.reshape(())}
    return names | {f"{stem}input_scale": np.ones((), np.float32)}, exact.astype(np.float32)


def pack_model(tensors: Tensors) -> dict[str, np.ndarray]:
    """Return a model's tensors with random linear layers in NVFP4, as ModelOpt writes them."""
    stored = dict(tensors)
    for seed, key in enumerate(key for key in tensors if LINEAR.search(key) and tensors[key].ndim == 2):
        stored |= float4("modelopt", key, tensors[key].shape, seed)[0]
    return stored


def write_both(
    folder: Path,
    layout: Layout,
    fixture: str,
    *,
    others: Mapping[str, str] | None = None,
    extra: Tensors | None = None,
    **changes: Any,
) -> tuple[Path, Path]:
    """Write a random model twice, its linear layers in NVFP4 and as their numbers in float32; return both folders.

    Args:
        others: of tensors with these words in their names, "fp8" or "plain" in place of NVFP4.
        extra: more tensors of the first folder.
    """
    config, tensors = plain_tensors(fixture, **changes)
    plain, stored = dict(tensors), dict(tensors)
    for seed, key in enumerate(key for key in tensors if LINEAR.search(key) and tensors[key].ndim == 2):
        shape = tensors[key].shape
        other = next((form for word, form in (others or {}).items() if word in key), None)
        if other == "plain":
            continue
        del stored[key]
        if other == "fp8":
            codes, scale, plain[key] = fp8_block(tensors[key] * shape[1] ** -0.5, (shape[0], shape[1]))
            stored |= {key: codes, f"{key}_scale": scale[0, 0]}
        else:
            parts, plain[key] = float4(layout, key, (shape[0], shape[1]), seed)
            stored |= parts
    write(folder / "plain", config, plain)
    named = {} if layout == "hf_quant_config" else {"quantization_config": CONFIGS[layout]}
    write(folder / "packed", {**config, **named}, {**stored, **(extra or {})})
    if layout == "hf_quant_config":
        own = json.dumps({"producer": {"name": "modelopt"}, "quantization": CONFIGS[layout]})
        (folder / "packed" / "hf_quant_config.json").write_text(own)
    return folder / "packed", folder / "plain"
