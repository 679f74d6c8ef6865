"""adapter_config.json of PEFT 0.21 and earlier: the rank and scale of each module; what changes results is refused.

A module's update is scale · B · A, with scale = lora_alpha / r, or lora_alpha / √r where `use_rslora` (Kalajdzievski
2023, arXiv 2312.03732); `rank_pattern` and `alpha_pattern` give single modules others.
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
_MAX_PATTERNS = 10_000
_NAME = re.compile(r"\^?[\w.]{1,500}")
# Fields that say how it was trained, or which modules have tensors: those are in the file.
_IDLE = {
    "auto_mapping", "base_model_name_or_path", "base_model_class", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "parent_library", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
_REASONS = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole matrices in an adapter are not supported",
    "trainable_token_indices": "whole rows of embeddings in an adapter are not supported",
    "target_parameters": "adapters of parameters, such as stacked experts, are not supported",
    "lora_bias": "biases in an adapter are not supported",
    "fan_in_fan_out": "must be false: linear layers are [out, in]",
    "layer_replication": "layers run twice are not supported",
    "alora_invocation_tokens": "adapters that begin within a text (aLoRA) are not supported",
}
# Others replace the base's own weights when they are loaded, so that the file alone means something else.
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LoraConfig:
    """Ranks and scales of an adapter's modules."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Of a module, by its name in the model that was trained."""
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What its B·A is multiplied by."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json. Raises CheckpointError that names the field, the value and what would do."""
    fields = read_object(folder / CONFIG)
    if fields.get("peft_type") != "LORA":
        raise _refused("peft_type", fields.get("peft_type"), "must be LORA")
    if fields.get("bias", "none") != "none":
        raise _refused("bias", fields["bias"], "must be none: biases in an adapter are not supported")
    start = fields.get("init_lora_weights")
    if not any(start is plain for plain in _PLAIN_STARTS[:3]) and start not in _PLAIN_STARTS[3:]:
        limit = "changes the base's weights: convert the adapter to plain LoRA when it is saved (PEFT can)"
        raise _refused("init_lora_weights", start, limit)
    for name, value in fields.items():
        if name not in _IDLE | _READ and value not in (None, False, 0, "", [], {}):
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
    )


def _matching[T](pattern: Mapping[str, T], module: str, default: T) -> T:
    """The first entry that is the module's name, or the end of it."""
    if not pattern:
        return default
    parts = module.split(".")
    ends = {".".join(parts[n:]) for n in range(len(parts))}
    return next((v for key, v in pattern.items() if key in ends or key.removeprefix("^") == module), default)


def _pattern(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
        raise _refused(name, found, f"must be an object of at most {_MAX_PATTERNS} modules")
    for key in found:
        # PEFT takes regular expressions; one that nobody vouches for may run for ever.
        if not _NAME.fullmatch(key):
            raise _refused(name, key, "must be the name of a module, or the end of one")
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
