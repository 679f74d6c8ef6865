"""Read Python calls, in one pass and without Python's own parser, whose time and depth have no bound to rely on."""

import json
import re

from .texts import CONSTANTS, NUMBER, json_string, unescaped

_SPACE = re.compile(r"(?:\s|#[^\n]*)*+")
_NAME = re.compile(r"[^\W\d][\w-]*+(?:\.[\w-]++)*+")  # of a function; names of tools may have hyphens
KEYWORD = re.compile(r"[^=(),\"'\[\]{}\n#]++")  # names of parameters may be almost any text
_WORD = re.compile(r"\w++")
_NUMBER = re.compile(
    r"0[xX][\da-fA-F_]++|0[bB][01_]++|0[oO][0-7_]++|(?:\d[\d_]*+\.?+[\d_]*+|\.\d[\d_]*+)(?:[eE][+-]?\d++)?+"
)
_STRING = re.compile(
    r"([rRuU]?)(?:'''((?:[^'\\]|\\.|'(?!''))*+)'''|\"\"\"((?:[^\"\\]|\\.|\"(?!\"\"))*+)\"\"\""
    r"|'((?:[^'\\]|\\.)*+)'|\"((?:[^\"\\]|\\.)*+)\")",
    re.DOTALL,
)
_MOST_NESTED = 100
_CLOSING = {"[": "]", "(": ")"}


class _NoCallError(ValueError):
    """The text is no list of calls."""


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the names of Python calls, and their arguments in JSON; None if the text is anything else.

    Calls stand in a line each, or in a list or tuple. Numbers stay as they are written, where JSON has that form.
    Strings may have line ends, and parameters any names: models write both.
    """
    try:
        return _Reading(text).calls() or None
    except ValueError:  # also an integer of more digits than Python reads
        return None


class _Reading:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._comma = False  # a comma stood before the last end of a list
        self._skip_space()

    def calls(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        while self._at < len(self._text):
            if (bracket := self._next()) in _CLOSING:
                self._at += 1
                found += self._items(_CLOSING[bracket])
            else:
                found.append(self._call())
            end = self._at
            self._skip_space()
            between = self._text[end : self._at]
            if "\n" not in between and not (self._taken(",") or self._taken(";") or self._at == len(self._text)):
                raise _NoCallError
            self._skip_space()
        return found

    def _items(self, closing: str) -> list[tuple[str, str]]:
        """Read the calls of a list up to its end."""
        found: list[tuple[str, str]] = []
        while not self._closed(closing, first=not found):
            found.append(self._call())
        return found

    def _call(self) -> tuple[str, str]:
        name = self._match(_NAME)
        self._take("(")
        arguments: dict[str, str] = {}
        while not self._closed(")", first=not arguments):
            if self._taken("**"):  # how names are written that no keyword can be
                self._take("{")
                for key, value in zip(*self._pairs(0), strict=True):
                    self._argue(arguments, key, value)
            else:
                key = json_string(self._match(KEYWORD).strip())
                self._take("=")
                self._argue(arguments, key, self._value(0))
        return name, _object(list(arguments), list(arguments.values()))

    def _argue(self, arguments: dict[str, str], key: str, value: str) -> None:
        """Add an argument, both in JSON."""
        if key in arguments:
            raise _NoCallError
        arguments[key] = value

    def _value(self, depth: int) -> str:
        """Read a value, and return it in JSON."""
        if depth > _MOST_NESTED:
            raise _NoCallError
        self._skip_space()
        following = self._next()
        if following in _CLOSING:
            return self._list(_CLOSING[following], depth)
        if following == "{":
            return self._dict(depth)
        if following in ("+", "-"):
            self._at += 1
            return following.strip("+") + self._number()
        if _STRING.match(self._text, self._at):
            return json_string(self._strings())
        if following.isdigit() or following == ".":
            return self._number()
        name = self._match(_WORD)
        if name not in CONSTANTS:
            raise _NoCallError
        return CONSTANTS[name]

    def _list(self, closing: str, depth: int) -> str:
        """Read a list or tuple, or a value in parentheses."""
        self._at += 1
        items: list[str] = []
        while not self._closed(closing, first=not items):
            items.append(self._value(depth + 1))
        return items[0] if closing == ")" and len(items) == 1 and not self._comma else f"[{', '.join(items)}]"

    def _dict(self, depth: int) -> str:
        self._at += 1
        return _object(*self._pairs(depth))

    def _pairs(self, depth: int) -> tuple[list[str], list[str]]:
        """Read the keys and the values of an object up to its end."""
        keys: list[str] = []
        values: list[str] = []
        while not self._closed("}", first=not keys):
            key = self._value(depth + 1)
            if key[0] in "[{":
                raise _NoCallError
            keys.append(key if key[0] == '"' else json.dumps(key))
            self._take(":")
            values.append(self._value(depth + 1))
        return keys, values

    def _number(self) -> str:
        written = self._match(_NUMBER)
        if NUMBER.fullmatch(written):
            return written
        try:
            return str(int(written, 0))
        except ValueError:
            return json.dumps(float(written), allow_nan=False)

    def _strings(self) -> str:
        """Read a string, and those that follow it: Python joins them."""
        parts = []
        while found := _STRING.match(self._text, self._at):
            written = next(text for text in found.groups()[1:] if text is not None)
            parts.append(written if found[1] in ("r", "R") or "\\" not in written else unescaped(written))
            self._at = found.end()
            self._skip_space()
        return "".join(parts)

    def _closed(self, closing: str, *, first: bool) -> bool:
        """Read what stands between two members, or the end; return whether it is the end."""
        self._comma = not first and self._taken(",")
        if self._taken(closing):
            return True
        if not (first or self._comma):
            raise _NoCallError
        return False

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _taken(self, text: str) -> bool:
        self._skip_space()
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _take(self, text: str) -> None:
        if not self._taken(text):
            raise _NoCallError

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip_space()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise _NoCallError
        self._at = found.end()
        return found.group()

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()


def _object(keys: list[str], values: list[str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True)) + "}"
