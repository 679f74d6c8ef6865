"""Read JSON objects from untrusted files. Their size is bounded, and a repeated key is refused."""

import json
import reprlib
from pathlib import Path
from typing import Any

from jswa.errors import CheckpointError
from jswa.storage.checkpoint_files import is_there, read_file

MAX_BYTES = 100_000_000  # safetensors' own limit for a header; configs and indices are far smaller
# Two bytes of JSON ("[]") take 80 once parsed, so a limit on bytes alone does not bound memory. A tensor takes about 10
# values in a header and 1 in an index: 200,000 tensors fit, ten times what the largest mixtures of experts have.
MAX_VALUES = 2_000_000

_brief = reprlib.Repr(maxlevel=3, maxlist=8, maxdict=4, maxstring=80, maxlong=80, maxother=80)


def read_object(path: Path, folder: Path | None = None, most: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint's `folder`, by default the one that has the file.

    The file may have `most` bytes. Parsing takes nine bytes for each of them if the text has one wide character.

    Raises CheckpointError, which names the file and a repeated key.
    """
    return parse_object(read_file(path, most, folder), str(path))


def read_list(path: Path, most: int = MAX_BYTES) -> list[Any]:
    """Return the JSON list in a file of a checkpoint; otherwise as `read_object`. Raises CheckpointError."""
    value = _parsed(read_file(path, most), str(path))
    if not isinstance(value, list):
        raise CheckpointError(f"{path} must hold a JSON list, not {type(value).__name__}")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint, or {} if there is no such file. Raises CheckpointError."""
    return read_object(path) if is_there(path) else {}


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object of at most MAX_VALUES values. `where` names it in errors. Raises CheckpointError."""
    value = _parsed(data, where)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value


def _parsed(data: bytes, where: str) -> Any:
    require_few(data, MAX_VALUES, where)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: key {label(twice)} occurs twice")
        return found

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except MemoryError as error:  # a string with one character beyond 16 bits takes 4 bytes for each of its bytes
        raise CheckpointError(f"{where} has {len(data)} bytes, which do not fit in memory once parsed") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read as JSON: {error}") from error


def require_few(data: bytes, most: int, where: str) -> None:
    """Raise CheckpointError if JSON may have more than `most` values. `where` names it in the error."""
    # Upper bound: every value follows a comma or is the first of a list or object.
    values = 1 + data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > most:
        raise CheckpointError(f"{where} has up to {values} values: must have at most {most}")


def shown(value: object) -> str:
    """Return a value as error texts show it: short, whatever its length and depth."""
    return _brief.repr(value)


def label(name: str) -> str:
    """Return a key or a file name as error texts show it: unchanged unless it is empty, long or not printable."""
    return name if name.isprintable() and 0 < len(name) <= 200 else shown(name)
