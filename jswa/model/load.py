"""Checkpoint folder to ModelConfig and parameters: tensor by tensor, every key used exactly once."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jswa.config import ModelConfig
from jswa.errors import CheckpointError
from jswa.model.hf.config import load_config, read_json
from jswa.model.hf.weights import Part, Source, assemble, canonical_name, sources
from jswa.model.transformer import Params, param_shapes

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_checkpoint(folder: Path, dtype: jnp.dtype) -> tuple[ModelConfig, Params]:
    """Read a Hugging Face checkpoint: config.json and safetensors, one file or sharded.

    Weights are cast to `dtype`, q/k/v and gate/up are fused, matrices become [in, out]. Host memory holds one
    parameter at a time. Raises CheckpointError naming the file and key where a tensor is missing, unknown, misshaped,
    stored twice or not of floating point, or where a file is truncated or corrupt.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    config = load_config(folder)
    with ExitStack() as stack:
        tensors = _open_tensors(folder, stack)
        config, tensors = _resolve_tied(config, tensors)
        table = sources(config)
        _require_same_keys({part.key for source in table.values() for part in source.parts}, set(tensors))
        params = {name: _load(source, tensors, dtype) for name, source in table.items()}
    expected = {name: leaf.shape for name, leaf in param_shapes(config, dtype).items()}
    actual = {name: value.shape for name, value in params.items()}
    assert actual == expected, "the name map disagrees with the decoder"
    return config, params


def dummy_checkpoint(folder: Path, dtype: jnp.dtype, seed: int) -> tuple[ModelConfig, Params]:
    """Random weights for the config of a folder; only config.json is read.

    Matrices are N(0, 1/fan_in), norms the identity, biases and sinks 0, so that activations keep their size.
    """
    config = load_config(folder)
    params: Params = {}
    for index, (name, leaf) in enumerate(param_shapes(config, dtype).items()):
        if len(leaf.shape) > 1:
            fan_in = leaf.shape[-1] if name == "embed" else leaf.shape[-2]
            noise = jax.random.normal(jax.random.key(seed + index), leaf.shape, dtype)
            params[name] = noise * jnp.asarray(fan_in**-0.5, dtype)
        else:
            value = 1.0 - config.final_norm.offset if name.endswith(".weight") else 0.0
            params[name] = jnp.full(leaf.shape, value, dtype)
    return config, params


class _Tensor:
    """One tensor of an open safetensors file."""

    def __init__(self, path: Path, file: Any, key: str) -> None:
        self._path, self._file, self._key = path, file, key
        info = self._guard(lambda: file.get_slice(key))
        self.shape = tuple(info.get_shape())
        self.dtype = str(info.get_dtype())

    def read(self, part: Part) -> np.ndarray:
        """The values, once shape and type are what the model needs."""
        where = f"{self._path.name}: {self._key}"
        if self.shape != part.shape:
            raise CheckpointError(f"{where} has shape {list(self.shape)}, the config asks for {list(part.shape)}")
        if self.dtype not in _FLOATS:
            raise CheckpointError(f"{where} has type {self.dtype}, must be one of {', '.join(_FLOATS)}")
        values: np.ndarray = self._guard(lambda: self._file.get_tensor(self._key))
        return values

    def _guard(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self._path.name}: {self._key} cannot be read: {error}") from error


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, _Tensor]:
    """All tensors that a text decoder may need, by canonical name."""
    tensors: dict[str, _Tensor] = {}
    for path in _weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} is not a readable safetensors file: {error}") from error
        for key in file.keys():  # noqa: SIM118 - the file object is no dict
            name = canonical_name(key)
            if name in tensors:
                raise CheckpointError(f"{path.name}: {key} is stored twice in this checkpoint")
            if name is not None:
                tensors[name] = _Tensor(path, file, key)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return [single]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index.name}: weight_map must map tensor names to file names")
    paths = [folder / name for name in sorted(set(names.values()))]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise CheckpointError(f"{index.name} names {path.name}, which is not a file of this checkpoint")
    return paths


def _resolve_tied(config: ModelConfig, tensors: dict[str, _Tensor]) -> tuple[ModelConfig, dict[str, _Tensor]]:
    """A tied checkpoint may store its one matrix under either name, or twice; two different ones are not tied."""
    if not config.tie_embeddings or _HEAD not in tensors:
        return config, tensors
    rest = {name: tensor for name, tensor in tensors.items() if name != _HEAD}
    if _EMBED not in tensors:
        return config, rest | {_EMBED: tensors[_HEAD]}
    part = Part(_EMBED, (config.vocab_size, config.d_model))
    if np.array_equal(tensors[_EMBED].read(part), tensors[_HEAD].read(part)):
        return config, rest
    return dataclasses.replace(config, tie_embeddings=False), tensors


def _require_same_keys(wanted: set[str], found: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    if extra := sorted(found - wanted):
        raise CheckpointError(f"the checkpoint has tensors that this model does not use: {_some(extra)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _load(source: Source, tensors: dict[str, _Tensor], dtype: jnp.dtype) -> jax.Array:
    pieces = [tensors[part.key].read(part) for part in source.parts]
    return jnp.asarray(assemble(source, pieces), dtype)
