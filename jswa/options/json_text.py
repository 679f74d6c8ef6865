"""Options that are JSON objects: mappings in Python, text on the command line and in `EngineConfig`."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from jswa.errors import ConfigError

JSON_OPTIONS = ("speculative_config", "kv_events_config")


def option_object(name: str, text: str, known: Collection[str]) -> dict[str, Any]:
    """Return an option that is given as a JSON object, all of whose fields are known. Raises ConfigError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, text[:80], f"must be a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(name, text[:80], "must be a JSON object")
    for field in given:
        if field not in known:
            raise ConfigError(f"{name}.{field}", given[field], f"is unknown; known are {', '.join(known)}")
    return given


def option_text(name: str, given: Mapping[str, Any] | str | None) -> str | None:
    """Return an option as JSON, in which it is kept. Raises ConfigError if it is neither a mapping nor a text."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(name, given, "must be a mapping, or a JSON object")
    try:
        return json.dumps(dict(given), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(name, given, f"must hold what JSON can: {error}") from error
