"""Arguments that are written between tags, as text: rules for them, made from a JSON Schema.

What is between the tags, without a line end on each side where the family writes one, is cast to the type that the
schema names, so a string has no quotes.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jswa.grammar.schema import Schema, SchemaError, resolved
from jswa.grammar.texts import literal, schema_rule
from jswa.text.answers.writes import CallText

_BOUNDS = {"minLength", "maxLength"}
_WORDS = {"type", "title", "description", "default", "examples", "nullable", "anyOf", "oneOf"}
_FORM = "the model's form of calls"


class Tag(NamedTuple):
    """The rule of an argument: `begin`, `value` and `end`. A `free` value is a pattern up to the end tag."""

    begin: str
    value: str
    end: str
    free: bool = False


def tag(name: str, schema: Schema, root: Schema, at: str, form: CallText, special: Mapping[str, int]) -> Tag:
    """Return the rule of an argument. Raises SchemaError.

    Args:
        root: the schema that references lead into.
        at: the place of the argument's own schema.
        form: how the family writes calls.
        special: ids of the special tokens by their text.
    """
    if any(character in "<>\n" for character in name):
        raise SchemaError(at, f"has a name that cannot be written in {_FORM}")
    begin, end = literal(form.key.replace("{key}", name), special), literal(form.end_tag, special)
    wrap = json.dumps(form.wrap)
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolved(root, at, schema["$ref"])
    if not isinstance(schema, Mapping):
        schema = {}
    types = _types(schema)
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        inner = " | ".join(literal(_written(value, types, at, form.end_tag), {}) for value in values)
        return Tag(f"{begin} {wrap}", f"({inner})", f"{wrap} {end}")
    if not types or "string" in types:
        unknown = schema.keys() - _WORDS - (_BOUNDS if types == {"string"} else set())
        if unknown or types - {"string", "null"}:
            raise SchemaError(at, f"cannot be forced in {_FORM}: a text that may be a string or something else")
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        length = f".{{{least},{most}}}" if (least, most) != (0, "") else ".*"
        line_end = form.wrap.replace("\n", "\\n")
        return Tag(begin, f"/{line_end}(?s:{length}){line_end}/", end, free=True)
    defined = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
    return Tag(f"{begin} {wrap}", schema_rule({**schema, **defined}), f"{wrap} {end}")


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that the reader of tags finds in a schema."""
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else {one for one in declared or () if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            found |= _types(one) if isinstance(one, Mapping) else set()
    return found


def _written(value: Any, types: set[str], at: str, end: str) -> str:
    """Return a constant as it is read back. Raises SchemaError if it would be read as something else."""
    if isinstance(value, str):
        if types - {"string"} or end in value:
            raise SchemaError(at, f"has a string that cannot be written in {_FORM}")
        return value
    if not types - {"string"}:
        raise SchemaError(at, f"has values without a type, which {_FORM} needs")
    return json.dumps(value)
