"""What a number of K and of V is worth in a KV cache of 8 bits, where the checkpoint says so.

It is one parameter of each layer that stores KV, layers.N.attention.kv.scales [2, K] float32: by KV head, K's first. A
layer without it writes its numbers as they are. Checkpoints call them, below self_attn:

    k_scale, v_scale                              compressed-tensors; [], [1], or a scale per head [K, 1, 1]
    k_proj.output_scale, v_proj.output_scale      the same, before it had names of their own, and Quark
    k_proj.k_scale, v_proj.v_scale                ModelOpt, by vLLM
    attn.k_scale, attn.v_scale                    vLLM, as it saves its own
    qkv_proj.k_scale, qkv_proj.v_scale            of fused projections
    kv_scale                                      one for both

Where keys are the values too (`keys_as_values`), K's may be there alone: it is V's as well. Where parts of both are the
same numbers (`folded_keys`), those are stored as V, by V's scale; only the rotated part of K has K's.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float32

from jswa.architecture import AttentionConfig, ModelConfig
from jswa.errors import CheckpointError
from jswa.model.transformer import Params
from jswa.model.weights.dequantize import FLOATS
from jswa.model.weights.placement import Placement
from jswa.model.weights.safetensors_files import Reader, Tensor

_ENDS = ("{}_scale", "{}_proj.output_scale", "{}_proj.{}_scale", "attn.{}_scale", "qkv_proj.{}_scale", "kv_scale")
# Queries are multiplied by K's in float16 on Hopper; nothing near these bounds comes from real keys.
_LEAST, _MOST = 2.0**-32, 2.0**16


class StoredScales(NamedTuple):
    """The tensors of one layer, not read yet, and its KV heads."""

    keys: Tensor
    values: Tensor
    heads: int


def scales_name(layer: int) -> str:
    """The parameter of a layer that stores KV."""
    return f"layers.{layer}.attention.kv.scales"


def scales_of(params: Params, attention: AttentionConfig, layer: int) -> Float32[Array, "2 K"] | None:
    """The scales of the KV that a layer reads, its own or another's."""
    return params.get(scales_name(layer if attention.kv_from is None else attention.kv_from))


def kv_scale_names(layers: int, tensors: Mapping[str, Tensor]) -> set[str]:
    """Those of a checkpoint's canonical names that are scales of KV."""
    return {name for layer in range(layers) for which in "kv" for name in _names(layer, which) if name in tensors}


def stored_scales(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, StoredScales]:
    """Of each layer that has any, by our name. Layers that store no KV need none, and theirs are not looked at.

    Raises CheckpointError, naming file and key, where one is missing or there twice, or its shape or type does not fit.
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
            there = keys or values
            assert there is not None
            raise CheckpointError(f"{there.where} is a scale of KV: must have {'V' if keys else 'K'}'s beside it")
        heads = attention.num_kv_heads
        for tensor in (keys, values):
            tensor.require_shape(*(shape for n in (1, heads) for shape in ((), (n,), (n, 1), (n, 1, 1))))
            tensor.require_type(*FLOATS)
        found[scales_name(index)] = StoredScales(keys, values, heads)
    return found


def read_scales(found: Mapping[str, StoredScales], reader: Reader, where: Placement) -> Params:
    """The parameters. Raises CheckpointError for numbers that are no scales."""
    return {name: where.put(name, np.stack([_read(x.keys, x.heads, reader), _read(x.values, x.heads, reader)]))
            for name, x in found.items()}  # fmt: skip


def _names(layer: int, which: str) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{end.format(which, which)}" for end in _ENDS]


def _only(layer: int, which: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    there = [tensors[name] for name in _names(layer, which) if name in tensors]
    if len(there) > 1:
        raise CheckpointError(f"{there[0].where} and {there[1].where} are the same scale of KV: must be one of them")
    return there[0] if there else None


def _read(tensor: Tensor, heads: int, reader: Reader) -> Float32[np.ndarray, " K"]:
    size = max(1, *tensor.shape) if tensor.shape else 1
    scales = reader.rows(tensor, 0, size, columns=1).astype(np.float32)[:, 0]
    wrong = scales[~((scales >= _LEAST) & (scales <= _MOST))]  # NaN too
    if len(wrong):
        raise CheckpointError(f"{tensor.where} has the scale {wrong[0]}: must be from 2^-32 to 2^16")
    return np.broadcast_to(scales, heads)
