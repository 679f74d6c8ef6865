"""Whether arguments fit the schema of a tool's parameters, as far as that can be told in a bounded time."""

from collections.abc import Mapping
from typing import Any

_MOST = 100_000  # pairs of a value and a schema, or a constant, that are compared
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def fits(arguments: Any, parameters: Any) -> bool:
    """Return whether a call's arguments are an object that the schema allows.

    Where the schema lists properties and says nothing of others, there are no others: so models are told. Keywords that
    are not known here restrict nothing.
    """
    if not isinstance(arguments, dict):
        return False
    if not isinstance(parameters, dict):
        return True
    closed = parameters
    if parameters.get("properties") and not parameters.keys() & {"additionalProperties", "patternProperties", "allOf",
                                                                 "anyOf", "oneOf", "$ref"}:  # fmt: skip
        closed = {**parameters, "additionalProperties": False}
    return allows(closed, arguments)


def allows(schema: Any, value: Any) -> bool:
    """Return whether a schema allows a value, as far as the keywords that are known here tell."""
    try:
        return _Comparison(schema).allows(schema, value)
    except RecursionError:
        return False


class _Comparison:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST

    def allows(self, schema: Any, value: Any) -> bool:
        """Return whether a schema allows a value. After too many comparisons none is allowed."""
        enum = schema.get("enum") if isinstance(schema, dict) else None
        self._left -= 1 + (len(enum) if isinstance(enum, list) else 0)
        if self._left < 0:
            return False
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema:
            return self.allows(self._referred(schema["$ref"]), value)
        if value is None and schema.get("nullable") is True:
            return True
        return (
            self._has_type(schema.get("type"), value)
            and ("const" not in schema or _same(value, schema["const"]))
            and (not isinstance(enum, list) or any(_same(value, one) for one in enum))
            and self._joined(schema, value)
            and (not isinstance(value, dict) or self._members(schema, value))
            and (not isinstance(value, list) or self._items(schema, value))
        )

    def _has_type(self, declared: Any, value: Any) -> bool:
        names = declared if isinstance(declared, list) else [declared]
        known = [name for name in names if isinstance(name, str) and name in _TYPES]
        if len(known) < len(names):
            return True  # no type, or one that is not known
        if isinstance(value, bool):
            return "boolean" in known
        if isinstance(value, float) and not value.is_integer() and "number" not in known:
            return False
        return any(isinstance(value, _TYPES[name]) for name in known)

    def _joined(self, schema: Mapping[str, Any], value: Any) -> bool:
        every = schema.get("allOf")
        some = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        return all(self.allows(one, value) for one in (every if isinstance(every, list) else ())) and all(
            any(self.allows(one, value) for one in choices) for choices in some
        )

    def _members(self, schema: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        known = properties if isinstance(properties, dict) else {}
        self._left -= len(required) if isinstance(required, list) else 0
        if isinstance(required, list) and any(isinstance(name, str) and name not in value for name in required):
            return False
        others = schema.get("additionalProperties") if not schema.get("patternProperties") else None
        return all(self.allows(known.get(key, others), one) for key, one in value.items())

    def _items(self, schema: Mapping[str, Any], value: list[Any]) -> bool:
        return "items" not in schema or "prefixItems" in schema or all(self.allows(schema["items"], v) for v in value)

    def _referred(self, reference: Any) -> Any:
        """Return the schema that a reference leads to; one that allows all if it leads nowhere."""
        found = self._root
        for key in reference[1:].split("/")[1:] if isinstance(reference, str) and reference[:1] == "#" else ["", ""]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON, in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
