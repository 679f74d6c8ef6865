"""LoRA adapter folders as PEFT saves them, and checkpoints with an adapter merged into their weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.parity.weights import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# Fields that PEFT 0.21 writes; tests replace some.
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "somewhere", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip


@dataclass(frozen=True)
class Lora:
    """One adapter: A [r, in] and B [out, r] by module, and the factor of B · A."""

    updates: Mapping[str, tuple[Tensor, Tensor]]
    scale: float
    config: Mapping[str, Any]

    def write(self, folder: Path) -> Path:
        """Write the folder as PEFT's `save_pretrained` does, and return it."""
        folder.mkdir(parents=True)
        save(folder, self.tensors(), self.config)
        return folder

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by PEFT's keys."""
        return {
            f"base_model.model.{module}.lora_{half}.weight": tensor
            for module, pair in self.updates.items()
            for half, tensor in zip("AB", pair, strict=True)
        }

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors with the adapter merged into them."""
        found = dict(tensors)
        for module, (a, b) in self.updates.items():
            wide = found[f"{module}.weight"].astype(np.float64) + self.scale * b.astype(np.float64) @ a
            found[f"{module}.weight"] = wide.astype(np.float32)
        return found


def random_lora(
    tensors: Mapping[str, Tensor], modules: Sequence[str], rank: int, seed: int, *, alpha: float = 6.0, **config: Any
) -> Lora:
    """Return an adapter of every linear layer in `modules`; its update is about as large as the layer's weights."""
    rng, updates = np.random.default_rng(seed), {}
    for key in sorted(tensors):
        module = key.removesuffix(".weight")
        if module.split(".")[-1] not in modules or ".experts." in key or "vision" in key:
            continue
        rows, columns = tensors[key].shape
        a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
        b = rng.standard_normal((rows, rank)) / np.sqrt(rank)
        updates[module] = a.astype(np.float32), b.astype(np.float32) * np.float32(rank / alpha)
    fields = {**CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": sorted(modules), **config}
    scale = alpha / np.sqrt(rank) if fields["use_rslora"] else alpha / rank
    return Lora(updates, float(scale), fields)


def save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write both files without checking their content."""
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
