"""Which numbers of a stack of experts a LoRA module changes, by the module's name in the trained model.

An adapter has experts in one of these forms:

    fused       PEFT's ParamWrapper on a parameter [E, ·, ·] of a module (`target_parameters`): A [E r, in], whose row
                e r + k is rank k of expert e, and B [out, r E], whose column k E + e is that rank. Its keys name the
                module and not the parameter. If two parameters of a module are adapted, the wrapper of the first is
                inside the wrapper of the second: M.base_layer.lora_A belongs to gate_up_proj, M.lora_A to down_proj.
    split       a linear layer for each expert and matrix, A [r, in] and B [out, r], as checkpoints name them:
                experts.3.gate_proj, or w1, w3 and w2.
    projections Unsloth's linear layers of gpt-oss: experts.gate_up_projs.3 and experts.down_projs.3.

PEFT before 0.19.1 swaps the sides of parameters [E, out, in]: A has outputs and B has inputs. PEFT since then does so
with parameters [E, in, out] of modules that do not say how they lie: those of transformers 4, and Llama 4's. The shapes
of A and B tell, so `Place` knows both sides.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jswa.architecture import ModelConfig, MoeConfig
from jswa.model.hf.families import FAMILIES
from jswa.model.hf.tensor_names import Names

_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.(.+)")
_OF_ONE = re.compile(r"(.+)\.(?:([0-9]{1,6})\.(\w+)|(gate_up|down)_projs\.([0-9]{1,6}))")
_HELD = {"interleaved", "halves"}  # stacks of which no trainer makes a gate and an up of their own
_PAIR = ("gate_up_proj", "down_proj")


class Place(NamedTuple):
    """The part of a stack [E, K, C] that a module changes.

    Attributes:
        stack: name of the parameter, such as layers.0.mlp.gate_up.
        experts: E.
        expert: the only expert that it changes; None: all of them, so the module is fused.
        inputs: K.
        begin: the first of the columns that it changes.
        outputs: how many columns those are.
        interleaved: gates and ups alternate in the module's outputs; in the stack all gates come first.
    """

    stack: str
    experts: int
    expert: int | None
    inputs: int
    begin: int
    outputs: int
    interleaved: bool


class Stack(NamedTuple):
    """A stack of a model: its name and sizes, and how many modules of one expert may change it side by side."""

    name: str
    experts: int
    inputs: int
    outputs: int
    parts: int


def stacks(config: ModelConfig) -> Iterator[Stack]:
    """Yield all stacks of experts of a model."""
    parts = 1 if FAMILIES[config.family].names.stored in _HELD else 2
    for index in range(len(config.layers)):
        found = _mixture(config, index)
        if found is not None:
            ours, moe = found
            where = f"layers.{index}.{ours}"
            yield Stack(f"{where}.gate_up", moe.num_experts, config.d_model, 2 * moe.hidden, parts)
            yield Stack(f"{where}.down", moe.num_experts, moe.hidden, config.d_model, 1)


def is_container(config: ModelConfig, module: str) -> bool:
    """Return whether a module, by its canonical name, holds the parameters of all experts of a layer."""
    found = _layer(config, module)
    return found is not None and found[2] in _containers(FAMILIES[config.family].names)


def parameters_of(config: ModelConfig) -> tuple[str, str]:
    """Return the names of a container's two parameters: of gates and ups, and of downs; the former is the first."""
    names = FAMILIES[config.family].names
    return names.expert_rows if names.stored == "rows" and not _has_modules(names) else _PAIR


def place_of(config: ModelConfig, module: str) -> Place | None:
    """Return what a module changes; None if it is none of experts.

    `module` is canonical (`tensor_map.canonical_name`); that of a container's parameter ends with the parameter.
    """
    found = _layer(config, module)
    if found is None:
        return None
    where, moe, rest = found
    names, width = FAMILIES[config.family].names, moe.hidden
    alternate = names.stored == "interleaved"
    gate_up = Place(f"{where}.gate_up", moe.num_experts, None, config.d_model, 0, 2 * width, interleaved=alternate)
    down = Place(f"{where}.down", moe.num_experts, None, width, 0, config.d_model, interleaved=False)
    gate, up = (gate_up._replace(begin=at, outputs=width, interleaved=False) for at in (0, width))
    halves = {} if names.stored in _HELD else {"gate_proj": gate, "up_proj": up}
    if halves:
        halves |= {names.expert_gate: gate, names.expert_up: up}
    container, _, last = rest.rpartition(".")
    single = halves | {"down_proj": down, names.expert_down: down}
    if container in _containers(names):
        fused = dict(zip(parameters_of(config), (gate_up, down), strict=True))
        if names.stored == "stacked":
            fused |= single
        if _has_modules(names):
            fused |= dict(zip((name.rpartition(".")[0] for name in names.expert_rows), (gate_up, down), strict=True))
        return fused.get(last)
    one = _OF_ONE.fullmatch(rest)
    if one is None or one[1] not in _containers(names) or int(one[2] or one[5]) >= moe.num_experts:
        return None
    if one[4]:
        return (gate_up if one[4] == "gate_up" else down)._replace(expert=int(one[5]))
    return single[one[3]]._replace(expert=int(one[2])) if one[3] in single else None


def _has_modules(names: Names) -> bool:
    """Return whether each of a family's two stacks is the weight of a module of its own."""
    return names.stored == "rows" and "." in names.expert_rows[0]


def _containers(names: Names) -> tuple[str, ...]:
    """Return the names of the module of all experts below a layer: the checkpoint's, and those of transformers 5."""
    return names.experts, "mlp.experts", f"{names.experts}.experts"


def _layer(config: ModelConfig, module: str) -> tuple[str, MoeConfig, str] | None:
    """Return the place of a module's mixture in the model, its config, and the module's name below the layer."""
    found = _LAYER.fullmatch(module)
    if found is None or int(found[1]) >= len(config.layers):
        return None
    mixture = _mixture(config, int(found[1]))
    return None if mixture is None else (f"layers.{int(found[1])}.{mixture[0]}", mixture[1], found[2])


def _mixture(config: ModelConfig, index: int) -> tuple[str, MoeConfig] | None:
    layer = config.layers[index]
    if layer.side is not None:
        return "side.moe", layer.side.moe
    return ("mlp", layer.mlp) if isinstance(layer.mlp, MoeConfig) else None


def factors(
    place: Place, a: Float[np.ndarray, "..."], b: Float[np.ndarray, "..."], *, swapped: bool
) -> tuple[Float[np.ndarray, "e K r"], Float[np.ndarray, "e r outputs"]]:
    """Return A and B of each expert that a module changes, as products read them: x · A · B.

    Args:
        a, b: the tensors of the adapter.
        swapped: A has the outputs, and B the inputs.
    """
    count = place.experts if place.expert is None else 1
    each = a.reshape(count, -1, a.shape[1]), b.reshape(len(b), -1, count).transpose(2, 1, 0)  # both [e, r, ...]
    inner, outer = reversed(each) if swapped else each
    if place.interleaved:
        outer = np.concatenate([outer[..., ::2], outer[..., 1::2]], axis=-1)
    return inner.transpose(0, 2, 1), outer
