"""A drafter's checkpoint, opened: its config and the headers of its files are checked, and no weight is read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Shaped
from numpy import ndarray

from jswa.architecture import ModelConfig
from jswa.errors import ConfigError
from jswa.model.drafters.seam import Drafter
from jswa.model.hf.quantization import Quantization
from jswa.model.hf.source import Source
from jswa.model.transformer import Params
from jswa.model.weights.load import weights_of
from jswa.model.weights.safetensors_files import Tensor, TensorReader
from jswa.storage.checkpoint_files import is_folder

OPTION = "speculative_config"
ReadWhole = Callable[[TensorReader], Shaped[ndarray, "..."]]


class Checkpoint(NamedTuple):
    """A drafter and where its parameters are.

    Attributes:
        model: its layers, as parameters are placed on devices.
        make: builds its module.
        table, tensors: the sources of its parameters, and the tensors of these.
        all_tensors: those and the tensors of `others`.
        stored: how the tensors are quantized.
        others: parameters that no source describes: a function each that reads the whole parameter.
        finish: given the parameters and the target's, returns the parameters as they are run.
    """

    drafter: Drafter
    model: ModelConfig
    make: Callable[[jnp.dtype], nnx.Module]
    table: Mapping[str, Source]
    tensors: dict[str, Tensor]
    all_tensors: dict[str, Tensor]
    stored: Quantization | None = None
    others: Mapping[str, ReadWhole] = {}
    finish: Callable[[Params, Params], Params] = lambda params, _: params

    def check(self) -> "Checkpoint":
        """Return it. Raises CheckpointError if a tensor is missing, unknown or misshaped."""
        weights_of(self.table, self.tensors, self.stored)
        return self


def refused(key: str, value: object, limit: str) -> ConfigError:
    """Return the error for a key of a drafter's config.json that does not fit the model."""
    return ConfigError(f"{OPTION}: {key}", value, limit)


def required(key: str, value: Any, wanted: Any, what: str) -> None:
    """Raise ConfigError unless a drafter's value is that of the model."""
    if value != wanted:
        raise refused(key, value, f"must be {wanted}, {what}")


def folder_of(folder: Path) -> Path:
    """Return the folder of a drafter. Raises ConfigError if it is none."""
    if not is_folder(folder):
        raise refused("model", str(folder), "must be a folder with a drafter's checkpoint")
    return folder
