"""The options about LoRA adapters: folders by name, and the room that is reserved. No jax here."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jswa.errors import ConfigError

_MAX_ADAPTERS = 64  # every step multiplies by the low-rank matrices of all adapters
_MAX_ADAPTER_NAME = 128  # characters
_MAX_LORA_RANK = 256
_LORA_RANK = 16  # of reserved room, as in vLLM


class LoraRoom(NamedTuple):
    """Room that is reserved at start.

    Attributes:
        adapters: how many it holds.
        rank: the largest rank of their modules.
        experts: whether they may adapt experts.
    """

    adapters: int
    rank: int
    experts: bool = False


def adapter_folders(modules: Sequence[str]) -> dict[str, Path]:
    """Return folders of LoRA adapters by name, in order, from `name=folder` entries. Raises ConfigError."""
    if not isinstance(modules, tuple) or not all(isinstance(module, str) for module in modules):
        raise ConfigError("lora_modules", modules, "must be a mapping of names to folders, or name=folder for each")
    if len(modules) > _MAX_ADAPTERS:
        raise ConfigError("lora_modules", f"{len(modules)} adapters", f"must be at most {_MAX_ADAPTERS}")
    folders: dict[str, Path] = {}
    for module in modules:
        name, _, folder = module.partition("=")
        if not name or not folder:
            raise ConfigError("lora_modules", module, "must be name=folder")
        wrong = wrong_adapter_name(name)
        if wrong is not None:
            raise ConfigError("lora_modules", module, f"the name {wrong}")
        if name in folders:
            raise ConfigError("lora_modules", module, f"{name!r} is given twice")
        folders[name] = Path(folder)
    return folders


def wrong_adapter_name(name: str) -> str | None:
    """Return the rule that a name of an adapter breaks, if it breaks one."""
    if 0 < len(name) <= _MAX_ADAPTER_NAME and name.isprintable() and name == name.strip():
        return None
    return f"must be 1 to {_MAX_ADAPTER_NAME} printable characters"


def room_of(adapters: int | None, rank: int | None, modules: int, *, experts: bool) -> LoraRoom | None:
    """Return the room that the options ask for: `max_loras`, `max_lora_rank`, how many `lora_modules`, `lora_experts`.

    None: as much as `lora_modules` take, and no adapter is loaded later. Raises ConfigError if it is too much, or too
    little for `lora_modules`.
    """
    if adapters is not None and adapters > _MAX_ADAPTERS:
        raise ConfigError("max_loras", adapters, f"must be at most {_MAX_ADAPTERS}")
    if adapters is not None and adapters < modules:
        raise ConfigError("max_loras", adapters, f"must be at least {modules}, the number of lora_modules")
    if rank is not None and rank > _MAX_LORA_RANK:
        raise ConfigError("max_lora_rank", rank, f"must be at most {_MAX_LORA_RANK}")
    if rank is not None and adapters is None and not modules:
        raise ConfigError(
            "max_lora_rank", rank, "needs max_loras or lora_modules: there is no adapter to make room for"
        )
    if not isinstance(experts, bool):
        raise ConfigError("lora_experts", experts, "must be True or False")
    if adapters is None and rank is None:
        if experts:
            limit = "needs max_loras: without it, lora_modules get the memory that they take, experts too"
            raise ConfigError("lora_experts", experts, limit)
        return None
    return LoraRoom(adapters or modules, rank or _LORA_RANK, experts)
