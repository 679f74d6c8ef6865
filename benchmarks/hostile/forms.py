"""Forms that no server has seen before: schemas, Lark grammars and regular expressions, each made from a number.

Forms of different numbers have different names, so that a server compiles each of them. The hostile kinds ask for about
as much work as the limits of docs/structured-outputs.md allow; `over` asks for a little more, and is refused by
arithmetic.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
INTEGER: Schema = {"type": "integer"}


def numbers() -> Iterator[int]:
    """Yield numbers that no earlier run on this machine has had: microseconds since 1970, counted up."""
    return itertools.count(time.time_ns() // 1_000)


def record(names: str, properties: list[Schema], *, required: bool) -> Schema:
    """Return the schema of an object that has these properties, named NAMES_0, NAMES_1, and so on, and no others."""
    named = {f"{names}_{place}": schema for place, schema in enumerate(properties)}
    return {
        "type": "object", "properties": named, "required": list(named) if required else [],
        "additionalProperties": False,
    }  # fmt: skip


def optional(number: int, count: int = 970) -> Schema:
    """Return an object of optional integers. Each is four of the 3,900 places where a text may go on at once."""
    return record(f"p{number:x}", [INTEGER] * count, required=False)


def over(number: int) -> Schema:
    """Return an object of optional integers that has more places than are allowed."""
    return optional(number, 1_000)


def required(number: int) -> Schema:
    """Return an object of 2,000 required integers."""
    return record(f"p{number:x}", [INTEGER] * 2_000, required=True)


def patterns(number: int) -> Schema:
    """Return an object of 200 strings whose patterns have automata of up to some thousand states."""
    texts: list[Schema] = [
        {"type": "string", "pattern": f"^(a|b)*a{number:x}(a|b){{{place % 12}}}$"} for place in range(200)
    ]
    return record(f"p{number:x}", texts, required=True)


def union(number: int) -> Schema:
    """Return a value that is one of 190 objects, each of four optional integers."""
    return {"anyOf": [record(f"p{number:x}_{place}", [INTEGER] * 4, required=False) for place in range(190)]}


def mixed(number: int) -> Schema:
    """Return one of the other hostile kinds, by turns."""
    makers = [make for name, make in KINDS.items() if name != "mixed"]
    return makers[number % len(makers)](number)


def ordinary(number: int) -> Schema:
    """Return a schema as programs send it: 30 properties; strings, integers, enums, objects and arrays."""
    text: Schema = {"type": "string", "maxLength": 80}
    choice = {"enum": ["low", "medium", "high", f"other {number:x}"]}
    inner = record("field", [text, {"type": "integer", "minimum": 0}, choice], required=True)
    several: Schema = {"type": "array", "items": INTEGER, "maxItems": 5}
    objects: Schema = {"type": "array", "items": inner, "maxItems": 3}
    return record(f"p{number:x}", [text, INTEGER, choice, inner, several, objects] * 5, required=True)


KINDS: dict[str, Callable[[int], Schema]] = {
    "optional": optional, "over": over, "patterns": patterns, "required": required, "union": union, "mixed": mixed,
}  # fmt: skip


def lark(number: int) -> str:
    """Return an ambiguous Lark grammar."""
    return f'start: e\ne: e e e | e e | "a" | "b{number:x}" | ""'


def regex(number: int) -> str:
    """Return a regular expression whose automaton grows with the text."""
    return f".*a{number:x}.{{500}}"


def completion(number: int, form: dict[str, Any] | None = None, **more: Any) -> bytes:
    """Return the body of a completion of up to 16 tokens, which is held to a form of `structured_outputs`."""
    body: dict[str, Any] = {"prompt": f"{number} cats and a dog", "max_tokens": 16, **more}
    return json.dumps(body if form is None else {**body, "structured_outputs": form}).encode()


def tools_chat(number: int) -> bytes:
    """Return the body of a chat that must call a tool whose arguments have an ordinary schema."""
    function = {"name": f"tool_{number:x}", "parameters": ordinary(number)}
    return json.dumps(
        {
            "messages": [{"role": "user", "content": "Please call the tool."}], "max_tokens": 16,
            "tools": [{"type": "function", "function": function}], "tool_choice": "required",
        }
    ).encode()  # fmt: skip
