"""A GGUF checkpoint: its config.json, generation_config.json and tensors, as Hugging Face would have them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jswa.errors import CheckpointError, UnsupportedModel
from jswa.gguf.architectures import ARCHITECTURES, Architecture
from jswa.gguf.families.keys import Model
from jswa.gguf.file.header import Value
from jswa.gguf.file.shards import Shards, read_shards
from jswa.gguf.made import Made
from jswa.gguf.tensors import ENDS, held_packed, numbers_of, packing, tensors_of
from jswa.storage.json_object import shown

# Tokens that end a turn, by their text: llama.cpp looks for these too, because files name only one end token.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]", "<|eot|>",
})  # fmt: skip
_CONTROL = 3
_FORMATS = {"Q4_0": ("pack-quantized", 4), "Q8_0": ("int-quantized", 8)}  # compressed-tensors' format, and bits
_MOST_NAMES = 2**16  # that a config may list
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class Checkpoint(NamedTuple):
    """What a GGUF checkpoint holds.

    Attributes:
        paths: its files.
        metadata: of the first file.
        config: the content of config.json.
        generation: the content of generation_config.json.
        tensors: by transformers' name.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Value]
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: dict[str, Made]


def read_checkpoint(path: Path, *, packed: bool = True) -> Checkpoint:
    """Read the headers of a GGUF checkpoint, of which one file is given.

    Args:
        packed: matrices in Q4_0 and Q8_0 are tensors of integers, as compressed-tensors has them, not of numbers.

    Raises CheckpointError that names file and key if a file is malformed, and UnsupportedModel if jswa does not read
    the architecture, or a feature of it.
    """
    shards = read_shards(path)
    metadata, where = shards.first.metadata, shards.first.path.name
    name = metadata.get("general.architecture")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{where}: general.type = {shown(kind)}: must be model")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{where}: general.architecture = {shown(name)}: must be one of {known}")
    architecture = ARCHITECTURES[name]
    model = Model(name, metadata, shards.tensors, where)
    config = _config(architecture, model, shards)
    tensors = tensors_of(architecture, shards.tensors, model.layers, config["head_dim"])
    tensors |= numbers_of(architecture, metadata, model.layers, where)
    if any(one.part == "codes" for one in tensors.values()):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    elif packed:
        packings = {key.removesuffix(".weight"): packing(key, made) for key, made in tensors.items()}
        if any(packings.values()) and len(packings) <= _MOST_NAMES:
            config["quantization_config"] = _compressed(packings)
            tensors = held_packed(tensors)
    return Checkpoint(shards.paths, metadata, config, _generation(metadata, where), tensors)


def _compressed(packings: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors for layers by their names and GGUF types, None: plain."""
    groups = {}
    for kind, (form, bits) in _FORMATS.items():
        names = [name for name, own in packings.items() if own == kind]
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
        if names:
            groups[kind] = {"format": form, "targets": names, "weights": weights}
    if len(groups) == 1:  # embedding and head are named
        only = next(iter(groups.values()))
        only["targets"] = ["Linear", *(name for name in only["targets"] if f"{name}.weight" in ENDS)]
    plain = [name for name, own in packings.items() if own is None]
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": plain}


def _config(architecture: Architecture, model: Model, shards: Shards) -> dict[str, Any]:
    """Return the content of config.json."""
    config = architecture.config(model)
    model.require_all_read()
    types = {tensor.type for tensor in shards.tensors.values() if len(tensor.shape) > 1}
    return {
        "architectures": [architecture.transformers[config["model_type"]]],
        **config,
        **_tokens(shards.first.metadata, model.where),
        # Most models of F16 and of fewer bits were bfloat16 before, and float16 overflows in some of them.
        "dtype": "float32" if types <= {"F32", "F64"} else "bfloat16",
    }


def _tokens(metadata: Mapping[str, Value], where: str) -> dict[str, Any]:
    found = {}
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if value is not None:
            found[ours] = _token(value, f"{where}: tokenizer.ggml.{theirs}_token_id")
    return found


def _token(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise CheckpointError(f"{where} = {shown(value)}: must be a token id")
    return value


def _generation(metadata: Mapping[str, Value], where: str) -> dict[str, Any]:
    """Return the content of generation_config.json: all tokens that end an answer, and defaults of sampling."""
    ends = {
        _token(metadata[key], f"{where}: {key}")
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        if key in metadata
    }
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        ends |= {
            i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and text in _ENDS
        }
    found: dict[str, Any] = {"eos_token_id": sorted(ends)} if ends else {}
    for theirs, ours in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{theirs}")
        if value is not None:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise CheckpointError(f"{where}: general.sampling.{theirs} = {shown(value)}: must be a number")
            found[ours] = value
    return found
