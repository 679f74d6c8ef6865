"""Keywords of a JSON Schema that restrict nothing, or say what other keywords say, which llguidance knows.

Generators write many such keywords: `propertyNames` that any name matches, `not: {}` for what may not be there,
`format: password`. llguidance refuses them, since it does not know them.
"""

from collections.abc import Mapping
from typing import Any

from jswa.grammar.exact.names import limit_names
from jswa.grammar.size.walk import Schema, resolved, target

# Formats that llguidance enforces. All others are notes, as JSON Schema says of every format.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
KINDS = ("null", "boolean", "number", "string", "array", "object")
_APPLIED = {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas",
            "dependencies"}  # fmt: skip
_OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties",
               "maxProperties", "dependentRequired", "unevaluatedProperties"}  # fmt: skip
_OF_ARRAYS = {"items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems",
              "minItems", "maxItems", "unevaluatedItems"}  # fmt: skip
_OF_TEXTS = {"minLength", "maxLength", "pattern", "format"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
RESTRICTING = {"type", "enum", "const", "then", "else"} | _APPLIED | _OF_OBJECTS | _OF_ARRAYS | _OF_TEXTS | _OF_NUMBERS
# Which draft a schema is of, what it is called, and what tools other than checkers read.
_NOTES = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "example", "xml",
          "externalDocs", "contentSchema"}  # fmt: skip
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains",
           "maxContains")  # fmt: skip


def is_free(schema: Any) -> bool:
    """Whether a schema allows every value."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() & RESTRICTING)


def is_never(schema: Any) -> bool:
    """Whether a schema allows no value; of those that `tidy` has seen."""
    return schema is False or (isinstance(schema, Mapping) and "not" in schema and is_free(schema["not"]))


def count_wholly(node: dict[str, Any]) -> None:
    """Write counts such as 5.0, which JSON Schema takes for 5, as whole numbers."""
    for key in _COUNTS:
        if isinstance(node.get(key), float) and node[key].is_integer():
            node[key] = int(node[key])


def tidy(node: dict[str, Any], at: str, root: Schema) -> None:
    """Take out of a schema what restricts nothing, after its parts.

    Args:
        at: its place in the document.
        root: the document, for references.

    Raises SchemaError for `propertyNames` that cannot be said in other words.
    """
    for key in [key for key, value in node.items() if key in _NOTES or _is_plain_note(key, value)]:
        del node[key]
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
        del node["format"]
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(key), bool):  # draft 4
            exclusive = node.pop(key)
            if exclusive and bound in node:
                node[key] = node.pop(bound)
    _tidy_array(node)
    _tidy_object(node, at, root)
    _tidy_applied(node)


def _is_plain_note(key: str, value: Any) -> bool:
    """Whether a keyword is unknown, and nothing can refer to what is inside; llguidance would merge it with others."""
    unknown = key not in RESTRICTING and key not in ("$defs", "definitions", "title", "description")
    return unknown and not isinstance(value, dict | list)


def _kinds(node: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, or all."""
    kinds = node.get("type", list(KINDS))
    return {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)}


def _drop(node: dict[str, Any], *keys: str) -> None:
    for key in keys:
        node.pop(key, None)


def _tidy_array(node: dict[str, Any]) -> None:
    if node.get("uniqueItems") is False or _is_at_most(node.get("maxItems"), 1):
        _drop(node, "uniqueItems")
    if not isinstance(node.get("items"), list):
        _drop(node, "additionalItems")
    least, most = node.get("minContains", 1), node.get("maxContains")
    if "contains" not in node or (least == 0 and (most is None or is_never(node["contains"]))):
        _drop(node, "contains", "minContains", "maxContains")
    elif is_free(node["contains"]) and all(isinstance(node.get(key, 0), int) for key in _COUNTS):
        _drop(node, "contains", "minContains", "maxContains")
        node["minItems"] = max(node.get("minItems", 0), least)
        if most is not None:
            node["maxItems"] = min(node.get("maxItems", most), most)
    if "unevaluatedItems" in node and not node.keys() & {*_APPLIED, "contains"}:
        rest = node.pop("unevaluatedItems")
        key = "additionalItems" if isinstance(node.get("items"), list) else "items"
        if key not in node:
            node[key] = rest
    elif is_free(node.get("unevaluatedItems")):
        _drop(node, "unevaluatedItems")


def _is_at_most(value: Any, most: int) -> bool:
    return isinstance(value, int) and value <= most


def _tidy_object(node: dict[str, Any], at: str, root: Schema) -> None:
    if "unevaluatedProperties" in node and not node.keys() & _APPLIED:
        rest = node.pop("unevaluatedProperties")
        node.setdefault("additionalProperties", rest)
    elif is_free(node.get("unevaluatedProperties")):
        _drop(node, "unevaluatedProperties")
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        _tidy_dependent(node, key)
    if "propertyNames" in node:
        if "object" not in _kinds(node):
            _drop(node, "propertyNames")
        else:
            limit_names(node, at, root, lambda one: allows_all_names(one, root))


def _tidy_dependent(node: dict[str, Any], key: str) -> None:
    """Drop what depends on a property and asks for nothing; require what depends on a required one."""
    several = node.get(key)
    if not isinstance(several, dict):
        return
    required: list[str] = node["required"] if isinstance(node.get("required"), list) else []
    left = dict[str, Any]()
    for name, one in several.items():
        if isinstance(one, list) and name in required:
            required = node["required"] = [*required, *(other for other in one if other not in required)]
        elif not (is_free(one) or (isinstance(one, list) and set(map(str, one)) <= {*map(str, required), name})):
            left[name] = one
    node[key] = left
    if not left:
        del node[key]


def _tidy_applied(node: dict[str, Any]) -> None:
    if "if" not in node:
        _drop(node, "then", "else")
    elif is_free(node.get("then", True)) and is_free(node.get("else", True)):
        _drop(node, "if", "then", "else")
    elif is_free(node["if"]) or is_never(node["if"]):
        asked = node.get("then" if is_free(node["if"]) else "else", True)
        _drop(node, "if", "then", "else")
        if isinstance(node.get("allOf", []), list):
            node["allOf"] = [*node.get("allOf", []), asked]
    if "not" in node:
        _tidy_not(node)
    if isinstance(node.get("allOf"), list) and all(map(is_free, node["allOf"])):
        del node["allOf"]
    for key in ("anyOf", "oneOf"):
        several = node.get(key)
        if isinstance(several, list) and (len(several) == 1 or key == "anyOf") and any(map(is_free, several)):
            del node[key]


def _tidy_not(node: dict[str, Any]) -> None:
    """Drop a `not` that forbids nothing, or only types."""
    child = node["not"]
    if is_never(child):
        del node["not"]
    elif isinstance(child, Mapping) and child.keys() & RESTRICTING == {"type"}:
        forbidden, kinds = _kinds(child), _kinds(node)
        if "number" in forbidden:
            forbidden |= {"integer"}
        if forbidden <= {*KINDS, "integer"} and not (
            "integer" in forbidden - {"number"} and "number" in kinds - forbidden
        ):
            node["type"] = [kind for kind in (*KINDS, "integer") if kind in kinds - forbidden]
            del node["not"]
            if not node["type"]:
                node["not"] = True


def allows_all_names(schema: Any, root: Schema, depth: int = 20) -> bool:
    """Whether a schema, whose parts are tidy, allows every string; False too where that is not plain."""
    if is_free(schema):
        return True
    if not isinstance(schema, Mapping) or not depth:
        return False
    ignored = _OF_OBJECTS | _OF_ARRAYS | _OF_NUMBERS
    left = (schema.keys() & RESTRICTING) - ignored - {"type"}
    if "string" not in _kinds(schema) or left - {"minLength", "$ref", "allOf", "anyOf"}:
        return False
    if isinstance(schema.get("$ref"), str):
        goal = resolved(root, "", schema["$ref"])
        if target(schema["$ref"]) == "" or not allows_all_names(goal, root, depth - 1):
            return False
    several = {
        key: [allows_all_names(one, root, depth - 1) for one in schema.get(key, ())] for key in ("allOf", "anyOf")
    }
    return (
        schema.get("minLength", 0) == 0 and all(several["allOf"]) and ("anyOf" not in schema or any(several["anyOf"]))
    )
