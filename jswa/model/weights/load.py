"""Loading of a checkpoint folder: ModelConfig and parameters on devices.

Tensors are read a few rows at a time, and every tensor must be used exactly once.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Shaped

from jswa.architecture import ModelConfig, MoeConfig
from jswa.errors import CheckpointError, ConfigError
from jswa.forms.base.form import Form
from jswa.forms.mxfp4 import MXFP4, MXFP4_JOINED, MXFP4_TILES
from jswa.forms.plain import PLAIN
from jswa.model.binding import param_shapes
from jswa.model.hf.assemble import assemble
from jswa.model.hf.config import load_config
from jswa.model.hf.quantization import Quantization, parse_quantization, read_config
from jswa.model.hf.source import Source, TensorPart
from jswa.model.hf.tensor_map import sources, unused_names
from jswa.model.partition import shard_config
from jswa.model.transformer import Params
from jswa.model.weights.converted import is_converted, load_converted
from jswa.model.weights.dequantize import Weight, companions, is_activation_scale, resolve, row_reader
from jswa.model.weights.formats import QuantizationMode, choose_formats, load_matrix, reformat
from jswa.model.weights.kv_scales import kv_scale_names, read_scales, stored_scales
from jswa.model.weights.packed.labels import settled
from jswa.model.weights.packed.reading import StoredMatrix
from jswa.model.weights.placement import Placement, empty, load_all
from jswa.model.weights.safetensors_files import Tensor, TensorReader, stored_tensors
from jswa.storage.checkpoint_files import is_folder
from jswa.storage.json_object import label
from pallas_kernels import Linear
from pallas_kernels.experts.api import Implementation
from pallas_kernels.experts.mxfp4 import BLOCK, TILE, tile_scales

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_FACTORS = (".scalar", ".expert_scale", ".output_scale")  # 1 is their neutral value, as for norms
_COMPARED_ROWS = 256


def load_checkpoint(
    folder: Path,
    dtype: jnp.dtype,
    *,
    adapt: Callable[[ModelConfig], ModelConfig] = lambda config: config,
    quantization: QuantizationMode = "none",
    experts: Implementation = "xla",
    linear: Linear = "xla",
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Read a Hugging Face checkpoint (config.json and safetensors) or a converted one.

    The tensors may be in one file or in checkpoint shards, plain or quantized. Weights are cast to `dtype` (quantized
    ones via float32; see `dequantize`), q/k/v and gate/up are fused, and matrices are transposed to [in, out]. Beside
    the parameters, host memory needs a few MiB per thread. The headers of all files are checked against each other, the
    index and the config before the first tensor is read.

    Args:
        adapt: changes how the config says that parameters and KV are stored.
        quantization, experts, linear: the storage format of matrices, and the kernels that run experts and linear
            layers; see `formats.choose_formats`.
        mesh: each of its devices gets its shard of every parameter (`jswa.model.partition`).

    Returns:
        The config of the whole model, not of a shard, and the parameters.

    Raises CheckpointError that names the file and key if a tensor is missing, unknown, misshaped, stored twice or of a
    wrong type, or if a file is truncated or corrupt. Raises ConfigError if the model cannot be split over the mesh.
    """
    if not is_folder(folder):
        raise CheckpointError(f"{folder}: must be a folder")
    declared = adapt(load_config(folder))
    _require_experts(declared, quantization)
    shard_config(declared, 1 if mesh is None else mesh.size)  # raises before anything is read
    if is_converted(folder):
        held = partial(reformat, mode=quantization, experts=experts)
        return load_converted(folder, declared, dtype, held, mesh, linear)
    stored = parse_quantization(read_config(folder))
    config, tensors = _resolve_tied(declared, stored_tensors(folder))
    ignored = unused_names(config, tensors)
    if stored is not None:
        ignored |= set(filter(is_activation_scale, tensors))
    if stored is not None and stored.method == "gptq":
        ignored |= _neutral_biases(config, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    of_kv = kv_scale_names(len(config.layers), tensors)
    scales = stored_scales(config, tensors)
    table = sources(config, tensors)
    of_weights = {name: tensor for name, tensor in tensors.items() if name not in of_kv}
    weights = weights_of(table, of_weights, stored)
    with TensorReader(tensors) as reader:
        weights = settled(weights, stored, reader)
        read = row_reader(weights, reader)
        if config is not declared and _same(_part(table, _EMBED), _part(table, _HEAD), read):
            config, table = declared, sources(declared, tensors)
        shapes = param_shapes(config, dtype)
        placement = Placement(config, mesh)
        params = load_table(
            table, weights, shapes, reader, placement, quantization=quantization, experts=experts, linear=linear
        )
        return config, params | read_scales(scales, reader, placement)


def load_table(
    table: Mapping[str, Source],
    weights: Mapping[str, Weight],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    reader: TensorReader,
    placement: Placement,
    *,
    quantization: QuantizationMode = "none",
    experts: Implementation = "xla",
    linear: Linear = "xla",
) -> Params:
    """Read the parameters of a table of sources.

    Args:
        weights: of the tensors of all sources (`weights_of`).
        shapes: of the whole parameters, as they are held if a matrix is not quantized.
        quantization, experts, linear: see `load_checkpoint`.
    """
    assert table.keys() == shapes.keys(), "the table and the module must have the same parameters"

    def matrix(name: str) -> StoredMatrix:
        return StoredMatrix(name, table[name], reader, weights, shapes[name], row_reader(weights, reader))

    formats = choose_formats(list(map(matrix, table)), quantization, experts, linear)

    def load(name: str) -> Params:
        if name in formats:
            return load_matrix(matrix(name), formats[name], experts, placement)
        out = empty(shapes[name].shape, np.dtype(shapes[name].dtype))
        assemble(table[name], out, row_reader(weights, reader))
        return {name: placement.put(name, out)}

    return load_all(load, shapes)


def weights_of(
    table: Mapping[str, Source], tensors: dict[str, Tensor], quantization: Quantization | None
) -> dict[str, Weight]:
    """Return the weight of each checkpoint tensor by key.

    Raises CheckpointError if a tensor is missing or belongs to no weight.
    """
    parts = [part for source in table.values() for part in source.parts]
    wanted = {name for part in parts for name in companions(part.key, tensors, quantization)}
    if missing := sorted(wanted - tensors.keys()):
        raise CheckpointError(f"the checkpoint lacks {_first_five(missing)}")
    if extra := sorted(tensors.keys() - wanted):
        raise CheckpointError(f"the checkpoint has tensors that this model does not use: {_first_five(extra)}")
    return {part.key: resolve(part, tensors, quantization) for part in parts}


def _neutral_biases(config: ModelConfig, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the biases of zeros that AutoGPTQ writes for matrices whose model has no bias."""
    used = {part.key for source in sources(config, tensors).values() for part in source.parts}
    extra = {name for name in tensors if name.endswith(".bias") and f"{name[:-4]}qweight" in tensors} - used
    with TensorReader({name: tensors[name] for name in extra}) as reader:
        return {name for name in extra if not reader.rows(tensors[name], 0, 1).any()}


def _first_five(names: list[str]) -> str:
    return ", ".join(map(label, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _resolve_tied(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Rename the head of a tied checkpoint that stores only the head.

    If the checkpoint stores both embedding and head, return an untied config; the caller compares the two matrices.
    """
    heads = [name for name in tensors if name.startswith(_HEAD)]  # includes its scales
    if not config.tie_embeddings or not heads:
        return config, tensors
    if any(name.startswith(_EMBED) for name in tensors):
        return dataclasses.replace(config, tie_embeddings=False), tensors
    return config, {name.replace(_HEAD, _EMBED) if name in heads else name: x for name, x in tensors.items()}


def _part(table: Mapping[str, Source], key: str) -> TensorPart:
    return next(part for source in table.values() for part in source.parts if part.key == key)


def _same(
    one: TensorPart, other: TensorPart, read: Callable[[TensorPart, int, int], Shaped[np.ndarray, "rows columns"]]
) -> bool:
    """Return whether two checkpoint matrices have the same numbers."""
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
    quantization: QuantizationMode = "none",
    experts: Implementation = "xla",
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Return random weights for the config of a folder; only config.json is read.

    Quantization "auto" stores all matrices in `dtype`, "mxfp4" the experts in MXFP4. Several devices get other numbers
    than one. Raises ConfigError if the model cannot be held or split so.
    """
    config = load_config(folder)
    _require_experts(config, quantization)
    shard_config(config, 1 if mesh is None else mesh.size)
    placement = Placement(config, mesh)
    if quantization == "mxfp4":
        tiled: dict[Implementation, Form] = {"mosaic": MXFP4_TILES, "mosaic_overlap": MXFP4_JOINED}
        _require_whole_blocks(config, TILE if experts in tiled else BLOCK)
        return config, random_params(config, dtype, seed, mesh, tiled.get(experts, MXFP4))
    params = random_params(config, dtype, seed, mesh)
    formatted: Params = {}
    for name in list(params):
        formatted |= reformat(name, {name: params.pop(name)}, placement, quantization, experts)
    return config, formatted


def _require_experts(config: ModelConfig, quantization: QuantizationMode) -> None:
    """Raise ConfigError if experts should be in MXFP4 and the model has none."""
    if quantization == "mxfp4" and not _mixtures(config):
        raise ConfigError("quantization", quantization, "is a format of experts, and the model has none")


def _require_whole_blocks(config: ModelConfig, size: int) -> None:
    """Raise ConfigError unless the sides of all experts' matrices are multiples of `size`."""
    for side in {config.d_model, *(moe.hidden for moe in _mixtures(config))}:
        if side % size:
            raise ConfigError("quantization", "mxfp4", f"experts have a side of {side}: must be a multiple of {size}")


def _mixtures(config: ModelConfig) -> list[MoeConfig]:
    return [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoeConfig)]


def random_params(
    config: ModelConfig, dtype: jnp.dtype, seed: int, mesh: Mesh | None = None, experts: Form = PLAIN
) -> Params:
    """Return random parameters: matrices N(0, 1/fan_in), identity norms, zero biases and sinks.

    Activations therefore have about the same magnitude in all layers. `experts`: the form of their matrices, as in
    `param_shapes`; in 4 bits all codes are equally likely.
    """
    params: Params = {}
    placement = Placement(config, mesh)
    for index, (name, leaf) in enumerate(param_shapes(config, dtype, experts).items()):
        target = placement.shape(name, leaf)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            make = partial(_random_joined if name.endswith(".joined") else _random_mxfp4, leaf, target.shape)
            make = partial(make, is_scale=True) if name.endswith(".scales") else make
        else:
            kind, offset = f".{name.rpartition('.')[2]}", config.final_norm.offset
            make = partial(_random, kind, leaf, target.shape, leaf.dtype, offset)
        # Each device of a mesh generates its own shard.
        generate = make if mesh is None else jax.jit(make, out_shardings=target.sharding)
        params[name] = generate(jax.random.key(seed + index))
    return params


def _random_mxfp4(
    whole: jax.ShapeDtypeStruct, shape: tuple[int, ...], key: jax.Array, *, is_scale: bool = False
) -> jax.Array:
    """Return random codes, or scales such that the numbers are about as large as those of `_random`.

    A scale is one of two neighbouring powers of two. The root mean square of the numbers is then 2.3 scales.
    """
    unsigned = jnp.dtype(f"uint{8 * whole.dtype.itemsize}")
    if not is_scale:
        return lax.bitcast_convert_type(jax.random.bits(key, shape, unsigned), whole.dtype)
    in_tiles = whole.dtype == jnp.int16
    inputs = whole.shape[2] * (TILE if in_tiles else BLOCK)
    least = 126 - round(math.log2(2.3 * inputs**0.5))
    scales = jax.random.randint(key, (*shape, 2), least, least + 2)
    return tile_scales(scales) if in_tiles else scales[..., 0].astype(jnp.uint8)


def _random_joined(whole: jax.ShapeDtypeStruct, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return the same for tiles whose scales lie behind their words."""
    codes, scales = jax.random.split(key)
    lines = _random_mxfp4(whole, shape, codes)
    return lines.at[..., -1, :].set(_random_mxfp4(whole, (*shape[:-2], shape[-1]), scales, is_scale=True))


@partial(jax.jit, static_argnums=range(5))
def _random(
    kind: str, whole: jax.ShapeDtypeStruct, shape: tuple[int, ...], dtype: jnp.dtype, offset: float, key: jax.Array
) -> jax.Array:
    """Return one random parameter of the given shape; `kind` is the end of its name.

    The shape may exceed that of the whole parameter, because devices may store the same KV heads. One program, so that
    nothing else of that size is allocated beside it.
    """
    if kind in _FACTORS:
        return jnp.ones(shape, dtype)
    if len(shape) > 1:
        fan_in = whole.shape[-1] if kind.endswith("embed") else whole.shape[-2]
        noise = jax.random.normal(key, shape, dtype)
        return noise * jnp.asarray(fan_in**-0.5, dtype)
    return jnp.full(shape, 1.0 - offset if kind == ".weight" else 0.0, dtype)
