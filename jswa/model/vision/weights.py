"""The parameters of a vision tower, from the files of a Gemma 4 checkpoint.

Every tensor of the tower must be used exactly once; those of the text model and of speech are not looked at. Matrices
are held in the type of the activations, whatever form the checkpoint or the decoder has them in: all of E2B's are
0.3 GB in 16 bits, and each is read once for 2,520 patches, so that 8 bits would save little memory and no time.
"""

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from jswa.errors import CheckpointError
from jswa.model.binding import shapes_of
from jswa.model.hf.config import load_config
from jswa.model.hf.quantization import parse_quantization, read_config
from jswa.model.hf.source import Source, TensorPart, matrix, vector
from jswa.model.transformer import Params
from jswa.model.vision.config import VisionConfig
from jswa.model.vision.gemma4 import Tower
from jswa.model.weights.converted import is_converted
from jswa.model.weights.dequantize import is_activation_scale
from jswa.model.weights.load import load_table, weights_of
from jswa.model.weights.packed.labels import settled
from jswa.model.weights.placement import Placement
from jswa.model.weights.safetensors_files import TensorReader, stored_tensors

_OURS = ("vision_tower.", "embed_vision.")
_NORMS = {
    "pre_attn": "input_layernorm",
    "post_attn": "post_attention_layernorm",
    "pre_mlp": "pre_feedforward_layernorm",
    "post_mlp": "post_feedforward_layernorm",
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def load_tower(folder: Path, config: VisionConfig, dtype: jnp.dtype, *, mesh: Mesh | None = None) -> Params:
    """Read the parameters of a checkpoint's vision tower; the headers of all files are checked first.

    Args:
        folder: the checkpoint's, whose tensors may be quantized.
        dtype: of all parameters, and so of the activations.
        mesh: each of its devices gets the whole tower; None: the default device.

    Raises CheckpointError that names file and key if a tensor is missing, unknown, misshaped, stored twice or of a
    wrong type, if a file is truncated or corrupt, or if the checkpoint is a converted one, which has no tower.
    """
    if is_converted(folder):
        raise CheckpointError(f"{folder} is converted, without its vision tower: name the checkpoint that it was")
    stored = parse_quantization(read_config(folder))
    tensors = stored_tensors(folder, tower_name)
    if stored is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_activation_scale(name)}
    table = tower_sources(config)
    weights = weights_of(table, tensors, stored)
    shapes = shapes_of(lambda: Tower(config, dtype))
    with TensorReader(tensors) as reader:
        weights = settled(weights, stored, reader)
        # No name of the tower is one that `cut_of` splits, so that each device of a mesh has all of it.
        return load_table(table, weights, shapes, reader, Placement(load_config(folder), mesh))


def has_tower(folder: Path) -> bool:
    """Return whether a checkpoint has tensors of a tower: converted ones have none, nor have some that were tuned."""
    return not is_converted(folder) and bool(stored_tensors(folder, tower_name))


def tower_name(key: str) -> str | None:
    """Return a tensor's name without the prefix of whole models; None if it is not of the tower."""
    name = key.removeprefix("model.")
    return name if name.startswith(_OURS) else None


def tower_sources(config: VisionConfig) -> dict[str, Source]:
    """Return the source of every parameter of the tower by parameter name."""
    width, theirs = config.width, "vision_tower"
    places = TensorPart(f"{theirs}.patch_embedder.position_embedding_table", (2, config.positions, width))
    table = {
        "pixels": matrix({f"{theirs}.patch_embedder.input_proj": width}, 3 * config.patch**2),
        "places": Source((places,)),
        "project": matrix({"embed_vision.embedding_projection": config.out}, width),
    }
    if config.standardize:
        table |= {"shift": vector(f"{theirs}.std_bias", width), "factor": vector(f"{theirs}.std_scale", width)}
    for index in range(config.layers):
        parts = _layer(config, f"{theirs}.encoder.layers.{index}")
        table |= {f"blocks.{index}.{name}": source for name, source in parts.items()}
    return table


def _layer(config: VisionConfig, theirs: str) -> dict[str, Source]:
    width, q, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    linears = {
        "attention.q": (f"{attention}.q_proj", q, width),
        "attention.k": (f"{attention}.k_proj", kv, width),
        "attention.v": (f"{attention}.v_proj", kv, width),
        "attention.out": (f"{attention}.o_proj", width, q),
        "gate": (f"{mlp}.gate_proj", config.mlp, width),
        "up": (f"{mlp}.up_proj", config.mlp, width),
        "down": (f"{mlp}.down_proj", width, config.mlp),
    }
    table = {f"{ours}.weight": vector(f"{theirs}.{name}.weight", width) for ours, name in _NORMS.items()}
    for norm in ("q_norm", "k_norm"):
        table[f"attention.{norm}.weight"] = vector(f"{attention}.{norm}.weight", config.head_dim)
    for ours, (name, outputs, inputs) in linears.items():
        table[f"{ours}.weight"] = matrix({f"{name}.linear": outputs}, inputs)
        if config.clipped:
            table[f"{ours}.bounds"] = Source(tuple(TensorPart(f"{name}.{bound}", ()) for bound in _BOUNDS))
    return table
