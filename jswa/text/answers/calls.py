"""Read the tool calls of one region of an answer, as its text streams.

A reader yields pieces: ("call", name) where a call begins, ("arguments", text) with the next characters of its
arguments in JSON, ("end", "") at its end, and ("content", text) for text that is no call, so that none is lost.
"""

import ast
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

from .template import CallForm

Piece = tuple[Literal["call", "arguments", "end", "content"], str]
Calls = list[tuple[str, Any]]  # names and arguments
_NO_ARGUMENTS = "{}"


class Reader(Protocol):
    """The reader of one region."""

    def feed(self, text: str) -> Iterator[Piece]:
        """Read the next text of the region."""
        ...

    def finish(self, value: Any) -> Iterator[Piece]:
        """Read the end of the region, or of an answer that was cut in it. `value`: transformers' value of it."""
        ...


def reader(form: CallForm, captures: Any) -> Reader:
    """Return the reader of a region. `captures`: what the named groups of the opening delimiter have found."""
    if form.kind == "arguments":
        return ArgumentsReader(str(captures.get(form.name, "")))
    if form.kind == "objects":
        return ObjectsReader(form.name, form.arguments)
    return WholeReader(python_calls if form.kind == "pythonic" else parsed_calls)


class ArgumentsReader:
    """A region with the arguments of one call. Text that is not JSON is passed on as it is."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self._started = False
        self._space = ""

    def feed(self, text: str) -> Iterator[Piece]:
        """Read the next text of the region."""
        if self._name is not None:
            yield "call", self._name
            self._name = None
        text = self._space + (text if self._started else text.lstrip())
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._started = True
            yield "arguments", shown

    def finish(self, value: Any) -> Iterator[Piece]:
        """End the call. A call without arguments gets an empty object."""
        yield from self.feed("")
        if not self._started:
            yield "arguments", _NO_ARGUMENTS
        yield "end", ""


class ObjectsReader:
    """A region with JSON objects, or a list of them; each object is a call.

    Its arguments stream once its name is known. An object without a name is content.
    """

    def __init__(self, name: str, arguments: str) -> None:
        # Models mix up the two names that families have for the arguments.
        self._roles = {json.dumps(key): "arguments" for key in (arguments, "arguments", "parameters")}
        self._roles[json.dumps(name)] = "name"
        self._begin("")

    def _begin(self, text: str) -> None:
        self._text, self._at = text, 0  # the object so far, and how much of it was read
        self._depth = 0
        self._quoted = self._escaped = False
        self._string = 0  # where the last string begins
        self._key = ""  # the last key, as it is written
        self._value: int | None = None  # where the value of the key begins
        self._closed: int | None = None  # where it ends, if it is an object that has ended
        self._name: str | None = None
        self._late = ""  # arguments that could not stream
        self._shown = 0  # arguments were passed on up to here
        self._complete = False  # the arguments have ended; later ones of the same object are ignored

    def feed(self, text: str) -> Iterator[Piece]:
        """Read the next text of the region."""
        self._text += text
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if self._depth:
                yield from self._inside(character)
            elif character == "{":
                self._begin(self._text[self._at - 1 :])
                self._at = self._depth = 1
            elif not character.isspace() and character not in ",;[]{}":
                yield "content", character
        yield from self._stream()

    def finish(self, value: Any) -> Iterator[Piece]:
        """End the object that is open."""
        if self._depth:
            yield from self._end(whole=False)

    def _inside(self, character: str) -> Iterator[Piece]:
        if self._quoted:
            self._in_string(character)
        elif character == '"':
            self._quoted, self._string = True, self._at - 1
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._closed = self._at
            elif self._depth == 0:
                yield from self._member()
                yield from self._end(whole=True)
        elif self._depth == 1 and character == ":" and self._value is None:
            self._value, self._closed = self._at, None
        elif self._depth == 1 and character == ",":
            yield from self._member()

    def _in_string(self, character: str) -> None:
        if self._escaped or character == "\\":
            self._escaped = not self._escaped
        elif character == '"':
            self._quoted = False
            if self._depth == 1 and self._value is None:
                self._key = self._text[self._string : self._at]

    def _member(self) -> Iterator[Piece]:
        """Read a key with its value, whose end was found."""
        yield from self._stream()
        role = self._roles.get(self._key)
        if self._value is not None and role is not None:
            written = self._text[self._value : self._at - 1].strip()
            if role == "arguments" and not self._complete:
                text = _string(written)
                self._late = "" if self._shown else written if text is None else text
                self._complete = True
            elif role == "name" and self._name is None:
                self._name = _string(written)
                if self._name is not None:
                    yield "call", self._name
        self._key, self._value = "", None

    def _stream(self) -> Iterator[Piece]:
        """Pass on the new text of the arguments, if they are an object and the name is known."""
        if self._value is None or self._name is None or self._roles.get(self._key) != "arguments" or self._complete:
            return
        end = len(self._text) if self._closed is None else self._closed
        begin = self._shown or end - len(self._text[self._value : end].lstrip())
        if begin < end and (self._shown or self._text[begin] == "{"):
            self._shown = end
            yield "arguments", self._text[begin:end]

    def _end(self, *, whole: bool) -> Iterator[Piece]:
        if self._name is None:
            yield "content", self._text[: self._at]
        else:
            if not self._shown and (whole or self._late):
                yield "arguments", _NO_ARGUMENTS if self._late in ("", "null") else self._late
            yield "end", ""
        self._begin(self._text[self._at :])


class WholeReader:
    """A region that is read at its end. What cannot be read is content.

    Args:
        calls: finds the calls in the region's text or in transformers' value of it; None if it is no list of calls.
    """

    def __init__(self, calls: Callable[[str, Any], Calls | None]) -> None:
        self._calls = calls
        self._text = ""

    def feed(self, text: str) -> Iterator[Piece]:
        """Read the next text of the region."""
        self._text += text
        yield from ()

    def finish(self, value: Any) -> Iterator[Piece]:
        """Read the whole region."""
        calls = self._calls(self._text, value)
        if calls is None:
            yield "content", self._text
        for name, arguments in calls or ():
            yield "call", name
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            yield "arguments", text or _NO_ARGUMENTS
            yield "end", ""


def parsed_calls(text: str, value: Any) -> Calls | None:
    """Return the calls that transformers' parser has found; None if one of them is no call."""
    calls = [one.get("function") if isinstance(one, dict) else None for one in _listed(value)]
    found = [(call.get("name"), call.get("arguments")) for call in calls if isinstance(call, dict)]
    named = [(name, arguments) for name, arguments in found if isinstance(name, str)]
    return named if named and len(named) == len(calls) else None


def python_calls(text: str, value: Any) -> Calls | None:
    """Return Python calls with keywords only, one in each line or a list of them; None if the text is anything else."""
    try:
        body = [node.value for node in ast.parse(text.strip()).body if isinstance(node, ast.Expr)]
        nodes = [call for node in body for call in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node])]
        calls: Calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args:
                return None
            pairs = {str(keyword.arg): _constant(keyword.value) for keyword in node.keywords}
            calls.append((ast.unparse(node.func), pairs))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls or None


_CONSTANTS = {"true": True, "false": False, "null": None}  # as models write them, who have read more JSON than Python


def _constant(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {str(_constant(key)): _constant(value) for key, value in zip(keys, values, strict=True) if key}
        case _:
            value = ast.literal_eval(node)
            if isinstance(value, bytes | complex | set):
                raise ValueError(f"{type(value).__name__} is not JSON")
            return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _string(written: str) -> str | None:
    """Return the value of a JSON string; None if it is anything else."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
