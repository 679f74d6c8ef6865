"""Whether the alternatives of a `oneOf` exclude each other, so that it says no more than an `anyOf`.

llguidance compares alternatives too, but none that are references, as generators write them.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jswa.grammar.size.walk import Schema, resolved

_KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MOST_LEVELS = 8
_MOST_PAIRS = 100_000


class _Facts(NamedTuple):
    """What a value of a schema must be: of one of these types, one of these constants, with these properties."""

    kinds: frozenset[str]
    constants: frozenset[str] | None
    required: frozenset[str]
    properties: Mapping[str, list[Schema]]


class Alternatives:
    """Compares the alternatives in one document, up to a number of pairs."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._pairs = 0
        self._known: dict[int, _Facts] = {}  # by identity: the document keeps its schemas

    def exclude_each_other(self, several: list[Schema]) -> bool:
        """Whether no value matches two of these schemas; False too where that is not plain."""
        return all(
            self._are_apart(one, other, _MOST_LEVELS) for i, one in enumerate(several) for other in several[:i]
        )  # fmt: skip

    def require(self, several: list[Schema], name: str) -> bool:
        """Have objects have the property that tells them apart; return whether all of them are objects with it."""
        goals = [goal for one in several if isinstance(goal := self._goal(one), dict)]
        if len(goals) < len(several) or not all(name in (goal.get("properties") or {}) for goal in goals):
            return False
        for goal in goals:
            required = goal.get("required", [])
            goal |= {"type": goal.get("type", "object"), "required": [*required, *({name} - {*required})]}
        self._known.clear()
        return True

    def _goal(self, schema: Schema) -> Schema:
        for _ in range(_MOST_LEVELS):
            if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
                schema = resolved(self._root, "", schema["$ref"])
        return schema

    def _are_apart(self, one: Schema, other: Schema, levels: int) -> bool:
        self._pairs += 1
        if not levels or self._pairs > _MOST_PAIRS:
            return False
        if one is False or other is False:
            return True
        for united, whole in ((one, other), (other, one)):
            options = self._options(united)
            if options and all(self._are_apart(option, whole, levels - 1) for option in options):
                return True
        a, b = self._facts(one), self._facts(other)
        if not a.kinds & b.kinds:
            return True
        if a.constants is not None and b.constants is not None:
            return a.constants.isdisjoint(b.constants)
        if {"object"} not in (a.kinds, b.kinds):
            return False
        return any(
            self._are_apart(x, y, levels - 1)
            for name in a.required | b.required
            for x in a.properties.get(name, ())
            for y in b.properties.get(name, ())
        )

    def _options(self, schema: Schema) -> list[Schema]:
        goal = self._goal(schema)
        found: list[Schema] = [] if isinstance(goal, bool) else goal.get("anyOf") or goal.get("oneOf") or []
        return found

    def _facts(self, schema: Schema) -> _Facts:
        if id(schema) not in self._known:
            self._known[id(schema)] = self._found(schema)
        return self._known[id(schema)]

    def _found(self, schema: Schema) -> _Facts:
        kinds, required, properties = _KINDS, set[str](), dict[str, list[Schema]]()
        constants: frozenset[str] | None = None
        for node in self._joined(schema, _MOST_LEVELS):
            if "type" in node:
                named = [node["type"]] if isinstance(node["type"], str) else node["type"]
                kinds &= {"number" if kind == "integer" else str(kind) for kind in named}
            values = node.get("enum", [node["const"]] if "const" in node else None)
            if isinstance(values, list):
                kinds &= {_kind(value) for value in values}
                here = frozenset(map(_canonical, values))
                constants = here if constants is None else constants & here
            if isinstance(node.get("required"), list):
                required |= {name for name in node["required"] if isinstance(name, str)}
            if isinstance(node.get("properties"), dict):
                for name, one in node["properties"].items():
                    properties.setdefault(name, []).append(one)
        return _Facts(kinds, constants, frozenset(required), properties)

    def _joined(self, schema: Schema, levels: int) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that a value has to match all."""
        if isinstance(schema, Mapping) and levels:
            yield schema
            if isinstance(schema.get("$ref"), str):
                yield from self._joined(resolved(self._root, "", schema["$ref"]), levels - 1)
            for one in schema.get("allOf") or ():
                yield from self._joined(one, levels - 1)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "number"


def _canonical(value: Any) -> str:
    """Return a text that equal JSON values share: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)
