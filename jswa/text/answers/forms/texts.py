"""Texts and words of calls in JSON."""

import json
import re

HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which no text in UTF-8 has
NUMBER = re.compile(r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?")  # in JSON
# In JSON; "true", "false" and "null" as models write them, who have read more JSON than Python.
CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|(.))", re.DOTALL)
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


def json_string(text: str) -> str:
    """Return a text in JSON. Halves of surrogate pairs stay escaped."""
    return HALVES.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(text, ensure_ascii=False))


def unescaped(text: str) -> str:
    """Return the inside of a string of Python or of JSON. Raises ValueError for a character that does not exist."""
    if "\\" not in text:
        return text
    whole = _ESCAPE.sub(_unescaped, text)
    return _PAIR.sub(lambda found: found.group().encode("utf-16", "surrogatepass").decode("utf-16"), whole)


def _unescaped(found: re.Match[str]) -> str:
    octal, two, four, eight, other = found.groups()
    if octal is not None:
        return chr(int(octal, 8))
    if (code := two or four or eight) is not None:
        if int(code, 16) > 0x10FFFF:
            raise ValueError(f"no character has the number {code}")
        return chr(int(code, 16))
    return _CONTROLS.get(other, other if other in "\\'\"/" else "\\" + other)
