"""Typed values of a GGUF file's metadata. Each error names the key, the value and what is accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

from jswa.errors import CheckpointError
from jswa.storage.json_object import shown

Metadata = Mapping[str, object]


def refused(key: str, value: object, limit: str) -> CheckpointError:
    """Return the error about a value of the metadata. `limit`: the accepted values, in words."""
    return CheckpointError(f"{key} = {shown(value)}: {limit}")


def text_of(metadata: Metadata, key: str) -> str | None:
    """Return a text; None if the key is absent. Raises CheckpointError if it is no text."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise refused(key, value, "must be a text")
    _require_unicode(key, value, value)
    return value


def flag_of(metadata: Metadata, key: str) -> bool | None:
    """Return a truth value; None if the key is absent. Raises CheckpointError if it is another value."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, bool):
        raise refused(key, value, "must be true or false")
    return value


def id_of(metadata: Metadata, key: str, tokens: int) -> int | None:
    """Return a token id below `tokens`; None if the key is absent. Raises CheckpointError."""
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < tokens:
        raise refused(key, value, f"must be the id of a token, from 0 to {tokens - 1}")
    return value


def texts_of(metadata: Metadata, key: str, most: int, most_characters: int) -> Sequence[str]:
    """Return a list of at most `most` texts, which have at most `most_characters` together. Raises CheckpointError."""
    values = _list_of(metadata, key, most)
    for at, value in enumerate(values):
        if not isinstance(value, str):
            raise refused(f"{key}[{at}]", value, "must be a text")
    if (size := sum(map(len, values))) > most_characters:
        raise refused(key, values, f"has {size} characters: must have at most {most_characters}")
    _require_unicode(key, values, "".join(values))
    return values


def numbers_of(metadata: Metadata, key: str, count: int) -> Sequence[float] | None:
    """Return a list of `count` numbers; None if the key is absent. Raises CheckpointError if one is NaN."""
    if metadata.get(key) is None:
        return None
    values = _list_of(metadata, key, count)
    if len(values) != count:
        raise refused(key, values, f"has {len(values)} values: must have one for each of the {count} tokens")
    for at, value in enumerate(values):
        if type(value) not in (int, float) or value != value:  # only NaN differs from itself
            raise refused(f"{key}[{at}]", value, "must be a number")
    return values


def _list_of(metadata: Metadata, key: str, most: int) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise refused(key, values, "must be a list")
    if len(values) > most:
        raise refused(key, values, f"has {len(values)} values: must have at most {most}")
    return values


def _require_unicode(key: str, value: object, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refused(key, value, "must be valid Unicode") from error
