"""Parsing of adapter_config.json (PEFT 0.21 and earlier): rank and scale of each module of a LoRA adapter.

A module's update is scale · B · A, with scale = lora_alpha / r, or lora_alpha / √r if `use_rslora` (Kalajdzievski 2023,
arXiv 2312.03732). `rank_pattern` and `alpha_pattern` override r and lora_alpha for single modules. Settings that would
change the result and are not implemented are refused. `target_parameters` are stacks of experts, which modules hold as
parameters of their own (`jswa.model.hf.peft_experts`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jswa.errors import CheckpointError
from jswa.storage.json_object import label, read_object, shown

CONFIG = "adapter_config.json"
MAX_RANK = 256
_MAX_BYTES = 2**23  # of the file: a list of all modules of a large model has some hundred thousand
_MAX_PATTERNS = 10_000
_NAME = re.compile(r"\^?[\w.]{1,500}")
# Fields about training, and about which modules are adapted; the tensors in the file show the latter.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "base_model_class", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "parent_library", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights",
    "target_parameters",
}  # fmt: skip
_ANY_MODULE = r".*\."  # PEFT writes it before the name of a parameter that it has made of several modules
_REASONS = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole matrices in an adapter are not supported",
    "trainable_token_indices": "whole rows of embeddings in an adapter are not supported",
    "lora_bias": "biases in an adapter are not supported",
    "fan_in_fan_out": "must be false, because linear layers are [out, in]",
    "layer_replication": "repeated layers are not supported",
    "alora_invocation_tokens": "adapters that apply to a part of the prompt (aLoRA) are not supported",
}
# Other initializations change the base model's weights on loading, so the adapter does not fit the original ones.
_PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LoraConfig:
    """Ranks and scales of an adapter's modules; `parameters` has the names of adapted parameters, or their ends."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()

    def targets(self, parameter: str) -> bool:
        """Return whether a parameter is adapted, by its name in the trained model."""
        return any(parameter == name or parameter.endswith(f".{name}") for name in self.parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the trained model."""
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's B · A."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json. Raises CheckpointError that names the field, the value and the limit."""
    fields = read_object(folder / CONFIG, most=_MAX_BYTES)
    if fields.get("peft_type") != "LORA":
        raise _refused("peft_type", fields.get("peft_type"), "must be LORA")
    if fields.get("bias", "none") != "none":
        raise _refused("bias", fields["bias"], "must be none, because biases in an adapter are not supported")
    init = fields.get("init_lora_weights")
    if not any(init is plain for plain in _PLAIN_INITS[:3]) and init not in _PLAIN_INITS[3:]:
        limit = "changes the weights of the base model: save the adapter as plain LoRA with PEFT"
        raise _refused("init_lora_weights", init, limit)
    for name, value in fields.items():
        if name not in _IGNORED | _READ and value not in (None, False, 0, "", [], {}):
            raise _refused(name, value, _REASONS.get(name, "is not supported"))
    rslora = fields.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise _refused("use_rslora", rslora, "must be true or false")
    return LoraConfig(
        _rank("r", fields.get("r", 8)),
        _alpha("lora_alpha", fields.get("lora_alpha", 8)),
        rslora,
        {module: _rank("rank_pattern", value) for module, value in _pattern(fields, "rank_pattern").items()},
        {module: _alpha("alpha_pattern", value) for module, value in _pattern(fields, "alpha_pattern").items()},
        _parameters(fields.get("target_parameters") or []),
    )


def _matching[T](pattern: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first entry that equals the module's name or its last components."""
    if not pattern:
        return default
    parts = module.split(".")
    ends = {".".join(parts[n:]) for n in range(len(parts))}
    return next((v for key, v in pattern.items() if key in ends or key.removeprefix("^") == module), default)


def _parameters(found: object) -> tuple[str, ...]:
    name, rule = "target_parameters", f"must be a list of at most {_MAX_PATTERNS} names of parameters"
    if not isinstance(found, list) or len(found) > _MAX_PATTERNS:
        raise _refused(name, found, rule)
    for one in found:
        if not isinstance(one, str) or not _NAME.fullmatch(one):
            raise _refused(name, one, rule)
        if one.endswith("bias"):
            raise _refused(name, one, "adapters of biases are not supported")
    return tuple(found)


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise _refused(name, found, f"must be an object of at most {_MAX_PATTERNS} modules")
    found = {key.removeprefix(_ANY_MODULE): value for key, value in found.items()}
    for key in found:
        # PEFT allows regular expressions; an untrusted one could run for a very long time.
        if not _NAME.fullmatch(key):
            raise _refused(name, key, "must be the name of a module, or its last components")
    return found


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise _refused(name, value, f"must be a whole number in [1, {MAX_RANK}]")
    return value


def _alpha(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e6:
        raise _refused(name, value, "must be a number in [-1e6, 1e6]")
    return float(value)


def _refused(name: str, value: object, limit: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG}: {label(name)} = {shown(value)}: {limit}")
