"""Checks of a JSON Schema before it is compiled: what is wrong is named with its place, as a JSON pointer.

llguidance says what it cannot compile, but not where; and it takes references that lead nowhere or round in circles.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from jswa.grammar.bounds import SchemaError as SchemaError
from jswa.grammar.bounds import make_exact
from jswa.grammar.exact.expressions import in_rust
from jswa.grammar.exact.lookahead import joined
from jswa.grammar.exact.notes import count_wholly, is_never, tidy
from jswa.grammar.patterns import check_pattern
from jswa.grammar.size.keywords import check_keywords
from jswa.grammar.size.limits import MAX_BYTES, MAX_DEPTH, MAX_JOINED, SchemaCounts
from jswa.grammar.size.walk import Schema as Schema
from jswa.grammar.size.walk import escape as escape
from jswa.grammar.size.walk import parts, parts_first, reachable, reference, target
from jswa.grammar.size.walk import resolved as resolved
from jswa.grammar.size.work import check_work

_MOST_ROUNDS = 30  # in which it is decided which schemas have an end
_MOST_TRIALS = 300  # schemas that are compiled to find the place of an error
_TRIAL_SECONDS = 0.5


def read_json(value: Any, counts: SchemaCounts | None = None) -> Any:
    """Return JSON text, or an object that must be JSON, as plain Python values. Raises SchemaError.

    Args:
        counts: what the grammar has so far; the bytes are added.
    """
    try:
        text = value if isinstance(value, str) else _written(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError("", f"must be JSON: {str(error)[:200]}") from error
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise SchemaError("", f"has more than {MAX_BYTES} bytes of JSON")
    if counts is not None:
        counts.add("bytes", size)
    if _depth(text) > MAX_DEPTH:
        raise SchemaError("", f"has more than {MAX_DEPTH} levels of brackets")
    try:
        found = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except ValueError as error:
        raise SchemaError("", f"must be JSON: {str(error)[:200]}") from error
    _check_text(found)
    return found


def _written(value: Any) -> str:
    """Return an object as JSON text. One list may be in many places, so the text ends where the limit does."""
    parts, size = [], 0
    for part in json.JSONEncoder(allow_nan=False).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            break
    return "".join(parts)


def check_schema(schema: Any, counts: SchemaCounts | None = None) -> Schema:
    """Return a schema without what llguidance gets wrong, and in which what can have no end is forbidden.

    Args:
        schema: plain values, as `read_json` returns them; they are changed.
        counts: what the grammar has so far; what the schema adds is added.

    Raises SchemaError.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaError("", "must be an object, true or false")
    _check_text(schema)
    nodes = _tidied(schema)
    _check_nodes(nodes)
    endless = _endless(nodes)
    if "" in endless:
        raise SchemaError(_place(nodes, endless), "refers to itself without an end: no finite value has this form")
    for at, node in nodes.items():
        if isinstance(node, dict):
            make_exact(node, at)
            if isinstance(node.get("$ref"), str):
                node["$ref"] = reference(target(node["$ref"]))
    check_work(nodes, SchemaCounts() if counts is None else counts)
    for pointer in endless:
        _forbid(schema, pointer)
    found: Schema = schema
    return found


def _tidied(schema: Schema) -> dict[str, Schema]:
    """Take out of a document what restricts nothing; return its schemas by pointer. Raises SchemaError."""
    nodes = reachable(schema)
    for at in parts_first(nodes):
        node = nodes[at]
        if isinstance(node, dict):
            count_wholly(node)
            check_keywords(node, at)
            tidy(node, at, schema)
            if is_never(node):
                if not at:
                    raise SchemaError("", "allows no value")
                _forbid(schema, at)
    return reachable(schema)


def _check_nodes(nodes: Mapping[str, Schema]) -> None:
    """Raise SchemaError for keywords of the wrong type, and for regular expressions that are too long or too many."""
    several = 0
    for at, node in nodes.items():
        if not isinstance(node, Mapping):
            continue
        check_keywords(node, at)
        named = ((name, f"{at}/patternProperties") for name in _keys(node, "patternProperties"))
        for pattern, place in ((node.get("pattern"), f"{at}/pattern"), *named):
            if isinstance(pattern, str):
                check_pattern(pattern, place)
                (joined if place.endswith("/pattern") else in_rust)(pattern, place)
        several += "/allOf/" in at and "pattern" in node
        if several > MAX_JOINED:
            raise SchemaError(f"{at}/pattern", f"is one of more than {MAX_JOINED} patterns in an allOf")


def locate(schema: Schema, reason: str, explain: Callable[[Schema], str | None]) -> SchemaError:
    """Return the error of a schema that cannot be compiled, with the innermost place that cannot be.

    Args:
        reason: why the whole schema cannot.
        explain: returns why a schema cannot be compiled; None if it can.
    """
    root = json.loads(json.dumps(schema), object_hook=_moved)
    nodes = reachable(schema)
    at, seen, left, end = "", {""}, _MOST_TRIALS, time.monotonic() + _TRIAL_SECONDS
    while True:
        for pointer in parts(nodes[at], at):
            if pointer in seen or nodes[pointer] is False or not left or time.monotonic() > end:
                continue
            seen.add(pointer)
            left -= 1
            inner = explain({"$defs": {"root": root}, "$ref": reference(f"/$defs/root{pointer}")})
            if inner is not None:
                at, reason = pointer, inner
                break
        else:
            return SchemaError(at, reason)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:20]} is too large")
    return number


def _check_text(value: Any) -> None:
    """Raise SchemaError for a value with a string that is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise SchemaError("", "is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise SchemaError("", f"has a lone surrogate, {error.object[error.start]!a}, which is no text") from error


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
    if isinstance(schema.get("$ref"), str) and target(schema["$ref"]) in endless:
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
        at = next((pointer for pointer in parts(nodes[at], at) if pointer in endless), at)
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
