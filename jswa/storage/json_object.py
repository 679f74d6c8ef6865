"""JSON objects from files that nobody vouches for: bounded in size, every key once, every refusal a CheckpointError."""

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from jswa.errors import CheckpointError

MAX_BYTES = 100_000_000  # safetensors' own limit for a header; no config or index comes near
# A value of two bytes ("[]") takes 80 once parsed, so bytes alone do not bound memory. A tensor of a header is about 10
# values, one of an index 1: room for 200,000 tensors a file, ten times what the largest mixtures of experts have.
MAX_VALUES = 2_000_000

_brief = reprlib.Repr(maxlevel=3, maxlist=8, maxdict=4, maxstring=80, maxlong=80, maxother=80)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file. Raises CheckpointError that names the file, and the key of a second value."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe waits for ever, reading a device never ends
            raise CheckpointError(f"{path} is not a file")
        if info.st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has {info.st_size} bytes: must have at most {MAX_BYTES}")
        with path.open("rb") as file:
            data = file.read(info.st_size)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object of at most MAX_VALUES values; `where` names it. Raises CheckpointError."""
    # All values but the first of each list and object follow a comma.
    values = 1 + data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_VALUES:
        raise CheckpointError(f"{where} has up to {values} values: must have at most {MAX_VALUES}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: key {label(twice)} occurs twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except MemoryError as error:  # one character beyond 16 bits makes a text take 4 bytes per byte
        raise CheckpointError(f"{where} has {len(data)} bytes, which do not fit in memory once parsed") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value


def shown(value: object) -> str:
    """A value as errors show it: short, whatever its length and depth."""
    return _brief.repr(value)


def label(name: str) -> str:
    """A key or a file name as errors show it: itself, unless it is empty, long or not printable."""
    return name if name.isprintable() and 0 < len(name) <= 200 else shown(name)
