"""LoRA adapters of experts in the forms of PEFT, and checkpoints with such an adapter merged into their weights.

Merging knows nothing of how jswa reads adapters: it adds PEFT's delta to the checkpoint's own tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.weights import Tensor
from tests.support.checkpoints.adapters import CONFIG, save

_DOWN = re.compile(
    r"(model\.(?:language_model\.)?layers\.\d+)\.(.+?)\.(?:0\.)?(down_proj|w2|output_linear|proj)(\.weight)?"
)
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_BOTH, _ONE = ("gate_up_proj", "input_linear.weight", "fc"), ("down_proj", "output_linear.weight", "proj")
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer of a checkpoint: where they are, and their sizes."""

    layer: str
    folder: str
    count: int
    width: int
    hidden: int
    transposed: bool  # [E, in, out]


def experts_of(tensors: Mapping[str, Tensor]) -> list[Experts]:
    """Return the experts of all layers of a checkpoint."""
    found = []
    for key in sorted(tensors):
        match = _DOWN.fullmatch(key)
        if match is None or not re.search(r"^(?!.*share)(experts|.*(experts|moe))$", match[2]):
            continue
        shape = tensors[key].shape
        each = f"{match[1]}.{match[2]}."
        numbers = {int(k.removeprefix(each).split(".")[0]) for k in tensors if re.match(re.escape(each) + r"\d+\.", k)}
        model = tensors[f"{match[1]}.input_layernorm.weight" if f"{match[1]}.input_layernorm.weight" in tensors
                        else f"{match[1]}.attention_norm.weight"].shape[0]  # fmt: skip
        transposed = len(shape) == 3 and shape[1] != model
        sides = shape[-2:] if not transposed else shape[:0:-1]
        found.append(Experts(match[1], match[2], len(numbers) or shape[0], sides[0], sides[1], transposed))
    return found


@dataclass(frozen=True)
class ExpertLora:
    """An adapter: each layer's A [E, r, in] and B [E, out, r] of gate_up and down; outputs as the module has them."""

    layers: list[tuple[Experts, Pair | None, Pair | None]]
    scale: float
    config: Mapping[str, Any]

    def fused(self, folder: str, *, swapped: bool = False) -> dict[str, Tensor]:
        """Return PEFT's tensors of wrapped parameters of a module below the layers."""
        found = {}
        for experts, gate_up, down in self.layers:
            inside = ".base_layer" if gate_up is not None and down is not None else ""
            for where, pair in ((inside, gate_up), ("", down)):
                if pair is not None:
                    for half, tensor in zip("AB", fused_pair(*pair, swapped=swapped), strict=True):
                        found[f"base_model.model.{experts.layer}.{folder}{where}.lora_{half}.weight"] = tensor
        return found

    def split(self, folder: str, leaves: tuple[str, str, str]) -> dict[str, Tensor]:
        """Return the tensors of linear layers for each expert, by the names of its gate, up and down."""
        found = {}
        for experts, gate_up, down in self.layers:
            assert gate_up is not None
            assert down is not None
            halves = [gate_up[1][:, : experts.hidden], gate_up[1][:, experts.hidden :], down[1]]
            for leaf, a, b in zip(leaves, (gate_up[0], gate_up[0], down[0]), halves, strict=True):
                for expert in range(experts.count):
                    key = f"base_model.model.{experts.layer}.{folder}.{expert}.{leaf}"
                    found[f"{key}.lora_A.weight"] = np.ascontiguousarray(a[expert])
                    found[f"{key}.lora_B.weight"] = np.ascontiguousarray(b[expert])
        return found

    def own_modules(self, names: tuple[str, str]) -> dict[str, Tensor]:
        """Return PEFT's tensors of wrapped weights of two modules, which are the checkpoint's."""
        found = {}
        for experts, *pairs in self.layers:
            for name, pair in zip(names, pairs, strict=True):
                assert pair is not None
                for half, tensor in zip("AB", fused_pair(*pair, swapped=False), strict=True):
                    found[f"base_model.model.{experts.layer}.{experts.folder}.{name}.lora_{half}.weight"] = tensor
        return found

    def projections(self, folder: str) -> dict[str, Tensor]:
        """Return Unsloth's tensors of a linear layer for each expert and parameter."""
        found = {}
        for experts, gate_up, down in self.layers:
            for name, pair in (("gate_up_projs", gate_up), ("down_projs", down)):
                assert pair is not None
                for expert in range(experts.count):
                    for half, tensor in zip("AB", pair, strict=True):
                        key = f"base_model.model.{experts.layer}.{folder}.{name}.{expert}.lora_{half}.weight"
                        found[key] = np.ascontiguousarray(tensor[expert])
        return found

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors with the adapter merged into them."""
        found = dict(tensors)
        for experts, *pairs in self.layers:
            for pair, names, singles in zip(pairs, (_BOTH, _ONE), ((*_GATES, *_UPS), _DOWNS), strict=True):
                if pair is None:
                    continue
                delta = self.scale * np.einsum("eor,eri->eoi", pair[1].astype(np.float64), pair[0])
                stacked = [f"{experts.layer}.{experts.folder}.{name}" for name in names]
                stacked = [key for key in stacked if key in found and found[key].ndim == 3]
                if stacked:
                    own = delta.transpose(0, 2, 1) if experts.transposed else delta
                    found[stacked[0]] = (found[stacked[0]] + own).astype(np.float32)
                else:
                    _merge_halves(found, experts, delta, singles)
        return found


def _merge_halves(found: dict[str, Tensor], experts: Experts, delta: Tensor, singles: tuple[str, ...]) -> None:
    """Add a delta [E, out, in] to tensors that have the gates, the ups or the downs, of one expert or of all."""
    for name in singles:
        half = (
            slice(experts.hidden, None) if name in _UPS else slice(0, experts.hidden) if name in _GATES else slice(None)
        )
        whole = f"{experts.layer}.{experts.folder}.{name}.weight"
        if whole in found:
            found[whole] = (found[whole] + delta[:, half]).astype(np.float32)
        for expert in range(experts.count):
            key = f"{experts.layer}.{experts.folder}.{expert}.{name}.weight"
            if key in found:
                found[key] = (found[key] + delta[expert, half]).astype(np.float32)


def fused_pair(a: Tensor, b: Tensor, *, swapped: bool) -> Pair:
    """Return A [E r, in] and B [out, r E] as PEFT's ParamWrapper has them; `swapped`: A has the outputs.

    Rank k of expert e is row e r + k of A and column k E + e of B.
    """
    if swapped:
        a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
    return np.ascontiguousarray(a.reshape(-1, a.shape[2])), np.ascontiguousarray(
        b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    )


def random_expert_lora(
    tensors: Mapping[str, Tensor], rank: int, seed: int, *, alpha: float = 6.0, only: str = "", **config: Any
) -> ExpertLora:
    """Return an adapter of all experts whose update is about as large as their weights; `only`: gate_up or down."""
    rng, layers = np.random.default_rng(seed), []
    fields = {**CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": [], **config}
    scale = alpha / (np.sqrt(rank) if fields["use_rslora"] else rank)

    def pair(count: int, outputs: int, inputs: int) -> Pair:
        a = rng.standard_normal((count, rank, inputs)) / np.sqrt(inputs)
        b = rng.standard_normal((count, outputs, rank)) / np.sqrt(rank) / scale
        return a.astype(np.float32), b.astype(np.float32)

    for experts in experts_of(tensors):
        both = (
            pair(experts.count, 2 * experts.hidden, experts.width),
            pair(experts.count, experts.width, experts.hidden),
        )
        layers.append((experts, None if only == "down" else both[0], None if only == "gate_up" else both[1]))
    return ExpertLora(layers, float(scale), fields)


def write(folder: Path, tensors: Mapping[str, Tensor], lora: ExpertLora, **config: Any) -> Path:
    """Write the folder as PEFT's `save_pretrained` does, and return it."""
    folder.mkdir(parents=True)
    save(folder, tensors, {**lora.config, **config})
    return folder


def write_fused(folder: Path, lora: ExpertLora, module: str = "mlp.experts") -> Path:
    """Write the adapter of both parameters of a module, and return the folder."""
    targets = [f"{module}.gate_up_proj", f"{module}.down_proj"]
    return write(folder, lora.fused(module), lora, target_parameters=targets)
