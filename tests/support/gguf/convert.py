"""Write a Hugging Face checkpoint as GGUF, as llama.cpp's convert_hf_to_gguf.py does it: the way that jswa undoes.

Names of tensors come from the gguf package; what else the converter does to each family is here, as data and small
functions, written from its facts and not from jswa's tables.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from tests.support.gguf.full import write_numbers
from tests.support.gguf.metadata import ARCHES, write_metadata

Array = NDArray[Any]
Config = Mapping[str, Any]
Pairs = Iterator[tuple[str, Array]]
# Matrices that the converter stacks: experts, and Gemma 3n's projections of streams.
_STACKED = re.compile(r"(.*(?:\.experts|altup_projections|altup_unembed_projections))\.(\d+)\.(?:(\w+)\.)?weight")


def convert(path: Path, config: Config, tensors: Mapping[str, Array], kind: str = "F32", split: int = 0) -> None:
    """Write a checkpoint as one GGUF file, its matrices in a type of llama.cpp, its vectors in F32.

    With `split` it becomes several files of so many tensors each, whose names are numbered.
    Norms of Gemma 2 and 3 get 1 added in float32, which not all numbers survive: round them first (`rounded`).
    """
    name, arch = ARCHES[config["model_type"]]
    writer = GGUFWriter(path, name, split_max_tensors=split)
    write_metadata(writer, config)
    write_numbers(writer, config, tensors)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"] + 8)
    for name, data in _converted(config, tensors):
        final = name.startswith(("blk.", "rope_"))
        found = name if final else names.get_name(name, (".weight", ".bias"))
        if found is None:
            raise KeyError(f"{name}: the converter has no name for it")
        is_matrix = data.ndim > 1 and not found.endswith(("_norm.weight", ".bias"))
        wanted = GGMLQuantizationType[kind if is_matrix else "F32"]
        _add(writer, found, np.ascontiguousarray(data, np.float32), wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors with norms of eight bits after the point, so that adding 1 and taking it away is exact."""
    return {name: np.round(x * 256) / 256 if name.endswith("norm.weight") else x for name, x in tensors.items()}


def _add(writer: GGUFWriter, name: str, data: Array, kind: GGMLQuantizationType) -> None:
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, data.astype(np.float32))
    elif kind == GGMLQuantizationType.F16:
        writer.add_tensor(name, data.astype(np.float16))
    else:
        writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)


def _converted(config: Config, tensors: Mapping[str, Array]) -> Pairs:
    """Yield the tensors as the converter of the family has them before it names them."""
    change = _CHANGES.get(config["model_type"], _unchanged)
    stacks: dict[str, dict[int, Array]] = {}
    for name, data in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is not None:
            merged = f"{match[1]}.{match[3]}.weight" if match[3] else f"{match[1]}.weight"
            stacks.setdefault(merged, {})[int(match[2])] = data
        elif "rotary_emb" not in name:
            plain = _of_drafts(config, name).replace("e_score_correction_bias", "e_score_correction.bias")
            yield from change(config, plain, data)
    for name, parts in stacks.items():
        mixtral = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        yield mixtral if "block_sparse_moe" in name else name, np.stack([parts[index] for index in range(len(parts))])
    yield from _rope_tensors(config)


def _of_drafts(config: Config, name: str) -> str:
    """Return the name of a tensor for multi-token prediction: its layers follow the decoder's."""
    layers = config["num_hidden_layers"]
    name = re.sub(r"^mtp\.layers\.(\d+)", lambda match: f"model.layers.{layers + int(match[1])}", name)
    name = name.replace("mtp.fc.", f"model.layers.{layers}.eh_proj.")
    name = name.replace("mtp.norm.", f"model.layers.{layers}.shared_head.norm.")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight", name)
    return name if match is None else f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"


def _unchanged(config: Config, name: str, data: Array) -> Pairs:
    yield name, data


def _permuted(config: Config, name: str, data: Array) -> Pairs:
    """Put the two halves of each head of q and k beside each other."""
    for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
        if f".{part}." in name:
            halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
    yield name, data


def _plus_one(config: Config, name: str, data: Array) -> Pairs:
    yield name, data + np.float32(1) if name.endswith("norm.weight") else data


def _gpt_oss(config: Config, name: str, data: Array) -> Pairs:
    if name.endswith("sinks"):
        yield f"{name}.weight", data
    elif "gate_up_proj" in name:
        one, other = (data[..., 0::2], data[..., 1::2]) if name.endswith("_bias") else _rows_apart(data)
        end = "bias" if name.endswith("_bias") else "weight"
        stem = name.removesuffix("_bias").removesuffix("gate_up_proj")
        yield f"{stem}gate_proj.{end}", one
        yield f"{stem}up_proj.{end}", other
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), data
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", np.swapaxes(data, -1, -2)
    else:
        yield name, data


def _rows_apart(data: Array) -> tuple[Array, Array]:
    turned = np.swapaxes(data, -1, -2)
    return turned[:, 0::2], turned[:, 1::2]


def _llama4(config: Config, name: str, data: Array) -> Pairs:
    if name.endswith("gate_up_proj"):
        gate, up = np.split(np.swapaxes(data, -1, -2), 2, axis=-2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", np.swapaxes(data, -1, -2)
    else:
        yield name, data


def _gemma3n(config: Config, name: str, data: Array) -> Pairs:
    yield (f"{name}.weight" if name.endswith("_scale") else name), data


def _gemma4(config: Config, name: str, data: Array) -> Pairs:
    layer = re.search(r"layers\.(\d+)\.", name)
    if name.endswith("router.scale"):
        assert layer is not None
        yield f"blk.{layer[1]}.ffn_gate_inp.scale", data
    elif name.endswith("per_expert_scale"):
        assert layer is not None
        yield f"blk.{layer[1]}.ffn_down_exps.scale", data
    else:
        ends = name.endswith("layer_scalar") or ".experts." in name
        yield (f"{name}.weight" if ends else name), data


def _afmoe(config: Config, name: str, data: Array) -> Pairs:
    yield (f"{name}.bias" if name.endswith(".expert_bias") else name), data


def _laguna(config: Config, name: str, data: Array) -> Pairs:
    layer = re.search(r"layers\.(\d+)\.mlp\.experts\.e_score", name)
    yield (name if layer is None else f"blk.{layer[1]}.exp_probs_b.bias"), data


def _step35(config: Config, name: str, data: Array) -> Pairs:
    for found, x in _plus_one(config, name, data):
        yield (f"{found}.bias" if found.endswith(".router_bias") else found), x


def _muse_glimmer(config: Config, name: str, data: Array) -> Pairs:
    """Add 1 to norms of layers, and make norms of q and k: the first multiplies scores."""
    yield from _permuted(config, name, data + np.float32(1) if name.endswith("layernorm.weight") else data)
    if name.endswith("q_proj.weight"):
        ones = np.ones(config["head_dim"], np.float32)
        yield name.replace("q_proj", "q_norm"), ones * np.float32(config["qk_scale_factor"])
        yield name.replace("q_proj", "k_norm"), ones


def _granitemoe(config: Config, name: str, data: Array) -> Pairs:
    layer = re.search(r"layers\.(\d+)\.block_sparse_moe\.input_linear", name)
    if layer is None:
        yield from _permuted(config, name, data)
        return
    for end, part in zip(("gate", "up"), np.split(data, 2, axis=-2), strict=True):
        yield f"blk.{layer[1]}.ffn_{end}_exps.weight", part


def _apertus(config: Config, name: str, data: Array) -> Pairs:
    if ".act_fn." not in name:
        yield name, data


_CHANGES: dict[str, Callable[[Config, str, Array], Pairs]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "ministral3", "smollm3", "granite", "arcee"), _permuted),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "nemotron"), _plus_one),
    "granitemoe": _granitemoe,
    "apertus": _apertus,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "afmoe": _afmoe,
    "laguna": _laguna,
    "step3p5": _step35,
    "muse_glimmer_text": _muse_glimmer,
}


def _rope_tensors(config: Config) -> Pairs:
    """Yield the factors of frequencies that the metadata cannot hold."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("long_factor"):
        yield "rope_factors_long.weight", np.array(scaling["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(scaling["short_factor"], np.float32)
    if config["model_type"] == "gemma4_text":
        full = config["rope_parameters"]["full_attention"]
        half = config["global_head_dim"] // 2
        turned = int(config["global_head_dim"] * full["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    if scaling.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3(config, scaling)


def _llama3(config: Config, scaling: Mapping[str, Any]) -> Array:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = config["rope_theta"]
    freqs = np.float32(1) / np.float32(theta[0] if isinstance(theta, list) else theta) ** (
        np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    )
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    factors = []
    for wavelength in 2 * np.pi / freqs:
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
