"""The tools that a model may call: their parameters, and the types of arguments that are written as texts."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .dialect import Dialect, NoValueError
from .texts import NUMBER, json_string

_MOST_SCHEMAS = 100  # that are looked at for one argument's types
_PLAIN = Dialect({})


class Casts:
    """The types of the arguments of some tools, in OpenAI's form.

    Attributes:
        parameters: the schema of each tool's arguments, by its name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.parameters: dict[Any, Any] = {}
        for tool in tools:
            function = tool.get("function") or tool
            self.parameters[function.get("name")] = function.get("parameters")
        self._types: dict[tuple[str, str], list[str]] = {}

    def keys(self, name: str) -> Mapping[str, Any]:
        """Return the parameters of a tool, by their names; none of a tool that is not known."""
        root = self.parameters.get(name)
        properties = root.get("properties") if isinstance(root, dict) else None
        return properties if isinstance(properties, dict) else {}

    def written(self, name: str, key: str, text: str, cut: bool) -> str:
        """Return an argument that is written as text in JSON, in the first type of its parameter that it can have.

        Args:
            cut: the text may be the begin of the argument, and so is the JSON.
        """
        types = self._types_of(name, key)
        if not cut:
            return next((found for kind in types if (found := _json(text, kind)) is not None), json_string(text))
        return json_string(text)[:-1] if not types or "string" in types else text

    def cast(self, value: Any) -> Any:
        """Return calls, or what is none, with the arguments of each call in their types, as far as they can be."""
        if isinstance(value, list):
            return [self.cast(one) for one in value]
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict):
            return value
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return value
        typed = {key: self._argument(argument, self._types_of(name, key)) for key, argument in arguments.items()}
        return {**value, "function": {**function, "arguments": typed}}

    def _argument(self, value: Any, types: list[str]) -> Any:
        if isinstance(value, str):
            return _cast(value, types)
        if isinstance(value, list) and "array" not in types:  # a tag that came several times
            return [_cast(one, types) if isinstance(one, str) else one for one in value]
        return value

    def _types_of(self, name: str, key: str) -> list[str]:
        types = self._types.get((name, key))
        if types is None:
            properties = self.keys(name)
            if key not in properties:
                return []
            types = self._types[name, key] = _types(properties[key], self.parameters[name])
        return types


def _types(schema: Any, root: Any) -> list[str]:
    """Return the types that a schema allows, in its order, following references."""
    types: list[str] = []
    left = [schema]
    for _ in range(_MOST_SCHEMAS):
        if not left:
            break
        one = _followed(left.pop(), root)
        if not isinstance(one, dict):
            continue
        said = one.get("type")
        types += [name for name in (said if isinstance(said, list) else [said]) if isinstance(name, str)]
        unions = [one.get(union) for union in ("anyOf", "oneOf")]
        choices = [choice for union in unions if isinstance(union, list) for choice in union]
        if one.get("nullable"):
            choices.append({"type": "null"})
        left += reversed(choices)
    return list(dict.fromkeys(types))


def _followed(schema: Any, root: Any) -> Any:
    """Return the schema that a reference leads to, or one that is no reference; of a circle, a part of it."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not (isinstance(reference, str) and reference.startswith("#/")):
            break
        found = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        schema = found
    return schema


def _cast(text: str, types: list[str]) -> Any:
    """Return a text in the first of the types that it can have; a text that can have none stays as it is."""
    for kind in types:
        try:
            match kind:
                case "integer" | "number":
                    return _number(text, whole=kind == "integer")
                case "boolean" if (word := text.strip().lower()) in ("true", "1", "false", "0"):
                    return word in ("true", "1")
                case "null" if text.strip() in ("null", "None"):
                    return None
                case "object" | "array":
                    value = json.loads(text)
                    if isinstance(value, dict if kind == "object" else list):
                        return value
        except (ValueError, RecursionError):
            continue
    return text


def _json(text: str, kind: str) -> str | None:
    """Return a text in JSON as a value of a type; None if it has none."""
    plain = text.strip()
    try:
        match kind:
            case "integer" | "number":
                exact = NUMBER.fullmatch(plain) and (kind == "number" or not set(plain) & set(".eE"))
                return plain if exact else json.dumps(_number(plain, whole=kind == "integer"))
            case "boolean" if plain.lower() in ("true", "1", "false", "0"):
                return "true" if plain.lower() in ("true", "1") else "false"
            case "null" if plain in ("null", "None"):
                return "null"
            case "object" | "array" if plain[:1] == ("{" if kind == "object" else "["):
                return _structure(plain)
    except (ValueError, RecursionError):
        pass
    return None


def _structure(text: str) -> str:
    """Return an object or a list in JSON: as it is, if it is JSON, or what it is in Python. Raises ValueError."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (NoValueError, RecursionError):
        raise
    except ValueError:
        return _PLAIN.value(text)
    return text


def _no_constant(name: str) -> None:
    raise NoValueError(f"{name} is no value in JSON")


def _number(text: str, *, whole: bool) -> int | float:
    """Return a number; `whole`: it must be an integer. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not math.isfinite(value) or (whole and not value.is_integer()):
        raise ValueError
    return int(value) if whole or (value.is_integer() and "." not in text) else value
