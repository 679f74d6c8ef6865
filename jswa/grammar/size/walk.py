"""The parts of a JSON Schema, and what its references lead to."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from jswa.grammar.bounds import SchemaError
from jswa.grammar.size.limits import MAX_SCHEMAS

Schema = Mapping[str, Any] | bool

_ONE = (
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_WITH_PARTS = frozenset((*_ONE, *_LISTS, *_MAPS))


def children(schema: Schema, at: str) -> Iterator[tuple[str, str, Schema]]:
    """Yield the keyword, the pointer and the schema of each part of a schema, but for its definitions."""
    present = schema.keys() & _WITH_PARTS if isinstance(schema, dict) else ()
    if not present:  # as in most schemas
        return
    assert isinstance(schema, dict)
    for key in _ONE:
        if key in present and isinstance(schema[key], dict | bool):
            yield key, f"{at}/{key}", schema[key]
    for key in _LISTS:
        if key in present and isinstance(schema[key], list):
            yield from _among(key, f"{at}/{key}", enumerate(schema[key]))
    for key in _MAPS:
        if key in present and isinstance(schema[key], dict):
            yield from _among(key, f"{at}/{key}", ((escape(name), one) for name, one in schema[key].items()))


def _among(key: str, at: str, inner: Iterable[tuple[int | str, Any]]) -> Iterator[tuple[str, str, Schema]]:
    return ((key, f"{at}/{name}", one) for name, one in inner if isinstance(one, dict | bool))


def parts(schema: Schema, at: str) -> Iterator[str]:
    """Yield the pointers of the parts of a schema, and of what it refers to."""
    yield from (pointer for _, pointer, _ in children(schema, at))
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        yield target(schema["$ref"])


def reachable(schema: Schema) -> dict[str, Schema]:
    """Return the schemas that a value may have to match, by pointer. Raises SchemaError for a wrong reference."""
    nodes: dict[str, Schema] = {}
    left: list[tuple[str, Schema]] = [("", schema)]
    while left:
        at, node = left.pop()
        if at in nodes:
            continue
        nodes[at] = node
        if len(nodes) > MAX_SCHEMAS:
            raise SchemaError(at, f"is one of more than {MAX_SCHEMAS} schemas")
        left.extend(reversed([(pointer, one) for _, pointer, one in children(node, at)]))
        if isinstance(node, Mapping) and isinstance(node.get("$ref"), str):
            goal = node["$ref"]
            if not (goal == "#" or goal.startswith("#/")):
                raise SchemaError(f"{at}/$ref", f"{goal[:80]!r} is not in this schema: only #/… can be read")
            left.append((target(goal), resolved(schema, at, goal)))
    return nodes


def parts_first(nodes: Mapping[str, Schema]) -> list[str]:
    """Return the pointers of schemas, each behind its parts and what it refers to, except in circles."""
    found, seen = list[str](), set[str]()
    for root in nodes:
        stack = [] if root in seen else [(root, parts(nodes[root], root))]
        seen.add(root)
        while stack:
            left = stack[-1][1]
            inner = next((one for one in left if one in nodes and one not in seen), None)
            if inner is None:
                found.append(stack.pop()[0])
            else:
                seen.add(inner)
                stack.append((inner, parts(nodes[inner], inner)))
    return found


def resolved(schema: Schema, at: str, goal: str) -> Schema:
    """Return the schema that a reference at a place leads to. Raises SchemaError if there is none."""
    found: Any = schema
    for key in target(goal).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isascii() and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise SchemaError(f"{at}/$ref", f"{goal[:80]!r} leads nowhere")
    if not isinstance(found, dict | bool):
        raise SchemaError(f"{at}/$ref", f"{goal[:80]!r} is not a schema")
    return found


def escape(key: str) -> str:
    """Return a key as it stands in a pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def reference(pointer: str) -> str:
    """Return the reference to a pointer, as a part of a URI."""
    return "#" + quote(pointer, safe="/~$")


def target(goal: str) -> str:
    """Return the pointer in a local reference."""
    return unquote(goal[1:])
