"""Checks of a LoRA adapter's headers against the model: what its tensors adapt, and whether they fit.

Dense layers are checkpoint tensors; experts are places in stacks (`jswa.model.hf.peft_experts`). An adapter that cannot
be served completely is refused. As in checkpoints, two kinds of tensors are ignored: those of a model's vision or audio
part, and those of k and v projections in layers that read another layer's KV.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jswa.architecture import ModelConfig
from jswa.errors import CheckpointError
from jswa.forms.base.names import LINEAR
from jswa.model.hf.peft import CONFIG, LoraConfig, read_lora_config
from jswa.model.hf.peft_experts import Place, is_container, parameters_of, place_of
from jswa.model.hf.source import Source
from jswa.model.hf.tensor_map import canonical_name, sources, unused_names
from jswa.model.weights.safetensors_files import FLOATS, Tensor
from jswa.model.weights.safetensors_header import read_header
from jswa.options.lora import LoraRoom
from jswa.storage.checkpoint_files import is_folder
from jswa.storage.json_object import label

_FILE, _PREFIX = "adapter_model.safetensors", "base_model.model."
# Bytes: 80,000 tensors. An engine that runs has no memory to spare for the header of a large checkpoint.
_MAX_HEADER = 2**24
_A, _B, _WRAPPED = ".lora_A.weight", ".lora_B.weight", ".base_layer"
_ROUTER = re.compile(r"\.(gate|router)(\.\w+)?$")
_DENSE = ("matrix", "columns", "rank_slices")  # layouts of matrices other than stacks of experts
_REASONS = (
    (".lora_magnitude_vector", "DoRA is not supported"),
    (".lora_embedding_", "adapters of embeddings are not supported"),
    (".lora_", "must end in .lora_A.weight or .lora_B.weight, as save_pretrained writes it"),
)


class Update(NamedTuple):
    """The update scale · B · A of one linear layer [out, in], or of a part of a stack of experts.

    Attributes:
        a: [r, in]; of all experts [E r, in].
        b: [out, r]; of all experts [out, r E].
        place: the part of a stack; None: a checkpoint tensor.
        swapped: A has the outputs of a stack, and B its inputs.
    """

    a: Tensor
    b: Tensor
    scale: float
    place: Place | None = None
    swapped: bool = False


class _Module(NamedTuple):
    """A module that has adapters: its names in the trained model and in checkpoints, and its tensors by suffix.

    Attributes:
        wraps: wrappers between the module and these tensors (PEFT's `base_layer`).
    """

    name: str
    canonical: str
    wraps: int
    ends: dict[str, Tensor]

    @property
    def first(self) -> Tensor:
        """The tensor that errors name."""
        return next(iter(self.ends.values()))


class _Target(NamedTuple):
    """What a module adapts: a key that no other target has, its name in PEFT's patterns, and where it is."""

    key: str
    named: str
    sides: tuple[int, int]  # outputs, inputs
    place: Place | None = None


def dense_targets(config: ModelConfig) -> dict[str, Source]:
    """Return the matrices other than experts that LoRA may adapt: linear layers of attention and of feed-forwards."""
    return {name: source for name, source in sources(config).items() if LINEAR.search(name) and source.layout in _DENSE}


def checked(folder: Path, config: ModelConfig, most: LoraRoom) -> dict[str, Update]:
    """Return the updates of a folder by what they change: a checkpoint tensor, or a part of a stack of experts.

    Only headers are read. `most`: what an adapter may have. Raises CheckpointError.
    """
    if not is_folder(folder):
        raise CheckpointError("must be a folder")
    settings = read_lora_config(folder)
    if not os.path.lexists(folder / _FILE):
        pickled = os.path.lexists(folder / "adapter_model.bin")
        raise CheckpointError(
            f"lacks {_FILE}" + (": adapter_model.bin is not read, because a pickle can run code" * pickled)
        )
    dense = {part.key: part.shape for source in dense_targets(config).values() for part in source.parts}
    modules = _modules(folder / _FILE, config, dense)
    found: dict[str, Update] = {}
    for module in modules.values():
        target = _target(module, modules, dense, settings, config)
        if target.place is not None and not most.experts:
            limit = "max_loras reserves memory for other layers only: set lora_experts = true"
            raise CheckpointError(f"{module.first.where} adapts experts: {limit}")
        if target.key in found:
            raise _twice(module.first, found[target.key].a)
        found[target.key] = _update(module, target, settings, most.rank)
    if not found:
        raise CheckpointError(f"{_FILE} has no tensors for this model")
    return _oriented(found)


def _modules(path: Path, config: ModelConfig, dense: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, int], _Module]:
    """Return the modules of a file by their canonical names and wrappers, without those that are ignored."""
    modules: dict[tuple[str, int], _Module] = {}
    for key, stored in read_header(path, _MAX_HEADER).items():
        tensor = Tensor(path, key, stored)
        name, end = _split(tensor)
        wraps = 0
        while name.endswith(_WRAPPED):
            name, wraps = name.removesuffix(_WRAPPED), wraps + 1
        wanted = canonical_name(f"{name}.weight")
        if wanted is None or unused_names(config, [wanted]):
            continue
        module = modules.setdefault((wanted, wraps), _Module(name, wanted.removesuffix(".weight"), wraps, {}))
        if end in module.ends:
            raise _twice(tensor, module.ends[end])
        module.ends[end] = tensor
        _require_known(tensor, module, config, dense)
    return modules


def _require_known(tensor: Tensor, module: _Module, config: ModelConfig, dense: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if the model has no such module, or if LoRA may not adapt it."""
    wanted = f"{module.canonical}.weight"
    if (wanted in dense and not module.wraps) or is_container(config, module.canonical):
        return
    if place_of(config, module.canonical) is not None and not module.wraps:
        return
    if _ROUTER.search(module.canonical) and any(layer.moe for layer in config.layers):
        raise CheckpointError(f"{tensor.where} adapts a router, which is not supported")
    others = {part.key for source in sources(config).values() for part in source.parts} - dense.keys()
    known = wanted in others or wanted in dense or wanted == "lm_head.weight"
    raise CheckpointError(
        f"{tensor.where} must adapt a linear layer of attention or of a dense feed-forward, or experts"
        if known
        else f"{tensor.where} adapts {label(wanted)}, which a model of type {config.family} does not have"
    )


def _split(tensor: Tensor) -> tuple[str, str]:
    """Return the name of the module that a tensor adapts, as in the trained model, and the tensor's suffix."""
    for end in (_A, _B):
        if tensor.key.endswith(end):
            return tensor.key.removesuffix(end).removeprefix(_PREFIX), end
    reason = next(
        (why for what, why in _REASONS if what in tensor.key), "whole tensors in an adapter are not supported"
    )
    raise CheckpointError(f"{tensor.where}: {reason}")


def _target(
    module: _Module,
    modules: Mapping[tuple[str, int], _Module],
    dense: Mapping[str, tuple[int, ...]],
    settings: LoraConfig,
    config: ModelConfig,
) -> _Target:
    """Return what a module adapts, which `_require_known` has seen."""
    tensor = f"{module.canonical}.weight"
    if tensor in dense:
        rows, columns = dense[tensor]
        return _Target(tensor, module.name, (rows, columns))
    canonical, named = module.canonical, module.name
    if is_container(config, canonical):
        parameter = _parameter(module, modules, settings, config)
        canonical, named = f"{canonical}.{parameter}", f"{named}.{parameter}"
    place = place_of(config, canonical)
    assert place is not None
    if place.expert is None and named == module.name:
        named = f"{named}.weight"
    key = f"{place.stack}, expert {place.expert}, {place.outputs} columns from {place.begin}"
    return _Target(key, named, (place.outputs, place.inputs), place)


def _parameter(
    module: _Module, modules: Mapping[tuple[str, int], _Module], settings: LoraConfig, config: ModelConfig
) -> str:
    """Return which of the two parameters of a container a module wraps: the inner wrapper has the first."""
    names, where = parameters_of(config), module.first.where
    present = [wraps for wraps in (1, 0) if (f"{module.canonical}.weight", wraps) in modules]
    if module.wraps > 1:
        raise CheckpointError(f"{where} adapts a third parameter of {label(module.name)}: must be one of {names}")
    if len(present) == 2:
        return names[0] if module.wraps else names[1]
    targets = [name for name in names if settings.targets(f"{module.name}.{name}")]
    if len(targets) != 1 or module.wraps:
        limit = f"must name {names[0]} or {names[1]}, or both if the file has both"
        raise CheckpointError(f"{where}: {CONFIG}: target_parameters = {targets} of {label(module.name)}: {limit}")
    return targets[0]


def _update(module: _Module, target: _Target, settings: LoraConfig, most: int) -> Update:
    if len(module.ends) < 2:
        raise CheckpointError(f"{module.first.where} lacks its lora_{'B' if _A in module.ends else 'A'}")
    (rows, columns), place = target.sides, target.place
    rank, a, b = settings.rank_of(target.named), module.ends[_A], module.ends[_B]
    if rank > most:
        raise CheckpointError(f"{CONFIG}: r = {rank} of {label(target.named)}: must be at most max_lora_rank = {most}")
    wide = rank if place is None or place.expert is not None else rank * place.experts
    # The stack's sides as they are, or swapped.
    shapes = [((wide, columns), (rows, wide)), ((wide, rows), (columns, wide))][: 1 if wide == rank else 2]
    by = f"the model and {CONFIG} ask for"
    a.require_shape(*(one for one, _ in shapes), by=by)
    b.require_shape(*(other for one, other in shapes if one == a.shape), by=by)
    for tensor in (a, b):
        tensor.require_type(*FLOATS)
    return Update(a, b, settings.scale_of(target.named), place, a.shape != shapes[0][0])


def _oriented(found: dict[str, Update]) -> dict[str, Update]:
    """Return the updates after deciding whether stacks are swapped, which the shapes of square ones do not tell.

    One trainer swaps all of them or none. Raises CheckpointError if no shape tells, or if they contradict each other.
    """
    fused = {key: one for key, one in found.items() if one.place is not None and one.place.expert is None}
    told = {key: one for key, one in fused.items() if one.place and one.place.inputs != one.place.outputs}
    if fused and not told:
        square = next(iter(fused.values())).a
        limit = "its sides are equal, so nothing tells A's inputs from outputs: adapt the experts' other matrix too"
        raise CheckpointError(f"{square.where}: {limit}")
    for one in told.values():
        first = next(iter(told.values()))
        if one.swapped != first.swapped:
            raise CheckpointError(f"{one.a.where} has inputs and outputs the other way round than {label(first.a.key)}")
    kinds: dict[str, Update] = {}
    for one in found.values():
        if one.place is not None:
            other = kinds.setdefault(one.place.stack, one)
            if other.place is not None and _kind(other.place) != _kind(one.place):
                raise _twice(one.a, other.a)
    swapped = any(one.swapped for one in told.values())
    return found | {key: one._replace(swapped=swapped) for key, one in fused.items()}


def _kind(place: Place) -> tuple[bool, int]:
    """Return what all parts of a stack that an adapter changes must have in common."""
    return place.expert is None, place.outputs


def _twice(tensor: Tensor, other: Tensor) -> CheckpointError:
    module = canonical_name(f"{_split(tensor)[0]}.weight")
    return CheckpointError(f"{tensor.where} adapts {label(module or '')}, which {label(other.key)} adapts too")
