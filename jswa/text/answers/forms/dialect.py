"""Read JSON as models write it: bare keys and texts, tokens for quotes, words and quotes of Python, a missing comma.

    {user-id:<|"|>u<|"|>, tags=['a', True] n:1.50}   →   {"user-id": "u", "tags": ["a", true], "n": 1.50}

What is written stays as it is: the order of keys, each key that came twice, the digits of numbers. The time is
proportional to the text's length.
"""

import re
from collections.abc import Iterable, Mapping

from jswa.text.assembler import MARK

from .texts import CONSTANTS, NUMBER, json_string, unescaped

_MOST_NESTED = 100
_SPACE = re.compile(r"\s*+")
_COMMAS = re.compile(r"[\s,]*+")
KEY = re.compile(r"[^:={},\[\]\"']*+")  # a key that needs no quotes
_KEY = re.compile(rf"({KEY.pattern})[:=]")
_COLON = re.compile(r"\s*+[:=]")
# A quote inside of a string ends it only before what may follow a string.
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_SINGLE = re.compile(r"'((?:[^'\\]|\\.|'(?!\s*+(?:[,}\]:=]|\Z)))*+)'", re.DOTALL)


class NoValueError(ValueError):
    """The text is no value of the dialect."""


class _CutError(Exception):
    """The text ends inside of a value."""


class Dialect:
    """A dialect of JSON: its quotes besides those of JSON and Python, each with the one that ends its string."""

    def __init__(self, quotes: Mapping[str, str]) -> None:
        self.quotes = quotes
        begins = "|".join(map(re.escape, sorted(quotes, key=len, reverse=True)))
        self.begins = re.compile(begins or r"(?!)")
        self.bare = re.compile(rf"(?:(?!{begins})[^,{{}}\[\]])++" if begins else r"[^,{}\[\]]++", re.DOTALL)

    def value(self, text: str) -> str:
        """Return a value, which the whole text is, in JSON. Raises NoValueError."""
        reading = _Reading(self, text, closed=True, names=())
        reading.value(0)
        if reading.rest().strip():
            raise NoValueError
        return "".join(reading.written)

    def object(self, text: str, names: Iterable[str] = (), *, closed: bool = True) -> tuple[str, str]:
        """Return the object that a text begins with, in JSON, and the text behind it. Raises NoValueError.

        Args:
            names: keys of the object that may hold characters that end a bare key.
            closed: the text is whole; else it was cut, and so may be the object.
        """
        reading = _Reading(self, text, closed=closed, names=tuple(names))
        if not text.lstrip().startswith("{"):
            raise NoValueError
        try:
            reading.value(0)
        except _CutError:
            return "".join(reading.written), ""
        return "".join(reading.written), reading.rest()


class _Reading:
    """One reading; `written` is the JSON so far."""

    def __init__(self, dialect: Dialect, text: str, *, closed: bool, names: tuple[str, ...]) -> None:
        self.written: list[str] = []
        self._dialect = dialect
        self._text = text
        self._at = 0
        self._closed = closed
        self._names = sorted(names, key=len, reverse=True)

    def rest(self) -> str:
        return self._text[self._at :]

    def value(self, depth: int) -> None:
        if depth > _MOST_NESTED:
            raise NoValueError
        self._skip(_SPACE)
        following = self._text[self._at : self._at + 1]
        if not following:
            raise NoValueError if self._closed else _CutError
        if following in "{[":
            self._at += 1
            self._members(depth, following)
        elif not self._string():
            self._bare()

    def _members(self, depth: int, opening: str) -> None:
        """Read an object or a list up to its end."""
        closing = "}" if opening == "{" else "]"
        self.written.append(opening)
        first = True
        while True:
            self._skip(_COMMAS)
            following = self._text[self._at : self._at + 1]
            if not following and not self._closed:
                raise _CutError
            if following in ("", closing):  # what ends the whole text ends all that is open
                self._at += len(following)
                self.written.append(closing)
                return
            if not first:
                self.written.append(", ")
            if opening == "{":
                self._key(depth)
            self.value(depth + 1)
            first = False

    def _key(self, depth: int) -> None:
        if self._string():
            colon = _COLON.match(self._text, self._at)
            if colon is None:
                if self._closed or self._text[self._at :].strip():
                    raise NoValueError
                raise _CutError
            self._at = colon.end()
            self.written.append(": ")
            return
        for name in self._names if depth == 0 else ():
            if self._text.startswith(name, self._at) and (colon := _COLON.match(self._text, self._at + len(name))):
                self._at = colon.end()
                break
        else:
            found = _KEY.match(self._text, self._at)
            if found is None:
                if self._closed or re.search(r"[:={},\[\]\"']", self._text[self._at :]):
                    raise NoValueError
                raise _CutError
            name, self._at = found[1].strip().replace(MARK, ""), found.end()
        self.written.append(f"{json_string(name)}: ")

    def _string(self) -> bool:
        """Read a string between quotes, if there is one."""
        begin = self._dialect.begins.match(self._text, self._at)
        if begin is not None:
            ending = self._dialect.quotes[begin.group()]
            end = self._text.find(ending, begin.end())
            if end < 0 and self._closed:
                raise NoValueError
            inner = json_string(self._text[begin.end() : end if end >= 0 else None].replace(MARK, ""))
            if end < 0:
                self.written.append(inner[:-1])
                raise _CutError
            self.written.append(inner)
            self._at = end + len(ending)
            return True
        found = _DOUBLE.match(self._text, self._at) or _SINGLE.match(self._text, self._at)
        if found is None:
            return False
        try:
            self.written.append(json_string(unescaped(found[1].replace(MARK, ""))))
        except ValueError as error:
            raise NoValueError from error
        self._at = found.end()
        return True

    def _bare(self) -> None:
        """Read a number, a word or a text without quotes."""
        found = self._dialect.bare.match(self._text, self._at)
        if found is None or not (text := found.group().replace(MARK, "").strip()):
            raise NoValueError
        self._at = found.end()
        cut = not self._closed and self._at == len(self._text)
        if NUMBER.fullmatch(text):
            self.written.append(text)
        elif text in CONSTANTS and not cut:
            self.written.append(CONSTANTS[text])
        else:
            self.written.append(json_string(text)[: -1 if cut else None])
        if cut:
            raise _CutError

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
