"""Checkpoint folder to ModelConfig and parameters: a few rows at a time, every key used exactly once."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Shaped

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.model.hf.assemble import assemble
from jswa.model.hf.config import load_config
from jswa.model.hf.quantization import Quantization, parse_quantization
from jswa.model.hf.weights import Part, Source, sources, unused
from jswa.model.partition import part_of
from jswa.model.transformer import Params, param_shapes
from jswa.model.weights.converted import is_converted, load_converted
from jswa.model.weights.dequantize import Weight, companions, is_idle, read_rows, resolve
from jswa.model.weights.files import Reader, Tensor, stored_tensors
from jswa.model.weights.hold import Mode, adopt, choose, load_held
from jswa.model.weights.kv_scales import kv_scale_names, read_scales, stored_scales
from jswa.model.weights.place import Placement, empty, load_all
from jswa.storage.json_object import label, read_object
from pallas_kernels.experts.api import Implementation

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_FACTORS = (".scalar", ".expert_scale", ".output_scale")  # neutral at 1, as norms are
_COMPARED_ROWS = 256


def load_checkpoint(
    folder: Path,
    dtype: jnp.dtype,
    *,
    adapt: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    quantization: Mode = "none",
    experts: Implementation = "xla",
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Read a checkpoint from its folder: one of Hugging Face, or one that `jswa convert` made of it.

    A checkpoint is config.json and safetensors, in one file or sharded, plain or quantised.

    Weights are cast to `dtype` (quantised ones by way of float32; see `dequantize`), q/k/v and gate/up are fused,
    matrices become [in, out]. Host memory holds, beside the parameters, some MiB per thread. Raises CheckpointError
    naming the file and key where a tensor is missing, unknown, misshaped, stored twice or of a wrong type, or where a
    file is truncated or corrupt. The headers of all files are checked against each other, the index and the config
    before the first tensor is read. `adapt` may change what the config says of how parameters and KV are stored.
    `quantization` says which matrices are held in fewer bits, `experts` which kernel they are for: see `hold.choose`.
    Each device of a `mesh` gets its part of every parameter (`jswa.model.partition`); the config is the whole model's.
    Raises ConfigError where the model cannot be split so.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    declared = adapt(load_config(folder))
    part_of(declared, 1 if mesh is None else mesh.size)  # before anything is read
    if is_converted(folder):
        return load_converted(folder, declared, dtype, partial(adopt, mode=quantization, experts=experts), mesh)
    stored = parse_quantization(read_object(folder / "config.json"))
    config, tensors = _resolve_tied(declared, stored_tensors(folder))
    idle = unused(config, tensors) | (set() if stored is None else set(filter(is_idle, tensors)))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in idle}
    of_kv = kv_scale_names(len(config.layers), tensors)
    scales = stored_scales(config, tensors)
    table = sources(config, tensors)
    weights = _weights(table, {name: tensor for name, tensor in tensors.items() if name not in of_kv}, stored)
    with Reader(tensors) as reader:

        def read(part: Part, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
            return read_rows(weights[part.key], reader, begin, end)

        if config is not declared and _same(_part(table, _EMBED), _part(table, _HEAD), read):
            config, table = declared, sources(declared, tensors)
        shapes = param_shapes(config, dtype)
        assert table.keys() == shapes.keys(), "the name map disagrees with the decoder"

        where = Placement(config, mesh)
        held = choose(table, weights, shapes, quantization, experts)

        def load(name: str) -> Params:
            if name in held:
                shape = shapes[name]
                return load_held(name, held[name], table[name], reader, weights, shape, read, experts, where)
            out = empty(shapes[name].shape, np.dtype(dtype))
            assemble(table[name], out, read)
            return {name: where.put(name, out)}

        return config, load_all(load, shapes) | read_scales(scales, reader, where)


def _weights(
    table: Mapping[str, Source], tensors: dict[str, Tensor], quantization: Quantization | None
) -> dict[str, Weight]:
    """The weight that each part is, by key. Every tensor belongs to one. Raises CheckpointError."""
    parts = [part for source in table.values() for part in source.parts]
    wanted = {name for part in parts for name in companions(part.key, tensors, quantization)}
    if missing := sorted(wanted - tensors.keys()):
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}")
    if extra := sorted(tensors.keys() - wanted):
        raise CheckpointError(f"the checkpoint has tensors that this model does not use: {_some(extra)}")
    return {part.key: resolve(part, tensors, quantization) for part in parts}


def _some(names: list[str]) -> str:
    return ", ".join(map(label, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _resolve_tied(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A tied checkpoint may store its one matrix under either name, or twice: untied until both have been read."""
    heads = [name for name in tensors if name.startswith(_HEAD)]  # and its scales
    if not config.tie_embeddings or not heads:
        return config, tensors
    if any(name.startswith(_EMBED) for name in tensors):
        return dataclasses.replace(config, tie_embeddings=False), tensors
    return config, {name.replace(_HEAD, _EMBED) if name in heads else name: x for name, x in tensors.items()}


def _part(table: Mapping[str, Source], key: str) -> Part:
    return next(part for source in table.values() for part in source.parts if part.key == key)


def _same(one: Part, other: Part, read: Callable[[Part, int, int], Shaped[np.ndarray, "rows columns"]]) -> bool:
    """Whether two matrices hold the same numbers."""
    return one.shape == other.shape and all(
        np.array_equal(read(one, row, end), read(other, row, end))
        for row in range(0, one.shape[0], _COMPARED_ROWS)
        for end in (min(row + _COMPARED_ROWS, one.shape[0]),)
    )


def dummy_checkpoint(
    folder: Path,
    dtype: jnp.dtype,
    seed: int,
    *,
    quantization: Mode = "none",
    experts: Implementation = "xla",
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Random weights for the config of a folder; only config.json is read. "auto" holds none in fewer bits.

    They are others on more devices than one.
    """
    config = load_config(folder)
    part_of(config, 1 if mesh is None else mesh.size)
    params, where = random_params(config, dtype, seed, mesh), Placement(config, mesh)
    held: Params = {}
    for name in list(params):
        held |= adopt(name, {name: params.pop(name)}, where, quantization, experts)
    return config, held


def random_params(config: ModelConfig, dtype: jnp.dtype, seed: int, mesh: Mesh | None = None) -> Params:
    """Matrices N(0, 1/fan_in), norms the identity, biases and sinks 0, so that activations keep their size."""
    params: Params = {}
    where = Placement(config, mesh)
    for index, (name, leaf) in enumerate(param_shapes(config, dtype).items()):
        place = where.shape(name, leaf)
        make = partial(_random, name, leaf, place.shape, dtype, config.final_norm.offset)
        # Each device of a mesh makes its own part.
        made = make if mesh is None else jax.jit(make, out_shardings=place.sharding)
        params[name] = made(jax.random.key(seed + index))
    return params


def _random(
    name: str, whole: jax.ShapeDtypeStruct, shape: tuple[int, ...], dtype: jnp.dtype, offset: float, key: jax.Array
) -> jax.Array:
    """One parameter of random weights, of a shape that may be other than the whole's: KV heads on several devices."""
    if name.endswith(_FACTORS):
        return jnp.ones(shape, dtype)
    if len(shape) > 1:
        fan_in = whole.shape[-1] if name.endswith("embed") else whole.shape[-2]
        noise = jax.random.normal(key, shape, dtype)
        return noise * jnp.asarray(fan_in**-0.5, dtype)
    return jnp.full(shape, 1.0 - offset if name.endswith(".weight") else 0.0, dtype)
