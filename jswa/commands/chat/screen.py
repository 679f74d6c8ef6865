"""Answers as a terminal shows them: wrapped between words, reasoning dim. A file gets the content as it is."""

import re
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len

# A line's end, blanks, a wide character (Chinese and Japanese have no blanks between words), or a word.
_WIDE = "\u2e80-\ua4cf\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_PART = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])  # a model's text moves no cursor and sets no title
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]
_FENCE = "```"


class Wrapping:
    """Breaks a text between words that comes in pieces; a word is given out once its end has come.

    Lines of code between ``` are left as they are, so that they can be copied.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        """Make one.

        Args:
            width: returns the columns of the terminal, which may change.
        """
        self._width = width
        self._held = self._blanks = self._line = ""  # what has not ended; blanks before it; the line of the text
        self._column = 0
        self._in_code = False

    @property
    def is_in_line(self) -> bool:
        """Whether the text so far ends within a line."""
        return self._column > 0 or bool(self._held)

    def add(self, text: str) -> str:
        """Take a piece of the text; return what can be shown."""
        parts = _PART.findall(self._held + text)
        self._held = parts.pop() if parts and parts[-1] != "\n" else ""
        return "".join(map(self._placed, parts))

    def end(self) -> str:
        """Return what is held."""
        held, self._held = self._held, ""
        return self._placed(held) if held.strip() else ""

    def _placed(self, part: str) -> str:
        is_code = self._in_code or self._line.startswith(_FENCE)
        if part == "\n":
            self._in_code ^= self._line.strip().startswith(_FENCE)
            self._line, self._blanks, self._column = "", "", 0
            return part
        self._line += part
        if part.isspace():
            self._blanks = part if is_code else part.expandtabs(4)
            return ""
        blanks, self._blanks = self._blanks, ""
        length, width = cell_len(part), max(self._width(), 1)
        if not is_code and self._column and self._column + len(blanks) + length > width:
            self._column = length
            return f"\n{part}"
        self._column += len(blanks) + length
        if self._column > width:  # the terminal has broken the line
            self._column %= width
        return blanks + part


class Screen:
    """Shows answers, piece by piece."""

    def __init__(self, out: TextIO, width: Callable[[], int] | None = None) -> None:
        """Make one.

        Args:
            width: returns the columns at which lines are broken; None breaks none.
        """
        self._out = out
        self._width = width
        self._wrapping: Wrapping | None = None
        self._kind = ""

    def show(self, kind: str, text: str) -> None:
        """Show a piece of an answer if it is "content", or "reasoning" and `out` is a terminal."""
        is_shown = kind == "content" or (kind == "reasoning" and self._out.isatty())
        if not text or not is_shown:
            return
        if kind != self._kind:
            self._between()
            self._kind = kind
            self._wrapping = None if self._width is None else Wrapping(self._width)
        if self._out.isatty():
            text = text.translate(_CONTROLS)
        self._write(text if self._wrapping is None else self._wrapping.add(text))

    def end(self) -> None:
        """Show what is held back of the answer."""
        if self._wrapping is not None:
            self._write(self._wrapping.end())
        self._wrapping, self._kind = None, ""

    def say(self, text: str) -> None:
        """Write a line."""
        print(text, file=self._out, flush=True)

    def _between(self) -> None:
        """End the reasoning before the content, on a line of its own."""
        if self._wrapping is None:
            return
        was_in_line = self._wrapping.is_in_line
        self._write(self._wrapping.end())
        if was_in_line:
            self.say("")

    def _write(self, text: str) -> None:
        if text:
            is_dim = self._kind == "reasoning"
            print(f"\x1b[2m{text}\x1b[0m" if is_dim else text, end="", file=self._out, flush=True)
