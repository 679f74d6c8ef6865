"""Checkpoints with matrices in int8 and a scale per group of inputs, as compressed-tensors has them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support.checkpoints.quantized import plain_tensors, write


def write_groups(
    folder: Path, name: str, sizes: dict[str, int], scales: str = "float16", ends: tuple[str, ...] = (), **config: Any
) -> None:
    """Write a fixture's checkpoint with projections in int8.

    Args:
        sizes: inputs of a group, by a part of the names; "": of the others.
        ends: the embedding or the head, by their names, if they are in int8 too.
    """
    own, tensors = plain_tensors(name)
    out, rng = {}, np.random.default_rng(0)
    for key, x in tensors.items():
        size = next((size for part, size in sizes.items() if part in key), sizes[""])
        out[key] = x
        if key.endswith("_proj.weight") or key.removesuffix(".weight") in ends:
            out[key] = rng.integers(-128, 128, x.shape, np.int8)
            factors = rng.uniform(0.5, 1, (x.shape[0], x.shape[1] // size)) / 500
            out[f"{key}_scale"] = np.asarray(jnp.asarray(factors, scales))
    groups = {
        str(size): {"targets": [f"re:.*{part}.*", *ends], "weights": {"num_bits": 8, "group_size": size, **config}}
        for part, size in sizes.items()
    }
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    write(folder, {**own, "quantization_config": method}, out)
