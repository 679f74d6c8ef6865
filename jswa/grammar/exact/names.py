"""`propertyNames`, which llguidance does not know, in the words that it knows: patterns of names."""

from collections.abc import Callable, Mapping
from typing import Any

from jswa.grammar.bounds import SchemaError
from jswa.grammar.exact.dates import DATES
from jswa.grammar.size.walk import Schema, resolved

_WORDS = {"type", "title", "description", "default", "examples", "$comment", "deprecated"}
_MOST_REFERENCES = 20
_FORMATS = {**DATES, "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"}


def limit_names(node: dict[str, Any], at: str, root: Schema, allows_all: Callable[[Any], bool]) -> None:
    """Say what the `propertyNames` of an object say by other keywords. Raises SchemaError where it cannot be said.

    Args:
        at: the place of the object.
        root: the document, for references.
        allows_all: whether a schema allows every string.
    """
    names = node["propertyNames"]
    for _ in range(_MOST_REFERENCES):
        if isinstance(names, Mapping) and names.keys() - _WORDS == {"$ref"} and isinstance(names["$ref"], str):
            names = resolved(root, f"{at}/propertyNames", names["$ref"])
    if allows_all(names):
        del node["propertyNames"]
        return
    others = node.get("additionalProperties", True)
    properties = node.get("properties", {})
    if node.get("patternProperties") or not isinstance(names, Mapping) or not isinstance(properties, dict):
        raise SchemaError(f"{at}/propertyNames", "restricts names that `patternProperties` are about as well")
    if "string" not in ([names["type"]] if isinstance(names.get("type"), str) else names.get("type", ["string"])):
        raise SchemaError(f"{at}/propertyNames/type", "allows no name")
    listed = _listed(names)
    if listed is not None:
        node["properties"] = {name: one if name in listed else False for name, one in properties.items()}
        pattern = "|".join(map(_escaped, (name for name in listed if name not in properties)))
        node |= {"patternProperties": {f"^(?:{pattern})$": others} if pattern else {}, "additionalProperties": False}
    elif properties:
        raise SchemaError(f"{at}/propertyNames", "restricts names where there are `properties` too")
    else:
        node |= {"patternProperties": {_pattern(names, at): others}, "additionalProperties": False}
    del node["propertyNames"]


def _listed(names: Mapping[str, Any]) -> list[str] | None:
    """Return the names that a schema lists, if it does nothing else."""
    if names.keys() - _WORDS not in ({"enum"}, {"const"}):
        return None
    values = names["enum"] if "enum" in names else [names["const"]]
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


def _pattern(names: Mapping[str, Any], at: str) -> str:
    """Return a regular expression of the names that a schema allows. Raises SchemaError if there is none."""
    asked = names.keys() - _WORDS
    if asked == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if asked == {"format"} and names["format"] in _FORMATS:
        return _FORMATS[names["format"]]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if asked and asked <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return f"^[\\s\\S]{{{least},{most}}}$"
    key = min(asked - {"pattern"}, default="pattern")
    raise SchemaError(f"{at}/propertyNames/{key}", "restricts names in a way that cannot be enforced")


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
