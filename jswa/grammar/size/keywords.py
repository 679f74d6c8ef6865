"""The types of the keywords of a JSON Schema, without which nothing can be counted."""

from collections.abc import Mapping
from typing import Any

from jswa.grammar.bounds import SchemaError

_COUNTS = {
    "array": ("minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "object": ("minProperties", "maxProperties"),
}


def check_keywords(node: Mapping[str, Any], at: str) -> None:
    """Raise SchemaError for a keyword with a value of the wrong type, but not where the schema's type ignores it."""
    kinds = node.get("type", list(_COUNTS))
    listed = [kinds] if isinstance(kinds, str) else kinds
    if not _is_list_of(listed, str):
        raise SchemaError(f"{at}/type", "must be a string or a list of strings")
    for key in ("anyOf", "oneOf", "allOf"):
        if key in node and not _is_list_of(node[key], dict | bool):
            raise SchemaError(f"{at}/{key}", "must be a list of schemas")
    if not isinstance(node.get("enum", []), list):
        raise SchemaError(f"{at}/enum", "must be a list")
    for key in (key for kind, keys in _COUNTS.items() if kind in listed for key in keys):
        if not _is_count(node.get(key, 0)):
            raise SchemaError(f"{at}/{key}", "must be a whole number, and not negative")
    if "object" in listed:
        _check_object(node, at)


def _check_object(node: Mapping[str, Any], at: str) -> None:
    inner = node.get("properties", {})
    if not isinstance(inner, dict) or not _is_list_of(list(inner.values()), dict | bool):
        raise SchemaError(f"{at}/properties", "must be an object of schemas")
    if not _is_list_of(node.get("required", []), str):
        raise SchemaError(f"{at}/required", "must be a list of strings")


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
