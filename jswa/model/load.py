"""Checkpoint folder to ModelConfig and parameters: tensor by tensor, every key used exactly once."""

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.json_object import label, read_object, shown
from jswa.model.hf.config import load_config
from jswa.model.hf.weights import Part, Source, assemble, canonical_name, sources, unused
from jswa.model.safetensors_header import Stored, read_header
from jswa.model.transformer import Params, param_shapes

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FACTORS = (".scalar", ".expert_scale", ".output_scale")  # neutral at 1, as norms are
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_checkpoint(
    folder: Path, dtype: jnp.dtype, *, adapt: Callable[[ModelConfig], ModelConfig] = lambda config: config
) -> tuple[ModelConfig, Params]:
    """Read a Hugging Face checkpoint: config.json and safetensors, one file or sharded.

    Weights are cast to `dtype`, q/k/v and gate/up are fused, matrices become [in, out]. Host memory holds one
    parameter at a time. Raises CheckpointError naming the file and key where a tensor is missing, unknown, misshaped,
    stored twice or not of floating point, or where a file is truncated or corrupt. The headers of all files are
    checked against each other, the index and the config before the first tensor is read. `adapt` may change what the
    config says of how parameters and KV are stored.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    declared = adapt(load_config(folder))
    config, tensors = _resolve_tied(declared, _stored_tensors(folder))
    idle = unused(config, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in idle}
    table = sources(config, tensors)
    parts = [part for source in table.values() for part in source.parts]
    _require_same_keys({part.key for part in parts}, set(tensors))
    for part in parts:
        tensors[part.key].require(part)
    with ExitStack() as stack:
        tensors = _opened(tensors, stack)
        if config is not declared and np.array_equal(tensors[_EMBED].read(), tensors[_HEAD].read()):
            config, table = declared, sources(declared, tensors)
        params = {name: _load(source, tensors, dtype) for name, source in table.items()}
    expected = {name: leaf.shape for name, leaf in param_shapes(config, dtype).items()}
    actual = {name: value.shape for name, value in params.items()}
    assert actual == expected, "the name map disagrees with the decoder"
    return config, params


def dummy_checkpoint(folder: Path, dtype: jnp.dtype, seed: int) -> tuple[ModelConfig, Params]:
    """Random weights for the config of a folder; only config.json is read."""
    config = load_config(folder)
    return config, random_params(config, dtype, seed)


def random_params(config: ModelConfig, dtype: jnp.dtype, seed: int) -> Params:
    """Matrices N(0, 1/fan_in), norms the identity, biases and sinks 0, so that activations keep their size."""
    params: Params = {}
    for index, (name, leaf) in enumerate(param_shapes(config, dtype).items()):
        if name.endswith(_FACTORS):
            params[name] = jnp.ones(leaf.shape, dtype)
        elif len(leaf.shape) > 1:
            fan_in = leaf.shape[-1] if name.endswith("embed") else leaf.shape[-2]
            noise = jax.random.normal(jax.random.key(seed + index), leaf.shape, dtype)
            params[name] = noise * jnp.asarray(fan_in**-0.5, dtype)
        else:
            value = 1.0 - config.final_norm.offset if name.endswith(".weight") else 0.0
            params[name] = jnp.full(leaf.shape, value, dtype)
    return params


class _Tensor(NamedTuple):
    """One tensor of a safetensors file; `file` is None until it is opened."""

    path: Path
    key: str
    stored: Stored
    file: Any = None

    def require(self, part: Part) -> None:
        """Refuse another shape or type than the model needs."""
        where = f"{self.path.name}: {label(self.key)}"
        if self.stored.shape != part.shape:
            shape = shown(list(self.stored.shape))
            raise CheckpointError(f"{where} has shape {shape}, the config asks for {list(part.shape)}")
        if self.stored.dtype not in _FLOATS:
            raise CheckpointError(f"{where} has type {self.stored.dtype}, must be one of {', '.join(_FLOATS)}")

    def read(self) -> np.ndarray:
        """The values."""
        try:
            values: np.ndarray = self.file.get_tensor(self.key)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path.name}: {label(self.key)} cannot be read: {error}") from error
        return values


def _stored_tensors(folder: Path) -> dict[str, _Tensor]:
    """All tensors that a text decoder may need, by canonical name, as the headers describe them."""
    places = _weight_map(folder)
    promised: dict[str, list[str]] = {} if places else {_SINGLE: []}
    for key, file in places.items():
        promised.setdefault(file, []).append(key)
    tensors: dict[str, _Tensor] = {}
    seen: dict[str, str] = {}  # also of what a text decoder does not need: no file counts twice
    for file in sorted(promised):
        header = read_header(folder / file)
        for key, stored in header.items():
            name = canonical_name(key)
            first = seen.get(key) or (tensors[name].path.name if name in tensors else None)
            if first is not None:
                raise CheckpointError(f"{file}: {label(key)} is stored twice in this checkpoint, first in {first}")
            if places.get(key, file) != file:
                raise CheckpointError(f"{file}: {label(key)} is here, but {_INDEX} places it in {places[key]}")
            seen[key] = file
            if name is not None:
                tensors[name] = _Tensor(folder / file, key, stored)
        for key in promised[file]:
            if key not in header:
                raise CheckpointError(f"{_INDEX}: weight_map places {label(key)} in {file}, which does not hold it")
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    """File names by tensor, from the index; empty for a checkpoint of one file."""
    index = folder / _INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(folder / _SINGLE):
            raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        return {}
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{_INDEX}: weight_map = {shown(places)}: must map tensor names to file names")
    for file, key in {file: key for key, file in places.items()}.items():
        # A file of the folder may be a link to anywhere, as in the hub's cache; a name may not lead out of it.
        if file in ("", ".", "..") or os.path.basename(file) != file or not os.path.isfile(folder / file):
            raise CheckpointError(
                f"{_INDEX}: weight_map places {label(key)} in {label(file)}, which is not a file of this checkpoint"
            )
    return places


def _resolve_tied(config: ModelConfig, tensors: dict[str, _Tensor]) -> tuple[ModelConfig, dict[str, _Tensor]]:
    """A tied checkpoint may store its one matrix under either name, or twice: untied until both have been read."""
    if not config.tie_embeddings or _HEAD not in tensors:
        return config, tensors
    if _EMBED in tensors:
        return dataclasses.replace(config, tie_embeddings=False), tensors
    return config, {_EMBED if name == _HEAD else name: tensor for name, tensor in tensors.items()}


def _require_same_keys(wanted: set[str], found: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    if extra := sorted(found - wanted):
        raise CheckpointError(f"the checkpoint has tensors that this model does not use: {_some(extra)}")


def _some(names: list[str]) -> str:
    return ", ".join(map(label, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _opened(tensors: dict[str, _Tensor], stack: ExitStack) -> dict[str, _Tensor]:
    """The tensors with their files, all of which the library accepts."""
    files: dict[Path, Any] = {}
    for path in {tensor.path for tensor in tensors.values()}:
        try:
            files[path] = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error
    return {name: tensor._replace(file=files[tensor.path]) for name, tensor in tensors.items()}


def _load(source: Source, tensors: dict[str, _Tensor], dtype: jnp.dtype) -> jax.Array:
    pieces = [tensors[part.key].read() for part in source.parts]
    return jnp.asarray(assemble(source, pieces), dtype)
