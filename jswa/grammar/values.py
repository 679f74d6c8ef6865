"""Arguments of calls that are not written as JSON: rules in Lark, made from a JSON Schema.

Numbers, and strings where they are JSON strings, are left to llguidance. What the rules cannot express is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jswa.grammar.schema import Schema, SchemaError, escape, resolved
from jswa.grammar.tags import tag
from jswa.grammar.texts import literal, schema_rule
from jswa.text.answers.forms.dialect import KEY
from jswa.text.answers.forms.pythonic import KEYWORD
from jswa.text.answers.writes import CallText

_WORDS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "$defs",
          "definitions", "readOnly", "writeOnly", "strict"}  # fmt: skip
_BASES = {"type", "enum", "const", "$ref", "anyOf", "nullable"}
_OBJECT = {"properties", "required", "additionalProperties"}
_ARRAY = {"items", "minItems", "maxItems"}
_TEXT = {"minLength", "maxLength"}
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_PLAIN = "[^\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f]"  # a character of a string between quotes that are tokens
_FORM = "the model's form of calls"
_NAMES = {"python": ("True", "False", "None")}


class Rules:
    """The rules of one grammar for arguments in one form; `lines` are those so far.

    Args:
        form: how the calls are written.
        special: ids of the special tokens by their text.
    """

    def __init__(self, form: CallText, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self._form = form
        self._special = special
        self._names: dict[tuple[int, str], str] = {}
        self._roots: list[Schema] = []

    def arguments(self, schema: Schema) -> str:
        """Return the name of the rule of a call's arguments. Raises SchemaError."""
        try:
            return self._arguments(schema)
        except RecursionError as error:
            raise SchemaError("", "is nested too deeply") from error

    def _arguments(self, schema: Schema) -> str:
        self._roots.append(schema)
        at = ""
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            at = schema["$ref"][1:]
            schema = resolved(self._roots[-1], at, schema["$ref"])
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise SchemaError(at, "must be the schema of an object")
        _check_keys(schema, at, _OBJECT)
        if self._form.values == "bare":
            return self._rule(at, schema)
        return self._named((len(self._roots), "arguments"), lambda: self._members(schema, at, top=True))

    def _rule(self, at: str, schema: Schema) -> str:
        return self._named((len(self._roots), at), lambda: self._value(schema, at))

    def _named(self, key: tuple[int, str], make: Any) -> str:
        if key not in self._names:
            self._names[key] = name = f"v{len(self._names)}"
            self.lines.append(f"{name}: {make()}")
        return self._names[key]

    def _value(self, schema: Schema, at: str) -> str:
        """Return the rule of a value."""
        if not isinstance(schema, Mapping | bool):
            raise SchemaError(at, "must be a schema")
        if schema is False:
            raise SchemaError(at, "allows no value")
        if schema is True or not schema.keys() - _WORDS:
            return self._any()
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return " | ".join(
                self._constant(value, f"{at}/{'enum' if 'enum' in schema else 'const'}") for value in values
            )
        if isinstance(schema.get("$ref"), str):
            _check_keys(schema, at, set())
            reference = schema["$ref"]
            return self._rule(reference[1:], resolved(self._roots[-1], at, reference))
        if "anyOf" in schema:
            _check_keys({k: v for k, v in schema.items() if k != "type"}, at, set())
            return " | ".join(self._rule(f"{at}/anyOf/{i}", one) for i, one in enumerate(schema["anyOf"]))
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return " | ".join(self._kind({**schema, "type": kind}, at, str(kind), strict=False) for kind in kinds)
        return self._kind(schema, at, str(kinds), strict=True)

    def _kind(self, schema: Mapping[str, Any], at: str, kind: str, *, strict: bool) -> str:
        """Return the rule of values of one type. `strict`: keys that other types have are refused."""
        every = _OBJECT | _ARRAY | _TEXT | _NUMBER
        true, false, none = _NAMES.get(self._form.values, ("true", "false", "null"))
        known = {"object": _OBJECT, "array": _ARRAY, "string": _TEXT, "integer": _NUMBER, "number": _NUMBER}
        more = {"pattern", "format"} if self._form.values == "python" and kind == "string" else set()
        _check_keys(schema, at, (known.get(kind, set()) if strict else every) | more)
        if kind == "object":
            return f'"{{" {self._members(schema, at)} "}}"'
        if kind == "array":
            return self._array(schema, at)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            kept = {key: value for key, value in schema.items() if key in _NUMBER or key == "type"}
            return schema_rule(kept)
        if kind == "boolean":
            return f'"{true}" | "{false}"'
        if kind == "null":
            return f'"{none}"'
        raise SchemaError(f"{at}/type", f"{kind[:40]!r} cannot be written in the model's form of calls")

    def _string(self, schema: Mapping[str, Any]) -> str:
        if self._form.values == "python":
            kept = {key: value for key, value in schema.items() if key not in _WORDS}
            return schema_rule({**kept, "type": "string"})
        quote = literal(self._form.quote, self._special)
        return f"{quote} /{_PLAIN}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/ {quote}"

    def _array(self, schema: Mapping[str, Any], at: str) -> str:
        item = self._rule(f"{at}/items", schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        further = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        inner = f"{item} ({self._comma} {item}){further}"
        return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'

    @property
    def _comma(self) -> str:
        return '","' if self._form.values == "bare" else '", "'

    def _members(self, schema: Mapping[str, Any], at: str, *, top: bool = False) -> str:
        """Return the rule of an object's members between its brackets, or of a call's arguments."""
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties") is not False and not top:
            return self._any_members()
        required = schema.get("required") or []
        if missing := [name for name in required if name not in properties]:
            raise SchemaError(f"{at}/required", f"{missing[0]!r} is not one of the properties")
        pairs = [
            (self._pair(name, f"{at}/properties/{escape(name)}", one, top=top), name in required)
            for name, one in properties.items()
        ]
        if self._form.values == "xml" and top:
            return " ".join(pair if needed else f"({pair})?" for pair, needed in pairs) or '""'
        return self._joined(pairs)

    def _joined(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return the rule of pairs in this order, of which some may be left out, with commas between them."""
        behind, first = '""', '""'  # what may follow a pair, and what may follow none
        for pair, needed in reversed(pairs):
            begin = f"{pair} {behind}"
            first = begin if needed else f"{begin} | {first}"
            behind = self._new(f"{self._comma} {begin}" if needed else f"{self._comma} {begin} | {behind}")
            first = self._new(first)
        return first

    def _new(self, rule: str, *, options: str = "") -> str:
        self._names[len(self._roots), f"new {len(self._names)}"] = name = f"v{len(self._names)}"
        self.lines.append(f"{name}{options}: {rule}")
        return name

    def _pair(self, name: str, at: str, schema: Schema, *, top: bool) -> str:
        form = self._form.values
        if form == "xml" and top:
            written = tag(name, schema, self._roots[-1], at, self._form, self._special)
            after = f" {literal(self._form.after, {})}" if self._form.after else ""
            if not written.free:
                return f"{written.begin} {written.value} {written.end}{after}"
            if self._form.end_tag in self._special:
                return f"{written.begin} {self._new(written.value)} {written.end}{after}"
            ended = self._new(written.value, options=f"[suffix={json.dumps(self._form.end_tag)}]")
            return f"{written.begin} {ended}{after}"
        value = self._rule(at, schema)
        if form == "bare":
            return f"{literal(self._key(name) + ':', self._special)} {value}"
        if form == "python" and top:
            if not KEYWORD.fullmatch(name) or name != name.strip():
                raise SchemaError(at, f"has a name that cannot be written in {_FORM}")
            return f"{literal(name + '=', self._special)} {value}"
        return f"{literal(f'{json.dumps(name, ensure_ascii=False)}: ', self._special)} {value}"

    def _key(self, name: str) -> str:
        """Return a key without quotes, unless its reader needs them."""
        bare = KEY.fullmatch(name) and name == name.strip() and self._form.quote not in name
        return name if bare else json.dumps(name, ensure_ascii=False)

    def _constant(self, value: Any, at: str) -> str:
        """Return the rule of one value."""
        if self._form.values == "bare" and self._form.quote in json.dumps(value, ensure_ascii=False).replace(
            '\\"', '"'
        ):
            raise SchemaError(at, f"has a string with {self._form.quote}, which cannot be written in {_FORM}")
        return literal("".join(self._written(value)), self._special if self._form.values == "bare" else {})

    def _written(self, value: Any) -> Iterator[str]:
        form, words = self._form, _NAMES.get(self._form.values, ("true", "false", "null"))
        if isinstance(value, str):
            yield f"{form.quote}{value}{form.quote}" if form.values == "bare" else json.dumps(value, ensure_ascii=False)
        elif isinstance(value, bool) or value is None:
            yield words[2 if value is None else 0 if value else 1]
        elif isinstance(value, list):
            yield "[" + self._separator.join("".join(self._written(one)) for one in value) + "]"
        elif isinstance(value, dict):
            colon = ":" if form.values == "bare" else ": "
            keys = (self._key(key) if form.values == "bare" else json.dumps(key, ensure_ascii=False) for key in value)
            inner = (
                f"{key}{colon}{''.join(self._written(one))}" for key, one in zip(keys, value.values(), strict=True)
            )
            yield "{" + self._separator.join(inner) + "}"
        else:
            yield json.dumps(value)

    @property
    def _separator(self) -> str:
        return self._comma[1:-1]

    def _any(self) -> str:
        """Return the rule of any value."""

        def made() -> str:
            kinds = ({"type": kind} for kind in ("string", "number", "boolean", "null"))
            simple = (self._kind(one, "", one["type"], strict=True) for one in kinds)
            items = f'"[" (any ({self._comma} any)*)? "]"'
            return " | ".join([*simple, items, f'"{{" {self._any_members()} "}}"'])

        if (0, "any") not in self._names:
            self._names[0, "any"] = "any"
            self.lines.append(f"any: {made()}")
        return "any"

    def _any_members(self) -> str:
        key = '/[A-Za-z_][A-Za-z0-9_]*/ ":"'
        if self._form.values != "bare":
            key = f"{schema_rule({'type': 'string'})} {json.dumps(': ')}"
        self._any()
        return f"({key} any ({self._comma} {key} any)*)?"


def _check_keys(schema: Mapping[str, Any], at: str, known: set[str]) -> None:
    unknown = schema.keys() - known - _WORDS - _BASES
    if unknown:
        key = min(unknown)
        raise SchemaError(f"{at}/{escape(key)}", f"cannot be forced in {_FORM}")
