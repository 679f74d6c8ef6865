"""How many objects and arrays a text may be inside at once.

Each is followed to its end, and where k of them end together the parser takes time in proportion to k³. Alternatives
may be nested: those of a property count together if the objects that have it are alternatives themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jswa.grammar.bounds import SchemaError
from jswa.grammar.size.limits import MAX_ALTERNATIVES
from jswa.grammar.size.walk import Schema, children, target

UNIONS = ("anyOf", "oneOf")
_MOST_LOOKED_AT = 200_000  # schemas in groups of alternatives, each as often as it is in one
_SCALARS = {"string", "number", "integer", "boolean", "null"}
_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}

Group = dict[str, int]  # pointers of alternatives, and of how many each is one


def choices(
    node: Mapping[str, Any], at: str, inner: Sequence[tuple[str, str, Schema]], known: Mapping[str, int]
) -> int:
    """Return of how many objects and arrays a value is one. Raises SchemaError if there are too many.

    Args:
        inner: keyword, pointer and schema of each of its parts.
        known: the numbers of its parts, as far as they are known.
    """
    found = 1
    for key in UNIONS:
        found *= sum(known.get(one, 1) for name, one, _ in inner if name == key) or 1
    found *= max(1, sum(isinstance(one, dict | list) for one in _list(node, "enum")))
    for name, one, _ in inner:
        found *= max(1, known.get(one, 1)) if name == "allOf" else 1
    if isinstance(node.get("$ref"), str):
        found *= max(1, known.get(target(node["$ref"]), 1))
    if found > MAX_ALTERNATIVES:
        raise _too_many(at)
    return 0 if found == 1 and _is_scalar(node) else found


def check_nested(nodes: Mapping[str, Schema], known: Mapping[str, int]) -> None:
    """Raise SchemaError if alternatives inside alternatives are too many. `known`: the `choices` of all schemas."""
    left = [{at: 1} for at in nodes if known.get(at, 1) > 1]
    seen = dict[frozenset[str], int]()
    looked_at = 0
    while left:
        group = left.pop()
        number = sum(count * known.get(at, 1) for at, count in group.items())
        at = next(iter(group))
        looked_at += len(group)
        if number > MAX_ALTERNATIVES or looked_at > _MOST_LOOKED_AT:
            raise _too_many(at)
        if seen.get(frozenset(group), 0) < number > 1:
            seen[frozenset(group)] = number
            bases = [base for one, count in group.items() for base in _bases(nodes, one, count, known, frozenset())]
            left.extend(inner for inner in _inside(nodes, bases) if len(inner) > 1 or max(inner.values()) > 1)


def _too_many(at: str) -> SchemaError:
    return SchemaError(at, f"is too large: a value may be one of more than {MAX_ALTERNATIVES} objects and arrays")


def _bases(
    nodes: Mapping[str, Schema], at: str, count: int, known: Mapping[str, int], above: frozenset[str]
) -> Iterator[tuple[str, int]]:
    """Yield the schemas with keywords of their own that a schema consists of, and of how many alternatives each is."""
    node = nodes.get(at, True)
    if not isinstance(node, Mapping) or at in above or len(above) > 100:
        return
    yield at, count
    whole = known.get(at, 1)
    inner = [(key, one) for key, one, _ in children(node, at) if key in (*UNIONS, "allOf")]
    options = {key: sum(known.get(one, 1) for name, one in inner if name == key) for key in UNIONS}
    for key, one in inner:
        share = max(1, whole // max(1, options.get(key, known.get(one, 1))))
        yield from _bases(nodes, one, count * share, known, above | {at})
    if isinstance(node.get("$ref"), str):
        goal = target(node["$ref"])
        share = max(1, whole // max(1, known.get(goal, 1)))
        yield from _bases(nodes, goal, share * (count if node.keys() - {"$ref"} - _NOTES else 1), known, above | {at})


def _inside(nodes: Mapping[str, Schema], bases: list[tuple[str, int]]) -> Iterator[Group]:
    """Yield the groups of schemas that one part of a value may have to match."""
    named, wild, items = dict[str, Group](), Group(), dict[int, Group]()
    for at, count in bases:
        for key, one, schema in children(nodes[at], at):
            if key == "properties":
                _add(named.setdefault(one.rpartition("/")[2], {}), one, schema, count)
            elif key in ("additionalProperties", "patternProperties"):
                _add(wild, one, schema, count)
            elif key in ("items", "prefixItems", "additionalItems"):
                place = one.removeprefix(f"{at}/{key}/")
                _add(items.setdefault(int(place) if place.isdecimal() else -1, {}), one, schema, count)
    rest = items.pop(-1, {})
    yield from ({**group, **wild} for group in named.values() if group or wild)
    yield from ({**group, **rest} for group in items.values() if group or rest)
    yield from (group for group in (wild, rest) if group)


def _add(group: Group, at: str, schema: Schema, count: int) -> None:
    """Add an alternative to a group. References alone that lead to one schema are one alternative."""
    if schema is False:
        return
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and not schema.keys() - {"$ref"} - _NOTES:
        group[target(schema["$ref"])] = 1
    else:
        group[at] = group.get(at, 0) + count


def _is_scalar(node: Mapping[str, Any]) -> bool:
    """Whether a value is no object and no array."""
    kinds = node.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if "const" in node:
        return not isinstance(node["const"], dict | list)
    return "enum" in node or (bool(listed) and all(kind in _SCALARS for kind in listed))


def _list(node: Mapping[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
