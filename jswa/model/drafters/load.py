"""Checks and loads the checkpoint of a drafter."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jswa.architecture import ModelConfig
from jswa.model.binding import shapes_of
from jswa.model.drafters.assistant_files import open_assistant
from jswa.model.drafters.checkpoint import Checkpoint, refused
from jswa.model.drafters.dflash_files import open_dflash, open_dspark
from jswa.model.drafters.eagle_files import open_eagle
from jswa.model.drafters.mtp_files import open_mtp
from jswa.model.drafters.seam import Drafter
from jswa.model.hf.source import Source
from jswa.model.transformer import Params
from jswa.model.weights.load import load_table, weights_of
from jswa.model.weights.packed.labels import settled
from jswa.model.weights.placement import Placement
from jswa.model.weights.safetensors_files import TensorReader

Opened = Callable[[Path, ModelConfig], Checkpoint]
METHODS: dict[str, Opened] = {
    "dflash": open_dflash,
    "dspark": open_dspark,
    "eagle3": open_eagle,
    "gemma4_assistant": open_assistant,
    "mtp": open_mtp,
}


def check_drafter(method: str, folder: Path, target: ModelConfig) -> Drafter:
    """Return the drafter of a checkpoint folder, after config.json and the headers of its files; no weight is read.

    Args:
        method: one of `METHODS`.
        folder: for "mtp" the target's own.
        target: the whole model.

    Raises ConfigError that names key, value and limit if the drafter does not fit the target, CheckpointError if a file
    is missing or corrupt, and UnsupportedModel.
    """
    return _open(method, folder, target).drafter


def load_drafter(
    method: str, folder: Path, target: ModelConfig, target_params: Params, dtype: jnp.dtype, *, mesh: Mesh | None = None
) -> tuple[Drafter, Params]:
    """Return the drafter of the whole model and its parameters, on the devices as `Placement` puts a decoder's.

    Args:
        target_params: the target's, of the whole model or on the same mesh.

    Raises what `check_drafter` raises, before a weight is read.
    """
    opened = _open(method, folder, target)
    placement = Placement(opened.model, mesh)
    weights = weights_of(opened.table, opened.tensors, opened.stored)
    shapes = shapes_of(lambda: opened.make(dtype))
    of_table = {name: _shape(source, shapes[name]) for name, source in opened.table.items()}
    with TensorReader(opened.all_tensors) as reader:
        weights = settled(weights, opened.stored, reader)
        params = load_table(opened.table, weights, of_table, reader, placement)
        for name, read in opened.others.items():
            value = read(reader)
            params[name] = placement.put(name, np.ascontiguousarray(value.astype(shapes[name].dtype)))
    assert params.keys() == shapes.keys(), "the table and the module must have the same parameters"
    return opened.drafter, opened.finish(params, target_params)


def _shape(source: Source, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of a parameter: a matrix may have more inputs than its module says (EAGLE-3's first layer)."""
    if source.layout != "matrix":
        return shape
    rows = sum(part.shape[0] for part in source.parts)
    return jax.ShapeDtypeStruct((source.parts[0].shape[1], rows), shape.dtype)  # type: ignore[no-untyped-call]


def _open(method: str, folder: Path, target: ModelConfig) -> Checkpoint:
    if method not in METHODS:
        raise refused("method", method, f"must be one of {', '.join(METHODS)}")
    return METHODS[method](folder, target)
