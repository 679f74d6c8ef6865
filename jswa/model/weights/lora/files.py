"""Reading of LoRA adapters: PEFT folders (adapter_config.json, adapter_model.safetensors) to parameters.

The headers of all folders are checked against the model before any tensor is read (`checks`).
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Shaped

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError, ConfigError, RequestError, UnknownAdapter
from jswa.model.hf.assemble import assemble
from jswa.model.hf.peft import MAX_RANK
from jswa.model.hf.peft_experts import factors, stacks
from jswa.model.hf.source import Source, TensorPart
from jswa.model.lora import Pairs, adapter_params, lora_width
from jswa.model.partition import cut_of
from jswa.model.transformer import Params
from jswa.model.weights.lora.checks import Update, checked, dense_targets
from jswa.model.weights.placement import Placement, empty
from jswa.model.weights.safetensors_files import TensorReader
from jswa.options.lora import LoraRoom
from jswa.storage.checkpoint_files import is_folder
from pallas_kernels import Experts

_log = logging.getLogger("jswa")
Pair = tuple[Float[np.ndarray, "r K"], Float[np.ndarray, "C r"]]  # A and scale · B as an adapter has them
_ANY = LoraRoom(1, MAX_RANK, experts=True)


@dataclass(frozen=True)
class Adapter:
    """One folder that is checked but not read yet; updates are keyed by what they change."""

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
        most: what an adapter may have: the room that the engine reserves.
    """

    checked: ModelConfig
    model: ModelConfig
    dtype: jnp.dtype
    most: LoraRoom

    def read(self, folder: str | Path) -> HostAdapter:
        """Check and read a folder. Raises RequestError that names it, and UnknownAdapter if it does not exist."""
        path = Path(folder)
        try:
            if not is_folder(path):
                raise UnknownAdapter("lora_path", str(folder), "must be a folder that exists")
            return read_adapter(Adapter(path.name, checked(path, self.checked, self.most)), self.model, self.dtype)
        except (CheckpointError, OSError) as error:
            raise RequestError("lora_path", str(folder), str(error)) from error


def check_adapters(folders: Mapping[str, Path], config: ModelConfig, most: LoraRoom = _ANY) -> list[Adapter]:
    """Check the headers of all folders against the model, and against what an adapter may have.

    Raises ConfigError that names the folder, the file, the key and the reason.
    """
    found = []
    for name, folder in folders.items():
        try:
            found.append(Adapter(name, checked(folder, config, most)))
        except CheckpointError as error:
            raise ConfigError("lora_modules", f"{name}={folder}", str(error)) from error
    return found


def load_adapters(
    adapters: Sequence[Adapter],
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    experts: Experts = "xla",
) -> AdapterWeights:
    """Read checked adapters; each device of a `mesh` gets its tensor parallel shard.

    `experts`: the implementation of experts. Raises ConfigError if a file has changed since the check, or if a number
    is not finite in `dtype`.
    """
    digests: dict[str, str] = {}
    pairs: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}  # (index, A [*E, K, r], B [*E, r, C]) by matrix
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
        joined = _joined(all_of, experts)
        params |= {one: placement.put(one, _aligned(array)) for one, array in adapter_params(name, *joined).items()}
    if params:
        size = sum(value.nbytes for value in params.values()) / 2**20
        _log.info("%d adapters beside %d matrices: %.1f MiB", len(adapters), len(pairs), size)
    return AdapterWeights(params, digests)


def _joined(
    all_of: Sequence[tuple[int, np.ndarray, np.ndarray]], experts: Experts
) -> tuple[Shaped[np.ndarray, "*E K R"], Shaped[np.ndarray, "*E R C"], Shaped[np.ndarray, " R"]]:
    """Return A, B and owners of all adapters of a matrix."""
    owner = np.concatenate([np.full(a.shape[-1], index, np.int32) for index, a, _ in all_of])
    a, b = np.concatenate([a for _, a, _ in all_of], axis=-1), np.concatenate([b for *_, b in all_of], axis=-2)
    if a.ndim == 2:
        return a, b, owner
    more = lora_width(len(owner), experts) - len(owner)
    wide = np.pad(a, ((0, 0), (0, 0), (0, more))), np.pad(b, ((0, 0), (0, more), (0, 0)))
    return *wide, np.pad(owner, (0, more), constant_values=-1)


def read_adapter(adapter: Adapter, config: ModelConfig, dtype: jnp.dtype) -> HostAdapter:
    """Read a checked adapter.

    Raises CheckpointError if a file has changed since the check, or if a number is not finite in `dtype`.
    """
    values, digest = _read(adapter)
    kind, found = np.dtype(dtype), dict[str, tuple[np.ndarray, np.ndarray]]()
    for name, source in dense_targets(config).items():
        pairs = [_pair(source, part, *values[part.key], kind) for part in source.parts if part.key in values]
        if pairs:
            found[name] = np.concatenate([a for a, _ in pairs], axis=1), np.concatenate([b for _, b in pairs])
    for stack in stacks(config):
        keys = [key for key, one in adapter.updates.items() if one.place is not None and one.place.stack == stack.name]
        if keys:
            sides = stack.experts, stack.inputs, stack.outputs
            found[stack.name] = _stack_pair({key: adapter.updates[key] for key in keys}, values, sides, kind)
    _require_finite(adapter, values, jnp.dtype(dtype))
    return HostAdapter(found, digest)


def _require_finite(adapter: Adapter, values: Mapping[str, Pair], dtype: jnp.dtype) -> None:
    """Raise CheckpointError if a number is not finite in `dtype`."""
    for key, pair in values.items():
        with np.errstate(over="ignore"):
            finite = all(np.isfinite(one.astype(np.dtype(dtype)).astype(np.float32)).all() for one in pair)
        if not finite:
            raise CheckpointError(f"{adapter.updates[key].b.where}: lora_A and lora_B must be finite in {dtype}")


def _stack_pair(
    updates: Mapping[str, Update], values: Mapping[str, Pair], sides: tuple[int, int, int], dtype: np.dtype
) -> tuple[Shaped[np.ndarray, "E inputs ranks"], Shaped[np.ndarray, "E ranks outputs"]]:
    """Return A and B of all experts of a stack [E, inputs, outputs]; B is 0 at the outputs of other modules.

    Modules of the same outputs share ranks, also if some experts have fewer.
    """
    ranks: dict[int, int] = {}  # the most by first output
    parts = []
    for key, one in updates.items():
        assert one.place is not None
        a, b = factors(one.place, *values[key], swapped=one.swapped)
        parts.append((one.place, a, b))
        ranks[one.place.begin] = max(ranks.get(one.place.begin, 0), b.shape[1])
    first = {begin: sum(rank for other, rank in ranks.items() if other < begin) for begin in ranks}
    (count, inputs, outputs), rank = sides, sum(ranks.values())
    down, up = np.zeros((count, inputs, rank), dtype), np.zeros((count, rank, outputs), dtype)
    for place, a, b in parts:
        own = slice(None) if place.expert is None else slice(place.expert, place.expert + 1)
        columns = slice(first[place.begin], first[place.begin] + b.shape[1])
        with np.errstate(over="ignore"):
            down[own, :, columns] = a
            up[own, columns, place.begin : place.begin + place.outputs] = b
    return down, up


def room_shapes(
    config: ModelConfig, room: LoraRoom, dtype: jnp.dtype, experts: Experts = "xla"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the parameters of a room for adapters beside all matrices that LoRA may adapt, by name.

    A slot has `rank` columns for each checkpoint tensor that the matrix is made of: 3 for q, k and v. `experts`: the
    implementation of experts.
    """
    sizes: dict[str, tuple[tuple[int, ...], int, int, int]] = {}  # (E or nothing, K, C, columns)
    for name, source in dense_targets(config).items():
        outputs, width = sum(part.shape[0] for part in source.parts), room.rank * len(source.parts)
        sizes[name] = (), source.parts[0].shape[1], outputs, room.adapters * width
    for stack in stacks(config) if room.experts else ():
        width = lora_width(room.adapters * room.rank * stack.parts, experts)
        sizes[stack.name] = (stack.experts,), stack.inputs, stack.outputs, width
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, (lead, inputs, outputs, width) in sizes.items():
        pair = _shape(dtype, *lead, inputs, width), _shape(dtype, *lead, width, outputs)
        shapes |= adapter_params(name, *pair, _shape(np.dtype(np.int32), width))
    return shapes


def _shape(dtype: jnp.dtype, *sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)  # type: ignore[no-untyped-call]


def empty_room(
    config: ModelConfig, room: LoraRoom, dtype: jnp.dtype, mesh: Mesh | None = None, experts: Experts = "xla"
) -> Params:
    """Return the parameters of a room without adapters. `experts`: the implementation of experts."""
    placement, shapes = Placement(config, mesh), room_shapes(config, room, dtype, experts)
    fill = {name: -1 if np.issubdtype(shape.dtype, np.integer) else 0 for name, shape in shapes.items()}
    params = {n: placement.put(n, _aligned(np.full(s.shape, fill[n], s.dtype))) for n, s in shapes.items()}
    size = sum(value.nbytes for value in params.values()) / 2**20
    _log.info("room for %d adapters of rank %d beside %d matrices: %.1f MiB", *room[:2], len(shapes) // 3, size)
    return params


def room_bytes(config: ModelConfig, room: LoraRoom, itemsize: int, devices: int = 1, experts: Experts = "xla") -> int:
    """Return the bytes of a room on each device. `config` is of the whole model; `experts`: see `room_shapes`."""
    total = 0
    for name, shape in room_shapes(config, room, jnp.dtype(np.int32), experts).items():
        cut = cut_of(name, shape.shape, config, devices) if devices > 1 else None
        size = math.prod(shape.shape) if cut is None else math.prod(shape.shape) // shape.shape[cut.axis] * cut.size
        total += size * (itemsize if len(shape.shape) > 1 else 4)
    return total


def _read(adapter: Adapter) -> tuple[dict[str, Pair], str]:
    """Return float32 A and scale · B by checkpoint tensor, and a digest of these numbers."""
    digest, values = hashlib.sha256(), {}
    with TensorReader({tensor.key: tensor for update in adapter.updates.values() for tensor in update[:2]}) as reader:
        for key, (a, b, scale, *_) in sorted(adapter.updates.items()):
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
