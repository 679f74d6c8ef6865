"""How much llguidance copies where it merges schemas: `allOf`, and `anyOf`, `oneOf`, `enum` or `$ref` beside others.

It writes the product of two unions out, and copies a schema for each property that it applies to. Its own limit counts
the merges, but not the size of what they copy.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from jswa.grammar.bounds import SchemaError
from jswa.grammar.size.walk import Schema, children, escape, target

MAX_CALLS = 100_000  # pairs of schemas that are looked at
MAX_LEVELS = 120  # of merges inside merges; llguidance has 128
_NOTES = {
    "title", "description", "default", "examples", "$id", "id", "$schema", "$comment", "$defs", "definitions",
    "$anchor", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator",
}  # fmt: skip
_UNIONS = ("anyOf", "oneOf")
_APPLIED = {*_UNIONS, "allOf", "$ref", "const", "enum"}
_KINDS = ("null", "boolean", "number", "string", "array", "object")


class SchemaPart(NamedTuple):
    """One of the things that a schema asks for: `key` says which, "base" for its plain keywords, "" for all of it."""

    key: str
    at: str


class SchemaCopies(NamedTuple):
    """What merges take: copies of schemas and values, and strings of which one at least has a pattern or a format."""

    schemas: int = 0
    patterns: int = 0


class Merging:
    """Counts the copies that the schemas of one document take.

    Args:
        nodes: its schemas by pointer.
    """

    def __init__(self, nodes: Mapping[str, Schema]) -> None:
        self._nodes = nodes
        self._known: dict[tuple[SchemaPart, SchemaPart], SchemaCopies] = {}
        self._sizes: dict[SchemaPart, int] = {}
        self._calls = 0

    def copies(self, at: str) -> SchemaCopies:
        """Return the copies that the schema at a place takes by itself. Raises SchemaError if they have no end."""
        parts, node = self._parts(at), self._node(at)
        pairs = chain(
            ((one, other) for i, one in enumerate(parts) for other in parts[:i]),
            # A property is merged with what the pattern of its name asks for: here each with all of them.
            (
                (
                    SchemaPart("", f"{at}/properties/{escape(name)}"),
                    SchemaPart("", f"{at}/patternProperties/{escape(pattern)}"),
                )
                for name in _map(node, "properties")
                for pattern in _map(node, "patternProperties")
            ),
        )
        return _sum(one for pair in pairs for one in (SchemaCopies(self._size(pair[1])), self._merged(*pair, at, 0)))

    def _node(self, at: str) -> Mapping[str, Any]:
        node = self._nodes.get(at, True)
        return node if isinstance(node, Mapping) else {}

    def _parts(self, at: str) -> list[SchemaPart]:
        """Return what a schema asks for; its `allOf` and what it refers to as parts of their own."""
        node = self._node(at)
        parts = [SchemaPart("base", at)] if node.keys() - _NOTES - _APPLIED else []
        parts += [SchemaPart(key, at) for key in ("const", "enum", *_UNIONS) if key in node]
        several = node.get("allOf")
        parts += [SchemaPart("", f"{at}/allOf/{i}") for i in range(len(several))] if isinstance(several, list) else []
        if isinstance(node.get("$ref"), str):
            parts.append(SchemaPart("", target(node["$ref"])))
        return parts

    def _options(self, part: SchemaPart) -> list[SchemaPart]:
        several = self._node(part.at)[part.key]
        return (
            [SchemaPart("", f"{part.at}/{part.key}/{i}") for i in range(len(several))]
            if isinstance(several, list)
            else []
        )

    def _size(self, part: SchemaPart) -> int:
        """Return the number of schemas and values in a part, without what it refers to."""
        if part in self._sizes:
            return self._sizes[part]
        node, inner = self._node(part.at), list[SchemaPart]()
        if part.key in ("const", "enum"):
            size = values_in(node[part.key])
        else:
            size = len(_kinds(node)) if part.key == "base" else 1
            if part.key in _UNIONS:
                inner = self._options(part)
            elif part.key == "base":
                inner = [SchemaPart("", at) for key, at, _ in children(node, part.at) if key not in _APPLIED]
            else:
                inner = [one for one in self._parts(part.at) if one.key or one.at.startswith(f"{part.at}/allOf/")]
        self._sizes[part] = size = size + sum(map(self._size, inner))
        return size

    def _merged(self, one: SchemaPart, other: SchemaPart, at: str, level: int) -> SchemaCopies:
        """Return the copies that the merge of two parts takes."""
        known = self._known.get((one, other))
        if known is not None:
            return known
        self._calls += 1
        if self._calls > MAX_CALLS or level > MAX_LEVELS:
            what = f"more than {MAX_CALLS} pairs of schemas, or on more than {MAX_LEVELS} levels"
            raise SchemaError(at, f"is too large: it merges {what}")
        self._known[one, other] = found = _sum(self._steps(one, other, at, level + 1))
        return found

    def _steps(self, one: SchemaPart, other: SchemaPart, at: str, level: int) -> Iterator[SchemaCopies]:
        for a, b in ((one, other), (other, one)):
            if not a.key:
                yield SchemaCopies(1 + (self._size(a) if "$ref" in self._node(a.at) else 0))
                if b.key or self._node(b.at):
                    yield from (self._merged(part, b, at, level) for part in self._parts(a.at))
                return
        for a, b in ((one, other), (other, one)):
            if a.key in _UNIONS:
                for option in self._options(a):
                    yield SchemaCopies(self._size(b))
                    yield self._merged(option, b, at, level)
                return
        for a, b in ((one, other), (other, one)):
            if a.key in ("const", "enum"):
                count = self._values(a)
                yield SchemaCopies(
                    self._size(a) + count * self._size(b), count if _has_pattern(self._node(b.at)) else 0
                )
                return
        yield from self._bases(one, other, at, level)

    def _values(self, part: SchemaPart) -> int:
        values = self._node(part.at)[part.key]
        return len(values) if part.key == "enum" and isinstance(values, list) else 1

    def _bases(self, one: SchemaPart, other: SchemaPart, at: str, level: int) -> Iterator[SchemaCopies]:
        nodes = self._node(one.at), self._node(other.at)
        kinds, others = map(_kinds, nodes)
        yield SchemaCopies(len(kinds) * len(others), int("string" in kinds & others and any(map(_has_pattern, nodes))))
        if len(kinds) + len(others) > 2:
            yield SchemaCopies(len(others) * self._size(one) + len(kinds) * self._size(other))
        of_objects = self._of_objects(one.at, other.at) if "object" in kinds & others else ()
        of_arrays = self._of_arrays(one.at, other.at) if "array" in kinds & others else ()
        for a, b in chain(of_objects, of_arrays):
            yield SchemaCopies(1 + self._size(b))
            yield self._merged(a, b, at, level)

    def _of_objects(self, one: str, other: str) -> Iterator[tuple[SchemaPart, SchemaPart]]:
        """Yield the parts of two objects that are merged with each other."""
        for a, b, first in ((one, other, True), (other, one, False)):
            named = _map(self._node(b), "properties")
            wild = self._wild(b)
            for name in _map(self._node(a), "properties"):
                here = SchemaPart("", f"{a}/properties/{escape(name)}")
                if name not in named:
                    yield from ((here, part) for part in wild)
                elif first:
                    yield here, SchemaPart("", f"{b}/properties/{escape(name)}")
            for name in _map(self._node(a), "patternProperties"):
                yield from ((SchemaPart("", f"{a}/patternProperties/{escape(name)}"), part) for part in wild)
        if all(isinstance(self._node(at).get("additionalProperties"), dict) for at in (one, other)):
            yield SchemaPart("", f"{one}/additionalProperties"), SchemaPart("", f"{other}/additionalProperties")

    def _wild(self, at: str) -> list[SchemaPart]:
        """Return the schemas of the properties of an object that it does not name."""
        node = self._node(at)
        found = [SchemaPart("", f"{at}/patternProperties/{escape(name)}") for name in _map(node, "patternProperties")]
        given = isinstance(node.get("additionalProperties"), dict)
        return [*found, SchemaPart("", f"{at}/additionalProperties")] if given else found

    def _of_arrays(self, one: str, other: str) -> Iterator[tuple[SchemaPart, SchemaPart]]:
        """Yield the parts of two arrays that are merged with each other."""
        (first, rest), (others, others_rest) = self._items(one), self._items(other)
        for i in range(max(len(first), len(others))):
            for a in [first[i]] if i < len(first) else rest:
                yield from ((a, b) for b in ([others[i]] if i < len(others) else others_rest))
        yield from ((a, b) for a in rest for b in others_rest)

    def _items(self, at: str) -> tuple[list[SchemaPart], list[SchemaPart]]:
        """Return the schemas of the first items of an array, and that of the others, if there is one."""
        node = self._node(at)
        key, rest = ("items", "additionalItems") if isinstance(node.get("items"), list) else ("prefixItems", "items")
        several = node.get(key)
        first = [SchemaPart("", f"{at}/{key}/{i}") for i in range(len(several))] if isinstance(several, list) else []
        return first, [SchemaPart("", f"{at}/{rest}")] if isinstance(node.get(rest), dict) else []


def values_in(value: Any) -> int:
    """Return the number of values in a JSON value, itself included."""
    left, count = [value], 0
    while left:
        one = left.pop()
        count += 1
        left.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
    return count


def _sum(several: Iterable[SchemaCopies]) -> SchemaCopies:
    schemas = patterns = 0
    for one in several:
        schemas, patterns = schemas + one.schemas, patterns + one.patterns
    return SchemaCopies(schemas, patterns)


def _has_pattern(node: Mapping[str, Any]) -> bool:
    return "pattern" in node or "format" in node


def _kinds(node: Mapping[str, Any]) -> set[str]:
    kinds = node.get("type", _KINDS)
    listed = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)]
    return {"number" if kind == "integer" else kind for kind in listed}


def _map(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = node.get(key)
    return found if isinstance(found, Mapping) else {}
