"""LoRA adapters by name: as options give them, and as the prefix cache keeps their texts apart. No jax."""

from collections.abc import Sequence
from pathlib import Path

from jswa.errors import ConfigError

MAX_ADAPTERS = 64  # every step multiplies by the ranks of all
_MAX_NAME = 128  # characters


def adapter_folders(modules: Sequence[str]) -> dict[str, Path]:
    """Folders by adapter, in order, from `name=folder` each. Raises ConfigError."""
    if not isinstance(modules, tuple) or not all(isinstance(module, str) for module in modules):
        raise ConfigError("lora_modules", modules, "must be a mapping of names to folders, or name=folder for each")
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError("lora_modules", f"{len(modules)} adapters", f"must be at most {MAX_ADAPTERS}")
    folders: dict[str, Path] = {}
    for module in modules:
        name, _, folder = module.partition("=")
        if not name or not folder:
            raise ConfigError("lora_modules", module, "must be name=folder")
        if len(name) > _MAX_NAME or not name.isprintable() or name != name.strip():
            raise ConfigError("lora_modules", module, f"the name must be 1 to {_MAX_NAME} printable characters")
        if name in folders:
            raise ConfigError("lora_modules", module, f"{name!r} is given twice")
        folders[name] = Path(folder)
    return folders


def root_key(salt: str, digest: str | None) -> str:
    """The root of the prefix cache's tree for a request's salt and the digest of its adapter's numbers.

    Different pairs have different roots, whatever the salt holds; without an adapter it is the salt, as a rule.
    """
    if digest is not None:
        return f"\0{digest}\0{salt}"
    return f"\0{salt}" if salt.startswith("\0") else salt
