"""The API keys of `--api-key-file`, which no command line, environment or list of processes shows."""

import dataclasses
from pathlib import Path

from jswa.errors import ConfigError

from ..options import ServeConfig

_MOST_BYTES = 2**20


def with_keys(config: ServeConfig) -> ServeConfig:
    """Return the options with the keys of their file behind those of `--api-key`. Raises ConfigError."""
    if config.api_key_file is None:
        return config
    keys = (*config.api_key, *_keys(config.api_key_file))
    return dataclasses.replace(config, api_key=keys, api_key_file=None)


def _keys(path: Path) -> list[str]:
    """Return the keys of a file: one in each line; empty lines and those that begin with # do not count."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        lines = [line.strip() for line in content.decode().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError("api_key_file", str(path), "is no text file that can be read") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if len(content) > _MOST_BYTES:
        raise ConfigError("api_key_file", str(path), f"must have at most {_MOST_BYTES} bytes")
    if not keys:
        raise ConfigError("api_key_file", str(path), "has no key; one in each line is expected")
    return keys
