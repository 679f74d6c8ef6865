"""Checkpoint folder to ModelConfig and parameters: a few rows at a time, every key used exactly once."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped
from tqdm import tqdm

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.json_object import label, read_object
from jswa.model.dequantize import Weight, companions, is_idle, read_rows, resolve
from jswa.model.files import Reader, Tensor, stored_tensors
from jswa.model.hf.assemble import assemble
from jswa.model.hf.config import load_config
from jswa.model.hf.quantization import Quantization, parse_quantization
from jswa.model.hf.weights import Part, Source, sources, unused
from jswa.model.transformer import Params, param_shapes

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_FACTORS = (".scalar", ".expert_scale", ".output_scale")  # neutral at 1, as norms are
_THREADS = 8
_ALIGNMENT = 64  # bytes; XLA on CPU takes such an array as it lies
_COMPARED_ROWS = 256


def load_checkpoint(
    folder: Path, dtype: jnp.dtype, *, adapt: Callable[[ModelConfig], ModelConfig] = lambda config: config
) -> tuple[ModelConfig, Params]:
    """Read a Hugging Face checkpoint: config.json and safetensors, one file or sharded, plain or quantised.

    Weights are cast to `dtype` (quantised ones by way of float32; see `dequantize`), q/k/v and gate/up are fused,
    matrices become [in, out]. Host memory holds, beside the parameters, some MiB per thread. Raises CheckpointError
    naming the file and key where a tensor is missing, unknown, misshaped, stored twice or of a wrong type, or where a
    file is truncated or corrupt. The headers of all files are checked against each other, the index and the config
    before the first tensor is read. `adapt` may change what the config says of how parameters and KV are stored.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    declared = adapt(load_config(folder))
    quantization = parse_quantization(read_object(folder / "config.json"))
    config, tensors = _resolve_tied(declared, stored_tensors(folder))
    idle = unused(config, tensors) | (set() if quantization is None else set(filter(is_idle, tensors)))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in idle}
    table = sources(config, tensors)
    weights = _weights(table, tensors, quantization)
    with Reader(tensors) as reader:

        def read(part: Part, begin: int, end: int) -> Shaped[np.ndarray, "rows columns"]:
            return read_rows(weights[part.key], reader, begin, end)

        if config is not declared and _same(_part(table, _EMBED), _part(table, _HEAD), read):
            config, table = declared, sources(declared, tensors)
        shapes = param_shapes(config, dtype)
        assert table.keys() == shapes.keys(), "the name map disagrees with the decoder"
        params = _all(partial(_load, read=read), table, shapes)
    return config, params


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


def _all(
    load: Callable[[Source, jax.ShapeDtypeStruct], jax.Array],
    table: Mapping[str, Source],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> Params:
    """All parameters, on a few threads, with a progress bar where a person looks."""
    params: Params = {}
    total = sum(_bytes(shape) for shape in shapes.values())
    with (
        tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="weights", disable=None) as bar,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool,
    ):
        jobs = {name: pool.submit(load, source, shapes[name]) for name, source in table.items()}
        try:
            for name, job in jobs.items():
                params[name] = job.result()
                bar.update(_bytes(shapes[name]))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return params


def _load(
    source: Source,
    shape: jax.ShapeDtypeStruct,
    read: Callable[[Part, int, int], Shaped[np.ndarray, "rows columns"]],
) -> jax.Array:
    size = _bytes(shape)
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    out = room[start : start + size].view(shape.dtype).reshape(shape.shape)
    assemble(source, out, read)
    placed: jax.Array = jax.device_put(out, may_alias=True)
    return placed


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
    size: int = math.prod(shape.shape) * np.dtype(shape.dtype).itemsize
    return size


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
