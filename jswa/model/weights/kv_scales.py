"""Scales of an fp8 KV cache, if a checkpoint contains them.

Each layer that stores KV may have a parameter layers.N.attention.kv.scales [2, K] float32: the scales of K, then of V,
per KV head. A layer without it stores unscaled numbers. Checkpoints name the scales as follows, below self_attn:

    k_scale, v_scale                              compressed-tensors; [], [1], or a scale per head [K, 1, 1]
    k_proj.output_scale, v_proj.output_scale      earlier versions of compressed-tensors, and Quark
    k_proj.k_scale, v_proj.v_scale                ModelOpt
    attn.k_scale, attn.v_scale                    vLLM
    qkv_proj.k_scale, qkv_proj.v_scale            fused projections
    kv_scale                                      one scale for K and V

With `keys_as_values`, K's scale alone is enough: V then has the same. With `folded_keys`, numbers that belong to both K
and V are stored with V's scale, and only the rotated part of K has K's.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.model.attention import scales_name
from jswa.model.transformer import Params
from jswa.model.weights.placement import Placement
from jswa.model.weights.safetensors_files import FLOATS, Tensor, TensorReader

_ENDS = ("{}_scale", "{}_proj.output_scale", "{}_proj.{}_scale", "attn.{}_scale", "qkv_proj.{}_scale", "kv_scale")
# On Hopper queries are multiplied by K's scale in float16; scales of real keys are far from these bounds.
_LEAST, _MOST = 2.0**-32, 2.0**16


class StoredScales(NamedTuple):
    """The scale tensors of one layer, which are not read yet, and its number of KV heads."""

    keys: Tensor
    values: Tensor
    heads: int


def kv_scale_names(layers: int, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the checkpoint's canonical names that are scales of KV."""
    return {name for layer in range(layers) for which in "kv" for name in _names(layer, which) if name in tensors}


def stored_scales(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, StoredScales]:
    """Return the scale tensors by parameter name. Scales of layers that store no KV are ignored.

    Raises CheckpointError that names file and key if a scale is missing or stored twice, or if its shape or type does
    not fit.
    """
    found = {}
    for index, layer in enumerate(config.layers):
        attention = layer.attention
        keys, values = (_only(index, which, tensors) for which in "kv")
        if attention.kv_from is not None or (keys is None and values is None):
            continue
        if attention.keys_as_values:
            values = values or keys
        if keys is None or values is None:
            tensor = keys or values
            assert tensor is not None
            raise CheckpointError(f"{tensor.where}: the layer must also have a scale for {'V' if keys else 'K'}")
        heads = attention.num_kv_heads
        for tensor in (keys, values):
            tensor.require_shape(*(shape for n in (1, heads) for shape in ((), (n,), (n, 1), (n, 1, 1))))
            tensor.require_type(*FLOATS)
        found[scales_name(index)] = StoredScales(keys, values, heads)
    return found


def read_scales(found: Mapping[str, StoredScales], reader: TensorReader, placement: Placement) -> Params:
    """Read the scales and return the parameters. Raises CheckpointError for scales out of range."""
    return {name: placement.put(name, np.stack([_read(x.keys, x.heads, reader), _read(x.values, x.heads, reader)]))
            for name, x in found.items()}  # fmt: skip


def _names(layer: int, which: str) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{end.format(which, which)}" for end in _ENDS]


def _only(layer: int, which: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    found = [tensors[name] for name in _names(layer, which) if name in tensors]
    if len(found) > 1:
        raise CheckpointError(f"{found[0].where} and {found[1].where} are the same scale of KV: must be only one")
    return found[0] if found else None


def _read(tensor: Tensor, heads: int, reader: TensorReader) -> Float32[np.ndarray, " K"]:
    size = max(1, *tensor.shape) if tensor.shape else 1
    scales = reader.rows(tensor, 0, size, columns=1).astype(np.float32)[:, 0]
    wrong = scales[~((scales >= _LEAST) & (scales <= _MOST))]  # NaN too
    if len(wrong):
        raise CheckpointError(f"{tensor.where} has the scale {wrong[0]}: must be from 2^-32 to 2^16")
    return np.broadcast_to(scales, heads)
