"""Arguments of earlier calls, as chat templates take them."""

import json
from collections.abc import Mapping
from typing import Any

RAW = "_raw"  # the key under which arguments that are no object reach a template
_MOST_NESTED = 100  # levels of arguments: templates write them by macros that call themselves


def call_arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of a call as templates take them: an object, whatever the model or the client has written.

    None, an empty text and "null" are no arguments. A text that is no JSON object (broken JSON, a list, a number), or
    whose value cannot be written as UTF-8, is kept as it came, under the key `_raw`; so is the JSON of a value that is
    no object. Of a key that comes twice the last value counts, as in all readers of JSON.
    """
    if isinstance(given, Mapping) and _flat(given, _MOST_NESTED):
        return dict(given)
    text = given if isinstance(given, str) else as_json(given)
    if given is None or not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # halves of surrogate pairs, and numbers that overflow, too
        return {RAW: text}
    if value is None:
        return {}
    return value if isinstance(value, dict) and _flat(value, _MOST_NESTED) else {RAW: text}


def text_arguments(arguments: Any) -> str:
    """Return the text of a call's arguments: the reverse of `call_arguments`. A text stays as it is."""
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, Mapping) and arguments.keys() == {RAW} and isinstance(arguments[RAW], str):
        raw: str = arguments[RAW]
        if call_arguments(raw) == arguments:
            return raw
    return as_json(arguments)


def as_json(value: Any) -> str:
    """Return a value as JSON, in which all characters are as they are."""
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _flat(value: Any, levels: int) -> bool:
    """Return whether a value has at most so many levels of objects and lists."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return not inner or (levels > 0 and all(_flat(one, levels - 1) for one in inner))
