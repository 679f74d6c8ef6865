"""Checks of a JSON Schema before it is compiled: what is wrong is named with its place, as a JSON pointer.

llguidance says what it cannot compile, but not where; and it takes references that lead nowhere or round in circles.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from jswa.grammar.bounds import SchemaError as SchemaError
from jswa.grammar.bounds import make_exact
from jswa.grammar.patterns import check_pattern

MAX_BYTES = 2**18  # of a schema or another grammar
MAX_DEPTH = 100  # of brackets inside brackets; llguidance reads 128
MAX_SCHEMAS = 10_000  # inside one schema
MAX_PATTERNS = 8  # of a schema that are in an `allOf`: with each one more, their product takes twice as long
_MOST_ROUNDS = 30  # in which it is decided which schemas have an end
_MOST_TRIALS = 300  # schemas that are compiled to find the place of an error
_TRIAL_SECONDS = 0.5
_ONE = (
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_SKIPPED = ("$defs", "definitions")  # not part of a value until a reference names them

Schema = Mapping[str, Any] | bool


def read_json(value: str | Mapping[str, Any], most: int = MAX_BYTES) -> Any:
    """Return JSON text, or an object that must be JSON, as plain Python values. Raises SchemaError."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError("", f"must be JSON: {str(error)[:200]}") from error
    if len(text.encode(errors="surrogatepass")) > most:
        raise SchemaError("", f"has more than {most} bytes of JSON")
    if _depth(text) > MAX_DEPTH:
        raise SchemaError("", f"has more than {MAX_DEPTH} levels of brackets")
    try:
        found = json.loads(text, parse_constant=_no_constant)
        text.encode()
    except ValueError as error:
        raise SchemaError("", f"must be JSON: {str(error)[:200]}") from error
    return found


def check_schema(schema: Any) -> Schema:
    """Return a schema without what llguidance gets wrong, and in which what can have no end is forbidden.

    Args:
        schema: plain values, as `read_json` returns them; they are changed.

    Raises SchemaError.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaError("", "must be an object, true or false")
    nodes = _reachable(schema)
    joined = [at for at, node in nodes.items() if "/allOf/" in at and isinstance(node, dict) and "pattern" in node]
    if len(joined) > MAX_PATTERNS:
        raise SchemaError(f"{joined[MAX_PATTERNS]}/pattern", f"is one of more than {MAX_PATTERNS} patterns in an allOf")
    endless = _endless(nodes)
    if "" in endless:
        raise SchemaError(_place(nodes, endless), "refers to itself without an end: no finite value has this form")
    for at, node in nodes.items():
        if isinstance(node, dict):
            make_exact(node, at)
            for pattern in (node.get("pattern"), *_keys(node, "patternProperties")):
                if isinstance(pattern, str):
                    check_pattern(pattern, f"{at}/pattern")
            if isinstance(node.get("$ref"), str):
                node["$ref"] = _reference(_target(node["$ref"]))
    for pointer in endless:
        _forbid(schema, pointer)
    found: Schema = schema
    return found


def locate(schema: Schema, reason: str, explain: Callable[[Schema], str | None]) -> SchemaError:
    """Return the error of a schema that cannot be compiled, with the innermost place that cannot be.

    Args:
        reason: why the whole schema cannot.
        explain: returns why a schema cannot be compiled; None if it can.
    """
    root = json.loads(json.dumps(schema), object_hook=_moved)
    nodes = _reachable(schema)
    at, seen, left, end = "", {""}, _MOST_TRIALS, time.monotonic() + _TRIAL_SECONDS
    while True:
        for pointer in _parts(nodes[at], at):
            if pointer in seen or nodes[pointer] is False or not left or time.monotonic() > end:
                continue
            seen.add(pointer)
            left -= 1
            inner = explain({"$defs": {"root": root}, "$ref": _reference(f"/$defs/root{pointer}")})
            if inner is not None:
                at, reason = pointer, inner
                break
        else:
            return SchemaError(at, reason)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _depth(text: str) -> int:
    """Return how deep the brackets of JSON text are nested, at most one too many; brackets in strings do not count."""
    depth = most = 0
    quoted = escaped = False
    for character in text:
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
            most = max(most, depth)
            if most > MAX_DEPTH:
                break
        elif character in "}]":
            depth -= 1
    return most


def escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _children(schema: Schema, at: str, *, definitions: bool = False) -> Iterator[tuple[str, Schema]]:
    """Yield pointers and schemas of the parts of a schema; of its definitions only if asked to."""
    if not isinstance(schema, Mapping):
        return
    for key in _ONE:
        if isinstance(schema.get(key), dict | bool):
            yield f"{at}/{key}", schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{at}/{key}/{i}", one) for i, one in enumerate(schema[key]) if isinstance(one, dict | bool))
    for key in _MAPS:
        if isinstance(schema.get(key), dict) and (definitions or key not in _SKIPPED):
            inner = schema[key].items()
            yield from ((f"{at}/{key}/{escape(n)}", one) for n, one in inner if isinstance(one, dict | bool))


def _parts(schema: Schema, at: str) -> Iterator[str]:
    """Yield the pointers of the parts of a schema, and of what it refers to."""
    yield from (pointer for pointer, _ in _children(schema, at))
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        yield _target(schema["$ref"])


def _reference(pointer: str) -> str:
    """Return the reference to a pointer, as a part of a URI."""
    return "#" + quote(pointer, safe="/~$")


def _target(reference: str) -> str:
    """Return the pointer in a local reference."""
    return unquote(reference[1:])


def _reachable(schema: Schema) -> dict[str, Schema]:
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
        left.extend(reversed(list(_children(node, at))))
        if isinstance(node, Mapping) and isinstance(node.get("$ref"), str):
            reference = node["$ref"]
            if not (reference == "#" or reference.startswith("#/")):
                raise SchemaError(f"{at}/$ref", f"{reference[:80]!r} is not in this schema: only #/… can be read")
            left.append((_target(reference), resolved(schema, at, reference)))
    return nodes


def resolved(schema: Schema, at: str, reference: str) -> Schema:
    found: Any = schema
    for key in _target(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isascii() and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise SchemaError(f"{at}/$ref", f"{reference[:80]!r} leads nowhere")
    if not isinstance(found, dict | bool):
        raise SchemaError(f"{at}/$ref", f"{reference[:80]!r} is not a schema")
    return found


def _endless(nodes: dict[str, Schema]) -> set[str]:
    """Return the schemas that no finite value matches since they need themselves."""
    endless = set(nodes)
    for _ in range(_MOST_ROUNDS):
        # Parts come after what they are part of: most schemas are decided in the first round.
        ending = [at for at in reversed(nodes) if at in endless and _ends(nodes[at], at, endless)]
        if not ending:
            return endless
    return set()  # so entangled that it is left to the one who asks


def _ends(schema: Schema, at: str, endless: set[str]) -> bool:
    """Whether a value can match a schema without what is in `endless`; if so, take it out of there."""
    ends = isinstance(schema, bool) or "enum" in schema or "const" in schema or _composed(schema, at, endless)
    if ends:
        endless.discard(at)
    return ends


def _composed(schema: Mapping[str, Any], at: str, endless: set[str]) -> bool:
    """Whether references, alternatives and required parts of a schema all have an end."""
    if isinstance(schema.get("$ref"), str) and _target(schema["$ref"]) in endless:
        return False
    several = schema.get("allOf")
    if isinstance(several, list) and any(f"{at}/allOf/{i}" in endless for i in range(len(several))):
        return False
    for key in ("anyOf", "oneOf"):
        several = schema.get(key)
        if isinstance(several, list) and several and all(f"{at}/{key}/{i}" in endless for i in range(len(several))):
            return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else ["object", "array", "null"]
    return any(kind not in ("object", "array") or _parts_end(schema, at, endless, kind) for kind in kinds)


def _parts_end(schema: Mapping[str, Any], at: str, endless: set[str], kind: str) -> bool:
    """Whether the parts that an object or an array must have do all have an end."""
    if kind == "object":
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        return not any(isinstance(n, str) and f"{at}/properties/{escape(n)}" in endless for n in names)
    least = schema.get("minItems")
    least = int(least) if isinstance(least, int | float) else 0
    first = schema.get("prefixItems")
    count = len(first) if isinstance(first, list) else 0
    if any(f"{at}/prefixItems/{i}" in endless for i in range(min(least, count))):
        return False
    return least <= count or f"{at}/items" not in endless


def _keys(node: Mapping[str, Any], name: str) -> tuple[str, ...]:
    inner = node.get(name)
    return tuple(inner) if isinstance(inner, dict) else ()


def _place(nodes: Mapping[str, Schema], endless: set[str]) -> str:
    """Return the pointer of a schema on the circle that the whole schema needs."""
    at, seen = "", set[str]()
    while at not in seen:
        seen.add(at)
        at = next((pointer for pointer in _parts(nodes[at], at) if pointer in endless), at)
    return at


def _forbid(schema: Any, pointer: str) -> None:
    """Replace a part of a schema by `false`, unless what it is in was replaced already."""
    *way, last = [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]
    for key in way:
        schema = schema[int(key)] if isinstance(schema, list) else schema.get(key) if isinstance(schema, dict) else None
    if isinstance(schema, list):
        schema[int(last)] = False
    elif isinstance(schema, dict):
        schema[last] = False


def _moved(node: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a schema that has become a definition: its references lead there."""
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        node["$ref"] = f"#/$defs/root{reference[1:]}"
    return node
