"""Read the tool calls of one region of an answer, as its text streams.

What a reader finds has each character of the region once: in a call, or as content. A region without a call is content
with its delimiters, as it was written.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from jswa.text.assembler import MARK
from jswa.types import StructuredOutputsParams

from .forms.casts import Casts
from .forms.dialect import Dialect, NoValueError, Written
from .forms.objects import ObjectsReader
from .forms.pieces import NO_ARGUMENTS, ObjectEnd, Piece, Quotes, Reader, Trimmed
from .forms.pythonic import python_calls
from .forms.tags import Tags, parameters
from .forms.texts import HALVES
from .guarded import Guarded
from .template import Field

Calls = Sequence[tuple[str, Any]]  # names and arguments
_JSON = Dialect({})
_MOST_ODD_KEYS = 64  # of a tool that are looked for by their names
_PLAIN_KEY = re.compile(r"[\w.$@/ -]+")  # which a dialect reads without knowing it


def reader(
    field: Field, names: Mapping[str, str], opening: str, casts: Casts, form: StructuredOutputsParams | None
) -> Reader:
    """Return the reader of a region.

    Args:
        names: what the named groups of the opening delimiter have found.
        opening: the opening delimiter.
        casts: the tools that may be called.
        form: what was asked of the content. What its JSON Schema allows is no call in a field that is guarded.
    """
    inner = _reader(field, names, opening, casts)
    return Guarded(inner, opening, casts, form) if field.guarded else inner


def _reader(field: Field, names: Mapping[str, str], opening: str, casts: Casts) -> Reader:
    form = field.form
    assert form is not None
    name = str(names.get(form.name, ""))
    match form.kind:
        case "arguments":
            return ArgumentsReader(name)
        case "objects":
            return ObjectsReader((form.name, "name", "tool_name"), form.arguments, opening)
        case "dialect":
            typed = partial(casts.written, name) if form.typed else None
            return DialectReader(name, opening, Dialect(form.quotes), casts.keys(name), typed)
        case "parameters":
            assert form.tags is not None
            return ParametersReader(name, opening, form.tags, casts)
        case "pythonic":
            return WholeReader(python_calls, opening)
    assert field.value_of is not None
    value_of = field.value_of
    return WholeReader(lambda text: parsed_calls(casts.cast(value_of(text, names))), opening)


class TextReader:
    """A region of calls in an answer that may have none: all of it is content."""

    def __init__(self, opening: str) -> None:
        self._opening = opening

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        opening, self._opening = self._opening, ""
        return [("content", opening + text)]

    def holds(self, closing: str) -> bool:
        """Return False: each closing delimiter ends the region."""
        return False

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """Read the end of the region."""
        return [("content", self._opening + (closing or ""))]


class ArgumentsReader:
    """A region with the arguments of one call, which stream. Text that is not JSON is passed on as it is.

    Text after the end of an object is content.
    """

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self._text = Trimmed()
        self._object = ObjectEnd()
        self._ended = False
        self._behind: str | None = ""  # white space after the object; None after other text

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        found: list[Piece] = []
        if self._name is not None:
            found.append(("call", self._name))
            self._name = None
        if not self._ended:
            end = self._object.find(text)
            if shown := self._text.add(text[:end]):
                found.append(("arguments", shown))
            if end is None:
                return found
            self._ended, text = True, text[end:]
        if self._behind is not None:
            text, self._behind = self._behind + text, None
            if not text.strip():
                text, self._behind = "", text
        return [*found, ("content", text)] if text else found

    def holds(self, closing: str) -> bool:
        """Return False: messages end at their delimiters, wherever these stand."""
        return False

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """End the call. A call without arguments gets an empty object."""
        empty: list[Piece] = [] if self._text.begun else [("arguments", NO_ARGUMENTS)]
        return [*self.feed(""), *empty, ("end", "")]


class DialectReader:
    """A region with the arguments of one call in a dialect of JSON, read at its end.

    Args:
        keys: the parameters of the tool.
        typed: gives JSON of a parameter and its text, if the dialect writes all arguments as texts.
    """

    def __init__(self, name: str, opening: str, dialect: Dialect, keys: Collection[str], typed: Written | None) -> None:
        self._name = name
        self._opening = opening
        self._dialect = dialect
        self._keys = list(islice((key for key in keys if not _PLAIN_KEY.fullmatch(key)), _MOST_ODD_KEYS))
        self._typed = typed
        self._parts: list[str] = []
        self._ending: str | None = None  # what ends the open string
        self._last = ""  # the last character that is no white space

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        self._parts.append(text)
        self._last = text.rstrip()[-1:] or self._last
        at = 0
        while at < len(text):
            if self._ending is None:
                found = self._dialect.begins.search(text, at)
                self._ending = None if found is None else self._dialect.quotes[found.group()]
                at = len(text) if found is None else found.end()
            else:
                end = text.find(self._ending, at)
                at = len(text) if end < 0 else end + len(self._ending)
                self._ending = self._ending if end < 0 else None
        return ()

    def holds(self, closing: str) -> bool:
        """Return whether a delimiter here is text: inside of a string, unless the object seems to have its end."""
        return self._ending is not None and self._last != "}"

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """Read the whole region."""
        text = "".join(self._parts)
        try:
            arguments, rest = self._dialect.object(text, self._keys, self._typed, closed=closing is not None)
        except NoValueError:
            return [("content", self._opening + text + (closing or ""))]
        return _called(self._name, arguments, rest)


class ParametersReader:
    """A region with the arguments of one call between tags, read at its end."""

    def __init__(self, name: str, opening: str, tags: Tags, casts: Casts) -> None:
        self._name = name
        self._opening = opening
        self._tags = tags
        self._casts = casts
        self._parts: list[str] = []
        self._open = False  # a parameter has begun
        self._tail = ""  # the last characters, which may begin a tag

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        self._parts.append(text)
        begin, end = self._tags.key[0], self._tags.end
        text = (self._tail + text).replace(MARK, "")
        if (last := max(text.rfind(begin), text.rfind(end))) >= 0:
            self._open = text.startswith(begin, last)
        self._tail = text[1 - max(len(begin), len(end)) :]
        return ()

    def holds(self, closing: str) -> bool:
        """Return whether a delimiter here is text: inside of a parameter, unless it ends the function too."""
        function = self._tags.function
        return self._open and (function is None or function[2] not in closing)

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """Read the whole region."""
        text = "".join(self._parts).replace(MARK, "")
        functions = self._tags.functions(self._name, text, closed=closing is not None)
        return [piece for name, text, closed in functions for piece in self._call(name, text, closed=closed)]

    def _call(self, name: str, text: str, *, closed: bool) -> list[Piece]:
        """Return the call of a function. Some models write JSON in place of tags."""
        if text.lstrip().startswith("{"):
            try:
                return _called(name, *_JSON.object(text, closed=closed))
            except NoValueError:
                pass
        known = self._casts.keys(name)
        written = partial(self._casts.written, name)
        arguments, rest = parameters(text, self._tags, known.__contains__, written, closed=closed)
        return _called(name, arguments, rest)


def _called(name: str, arguments: str, rest: str) -> list[Piece]:
    """Return what is found of one call, and of text besides."""
    content: list[Piece] = [("content", rest)] if rest.strip() else []
    return [("call", name), ("arguments", arguments), ("end", ""), *content]


class WholeReader:
    """A region that is read at its end. What cannot be read is content.

    Args:
        calls: finds the calls in the region's text; returns None, or raises ValueError, if it is no list of calls.
        opening: the delimiter before the region.
    """

    def __init__(self, calls: Callable[[str], Calls | None], opening: str) -> None:
        self._calls = calls
        self._opening = opening
        self._parts: list[str] = []
        self._quotes = Quotes()

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        self._parts.append(text)
        self._quotes.add(text)
        return ()

    def holds(self, closing: str) -> bool:
        """Return whether a delimiter here is text, inside of a string."""
        return self._quotes.open

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """Read the whole region."""
        text = "".join(self._parts)
        try:
            calls = [(name, _written(arguments)) for name, arguments in self._calls(text) or ()]
        except (ValueError, RecursionError):  # also values that are nested too deeply
            calls = []
        found: list[Piece] = [] if calls else [("content", self._opening + text + (closing or ""))]
        for name, arguments in calls:
            found += _called(name, arguments, "")
        return found


def parsed_calls(value: Any) -> Calls | None:
    """Return the calls that the value of a region has; None if one of them is no call."""
    calls = [one.get("function") if isinstance(one, dict) else None for one in _listed(value)]
    found = [(call.get("name"), call.get("arguments")) for call in calls if isinstance(call, dict)]
    named = [(name, arguments) for name, arguments in found if isinstance(name, str) and not HALVES.search(name)]
    return named if named and len(named) == len(calls) else None


def _written(arguments: Any) -> str:
    """Return arguments as JSON; those that are not JSON are passed on as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return HALVES.sub(lambda found: f"\\u{ord(found.group()):04x}", text) or NO_ARGUMENTS


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
