"""Read JSON as models write it: bare keys and texts, tokens for quotes, words and quotes of Python, a missing comma.

    {user-id:<|"|>u<|"|>, tags=['a', True] n:1.50}   →   {"user-id": "u", "tags": ["a", true], "n": 1.50}

What is written stays as it is: the order of keys, each key that came twice, the digits of numbers. The time is
proportional to the text's length.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from jswa.text.assembler import MARK

from .texts import CONSTANTS, NUMBER, json_string, unescaped

Written = Callable[[str, str, bool], str]  # a key, its text and whether that was cut → JSON
_MOST_NESTED = 100
_SPACE = re.compile(r"\s*+")
_COMMAS = re.compile(r"[\s,]*+")
KEY = re.compile(r"[^:={},\[\]\"']*+")  # a key that needs no quotes
_KEY = re.compile(rf"({KEY.pattern})[:=]")
_ENDS = re.compile(r"[:={},\[\]\"']")
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
        reading = _Reading(self, text, closed=True)
        reading.value(0)
        if reading.rest().strip():
            raise NoValueError
        return "".join(reading.written)

    def object(
        self, text: str, names: Iterable[str] = (), typed: Written | None = None, *, closed: bool = True
    ) -> tuple[str, str]:
        """Return the object that a text begins with, in JSON, and the text after it. Raises NoValueError.

        Args:
            names: keys of the object that may hold characters that end a bare key.
            typed: gives the JSON of a member of the object whose text stands between quotes of the dialect.
            closed: the text is whole; else it was cut, and so may be the object.
        """
        reading = _Reading(self, text, closed=closed, names=tuple(names), typed=typed)
        if not text.lstrip().startswith("{"):
            raise NoValueError
        try:
            reading.value(0)
        except _CutError:
            return "".join(reading.written), ""
        return "".join(reading.written), reading.rest()


class _Reading:
    """One reading; `written` is the JSON so far."""

    def __init__(
        self,
        dialect: Dialect,
        text: str,
        *,
        closed: bool,
        names: tuple[str, ...] = (),
        typed: Written | None = None,
    ) -> None:
        self.written: list[str] = []
        self._dialect = dialect
        self._text = text
        self._at = 0
        self._closed = closed
        self._names = sorted(names, key=len, reverse=True)
        self._typed = typed
        self._key_of: str | None = None  # of the member whose value is read, if that may be typed

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
                key = self._key(depth)
                self._key_of = key if depth == 0 and self._typed is not None else None
            self.value(depth + 1)
            first = False

    def _key(self, depth: int) -> str:
        """Read a key and its colon. If the text ends before that, the key was cut."""
        text, at = self._text, self._at
        string = self._quoted()
        colon = None if string is None else _COLON.match(text, self._at)
        if string is not None and colon is not None:
            name, self._at = string, colon.end()
        elif string is None and (known := self._known(depth)) is not None:
            name, self._at = known
        elif string is None and (found := _KEY.match(text, at)) is not None:
            name, self._at = found[1].strip().replace(MARK, ""), found.end()
        elif self._closed or _ENDS.search(text, self._at):
            raise NoValueError
        else:
            raise self._cut(text[at:].strip().replace(MARK, "") if string is None else string)
        self.written.append(f"{json_string(name)}: ")
        return name

    def _cut(self, text: str) -> _CutError:
        """Write a string that the text's end has cut; return what tells so."""
        self.written.append(json_string(text)[:-1])
        return _CutError()

    def _known(self, depth: int) -> tuple[str, int] | None:
        """Return the known name that is the key here, and the place after its colon; None if there is none."""
        for name in self._names if depth == 0 else ():
            if self._text.startswith(name, self._at) and (colon := _COLON.match(self._text, self._at + len(name))):
                return name, colon.end()
        return None

    def _string(self) -> bool:
        """Read a string as a value, if there is one."""
        begin = self._dialect.begins.match(self._text, self._at)
        if begin is not None and self._key_of is not None and self._typed is not None:
            text, cut = self._between(begin)
            self.written.append(self._typed(self._key_of, text, cut))
        elif begin is not None:
            text, cut = self._between(begin)
            self.written.append(json_string(text)[: -1 if cut else None])
        else:
            string, cut = self._quoted(), False
            if string is None:
                return False
            self.written.append(json_string(string))
        if cut:
            raise _CutError
        return True

    def _between(self, begin: re.Match[str]) -> tuple[str, bool]:
        """Read the text between quotes of the dialect; return it, and whether its end is missing."""
        ending = self._dialect.quotes[begin.group()]
        end = self._text.find(ending, begin.end())
        if end < 0 and self._closed:
            raise NoValueError
        self._at = len(self._text) if end < 0 else end + len(ending)
        return self._text[begin.end() : None if end < 0 else end].replace(MARK, ""), end < 0

    def _quoted(self) -> str | None:
        """Read a string between any quotes; None if there is none."""
        begin = self._dialect.begins.match(self._text, self._at)
        if begin is not None:
            text, cut = self._between(begin)
            if cut:
                raise self._cut(text)
            return text
        found = _DOUBLE.match(self._text, self._at) or _SINGLE.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        try:
            return unescaped(found[1].replace(MARK, ""))
        except ValueError as error:
            raise NoValueError from error

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
