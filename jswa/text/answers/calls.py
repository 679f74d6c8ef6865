"""Read the tool calls of one region of an answer, as its text streams."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .forms.objects import ObjectsReader
from .forms.pieces import NO_ARGUMENTS, Piece, Trimmed
from .forms.pythonic import python_calls
from .template import CallForm

Calls = Sequence[tuple[str, Any]]  # names and arguments
# Halves of surrogate pairs, which were escaped in JSON: no text in UTF-8 has any. MARK is left to the parser.
_HALVES = re.compile("[\ud801-\udfff]")


class Reader(Protocol):
    """The reader of one region."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        ...

    def finish(self) -> Sequence[Piece]:
        """Read the end of the region, or of an answer that was cut in it."""
        ...


def reader(form: CallForm, captures: Any, value_of: Callable[[str], Any]) -> Reader:
    """Return the reader of a region.

    Args:
        captures: what the named groups of the opening delimiter have found.
        value_of: returns the value of a whole region, of the kind "whole". Raises ValueError if it has none.
    """
    if form.kind == "arguments":
        return ArgumentsReader(str(captures.get(form.name, "")))
    if form.kind == "objects":
        return ObjectsReader(form.name, form.arguments)
    return WholeReader(python_calls if form.kind == "pythonic" else lambda text: parsed_calls(value_of(text)))


class ArgumentsReader:
    """A region with the arguments of one call. Text that is not JSON is passed on as it is."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self._text = Trimmed()

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        found: list[Piece] = []
        if self._name is not None:
            found.append(("call", self._name))
            self._name = None
        if shown := self._text.add(text):
            found.append(("arguments", shown))
        return found

    def finish(self) -> Sequence[Piece]:
        """End the call. A call without arguments gets an empty object."""
        empty: list[Piece] = [] if self._text.begun else [("arguments", NO_ARGUMENTS)]
        return [*self.feed(""), *empty, ("end", "")]


class WholeReader:
    """A region that is read at its end. What cannot be read is content.

    Args:
        calls: finds the calls in the region's text; returns None, or raises ValueError, if it is no list of calls.
    """

    def __init__(self, calls: Callable[[str], Calls | None]) -> None:
        self._calls = calls
        self._parts: list[str] = []

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        self._parts.append(text)
        return ()

    def finish(self) -> Sequence[Piece]:
        """Read the whole region."""
        text = "".join(self._parts)
        try:
            calls = [(name, _written(arguments)) for name, arguments in self._calls(text) or ()]
        except (ValueError, RecursionError):  # also values that are nested too deeply
            calls = []
        found: list[Piece] = [] if calls else [("content", text)]
        for name, arguments in calls:
            found += [("call", name), ("arguments", arguments), ("end", "")]
        return found


def parsed_calls(value: Any) -> Calls | None:
    """Return the calls that the value of a region has; None if one of them is no call."""
    calls = [one.get("function") if isinstance(one, dict) else None for one in _listed(value)]
    found = [(call.get("name"), call.get("arguments")) for call in calls if isinstance(call, dict)]
    named = [(name, arguments) for name, arguments in found if isinstance(name, str) and not _HALVES.search(name)]
    return named if named and len(named) == len(calls) else None


def _written(arguments: Any) -> str:
    """Return arguments as JSON; those that are not JSON are passed on as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return _HALVES.sub(lambda found: f"\\u{ord(found.group()):04x}", text) or NO_ARGUMENTS


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
