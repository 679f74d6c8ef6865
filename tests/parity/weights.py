"""Random weights that are drawn, not stored, and checkpoint folders of such weights.

Every tensor of a tiny checkpoint is a pure function of name, shape, mean and seed. So a fixture need not hold its
weights, the torch side and the JAX side draw the same numbers, and adding a tensor changes no other.

NumPy and safetensors only. After any change to `random_weights`, run `make parity`.
"""

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensor = NDArray[np.float32]
Scales = Sequence[tuple[str, float]]  # (regular expression, factor)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float], seed: int, scales: Scales = ()
) -> dict[str, Tensor]:
    """Return one float32 tensor per name: matrices N(0, 1/fan_in), vectors mean + 0.3 N(0, 1).

    fan_in is the last axis (torch stores a linear layer as [out, in]). A vector without a mean has mean 0. A tensor is
    multiplied by the factor of every scale whose pattern is found in its name.
    """
    tensors = {name: _random_tensor(name, shape, means.get(name, 0.0), seed) for name, shape in shapes.items()}
    for name in tensors:
        for pattern, factor in scales:
            if re.search(pattern, name):
                tensors[name] = tensors[name] * np.float32(factor)
    return tensors


def _random_tensor(name: str, shape: tuple[int, ...], mean: float, seed: int) -> Tensor:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape)
    if len(shape) >= 2:
        return (noise / math.sqrt(shape[-1])).astype(np.float32)
    return np.asarray(mean + 0.3 * noise, np.float32)  # of a single number too


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
) -> None:
    """Write `config.json` and one safetensors file, or `shards` files with an index (ValueError if shards < 1)."""
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[k::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
