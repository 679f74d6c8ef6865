"""Tensor parallelism: the part of a model, and of each of its parameters, that one of several devices holds. No jax.

One device's part is a `ModelConfig` too, with its own query heads, KV heads and widths, so everything made from a
config (decoder, arena, kernels) is that of one device. Split are, as in Megatron-LM (Shoeybi et al. 2019, arXiv
1909.08053):

    attention      by query heads, with the KV heads that they read (where these are fewer, several devices have one)
    feed-forward   by its inner width
    experts        whole experts: matrices keep the shapes that kernels are tuned for, and blocks of 32 and tiles of 64
                   inputs of 4-bit weights are never cut
    embedding, logits    by vocabulary

All else is on every device. What attention and feed-forward give is a summand of the whole: one sum over devices each.
"""

import dataclasses
import re
from typing import Literal, NamedTuple

from jswa.architecture import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, MoeConfig, SideExperts
from jswa.errors import ConfigError

_FIELD = "tensor_parallel_size"
Run = tuple[int, int]
Side = Literal["inputs", "outputs", "leading", "first"]

# Which side of a parameter is split: a matrix [..., inputs, outputs], its first axis, or not at all: "first" is a bias
# behind a sum over devices, which one device adds. No entry: every device has all of it.
_DENSE: dict[str, Side] = {"gate_up": "outputs", "gate_up_bias": "outputs", "down": "inputs", "down_bias": "first"}
_SIDES: dict[str, dict[str, Side]] = {
    "ends": {"embed": "leading", "lm_head": "outputs", "head_bias": "outputs"},
    "attention": {
        **dict.fromkeys(("qkv", "qkv_bias", "gate", "gate_bias", "sinks", "kv"), "outputs"),
        "out": "inputs",
        "out_bias": "first",
    },
    "dense": _DENSE,
    "shared": _DENSE,
    "experts": dict.fromkeys(_DENSE, "leading"),
    "other": {},
}
_HELD = re.compile(r"\.(values|scales|blocks|words|lora_a|lora_b|lora_owner)$")
_LAYER = re.compile(r"layers\.(\d+)\.(attention|mlp\.shared|side\.moe\.shared|mlp|side\.moe)\.(\w+)")


class Cut(NamedTuple):
    """How a parameter is split along an axis: the runs [begin, end) that each device holds, side by side.

    A device without runs holds zeros, as many as the first one's numbers.
    """

    axis: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def size(self) -> int:
        """What each device holds along the axis."""
        return sum(end - begin for begin, end in self.runs[0])


def part_of(model: ModelConfig, devices: int) -> ModelConfig:
    """The part of each of so many devices; they are alike. Raises ConfigError for what cannot be split."""
    if devices == 1:
        return model
    _require_whole("vocab_size", model.vocab_size, devices)
    if model.altup is not None:
        raise ConfigError(_FIELD, devices, f"{model.family} has parallel residual streams (AltUp): must be 1")
    layers = tuple(_layer(layer, devices) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, devices=devices)


def _layer(layer: LayerConfig, devices: int) -> LayerConfig:
    side = layer.side and dataclasses.replace(layer.side, moe=_moe(layer.side.moe, devices))
    mlp = _mlp(layer.mlp, devices) if isinstance(layer.mlp, MlpConfig) else _moe(layer.mlp, devices)
    return dataclasses.replace(layer, attention=_attention(layer.attention, devices), mlp=mlp, side=side)


def _attention(a: AttentionConfig, devices: int) -> AttentionConfig:
    _require_whole("num_attention_heads", a.num_heads, devices)
    if a.num_kv_heads % devices and devices % a.num_kv_heads:
        raise ConfigError(_FIELD, devices, f"must divide or be a multiple of num_key_value_heads = {a.num_kv_heads}")
    if a.qk_norm is not None and a.qk_norm_all_heads:
        raise ConfigError(_FIELD, devices, "queries and keys are normed over all heads together: must be 1")
    heads = a.num_heads // devices
    return dataclasses.replace(a, num_heads=heads, num_kv_heads=max(1, a.num_kv_heads // devices))


def _mlp(mlp: MlpConfig, devices: int) -> MlpConfig:
    _require_whole("intermediate_size", mlp.hidden, devices)
    if mlp.sparsity is not None:
        raise ConfigError(_FIELD, devices, "gates are cut by their mean over the whole width (sparsity): must be 1")
    return dataclasses.replace(mlp, hidden=mlp.hidden // devices)


def _moe(moe: MoeConfig, devices: int) -> MoeConfig:
    _require_whole("num_experts", moe.num_experts, devices)
    return dataclasses.replace(moe, devices=devices, shared=moe.shared and _mlp(moe.shared, devices))


def _require_whole(name: str, value: int, devices: int) -> None:
    if value % devices:
        raise ConfigError(_FIELD, devices, f"must divide {name} = {value}")


def cut_of(name: str, shape: tuple[int, ...], model: ModelConfig, devices: int) -> Cut | None:
    """How the parameter of that name and whole shape is split; None: every device has all of it.

    Args:
        name: with its suffix, where a matrix is held in 4 or 8 bits, or where it is of adapters.
        model: the whole model.
    """
    held = _HELD.search(name)
    owner, last, layer = _place(name[: held.start()] if held else name, model)
    side = _SIDES[owner].get(last)
    if side is None:
        return None
    if side == "first":
        return Cut(-1, (((0, shape[-1]),), *((),) * (devices - 1)))
    if side == "leading":
        return Cut(0, _even(shape[0], devices))
    form = held[1] if held else ""
    if form == "lora_owner" or form == ("lora_a" if side == "outputs" else "lora_b"):
        return None
    if side == "inputs":
        return None if form == "scales" else Cut(-2, _even(shape[-2], devices))
    if layer is not None and last in ("qkv", "qkv_bias"):
        return Cut(-1, _heads(layer.attention, devices))
    if layer is not None and last == "kv":  # scales by KV head
        return Cut(-1, tuple((_stored(layer.attention, device, devices),) for device in range(devices)))
    return Cut(-1, _even(shape[-1], devices, halves=1 + _is_gated(owner, last, layer)))


def _place(name: str, model: ModelConfig) -> tuple[str, str, LayerConfig | None]:
    """Whose a parameter is, the key of `_SIDES`, and its name there."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return "ends" if name in ("embed", "lm_head", "head_bias") else "other", name, None
    layer, module, last = model.layers[int(found[1])], found[2], found[3]
    if module == "attention":
        return module, last, layer
    if module.endswith("shared"):
        return "shared", last, layer
    return "dense" if module == "mlp" and isinstance(layer.mlp, MlpConfig) else "experts", last, layer


def _is_gated(owner: str, last: str, layer: LayerConfig | None) -> bool:
    """Whether a parameter is gates, and then ups."""
    if layer is None or last not in ("gate_up", "gate_up_bias"):
        return False
    mlp: MlpConfig | MoeConfig | SideExperts | None = layer.mlp
    if owner == "shared":
        moe = layer.mlp if isinstance(layer.mlp, MoeConfig) else layer.side.moe if layer.side else None
        mlp = moe.shared if moe else None
    return isinstance(mlp, MlpConfig) and mlp.gated


def _even(size: int, devices: int, *, halves: int = 1) -> tuple[tuple[Run, ...], ...]:
    """Equal shares of each half."""
    half = size // halves
    each = half // devices
    return tuple(tuple((h * half + d * each, h * half + (d + 1) * each) for h in range(halves)) for d in range(devices))


def _stored(a: AttentionConfig, device: int, devices: int) -> Run:
    """The KV heads that a device keeps."""
    first = device * a.num_kv_heads // devices
    return first, first + max(1, a.num_kv_heads // devices)


def _heads(a: AttentionConfig, devices: int) -> tuple[tuple[Run, ...], ...]:
    """Columns of q, k and v: each device's query heads, and the KV heads that those read."""
    heads = a.num_heads // devices
    sizes = [] if a.kv_from is not None else [a.head_dim] if a.keys_as_values else [a.head_dim, a.v_head_dim]
    runs = []
    for device in range(devices):
        first, end = _stored(a, device, devices)
        begin, own = a.num_heads * a.head_dim, [(device * heads * a.head_dim, (device + 1) * heads * a.head_dim)]
        for size in sizes:
            own.append((begin + first * size, begin + end * size))
            begin += a.num_kv_heads * size
        runs.append(tuple(own))
    return tuple(runs)
