"""The tensors `model.mtp.layers.N` of a MiMo-V2 checkpoint."""

import dataclasses
import re
from pathlib import Path

from jswa.architecture import LayerConfig, MlpConfig, ModelConfig
from jswa.errors import CheckpointError
from jswa.model.drafters.checkpoint import Checkpoint, folder_of, refused
from jswa.model.drafters.mtp import Mtp
from jswa.model.hf.fields import Fields
from jswa.model.hf.quantization import parse_quantization
from jswa.model.hf.source import Source, TensorPart
from jswa.model.hf.tensor_map import rank_slices, sources
from jswa.model.weights.safetensors_files import stored_tensors
from jswa.storage.json_object import read_object

_FAMILY, _DENSE_WIDTH, _MOST = "mimo_v2_flash", 16384, 7
_LAYER = re.compile(r"^model\.mtp\.layers\.(\d{1,3})\.(.+)$")


def open_mtp(folder: Path, target: ModelConfig) -> Checkpoint:
    """Open the layers for multi-token prediction in the target's own folder.

    Raises ConfigError if the target has none, CheckpointError if a file is missing or corrupt.
    """
    if target.family != _FAMILY:
        raise refused(
            "method", "mtp", f"must be another method for {target.family}: MiMo-V2 alone has such layers here"
        )
    raw = read_object(folder_of(folder) / "config.json")
    tensors = stored_tensors(folder, _tensor_name)
    numbers = {int(name.split(".")[2]) for name in tensors}
    if not numbers:
        raise refused("method", "mtp", "must be another method: the checkpoint has no tensors model.mtp.layers")
    if numbers != set(range(len(numbers))) or len(numbers) > _MOST:
        raise CheckpointError(
            f"model.mtp.layers has numbers {sorted(numbers)[:8]}: must count from 0, to {_MOST - 1} at most"
        )
    drafter = Mtp(_layers(Fields(raw, "config.json"), target, len(numbers)), len(target.layers))
    model = drafter.model
    every = sources(model, tensors, rank_slices(target))
    table = {name: source for name, source in every.items() if name.startswith("layers.")}
    for index in range(len(numbers)):
        theirs, d = f"model.layers.{index}", model.d_model
        table[f"layers.{index}.eh_proj"] = Source((TensorPart(f"{theirs}.eh_proj.weight", (d, 2 * d)),), "matrix")
        for ours, name in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_norm", "final_layernorm")):
            table[f"layers.{index}.{ours}.weight"] = Source((TensorPart(f"{theirs}.{name}.weight", (d,)),))
    return Checkpoint(drafter, model, drafter.module, table, tensors, tensors, parse_quantization(raw)).check()


def _tensor_name(key: str) -> str | None:
    """Return the name of a tensor as in the layers of a decoder."""
    found = _LAYER.match(key)
    if found is None:
        return None
    rest = found[2].replace("pre_mlp_layernorm", "post_attention_layernorm")
    return f"model.layers.{int(found[1])}.{rest}"


def _layers(fields: Fields, target: ModelConfig, count: int) -> ModelConfig:
    """Return a model of local layers with the dense feed-forward."""
    local = [layer.attention for layer in target.layers if layer.attention.kind == "local"]
    if not local:
        raise refused("method", "mtp", "must be another method, because the model has no local layers")
    first = target.layers[0]
    activation = first.mlp.activation
    mlp = MlpConfig(fields.width("intermediate_size", _DENSE_WIDTH), activation)
    layer = LayerConfig(local[0], mlp, pre_attn=first.pre_attn, pre_mlp=first.pre_mlp)
    return dataclasses.replace(target, layers=(layer,) * count)
