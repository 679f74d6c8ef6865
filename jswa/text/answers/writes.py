"""How the models of a family write answers, for text that is made to be one: the reverse of reading them.

A response template may say so under `writes`. In its texts `{space}` stands for up to two blanks or line ends, and in
that of a call `{name}`, `{arguments}` and `{number}` for the function's name, its arguments and any digits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a field for reasoning
Values = Literal["json", "python", "xml", "bare"]


@dataclass(frozen=True)
class Region:
    """The texts before and behind a part of an answer. `repeats`: several such parts may follow each other."""

    begin: str = ""
    end: str = ""
    repeats: bool = False


@dataclass(frozen=True)
class CallText:
    """The text of calls.

    Attributes:
        text: of one call.
        begin, between, end: stand around all calls of an answer, and between two of them.
        values: how arguments are written: "json" is JSON, "python" keywords of a Python call, "xml" a tag for each
            argument, "bare" JSON whose keys have no quotes and whose strings stand between two `quote`s.
        key, end_tag, after: stand before and after the value of an argument of "xml"; `wrap` is at both its ends.
        single: an answer has one call at most.
    """

    text: str
    begin: str = ""
    between: str = ""
    end: str = ""
    values: Values = "json"
    quote: str = '"'
    key: str = "<parameter={key}>"
    wrap: str = "\n"
    end_tag: str = "</parameter>"
    after: str = "\n"
    single: bool = False


@dataclass(frozen=True)
class Writes:
    """The parts of an answer.

    Attributes:
        reasoning: None if the family does not reason.
        preamble: content before a call, if it does not look like other content.
        content: what the user reads.
        calls: None if calls cannot be forced.
    """

    reasoning: Region | None
    preamble: Region | None
    content: Region
    calls: CallText | None


def read_writes(spec: Mapping[str, Any]) -> Writes:
    """Return what a response template says under `writes`, or what its delimiters tell. Raises ValueError or TypeError.

    Delimiters tell it if they are texts and not patterns, and calls are JSON objects.
    """
    said = spec.get("writes")
    if said is None:
        return _told(spec.get("fields") or {})
    if not isinstance(said, Mapping):
        raise TypeError(f"writes must be an object, not {type(said).__name__}")
    reasoning, preamble, content = (_region(said, name) for name in ("reasoning", "preamble", "content"))
    calls = CallText(**said["calls"]) if "calls" in said else None
    if calls is not None and ("{arguments}" not in calls.text or calls.values not in get_args(Values)):
        raise ValueError("writes.calls must have a text with {arguments}, and values " + ", ".join(get_args(Values)))
    if unknown := said.keys() - {"reasoning", "preamble", "content", "calls"}:
        raise ValueError(f"writes has an unknown key {min(unknown)!r}")
    return Writes(reasoning, preamble, content or Region(), calls)


def _told(fields: Mapping[str, Any]) -> Writes:
    """Return how answers are written, as far as the delimiters of a response template tell."""
    thoughts = next((fields[name] for name in REASONING if name in fields), None)
    content, calls = fields.get("content") or {}, fields.get("tool_calls") or {}
    reasoning = None
    if thoughts is not None and isinstance(thoughts.get("open"), str) and isinstance(thoughts.get("close"), str):
        reasoning = Region(thoughts["open"], thoughts["close"])
    begin = content.get("open", "")
    function = (calls.get("transform") or {}).get("function")
    text = None
    if isinstance(calls.get("open"), str) and calls.get("content") == "json":
        end = calls["close"] if isinstance(calls.get("close"), str) else ""
        if function == "{content}":
            text = calls["open"] + '{"name": "{name}", "arguments": {arguments}}' + end
    return Writes(
        reasoning, None, Region(begin if isinstance(begin, str) else ""), None if text is None else CallText(text)
    )


def _region(said: Mapping[str, Any], name: str) -> Region | None:
    return Region(**said[name]) if name in said else None
