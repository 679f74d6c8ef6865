"""Reading of LoRA adapters: PEFT folders (adapter_config.json, adapter_model.safetensors) to parameters.

The headers of all folders are checked against the model before any tensor is read. An adapter that cannot be served
completely is refused. As in checkpoints, two kinds of tensors are ignored: those of a model's vision or audio part, and
those of k and v projections in layers that read another layer's KV.
"""

import hashlib
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Shaped

from jswa.architecture import ModelConfig
from jswa.config import LoraRoom
from jswa.errors import CheckpointError, ConfigError, RequestError, UnknownAdapter
from jswa.forms.base.names import LINEAR
from jswa.model.hf.assemble import assemble
from jswa.model.hf.peft import CONFIG, MAX_RANK, LoraConfig, read_lora_config
from jswa.model.hf.source import Source, TensorPart
from jswa.model.hf.tensor_map import canonical_name, sources, unused_names
from jswa.model.lora import Pairs, adapter_params
from jswa.model.partition import cut_of
from jswa.model.transformer import Params
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.safetensors_files import FLOATS, Tensor, TensorReader
from jswa.model.weights.safetensors_header import read_header
from jswa.storage.checkpoint_files import is_folder
from jswa.storage.json_object import label

_log = logging.getLogger("jswa")
_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."
# Bytes: 80,000 tensors. An engine that runs has no memory to spare for the header of a large checkpoint.
_MAX_HEADER = 2**24
_A, _B = ".lora_A.weight", ".lora_B.weight"
_DENSE = ("matrix", "columns", "rank_slices")  # layouts of matrices other than stacks of experts
_REASONS = (
    (".lora_magnitude_vector", "DoRA is not supported"),
    (".lora_embedding_", "adapters of embeddings are not supported"),
    (".lora_", "must end in .lora_A.weight or .lora_B.weight, as save_pretrained writes it"),
)


class Update(NamedTuple):
    """The update scale · B · A of one linear layer [out, in], which is one checkpoint tensor."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float


@dataclass(frozen=True)
class Adapter:
    """One folder that is checked but not read yet; updates are keyed by the name of the checkpoint tensor."""

    name: str
    updates: Mapping[str, Update]


class AdapterWeights(NamedTuple):
    """Loaded adapters: parameters to add to the model's, and a digest of each adapter's numbers by adapter name.

    The order of `digests` is that of adapter numbers, from 1; see `jswa.model.lora`.
    """

    params: Params
    digests: dict[str, str]


class HostAdapter(NamedTuple):
    """An adapter in host memory: A and B of each adapted matrix, and a digest of the numbers."""

    pairs: Pairs
    digest: str


@dataclass(frozen=True)
class LoraReader:
    """Reads adapters for an engine that runs; any thread may call it. It holds no reference to the engine.

    Attributes:
        checked: the model as its config.json describes it, which files are checked against.
        model: the model as its parameters were loaded.
        rank: largest rank of a module.
    """

    checked: ModelConfig
    model: ModelConfig
    dtype: jnp.dtype
    rank: int

    def read(self, folder: str | Path) -> HostAdapter:
        """Check and read a folder. Raises RequestError that names it, and UnknownAdapter if it does not exist."""
        path = Path(folder)
        try:
            if not is_folder(path):
                raise UnknownAdapter("lora_path", str(folder), "must be a folder that exists")
            return read_adapter(Adapter(path.name, _checked(path, self.checked, self.rank)), self.model, self.dtype)
        except (CheckpointError, OSError) as error:
            raise RequestError("lora_path", str(folder), str(error)) from error


def check_adapters(folders: Mapping[str, Path], config: ModelConfig, rank: int = MAX_RANK) -> list[Adapter]:
    """Check the headers of all folders against the model, and their ranks against the largest one.

    Raises ConfigError that names the folder, the file, the key and the reason.
    """
    found = []
    for name, folder in folders.items():
        try:
            found.append(Adapter(name, _checked(folder, config, rank)))
        except CheckpointError as error:
            raise ConfigError("lora_modules", f"{name}={folder}", str(error)) from error
    return found


def load_adapters(
    adapters: Sequence[Adapter], config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None
) -> AdapterWeights:
    """Read checked adapters; each device of a `mesh` gets its tensor parallel shard.

    Raises ConfigError if a file has changed since the check, or if a number is not finite in `dtype`.
    """
    digests: dict[str, str] = {}
    pairs: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}  # (index, A [K, r], B [r, C]) by matrix
    for index, adapter in enumerate(adapters, start=1):
        try:
            found = read_adapter(adapter, config, dtype)
        except CheckpointError as error:
            raise ConfigError("lora_modules", adapter.name, str(error)) from error
        digests[adapter.name] = found.digest
        for name, pair in found.pairs.items():
            pairs.setdefault(name, []).append((index, *pair))
    params: Params = {}
    placement = Placement(config, mesh)
    for name, all_of in pairs.items():
        owner = np.concatenate([np.full(a.shape[1], index, np.int32) for index, a, _ in all_of])
        joined = np.concatenate([a for _, a, _ in all_of], axis=1), np.concatenate([b for _, _, b in all_of]), owner
        params |= {one: placement.put(one, _aligned(array)) for one, array in adapter_params(name, *joined).items()}
    if params:
        size = sum(value.nbytes for value in params.values()) / 2**20
        _log.info("%d adapters beside %d matrices: %.1f MiB", len(adapters), len(pairs), size)
    return AdapterWeights(params, digests)


def read_adapter(adapter: Adapter, config: ModelConfig, dtype: jnp.dtype) -> HostAdapter:
    """Read a checked adapter.

    Raises CheckpointError if a file has changed since the check, or if a number is not finite in `dtype`.
    """
    values, digest = _read(adapter)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, source in _targets(config).items():
        pairs = []
        for part in source.parts:
            if part.key in values:
                pairs.append(_pair(source, part, *values[part.key], np.dtype(dtype)))
                if not all(np.isfinite(one.astype(np.float32)).all() for one in pairs[-1]):
                    where = adapter.updates[part.key].b.where
                    raise CheckpointError(f"{where}: lora_A and lora_B must be finite in {jnp.dtype(dtype)}")
        if pairs:
            found[name] = np.concatenate([a for a, _ in pairs], axis=1), np.concatenate([b for _, b in pairs])
    return HostAdapter(found, digest)


def room_shapes(config: ModelConfig, room: LoraRoom, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parameters of a room for adapters beside all matrices that LoRA may adapt, by name.

    A slot has `rank` columns for each checkpoint tensor that the matrix is made of: 3 for q, k and v.
    """
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, source in _targets(config).items():
        rows, columns = source.parts[0].shape[1], sum(part.shape[0] for part in source.parts)
        width = room.adapters * room.rank * len(source.parts)
        shapes |= adapter_params(
            name,
            _shape(dtype, rows, width),
            _shape(dtype, width, columns),
            _shape(np.dtype(np.int32), width),
        )
    return shapes


def _shape(dtype: jnp.dtype, *sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)  # type: ignore[no-untyped-call]


def empty_room(config: ModelConfig, room: LoraRoom, dtype: jnp.dtype, mesh: Mesh | None = None) -> Params:
    """Return the parameters of a room without adapters."""
    placement, shapes = Placement(config, mesh), room_shapes(config, room, dtype)
    fill = {name: -1 if np.issubdtype(shape.dtype, np.integer) else 0 for name, shape in shapes.items()}
    params = {n: placement.put(n, _aligned(np.full(s.shape, fill[n], s.dtype))) for n, s in shapes.items()}
    size = sum(value.nbytes for value in params.values()) / 2**20
    _log.info("room for %d adapters of rank %d beside %d matrices: %.1f MiB", *room, len(shapes) // 3, size)
    return params


def room_bytes(config: ModelConfig, room: LoraRoom, itemsize: int, devices: int = 1) -> int:
    """Return the bytes of a room on each device. `config` is of the whole model."""
    total = 0
    for name, shape in room_shapes(config, room, jnp.dtype(np.int32)).items():
        cut = cut_of(name, shape.shape, config, devices) if devices > 1 else None
        size = math.prod(shape.shape) if cut is None else math.prod(shape.shape) // shape.shape[cut.axis] * cut.size
        total += size * (itemsize if len(shape.shape) > 1 else 4)
    return total


def _targets(config: ModelConfig) -> dict[str, Source]:
    """Return the matrices that LoRA may adapt: linear layers of attention and of feed-forwards other than experts."""
    return {name: source for name, source in sources(config).items() if LINEAR.search(name) and source.layout in _DENSE}


def _checked(folder: Path, config: ModelConfig, most: int) -> dict[str, Update]:
    """Return the updates of a folder, whose headers alone are read. Raises CheckpointError."""
    parts = {part.key: part for source in _targets(config).values() for part in source.parts}
    others = {part.key for source in sources(config).values() for part in source.parts} - parts.keys()
    if not is_folder(folder):
        raise CheckpointError("must be a folder")
    settings = read_lora_config(folder)
    if not os.path.lexists(folder / _FILE):
        pickled = os.path.lexists(folder / "adapter_model.bin")
        raise CheckpointError(
            f"lacks {_FILE}" + (": adapter_model.bin is not read, because a pickle can run code" * pickled)
        )
    found: dict[str, dict[str, tuple[str, Tensor]]] = {}  # (module, tensor) by checkpoint tensor and suffix
    for key, stored in read_header(folder / _FILE, _MAX_HEADER).items():
        tensor = Tensor(folder / _FILE, key, stored)
        module, end = _module(tensor)
        wanted = canonical_name(f"{module}.weight")
        if wanted is None or unused_names(config, [wanted]):
            continue
        if wanted not in parts:
            raise CheckpointError(f"{tensor.where} {_why_not(wanted, config, others)}")
        if end in found.setdefault(wanted, {}):
            raise CheckpointError(
                f"{tensor.where} adapts {wanted}, which {label(found[wanted][end][1].key)} adapts too"
            )
        found[wanted][end] = module, tensor
    if not found:
        raise CheckpointError(f"{_FILE} has no tensors for this model")
    return {key: _update(parts[key], ends, settings, most) for key, ends in found.items()}


def _module(tensor: Tensor) -> tuple[str, str]:
    """Return the name of the module that a tensor adapts, as in the trained model, and the tensor's suffix."""
    for end in (_A, _B):
        if tensor.key.endswith(end):
            return tensor.key.removesuffix(end).removeprefix(_PREFIX), end
    reason = next(
        (why for what, why in _REASONS if what in tensor.key), "whole tensors in an adapter are not supported"
    )
    raise CheckpointError(f"{tensor.where}: {reason}")


def _why_not(key: str, config: ModelConfig, others: Iterable[str]) -> str:
    if ".experts." in key:
        return "adapts experts, which is not supported"
    if key in others or key == "lm_head.weight":
        return "must adapt a linear layer of attention or of a dense feed-forward"
    return f"adapts {label(key)}, which a model of type {config.family} does not have"


def _update(part: TensorPart, ends: Mapping[str, tuple[str, Tensor]], settings: LoraConfig, most: int) -> Update:
    (module, first), *_ = ends.values()
    if len(ends) < 2:
        raise CheckpointError(f"{first.where} lacks its lora_{'B' if _A in ends else 'A'}")
    rows, columns = part.shape
    rank, a, b = settings.rank_of(module), ends[_A][1], ends[_B][1]
    if rank > most:
        raise CheckpointError(f"{CONFIG}: r = {rank} of {label(module)}: must be at most max_lora_rank = {most}")
    for tensor, shape in ((a, (rank, columns)), (b, (rows, rank))):
        tensor.require_shape(shape, by=f"the model and {CONFIG} ask for")
        tensor.require_type(*FLOATS)
    return Update(a, b, settings.scale_of(module))


Pair = tuple[Float[np.ndarray, "r K"], Float[np.ndarray, "C r"]]


def _read(adapter: Adapter) -> tuple[dict[str, Pair], str]:
    """Return float32 A and scale · B by checkpoint tensor, and a digest of these numbers."""
    digest, values = hashlib.sha256(), {}
    with TensorReader({tensor.key: tensor for update in adapter.updates.values() for tensor in update[:2]}) as reader:
        for key, (a, b, scale) in sorted(adapter.updates.items()):
            with np.errstate(over="ignore", invalid="ignore"):
                down, up = (reader.rows(x, 0, x.shape[0]).astype(np.float32) for x in (a, b))
                up *= np.float32(scale)
            digest.update(f"{key} {down.shape} {up.shape}\n".encode())
            digest.update(down.tobytes())
            digest.update(up.tobytes())
            values[key] = down, up
    return values, digest.hexdigest()


def _pair(
    source: Source, part: TensorPart, a: Float[np.ndarray, "r K"], b: Float[np.ndarray, "C r"], dtype: np.dtype
) -> tuple[Shaped[np.ndarray, "K r"], Shaped[np.ndarray, "r M"]]:
    """Return A and B in the order of the parameter's inputs and outputs; B is 0 at the outputs of other tensors."""
    rank = len(a)

    def inputs(_: TensorPart, begin: int, end: int) -> Float[np.ndarray, "rows K"]:
        return a[begin:end]

    def outputs(other: TensorPart, begin: int, end: int) -> Float[np.ndarray, "rows r"]:
        return b[begin:end] if other.key == part.key else np.zeros((end - begin, rank), np.float32)

    of_inputs = source.layout == "columns"  # this layout reorders inputs, the others may reorder outputs
    down, up = np.empty((a.shape[1], rank), dtype), np.empty((rank, sum(p.shape[0] for p in source.parts)), dtype)
    by_input = Source((part._replace(shape=a.shape),), "columns" if of_inputs else "matrix")
    by_output = source._replace(parts=tuple(p._replace(shape=(p.shape[0], rank)) for p in source.parts))
    if of_inputs:
        by_input, by_output = by_input._replace(folds=source.folds), by_output._replace(layout="matrix", folds=())
    with np.errstate(over="ignore"):
        assemble(by_input, down, inputs)
        assemble(by_output, up, outputs)
    return down, up


def _aligned(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    out = empty(array.shape, array.dtype)
    out[...] = array
    return out
