"""What readers of tool calls find, piece by piece."""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

# ("call", name) where a call begins, ("arguments", text) with the next characters of its arguments in JSON, ("end", "")
# at its end, and ("content", text) for text that is no call, so that none is lost.
Piece = tuple[Literal["call", "arguments", "end", "content"], str]
NO_ARGUMENTS = "{}"
_INSIDE = {quote: re.compile(rf"(?:[^{quote}\\\n]|\\.)*+", re.DOTALL) for quote in "\"'"}
_PLAIN = re.compile(r"[^\"']*+")
_BRACES = re.compile(r'[^{}"]*+')
_STRING = re.compile(r'(?:[^"\\]|\\.)*+', re.DOTALL)


class Reader(Protocol):
    """The reader of one region."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        ...

    def holds(self, closing: str) -> bool:
        """Return whether a closing delimiter at this place is text, as inside of a string."""
        ...

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """Read the end of the region: the delimiter `closing`, or None if the answer ends in it."""
        ...


class Quotes:
    """Whether text, as it streams, stands in a string between quotes. A line end that is not escaped ends a string."""

    def __init__(self) -> None:
        self._quote: str | None = None
        self._escaped = False

    @property
    def open(self) -> bool:
        """Whether the text so far ends in a string."""
        return self._quote is not None

    def add(self, text: str) -> None:
        """Read more text."""
        at = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        while at < len(text):
            at = _end(_PLAIN if self._quote is None else _INSIDE[self._quote], text, at)
            if at == len(text):
                break
            if text[at] == "\\":  # the text ends in half an escape
                self._escaped = True
            else:
                self._quote = text[at] if self._quote is None else None
            at += 1


class ObjectEnd:
    """The place where the JSON object ends that a text begins with, as the text streams."""

    def __init__(self) -> None:
        self._depth = 0
        self._begun = self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """Read more text; return the place in it after the object's end, or None if that is not there."""
        at = 0
        if not self._begun:
            at = len(text) - len(text.lstrip())
            if at == len(text):
                return None
            self._begun = True
            self._depth = int(text[at] == "{")
            at += self._depth
        while self._depth and at < len(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                at = _end(_STRING, text, at)
                self._escaped = text[at : at + 1] == "\\"  # half an escape, where the text ends
                self._quoted = self._escaped or at == len(text)
            else:
                at = _end(_BRACES, text, at)
                one = text[at : at + 1]
                self._quoted = one == '"'
                self._depth += (one == "{") - (one == "}")
                if not self._depth:
                    return at + 1
            at += 1
        return None


class Trimmed:
    """Text without white space at both ends, as it streams."""

    def __init__(self) -> None:
        self.begun = False
        self._spaces: list[str] = []

    def add(self, text: str) -> str:
        """Return the text that can be shown after more of it: white space at its end is held back."""
        if not self.begun:
            text = text.lstrip()
        shown = text.rstrip()
        held, spaces = self._spaces, text[len(shown) :]
        if not shown:
            if spaces:
                held.append(spaces)
            return ""
        self.begun = True
        self._spaces = [spaces] if spaces else []
        return "".join([*held, shown]) if held else shown

    def forget(self) -> None:
        """Drop white space that was held back."""
        self._spaces = []


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match at a place, where there is always one."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
