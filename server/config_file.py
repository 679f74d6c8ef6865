"""The YAML file of `jswa serve --config`."""

import difflib
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from jswa.commands.options.other_engines import HARMLESS, SAME, hint, without_effect
from jswa.errors import ConfigError
from jswa.kernels import instead_of
from jswa.options.json_text import JSON_OPTIONS


def read_file(path: Path, options: Sequence[str], switches: Collection[str]) -> dict[str, Any]:
    """Return the options of a YAML file by name.

    A key may have hyphens or underscores, and `no-` before a switch, as on the command line. A mapping is written as
    the command line takes it.

    Args:
        options: names that are allowed.
        switches: those of them that are on or off.

    Raises ConfigError.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", str(path), "is no file that can be read") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError("config", path.name, f"cannot be read as YAML: {type(error).__name__}") from error
    if not isinstance(content or {}, dict):
        raise ConfigError("config", path.name, "must be a YAML mapping of options by name")
    found: dict[str, Any] = {}
    for key, value in (content or {}).items():
        field, name = f"{path.name}: {key}", str(key).replace("-", "_")
        positive = name.removeprefix("no_")
        if positive != name and positive in switches:
            if not isinstance(value, bool):
                raise ConfigError(field, value, "must be true or false")
            name, value = positive, not value
        flag = f"--{name.replace('_', '-')}"
        if flag in HARMLESS and value is True:
            print(f"WARNING: {path.name}: {without_effect(flag)}", file=sys.stderr)
            continue
        name = SAME.get(flag, flag).removeprefix("--").replace("-", "_")
        if name not in options:
            raise ConfigError(field, "...", f"is not an option{near_option(name, options)}")
        if name in found:
            raise ConfigError(field, "...", "is given twice")
        found[name] = _flat(field, name, value)
    return {name: value for name, value in found.items() if value is not None}


def _flat(field: str, name: str, value: object) -> object:
    """Return a mapping as the command line takes it, and other values as they are. Raises ConfigError."""
    if not isinstance(value, dict):
        return value
    if name in JSON_OPTIONS:
        return json.dumps(value)
    pairs = [f"{key}={one}" for key, one in value.items()]
    if name == "lora_modules":
        return pairs
    if name == "kernels":
        return ",".join(pairs)
    raise ConfigError(field, "...", "must be a value or a list, no mapping")


def near_option(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence that says what may be meant by an option's name; "" if nothing is near."""
    option = name.removeprefix("JSWA_").lower()
    if (newer := instead_of(option)) is not None:
        return f"; it is now {newer}"
    if (said := hint(f"--{option}")) is not None:
        return f"; {said.removesuffix('.')}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
