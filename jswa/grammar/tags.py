"""Arguments that are written between tags, as text: rules for them, made from a JSON Schema.

What is between the tags, without a line end on each side, is cast to the type that the schema names, so a string has no
quotes.
"""

import json
from collections.abc import Mapping
from typing import Any

from jswa.grammar.schema import Schema, SchemaError, resolved
from jswa.grammar.texts import schema_rule

_BOUNDS = {"minLength", "maxLength"}
_WORDS = {"type", "title", "description", "default", "examples", "nullable", "anyOf", "oneOf"}
_FORM = "the model's form of calls"


def tag(name: str, schema: Schema, root: Schema, at: str) -> tuple[str, str | None]:
    """Return the rule of an argument, and the pattern of a text in it that ends with the tag. Raises SchemaError.

    If there is a pattern, the rule is what stands before it.

    Args:
        root: the schema that references lead into.
        at: the place of the argument's own schema.
    """
    if any(character in "<>\n" for character in name):
        raise SchemaError(at, f"has a name that cannot be written in {_FORM}")
    begin, end = f"<parameter={name}>", "</parameter>\n"
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolved(root, at, schema["$ref"])
    if not isinstance(schema, Mapping):
        schema = {}
    types = _types(schema)
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        inner = " | ".join(json.dumps(f"\n{_written(value, types, at)}\n{end}", ensure_ascii=False) for value in values)
        return f"{_quoted(begin)} ({inner})", None
    if not types or "string" in types:
        unknown = schema.keys() - _WORDS - (_BOUNDS if types == {"string"} else set())
        if unknown or types - {"string", "null"}:
            raise SchemaError(at, f"cannot be forced in {_FORM}: a text that may be a string or something else")
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        length = f".{{{least},{most}}}" if (least, most) != (0, "") else ".*"
        return _quoted(begin), f"/\\n(?s:{length})\\n/"
    defined = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
    return f"{_quoted(begin + chr(10))} {schema_rule({**schema, **defined})} {_quoted(chr(10) + end)}", None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that the reader of tags finds in a schema."""
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else {one for one in declared or () if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            found |= _types(one) if isinstance(one, Mapping) else set()
    return found


def _written(value: Any, types: set[str], at: str) -> str:
    """Return a constant as it is read back. Raises SchemaError if it would be read as something else."""
    if isinstance(value, str):
        if types - {"string"} or "</parameter>" in value:
            raise SchemaError(at, f"has a string that cannot be written in {_FORM}")
        return value
    if not types - {"string"}:
        raise SchemaError(at, f"has values without a type, which {_FORM} needs")
    return json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
