r"""A checked schema as llguidance is given it, so that it admits what the schema says and nothing else.

* Regular expressions are rewritten (`expressions`, `lookahead`), and so are dates (`dates`).
* In an object with properties, llguidance 1.9 lets the names of others be spelled with escapes: a name `a` that is
  spelled `\u0061` would evade the schema of `a`. The names that a pattern admits have no such spelling. So an object
  whose other properties may have any value gets a pattern that all names match. Where they have a schema of their own,
  which a pattern would give to the properties as well, and where there are other patterns, texts have no such escapes.
* A `oneOf` whose alternatives exclude each other becomes an `anyOf` (`apart`). Where that needs the property that
  `discriminator` names, objects must have it.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jswa.grammar.bounds import SchemaError
from jswa.grammar.exact.apart import Alternatives
from jswa.grammar.exact.dates import DATES
from jswa.grammar.exact.expressions import in_rust
from jswa.grammar.exact.lookahead import joined
from jswa.grammar.exact.notes import RESTRICTING, is_free
from jswa.grammar.size.walk import Schema, reachable

NO_CODES = {"json_allowed_escapes": 'nrbtf\\"'}  # llguidance's option for texts without the escapes \u0000 to \u001f
_ANY_NAME = "^"
_CODE = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")


def admitted(schema: Schema) -> tuple[Schema, Mapping[str, Any]]:
    """Return a schema that `check_schema` has returned as llguidance reads it rightly, and options that it needs.

    Raises SchemaError if it needs texts without codes of characters, and has a value that is written with one.
    """
    made: Schema = copy.deepcopy(schema)
    by_pointer = {at: node for at, node in reachable(made).items() if isinstance(node, dict)}
    nodes = [*by_pointer.values()]
    alternatives, options = Alternatives(made), dict[str, Any]()
    # llguidance merges no two objects with different patterns of names.
    may_close = not (any(map(_merges, nodes)) and any(node.get("patternProperties") for node in nodes))
    for node in nodes:
        _any_of_one(node, alternatives)
        _join_patterns(node)
        if isinstance(patterns := node.get("patternProperties"), dict):
            node["patternProperties"] = {in_rust(name): one for name, one in patterns.items()}
        if _names_are_loose(node) and not (may_close and _close_names(node)):
            options = NO_CODES
    for at, node in by_pointer.items() if options else ():
        _can_be_written(at, node)
    return made, options


def _can_be_written(at: str, node: Mapping[str, Any]) -> None:
    """Raise SchemaError if a schema allows no value that is written without codes of characters."""
    values, names = node.get("enum", [node["const"]] if "const" in node else []), node.get("required")
    needed = [values] if isinstance(values, list) and values and all(map(_has_code, values)) else []
    needed += [name for name in names if _has_code(name)] if isinstance(names, list) else []
    if needed:
        found = json.dumps(needed[0])[:40]
        raise SchemaError(at, f"needs {found}: control characters cannot be written where other names have schemas")


def _has_code(value: object) -> bool:
    """Whether JSON writes a value with a code of a character, such as that of U+0007."""
    return _CODE.search(json.dumps(value)) is not None


def _merges(node: Mapping[str, Any]) -> bool:
    """Whether a schema is joined with others."""
    return "allOf" in node or (bool(node.keys() & {"$ref", "anyOf", "oneOf"}) and len(node.keys() & RESTRICTING) > 1)


def _join_patterns(node: dict[str, Any]) -> None:
    """Rewrite the expression of a string; say dates, and the expressions that it is joined with, by `allOf`."""
    patterns = joined(node["pattern"]) if isinstance(node.get("pattern"), str) else []
    if isinstance(node.get("format"), str) and node["format"] in DATES:
        patterns.append(DATES[node.pop("format")])
    if patterns:
        node["pattern"], *others = patterns
        more = [{"type": "string", "pattern": one} for one in others]
        node |= {"allOf": [*node.get("allOf", []), *more]} if more else {}


def _any_of_one(node: dict[str, Any], alternatives: Alternatives) -> None:
    """Say a `oneOf` by `anyOf` where that is the same."""
    discriminator, several = node.pop("discriminator", None), node.get("oneOf")
    if not isinstance(several, list) or len(several) < 2:
        return
    apart = alternatives.exclude_each_other(several)
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    if not apart and isinstance(name, str) and alternatives.require(several, name):
        apart = alternatives.exclude_each_other(several)
    if apart:
        del node["oneOf"]
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", []), {"anyOf": several}]
        else:
            node["anyOf"] = several


def _names_are_loose(node: Mapping[str, Any]) -> bool:
    """Whether a name that an object has a schema for can be spelled in a way that llguidance takes for another name."""
    names, patterns = _names(node), node.get("patternProperties")
    if names is None or not isinstance(patterns, dict | None) or not (names or patterns):
        return False
    return node.get("additionalProperties") is not False or bool(patterns and not _can_be_spelled_once(names))


def _close_names(node: dict[str, Any]) -> bool:
    """Give an object a pattern for the names of its other properties; return False if it can have none."""
    if node.get("patternProperties") or not is_free(node.get("additionalProperties", True)):
        return False
    if not _can_be_spelled_once(_names(node) or []):
        return False
    node |= {"patternProperties": {_ANY_NAME: True}, "additionalProperties": False}
    return True


def _names(node: Mapping[str, Any]) -> list[Any] | None:
    """Return the names of properties in a schema; None if these keywords are not read, for it is about other types."""
    properties, required = node.get("properties", {}), node.get("required", [])
    return [*properties, *required] if isinstance(properties, dict) and isinstance(required, list) else None


def _can_be_spelled_once(names: Iterable[Any]) -> bool:
    """Whether names have no control characters, which a pattern lets be spelled in two ways."""
    return all(isinstance(name, str) and min(name, default=" ") >= " " and "\x7f" not in name for name in names)
