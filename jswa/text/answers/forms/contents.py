"""The value of a region that is read at its end, by what a response template says of its content.

Each kind of content is read in a time proportional to its length.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jswa.text.patterns.automaton import Automaton
from jswa.text.patterns.search import matches
from jswa.text.patterns.syntax import parse

from .dialect import Dialect

ValueOf = Callable[[str], Any]  # raises ValueError, or RecursionError for what is nested too deeply
_MOST_NESTED = 8
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


def field_reader(field: Mapping[str, Any]) -> Callable[[str, Mapping[str, str]], Any]:
    """Return the function that reads the text of a template's field, with what named groups have found.

    Raises ValueError or TypeError if what the field says of its content is wrong.
    """
    value_of = value_reader(field.get("content", "text"), field.get("content_args", {}))
    transform, each = field.get("transform"), field.get("transform_each")

    def read(text: str, captures: Mapping[str, str]) -> Any:
        value = value_of(text)
        if transform is None:
            return value
        if not each:
            return transformed(transform, {**captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise ValueError("the content is no list of objects")
        return [transformed(transform, {**captures, **one}) for one in value]

    return read


def value_reader(kind: str, arguments: Mapping[str, Any], depth: int = 0) -> ValueOf:
    """Return the function that reads content of a kind. Raises ValueError or TypeError for wrong arguments."""
    if depth > _MOST_NESTED:
        raise ValueError(f"value_parser must be nested at most {_MOST_NESTED} times")
    inner: ValueOf = str
    if (said := arguments.get("value_parser")) is not None:
        inner = value_reader(said.get("name", "text"), said.get("args", {}), depth + 1)
    strip: ValueOf = str.strip if arguments.get("strip", True) else str
    if kind == "json":
        delimiters = dict(arguments.get("string_delims", ()))
        return _json_reader(delimiters, strip, bare_keys=bool(arguments.get("unquoted_keys")))
    if kind == "xml-inline":
        return _tag_reader(arguments["tag_pattern"], inner, merges=bool(arguments.get("merge_duplicates")))
    if kind == "kv-lines":
        return _line_reader(arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":"), strip, inner)
    plain: Mapping[str, ValueOf] = {"text": str, "int": int, "float": float, "bool": _truth}
    if kind not in plain:
        raise ValueError(f"no content is of the kind {kind!r}")
    return lambda text: plain[kind](strip(text))


def transformed(form: Any, names: Mapping[str, Any]) -> Any:
    """Return what a template's `transform` makes of named values. Raises ValueError if it names others."""
    if isinstance(form, Mapping):
        return {key: transformed(one, names) for key, one in form.items()}
    if isinstance(form, list):
        return [transformed(one, names) for one in form]
    found = _PLACEHOLDER.fullmatch(form) if isinstance(form, str) else None
    if found is None:
        return form
    value: Any = names
    for key in found[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{form} names no value")
        value = value[key]
    return value


def _truth(text: str) -> bool:
    return text.lower() in ("true", "1")


def _json_reader(delimiters: Mapping[str, str], strip: ValueOf, *, bare_keys: bool) -> ValueOf:
    if not all(isinstance(one, str) and one for pair in delimiters.items() for one in pair):
        raise ValueError("string_delims must be pairs of texts that are not empty")
    dialect = Dialect(delimiters)

    def read(text: str) -> Any:
        try:
            return json.loads(dialect.value(text) if delimiters or bare_keys else text)
        except (ValueError, RecursionError):
            return strip(text)  # what is not JSON is text

    return read


def _tag_reader(pattern: str, inner: ValueOf, *, merges: bool) -> ValueOf:
    automaton = Automaton([parse(pattern)])

    def read(text: str) -> Any:
        found: dict[str, list[Any]] = {}
        for match in matches(automaton, text):
            if "key" not in match.names:
                raise ValueError("a tag has no key")
            found.setdefault(match.names["key"], []).append(inner(match.names.get("value", "")))
        return {key: values if merges and len(values) > 1 else values[-1] for key, values in found.items()}

    return read


def _line_reader(line_end: str, colon: str, strip: ValueOf, inner: ValueOf) -> ValueOf:
    if not all(isinstance(one, str) and one for one in (line_end, colon)):
        raise ValueError("line_sep and kv_sep must be texts, and not empty")

    def read(text: str) -> Any:
        pairs = [line.split(colon, 1) for line in text.split(line_end) if strip(line) and colon in line]
        return {strip(key): inner(strip(value)) for key, value in pairs}

    return read
