"""Regions that may be a call or content: forms of calls that no token tells."""

import json
import re
from collections.abc import Sequence
from typing import Any

from jswa.types import StructuredOutputsParams

from .forms.casts import Casts
from .forms.fits import allows, fits
from .forms.objects import ObjectsReader
from .forms.pieces import Piece, Reader

# The name of the first call in a text, if it is an object or a Python call.
_FIRST = re.compile(r'[\s\[(]*+(?:([^\W\d][\w.-]*+)\(|\{\s*+"(?:name|tool_name)"\s*+:\s*+"([^"\\]*+)")')
_MOST_BEFORE_A_NAME = 1_000  # characters that are looked through for the name of the first call


class Guarded:
    """A region that may be calls or content. It is calls if each of them names a known tool, with arguments that fit.

    Its text is held back until that is known.
    """

    def __init__(self, inner: Reader, opening: str, casts: Casts, form: StructuredOutputsParams | None) -> None:
        self._inner = inner
        self._parts = [opening]
        self._pieces: list[Piece] = []
        self._casts = casts
        self._form = form
        self._before: str | None = ""  # the text up to the name of the first call; None after it
        self._free = False  # it is content

    def feed(self, text: str) -> Sequence[Piece]:
        """Read the next text of the region."""
        if self._free:
            return [("content", text)]
        self._parts.append(text)
        self._pieces += self._inner.feed(text)
        if self._before is not None:
            self._before += text
            found = _FIRST.match(self._before)
            if found is not None and (found[1] or found[2]) not in self._casts.parameters:
                return self._freed()
            if found is not None or len(self._before) > _MOST_BEFORE_A_NAME:
                self._before = None
        return ()

    def holds(self, closing: str) -> bool:
        """Return whether a delimiter here is text."""
        return self._inner.holds(closing)

    def finish(self, closing: str | None) -> Sequence[Piece]:
        """Read the whole region."""
        if self._free:
            return [("content", closing)] if closing else []
        pieces = [*self._pieces, *self._inner.finish(closing)]
        if self._are_calls(pieces):
            return [piece for piece in pieces if piece[0] != "content"]
        return [*self._freed(), ("content", closing or "")]

    def _freed(self) -> Sequence[Piece]:
        """Pass the text on as content, and all that follows in the region."""
        self._free = True
        return [("content", "".join(self._parts))]

    def _are_calls(self, pieces: Sequence[Piece]) -> bool:
        if any(text.strip() for kind, text in pieces if kind == "content"):
            return False
        if isinstance(self._inner, ObjectsReader) and self._inner.doubtful:
            return False
        names = [text for kind, text in pieces if kind == "call"]
        if not names or self._is_shaped():
            return False
        arguments = [list[str]() for _ in names]
        call = -1
        for kind, text in pieces:
            call += kind == "call"
            if kind == "arguments":
                arguments[call].append(text)
        return all(self._fits(name, "".join(texts)) for name, texts in zip(names, arguments, strict=True))

    def _fits(self, name: str, arguments: str) -> bool:
        if name not in self._casts.parameters:
            return False
        try:
            return fits(json.loads(arguments), self._casts.parameters[name])
        except (ValueError, RecursionError):
            return False

    def _is_shaped(self) -> bool:
        """Return whether the text is an object that the form allows which was asked of the content."""
        schema: Any = None if self._form is None else self._form.json
        try:
            if self._form is not None and self._form.json_object:
                schema = {"type": "object"}
            elif isinstance(schema, str):
                schema = json.loads(schema)
            return schema is not None and allows(schema, json.loads("".join(self._parts)))
        except (ValueError, RecursionError):
            return False
