"""Parsing of `quantization_config`: how a checkpoint's weights are stored, or why jswa cannot read them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.model.hf.fields import Fields
from jswa.model.hf.schemes import Label, Layers, Scheme, Schemes, layers_named, layers_with
from jswa.model.hf.tensor_map import canonical_name
from jswa.storage.json_object import read_object, read_optional, shown

_KEYS = ("quantization_config", "compression_config")
_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4")
_FORMATS = (
    *("float-quantized", "int-quantized", "mxfp4-pack-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    "pack-quantized",
)
# ModelOpt's algorithms, and how the engine holds their weights. Those of activations are ignored: "NVFP4" and
# "W4A16_NVFP4" store the same weights.
_MODELOPT: dict[str, str] = {
    "FP8": "8 bits",
    "FP8_PER_CHANNEL_PER_TOKEN": "8 bits",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}
_MIXED = "MIXED_PRECISION"
_STRATEGIES = ("tensor", "channel", "block", "group")
# Orders of activations in compressed-tensors for which a tensor names the group of each input.
_ACT_ORDERS = (True, "group", "dynamic")
_MAX_GROUPS, _MAX_BLOCK, _MAX_NAMES = 64, 2**16, 2**16


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's quantized weights are stored; the tensors show which weights are quantized.

    Attributes:
        method: name of the method in errors.
        blocks: rows and columns that share a scale, for each group of weights with block scales. Scales per tensor and
            per row need no entry, nor do integers packed in int32: their tensors show bits and groups.
        zero_offset: to be added to the stored zero points of packed integers.
        mixed: whether routed experts are stored in MXFP4, whatever the method says of the other layers.
        schemes: which layers are stored how, as far as the config tells; None for methods that store all alike.
    """

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    zero_offset: int = 0
    mixed: bool = False
    schemes: Schemes | None = None

    @property
    def mxfp4_experts(self) -> bool:
        """Whether experts are stored in MXFP4 by the config's word."""
        return self.mixed or self.method == "mxfp4"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's config.json, which names its quantization too.

    Earlier versions of ModelOpt write the quantization to a file of its own, hf_quant_config.json; then that becomes
    the `quantization_config`. Raises CheckpointError.
    """
    raw = read_object(folder / "config.json")
    if any(raw.get(key) is not None for key in _KEYS):
        return raw
    table = Fields(read_optional(folder / "hf_quant_config.json"), "hf_quant_config.json").table("quantization")
    return {**raw, "quantization_config": {**table, "quant_method": "modelopt"}} if table else raw


def parse_quantization(raw: dict[str, Any]) -> Quantization | None:
    """Parse the quantization of a config.json; None if weights are plain.

    The quantization of activations and KV is ignored, because jswa quantizes weights only, and reads scales of KV
    wherever a checkpoint has them (`jswa.model.weights.kv_scales`). Raises UnsupportedModel that names a method or
    format that jswa cannot read, and CheckpointError for invalid values.
    """
    text = raw.get("text_config")
    for holder, where in ((raw, "config.json"), (text if isinstance(text, dict) else {}, "config.json: text_config")):
        for key in _KEYS:
            if holder.get(key) is not None:
                table = Fields(holder, where).table(key)
                return _parse(Fields(table, f"{where}: {key}"))
    return None


def _parse(fields: Fields) -> Quantization:
    method = fields.string("quant_method", "(none)")
    if method not in _METHODS:
        raise UnsupportedModel(f"{fields.where}: quant_method = {shown(method)}: must be one of {', '.join(_METHODS)}")
    if method == "compressed-tensors":
        return _compressed(fields)
    if method == "modelopt":
        return _modelopt(fields)
    if method in ("awq", "gptq"):
        return _packed_integers(method, fields)
    if method == "fp8":
        return _float8(fields)
    return Quantization(method)


def _float8(fields: Fields) -> Quantization:
    """Parse the config of fp8, whose routed experts may be stored in MXFP4 instead.

    MiMo-V2.6 says this as `store_dtype`, others as `routed_experts_quant_method`: SGLang's configs/model_config.py.
    """
    if fields.string("fmt", "e4m3") != "e4m3":
        raise UnsupportedModel(f"{fields.where}: fmt = {shown(fields.raw['fmt'])}: must be e4m3")
    size = fields.raw.get("weight_block_size")
    blocks = () if size is None else (_block(fields, "weight_block_size"),)
    if "mxfp4" not in (fields.raw.get("store_dtype"), fields.raw.get("routed_experts_quant_method")):
        return Quantization("fp8", blocks)
    if fields.integer("mxfp4_block_size", 32) != 32:
        size = shown(fields.raw["mxfp4_block_size"])
        raise UnsupportedModel(f"{fields.where}: mxfp4_block_size = {size}: must be 32")
    experts = Scheme(layers_named([r"re:.*\.experts\..*"]), "mxfp4")
    others = Scheme(Layers(classes=True), "blocks" if blocks else "8 bits")
    skipped = layers_named([*_names(fields, "ignored_layers"), *_names(fields, "modules_to_not_convert")])
    return Quantization("fp8", blocks, mixed=True, schemes=Schemes((experts, others), skipped))


def _packed_integers(method: str, fields: Fields) -> Quantization:
    """Parse the config of AWQ (AutoAWQ) or GPTQ (AutoGPTQ, GPTQModel)."""
    scheme = _integers(method, fields, Layers(classes=True))
    if method == "awq":
        version = fields.string("version", "gemm").lower()
        if version != "gemm":
            raise UnsupportedModel(f"{fields.where}: version = {shown(version)}: must be gemm")
        skipped = layers_with(_names(fields, "modules_to_not_convert"))
        return Quantization(method, schemes=Schemes((scheme,), skipped))
    form = fields.string("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(f"{fields.where}: checkpoint_format = {shown(form)}: must be gptq or gptq_v2")
    # GPTQModel's rules: a pattern of layers and what differs in them, or "-:" and a pattern of layers in 16 bits.
    rules = Fields(fields.table("dynamic"), f"{fields.where}: dynamic")
    if len(rules.raw) > _MAX_GROUPS:
        raise fields.wrong("dynamic", f"must be an object of at most {_MAX_GROUPS} rules")
    skipped = layers_named(f"re:{rule[2:]}" for rule in rules.raw if rule.startswith("-:"))
    own = [
        _integers(
            method,
            Fields({**fields.raw, **rules.table(rule)}, f"{rules.where}: {shown(rule)}"),
            layers_named([f"re:{rule.removeprefix('+:')}"]),
        )
        for rule in rules.raw
        if not rule.startswith("-:")
    ]
    if any(one.layers.classes for one in own):  # a pattern that is not run: nobody knows whose labels hold
        own, scheme = [], replace(scheme, label=None)
    return Quantization(method, zero_offset=1 if form == "gptq" else 0, schemes=Schemes((*own, scheme), skipped))


def _integers(method: str, fields: Fields, layers: Layers) -> Scheme:
    """Return how layers in the integers of AWQ or GPTQ are stored."""
    bits = fields.integer("bits" if "bits" in fields.raw else "w_bit", 4)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise UnsupportedModel(f"{fields.where}: bits = {bits}: must be 4{'' if method == 'awq' else ' or 8'}")
    group = max(0, fields.optional_integer("group_size", 128, low=-1, high=_MAX_BLOCK) or 0)
    of_inputs = group if "group_size" in fields.raw else None
    if method == "awq":
        label = Label(bits, of_inputs, symmetric=not fields.boolean("zero_point", True))
    else:
        symmetric = fields.boolean("sym", True) if "sym" in fields.raw else None
        act_order = fields.boolean("desc_act", False) and not fields.boolean("static_groups", False)
        label = Label(bits, of_inputs, symmetric, act_order)
    return Scheme(layers, "int4" if bits == 4 else None, group, label)


def _modelopt(fields: Fields) -> Quantization:
    """Parse a config of NVIDIA's ModelOpt: the object in config.json, or the older one of hf_quant_config.json.

    Keys and algorithms as in vLLM's model_executor/layers/quantization/modelopt.py.
    """
    skipped = layers_named(_patterns([*_names(fields, "ignore"), *_names(fields, "exclude_modules")]))
    if fields.string("quant_algo", "(none)").upper() != _MIXED:
        scheme = Scheme(Layers(classes=True), _algorithm(fields))
        return Quantization("modelopt", schemes=Schemes((scheme,), skipped))
    layers = Fields(fields.table("quantized_layers"), f"{fields.where}: quantized_layers")
    if not 0 < len(layers.raw) <= _MAX_NAMES:
        raise fields.wrong("quantized_layers", f"must be an object of 1 to {_MAX_NAMES} layers")
    names: dict[str | None, list[str]] = {}
    for name in layers.raw:
        held = _algorithm(Fields(layers.table(name), f"{layers.where}: {shown(name)}"))
        names.setdefault(held, []).append(f"{name}.*" if name.endswith(".experts") else name)
    schemes = tuple(Scheme(layers_named(_patterns(own)), held) for held, own in names.items())
    return Quantization("modelopt", schemes=Schemes(schemes, skipped))


def _algorithm(fields: Fields) -> str:
    """Return how the engine holds the weights of one of ModelOpt's algorithms. Raises UnsupportedModel for others."""
    name = fields.string("quant_algo", "(none)")
    held = _MODELOPT.get(name.upper())
    if held is None:
        limit = f"must be one of {', '.join(_MODELOPT)}, or {_MIXED} of these"
        raise UnsupportedModel(f"{fields.where}: quant_algo = {shown(name)}: {limit}")
    group = fields.optional_integer("group_size", None, low=0, high=_MAX_BLOCK)
    if held == "nvfp4" and group not in (None, 0, 16):
        raise UnsupportedModel(f"{fields.where}: group_size = {group}: must be 16 for {name}")
    return held


def _patterns(names: Iterable[str]) -> list[str]:
    """Return the names of layers, of which some have wildcards as in a shell, as compressed-tensors writes them."""
    found = [(canonical_name(f"{name}.weight") or "").removesuffix(".weight") for name in names]
    escaped = {name: name.replace(".", "\\.").replace("*", ".*") for name in found if name}
    return [name if "*" not in name else f"re:{escaped[name]}$" for name in escaped]


def _names(fields: Fields, key: str) -> list[str]:
    """Return a list of names, which may be absent. Raises CheckpointError."""
    found = fields.raw.get(key) or []
    if not isinstance(found, list) or len(found) > _MAX_NAMES or not all(isinstance(name, str) for name in found):
        raise fields.wrong(key, f"must be a list of at most {_MAX_NAMES} names")
    return found


def _compressed(fields: Fields) -> Quantization:
    """Parse a compressed-tensors config."""
    if fields.table("transform_config"):
        raise UnsupportedModel(f"{fields.where}: transform_config needs rotated weights, which are not implemented")
    sparsity = Fields(fields.table("sparsity_config"), f"{fields.where}: sparsity_config").string("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModel(f"{fields.where}: sparsity_config: format = {shown(sparsity)}: must be dense")
    groups, common = fields.table("config_groups"), fields.string("format", "(none)")
    fewest = 0 if fields.raw.get("kv_cache_scheme") is not None else 1
    if not fewest <= len(groups) <= _MAX_GROUPS:
        raise fields.wrong("config_groups", f"must be an object of 1 to {_MAX_GROUPS} groups")
    blocks, schemes = [], []
    for name in groups:
        where = f"{fields.where}: config_groups: {shown(name)}"
        group = Fields(Fields(groups, where).table(name), where)
        kind = group.string("format", common)
        if kind not in _FORMATS:
            raise UnsupportedModel(f"{where}: format = {shown(kind)}: must be one of {', '.join(_FORMATS)}")
        weights = Fields(group.table("weights"), f"{where}: weights")
        own = _weights(weights, kind)
        blocks += own
        layers = layers_named(_names(group, "targets") or ["Linear"])
        schemes.append(_scheme(weights, kind, layers, has_blocks=bool(own)))
    skipped = layers_named(_names(fields, "ignore"))
    return Quantization("compressed-tensors", tuple(dict.fromkeys(blocks)), schemes=Schemes(tuple(schemes), skipped))


def _scheme(weights: Fields, form: str, layers: Layers, *, has_blocks: bool) -> Scheme:
    """Return how the engine holds the weights of one group."""
    if form == "mxfp4-pack-quantized":
        return Scheme(layers, "mxfp4")
    if form == "nvfp4-pack-quantized":
        return Scheme(layers, "nvfp4")
    symmetric, bits = weights.boolean("symmetric", True), weights.integer("num_bits", 8)
    group = max(0, weights.optional_integer("group_size", None, low=-1, high=_MAX_BLOCK) or 0)
    if form == "pack-quantized":
        by_group = weights.string("strategy", "group" if group else "channel") == "group"
        label = Label(bits, group if by_group else 0, symmetric, weights.raw.get("actorder") in _ACT_ORDERS)
        return Scheme(layers, "int4" if bits == 4 else None, group, label)
    if weights.string("type", "int") == "float":
        return Scheme(layers, "blocks" if has_blocks else "8 bits")
    label = Label(bits, symmetric=symmetric)
    if has_blocks:
        held = "int8 groups" if symmetric and weights.raw.get("block_structure") is None else None
        return Scheme(layers, held, group, label)
    return Scheme(layers, "8 bits" if symmetric else None, label=label)


def _weights(fields: Fields, form: str) -> list[tuple[int, int]]:
    """Return the block size of one group, if it has one."""
    if form == "mxfp4-pack-quantized":  # MXFP4 always has blocks of 32 columns
        return []
    kind, bits = fields.string("type", "int"), fields.integer("num_bits", 8)
    if form == "nvfp4-pack-quantized":
        return _float4(fields, kind, bits)
    if form == "pack-quantized":
        if kind != "int" or bits not in (4, 8):
            limit = "must be int, 4 or 8 bits"
            raise UnsupportedModel(f"{fields.where}: type = {shown(kind)}, num_bits = {bits}: {limit}")
        return []
    if kind not in ("int", "float") or bits != 8:
        raise UnsupportedModel(f"{fields.where}: type = {shown(kind)}, num_bits = {bits}: must be int or float, 8 bits")
    if fields.raw.get("actorder"):
        raise UnsupportedModel(f"{fields.where}: actorder = {shown(fields.raw['actorder'])} is not implemented")
    size = fields.optional_integer("group_size", None, low=-1, high=_MAX_BLOCK)
    strategy = fields.string("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in _STRATEGIES:
        raise UnsupportedModel(f"{fields.where}: strategy = {shown(strategy)}: must be one of {', '.join(_STRATEGIES)}")
    if strategy == "block":
        return [_block(fields, "block_structure")]
    if strategy == "group":
        return [(1, fields.integer("group_size", None, high=_MAX_BLOCK))]
    return []


def _float4(fields: Fields, kind: str, bits: int) -> list[tuple[int, int]]:
    """Return no block sizes: NVFP4 always has groups of 16 columns. Raises UnsupportedModel for other sizes."""
    group = fields.optional_integer("group_size", 16, high=_MAX_BLOCK)
    if (kind, bits, group) != ("float", 4, 16):
        found = f"type = {shown(kind)}, num_bits = {bits}, group_size = {group}"
        raise UnsupportedModel(f"{fields.where}: {found}: must be float, 4 bits, groups of 16")
    return []


def _block(fields: Fields, key: str) -> tuple[int, int]:
    """Return the rows and columns of a block. Raises CheckpointError."""
    sizes = fields.raw.get(key)
    whole = isinstance(sizes, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
    if not isinstance(sizes, list) or not whole or len(sizes) != 2 or not all(0 < n <= _MAX_BLOCK for n in sizes):
        raise CheckpointError(
            f"{fields.where}: {key} = {shown(sizes)}: must be two whole numbers from 1 to {_MAX_BLOCK}"
        )
    return sizes[0], sizes[1]
