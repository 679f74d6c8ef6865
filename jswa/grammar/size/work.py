"""The work that a JSON Schema is for llguidance, by arithmetic: its own limits bound only a part of it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jswa.grammar.bounds import SchemaError
from jswa.grammar.exact.lookahead import lookaheads
from jswa.grammar.size.alternatives import UNIONS, check_nested, choices
from jswa.grammar.size.limits import MAX_PLACES, MAX_STEP, MAX_TEXT, SchemaCounts
from jswa.grammar.size.merging import Merging, values_in
from jswa.grammar.size.walk import Schema, children, escape, parts_first, target

_MUCH = 10**9
_JOINS = {*UNIONS, "allOf", "$ref", "const", "enum"}


_Inner = list[tuple[str, str, Schema]]  # keyword, pointer and schema of each part of a schema


class _Facts(NamedTuple):
    """What is known of a schema when what refers to it is looked at.

    Attributes:
        places: where a text may go on at once, behind its first bracket.
        step: a common multiple of all its `multipleOf`.
        alternatives, weight: the alternatives that a `oneOf` compares, and the work of comparing one with another.
        is_one: whether the alternatives are those of a `oneOf`.
    """

    places: int = 0
    step: int = 1
    alternatives: int = 1
    weight: int = 1
    is_one: bool = False


def check_work(nodes: Mapping[str, Schema], counts: SchemaCounts) -> None:
    """Raise SchemaError, with the place, for a schema that would take too much time or memory.

    Args:
        nodes: all schemas of a document by pointer.
        counts: what the grammar has so far; what the schema adds is added.
    """
    counts.add("schemas", len(nodes))
    merging, known, among = Merging(nodes), dict[str, _Facts](), dict[str, int]()
    for at in parts_first(nodes):
        node = nodes[at]
        if not isinstance(node, Mapping):
            continue
        _check_values(node, at, counts)
        _check_names(node, at, counts)
        copies = merging.copies(at)
        counts.add("merges", copies.schemas, at)
        counts.add("checked patterns", copies.patterns + _patterns(node), at)
        counts.add("steps", _step(node, at), at)
        inner = list(children(node, at))
        alternatives, weight, is_one = _compared(node, at, inner, known)
        if is_one:
            counts.add("comparisons", alternatives**2 * weight // 2, at)
        among[at] = choices(node, at, inner, among)
        known[at] = _Facts(
            _places(node, at, inner, known), _common_step(node, at, inner, known), alternatives, weight, is_one
        )
    check_nested(nodes, among)


def check_text(text: str, at: str = "") -> None:
    """Raise SchemaError for a string that is forced as a whole and is too long."""
    if len(text) > MAX_TEXT:
        raise SchemaError(at, f"has a string of more than {MAX_TEXT} characters")


def _check_values(node: Mapping[str, Any], at: str, counts: SchemaCounts) -> None:
    for key in ("const", "enum"):
        if key in node:
            counts.add("values", values_in(node[key]), f"{at}/{key}")
            for text in _texts(node[key]):
                check_text(text, f"{at}/{key}")
    for name in (*_map(node, "properties"), *_names(node)):
        check_text(name, at)


def _check_names(node: Mapping[str, Any], at: str, counts: SchemaCounts) -> None:
    """Count the names of an object, and what is compared with its patterns of names."""
    named, patterns = _map(node, "properties"), _map(node, "patternProperties")
    more = [name for name in _names(node) if name not in named]
    counts.add("schemas", len(more), f"{at}/required")
    counts.add("name checks", len(patterns) * (len(patterns) + len(named) + len(more)), f"{at}/patternProperties")


def _patterns(node: Mapping[str, Any]) -> int:
    """Return how many patterns of a schema are joined with its format or bounds of its length."""
    texts = [key for key in ("pattern", "format") if isinstance(node.get(key), str)]
    ahead = lookaheads(node["pattern"]) if "pattern" in texts else 0  # each is an expression of its own
    return ahead + (1 if len(texts) == 2 or (texts and node.keys() & {"minLength", "maxLength"}) else 0)


def _places(node: Mapping[str, Any], at: str, inner: _Inner, known: Mapping[str, _Facts]) -> int:
    """Return at how many places of a grammar a text may be in a value, behind its bracket. Raises SchemaError."""
    named, required = _map(node, "properties"), set(_names(node))
    optional = sum(name not in required for name in named)
    found = 4 * optional  # for each a row of the parser has four items
    if optional and node.get("maxProperties") is not None:
        found = max(found, optional * (1 + len(named) - optional))
    elif optional and node.get("minProperties"):
        found = max(found, optional * len(named))
    found += sum(_of(known, one).places for key, one, _ in inner if key == "allOf")
    if isinstance(node.get("$ref"), str):
        found += _of(known, target(node["$ref"])).places
    for key in UNIONS:
        found = max(found, 1) * sum(_of(known, one).places for name, one, _ in inner if name == key) or found
    if found > MAX_PLACES:
        why = "where a value may go on; an optional property has 4"
        raise SchemaError(at, f"is too large: it has more than {MAX_PLACES} places {why}")
    return found


def _step(node: Mapping[str, Any], at: str) -> int:
    """Return a `multipleOf` without its decimal point; 1 without one. Raises SchemaError if it is too large."""
    value = node.get("multipleOf")
    if not isinstance(value, int | float) or isinstance(value, bool) or not value:
        return 1
    numerator, denominator = abs(value).as_integer_ratio()
    digits = max(denominator - 1, 0).bit_length()  # behind the point: a half has one, a quarter two
    if numerator * 5**digits > MAX_STEP:
        raise SchemaError(f"{at}/multipleOf", f"has more than {MAX_STEP} without its decimal point")
    return int(numerator * 5**digits)


def _common_step(node: Mapping[str, Any], at: str, inner: _Inner, known: Mapping[str, _Facts]) -> int:
    """Return a common multiple of the steps in a schema. Raises SchemaError if one value may need too large a one."""
    found = math.lcm(_step(node, at), *(_of(known, one).step for one in _pointers(node, inner)))
    joined = len(node.keys() & _JOINS) > 1 or "allOf" in node or (node.keys() & _JOINS and "multipleOf" in node)
    if joined and found > MAX_STEP:
        raise SchemaError(at, f"joins `multipleOf` whose common multiple is more than {MAX_STEP}")
    return min(found, _MUCH)


def _compared(node: Mapping[str, Any], at: str, inner: _Inner, known: Mapping[str, _Facts]) -> tuple[int, int, bool]:
    """Return the alternatives of a schema, the work of comparing two, and whether a `oneOf` compares them."""
    alternatives, weight, is_one = 1, 1, "oneOf" in node
    for name in set(_names(node)):
        one = _of(known, f"{at}/properties/{escape(name)}")
        weight += one.alternatives**2 * one.weight
    for name in UNIONS:
        options = [_of(known, one) for key, one, _ in inner if key == name]
        alternatives *= sum(one.alternatives for one in options) or 1
        weight += max((one.weight for one in options), default=0)
    alternatives *= values_in(_list(node, "enum")) if "enum" in node else 1
    joined = [_of(known, one) for key, one, _ in inner if key == "allOf"]
    if isinstance(node.get("$ref"), str) and len(node) > 1:  # one that stands alone is compared with nothing
        joined.append(_of(known, target(node["$ref"])))
    for one in joined:
        alternatives, weight = alternatives * one.alternatives, weight + one.weight
        is_one = is_one or one.is_one
    return min(alternatives, _MUCH), min(weight, _MUCH), is_one


def _pointers(node: Mapping[str, Any], inner: _Inner) -> list[str]:
    found = [pointer for _, pointer, _ in inner]
    return [*found, target(node["$ref"])] if isinstance(node.get("$ref"), str) else found


def _of(known: Mapping[str, _Facts], at: str) -> _Facts:
    return known.get(at, _Facts())


def _texts(value: Any) -> Iterable[str]:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left.extend((*one, *one.values()))
        elif isinstance(one, list):
            left.extend(one)


def _map(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = node.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(node: Mapping[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []


def _names(node: Mapping[str, Any]) -> list[str]:
    return [name for name in _list(node, "required") if isinstance(name, str)]
