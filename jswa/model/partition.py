"""Tensor parallelism: the shard of a model, and of each parameter, that one device stores. Imports no jax.

One device's shard is a `ModelConfig` with its own query heads, KV heads and widths, so everything that is built from a
config (decoder, arena, kernels) is built for one device. As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053), the
model is split as follows:

    attention            by query heads, with the KV heads that they read; if there are fewer KV heads than devices,
                         several devices store the same one
    feed-forward         by its inner width
    experts              by expert: matrices keep the shapes that kernels are tuned for, and the blocks of 32 and tiles
                         of 64 inputs of MXFP4 weights stay whole
    embedding, logits    by vocabulary

Devices that store the same KV head of a full layer may share its tokens (decode context parallelism, as in Helix
Parallelism, Bhatia et al. 2025, arXiv 2507.07120): then each stores every n-th of them.

All other parameters are replicated. The outputs of attention and feed-forward are summed over devices, one sum each.
"""

import dataclasses
import re
from typing import Literal, NamedTuple

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, MoeConfig, SideExperts
from jswa.errors import ConfigError

_FIELD = "tensor_parallel_size"
Range = tuple[int, int]  # [begin, end)
Side = Literal["inputs", "outputs", "leading", "first"]

# Axis on which a parameter is split: "inputs" or "outputs" of a matrix [..., inputs, outputs], or the "leading" axis.
# A "first" parameter is the bias of a result that is summed over devices, so only the first device stores it.
# Parameters without an entry are replicated.
_DENSE: dict[str, Side] = {"gate_up": "outputs", "gate_up_bias": "outputs", "down": "inputs", "down_bias": "first"}
_SIDES: dict[str, dict[str, Side]] = {
    "ends": {"embed": "leading", "lm_head": "outputs", "head_bias": "outputs"},
    "attention": {
        **dict.fromkeys(("qkv", "qkv_bias", "gate", "gate_bias", "sinks", "sink_key", "kv"), "outputs"),
        "out": "inputs",
        "out_bias": "first",
    },
    "dense": _DENSE,
    "shared": _DENSE,
    "experts": dict.fromkeys(_DENSE, "leading"),
    "other": {},
}
# Behind the name of a parameter may be the end of an array that holds it (`jswa.forms`), or of an adapter's.
_LAYER = re.compile(r"layers\.(\d+)\.(attention|mlp\.shared|side\.moe\.shared|mlp|side\.moe)\.(\w+)(?:\.(\w+))?")
_END = re.compile(r"(embed|lm_head|head_bias)(?:\.(\w+))?")


class ShardCut(NamedTuple):
    """How a parameter is split along an axis.

    Attributes:
        ranges: for each device, the ranges of the axis that it stores, one after the other. A device without ranges
            stores zeros, in the size of the first device's shard.
    """

    axis: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def size(self) -> int:
        """Size of each device's shard along the axis."""
        return sum(end - begin for begin, end in self.ranges[0])


def shard_config(model: ModelConfig, devices: int, context: int = 1) -> ModelConfig:
    """Return the config of one device's shard; all devices have the same.

    Args:
        context: devices that share the tokens of a full layer's KV head.

    Raises ConfigError if the model cannot be split over so many devices.
    """
    _require_copies(model, devices, context)
    if devices == 1:
        return model
    _require_whole("vocab_size", model.vocab_size, devices)
    if model.altup is not None:
        raise ConfigError(_FIELD, devices, f"must be 1, because {model.family} has parallel residual streams (AltUp)")
    layers = tuple(_layer(layer, devices) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, devices=devices, context_devices=context)


def _require_copies(model: ModelConfig, devices: int, context: int) -> None:
    """Raise ConfigError unless so many devices store the same KV head of each full layer."""
    heads = {layer.attention.num_kv_heads for layer in model.layers if layer.attention.kind == "full"}
    copies = min((max(1, devices // count) for count in heads), default=1)
    if copies % context == 0:
        return
    if not heads:
        limit = "must be 1: the model has no full layers, and windows are short"
    else:
        limit = (
            f"must divide {copies}, the number of devices that store the same KV head of a full layer: "
            f"tensor_parallel_size = {devices}, num_key_value_heads = {max(heads)}. It spreads the tokens of these "
            "copies; other heads are already stored once"
        )
    raise ConfigError("decode_context_parallel_size", context, limit)


def _layer(layer: LayerConfig, devices: int) -> LayerConfig:
    side = layer.side and dataclasses.replace(layer.side, moe=_moe(layer.side.moe, devices))
    mlp = _mlp(layer.mlp, devices) if isinstance(layer.mlp, MlpConfig) else _moe(layer.mlp, devices)
    return dataclasses.replace(layer, attention=_attention(layer.attention, devices), mlp=mlp, side=side)


def _attention(a: AttentionConfig, devices: int) -> AttentionConfig:
    _require_whole("num_attention_heads", a.num_heads, devices)
    if a.num_kv_heads % devices and devices % a.num_kv_heads:
        raise ConfigError(_FIELD, devices, f"must divide or be a multiple of num_key_value_heads = {a.num_kv_heads}")
    if a.qk_norm is not None and a.qk_norm_all_heads:
        raise ConfigError(_FIELD, devices, "must be 1, because q and k are normed over all heads together")
    heads = a.num_heads // devices
    return dataclasses.replace(a, num_heads=heads, num_kv_heads=max(1, a.num_kv_heads // devices))


def _mlp(mlp: MlpConfig, devices: int) -> MlpConfig:
    _require_whole("intermediate_size", mlp.hidden, devices)
    if mlp.sparsity is not None:
        raise ConfigError(_FIELD, devices, "must be 1, because activation sparsity needs the mean of all gates")
    return dataclasses.replace(mlp, hidden=mlp.hidden // devices)


def _moe(moe: MoeConfig, devices: int) -> MoeConfig:
    _require_whole("num_experts", moe.num_experts, devices)
    return dataclasses.replace(moe, devices=devices, shared=moe.shared and _mlp(moe.shared, devices))


def _require_whole(name: str, value: int, devices: int) -> None:
    if value % devices:
        raise ConfigError(_FIELD, devices, f"must divide {name} = {value}")


def cut_of(name: str, shape: tuple[int, ...], model: ModelConfig, devices: int) -> ShardCut | None:
    """Return how a parameter is split, or None if it is replicated.

    Arrays of a form need no rule of their own if they have the axes of the matrix, however many inputs or outputs share
    a number. One with a single axis has a number per output.

    Args:
        name: name of the parameter, with the end of an array of its form or of its adapter.
        shape: shape of the whole parameter.
        model: config of the whole model, not of a shard.
    """
    owner, last, form, layer = _split_name(name, model)
    side = _SIDES[owner].get(last)
    if side is None or not shape or form == "lora_owner":
        return None
    if side == "first":
        return ShardCut(-1, (((0, shape[-1]),), *((),) * (devices - 1)))
    if side == "leading":
        return ShardCut(0, _even(shape[0], devices))
    if form == ("lora_a" if side == "outputs" else "lora_b"):
        return None
    if form == "group_of":  # the groups of 4-bit weights do not cross devices: jswa.model.weights.packed.int4
        return ShardCut(-1, _even(shape[-1], devices)) if side == "inputs" else None
    if side == "inputs":
        return None if len(shape) == 1 else ShardCut(-2, _even(shape[-2], devices))
    if layer is not None and last in ("qkv", "qkv_bias"):
        columns = _qkv_columns(layer.attention, devices)
        return ShardCut(-1, _in_blocks(columns, shape[-1]) if form == "block_scales" else columns)
    if layer is not None and last in ("kv", "sink_key"):  # one scale, or key, per KV head
        heads = tuple((_kv_heads(layer.attention, device, devices),) for device in range(devices))
        return ShardCut(-1 if last == "kv" else 0, heads)
    return ShardCut(-1, _even(shape[-1], devices, halves=1 + _is_gated(owner, last, layer)))


def _split_name(name: str, model: ModelConfig) -> tuple[str, str, str, LayerConfig | None]:
    """Return the key of a parameter in `_SIDES`, its name there, the end behind it or "", and its layer."""
    found = _LAYER.fullmatch(name)
    if found is None:
        end = _END.fullmatch(name)
        return ("other", name, "", None) if end is None else ("ends", end[1], end[2] or "", None)
    layer, module, last, form = model.layers[int(found[1])], found[2], found[3], found[4] or ""
    if module.endswith("shared"):
        return "shared", last, form, layer
    if module != "attention":
        module = "dense" if module == "mlp" and isinstance(layer.mlp, MlpConfig) else "experts"
    return module, last, form, layer


def _is_gated(owner: str, last: str, layer: LayerConfig | None) -> bool:
    """Return whether a parameter consists of a gate half and an up half."""
    if layer is None or last not in ("gate_up", "gate_up_bias"):
        return False
    mlp: MlpConfig | MoeConfig | SideExperts | None = layer.mlp
    if owner == "shared":
        moe = layer.mlp if isinstance(layer.mlp, MoeConfig) else layer.side.moe if layer.side else None
        mlp = moe.shared if moe else None
    return isinstance(mlp, MlpConfig) and mlp.gated


def _even(size: int, devices: int, *, halves: int = 1) -> tuple[tuple[Range, ...], ...]:
    """Return equal ranges of each half for every device."""
    half = size // halves
    each = half // devices
    return tuple(tuple((h * half + d * each, h * half + (d + 1) * each) for h in range(halves)) for d in range(devices))


def _kv_heads(a: AttentionConfig, device: int, devices: int) -> Range:
    """Return the range of KV heads that a device stores."""
    first = device * a.num_kv_heads // devices
    return first, first + max(1, a.num_kv_heads // devices)


def _in_blocks(columns: tuple[tuple[Range, ...], ...], count: int) -> tuple[tuple[Range, ...], ...]:
    """Return the blocks of columns of each device, of `count` equal ones; no device shares one with another."""
    each = max(end for ranges in columns for _, end in ranges) // count
    return tuple(tuple((begin // each, end // each) for begin, end in ranges) for ranges in columns)


def _qkv_columns(a: AttentionConfig, devices: int) -> tuple[tuple[Range, ...], ...]:
    """Return the columns of q, k and v for every device: its query heads and the KV heads that they read."""
    heads = a.num_heads // devices
    sizes = [] if a.kv_from is not None else [a.head_dim] if a.keys_as_values else [a.head_dim, a.v_head_dim]
    ranges = []
    for device in range(devices):
        first, end = _kv_heads(a, device, devices)
        begin, own = a.num_heads * a.head_dim, [(device * heads * a.head_dim, (device + 1) * heads * a.head_dim)]
        for size in sizes:
            own.append((begin + first * size, begin + end * size))
            begin += a.num_kv_heads * size
        ranges.append(tuple(own))
    return tuple(ranges)
