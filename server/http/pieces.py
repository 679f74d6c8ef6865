"""JSON in pieces, encoded as its values arrive: no callback of the event loop handles a whole long response."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
_FOLD = 256  # items that are joined into one piece
_TEXT = secrets.token_hex(16)  # stands for a text; no client knows it
_CHUNK = 2**16  # bytes that are sent at a time; a larger piece is sent whole


class JsonList:
    """A JSON array that grows at its end. The time to add an item does not depend on the array's length."""

    def __init__(self) -> None:
        self._folded: list[bytes] = []
        self._items: list[bytes] = []

    def add(self, item: bytes) -> None:
        """Append an item, which is JSON."""
        self._items.append(item)
        if len(self._items) == _FOLD:
            self._fold()

    def pieces(self, before: "JsonList | None" = None) -> list[bytes]:
        """Return the JSON of the array, in pieces. The items of `before` come first."""
        parts = [*(before.parts if before is not None else ()), *self.parts]
        return listed([part] for part in parts)

    @property
    def parts(self) -> list[bytes]:
        """The items in JSON without brackets, many of them joined into each part."""
        self._fold()
        return self._folded

    def _fold(self) -> None:
        if self._items:
            self._folded.append(b",".join(self._items))
            self._items = []


def with_fields(value: Mapping[str, Any], fields: Mapping[str, Iterable[bytes]]) -> list[bytes]:
    """Return the JSON of an object in pieces: the fields of `value`, which has at least one, and then `fields`.

    The values of `fields` are JSON in pieces.
    """
    pieces = [encode(value)[:-1]]
    for name, parts in fields.items():
        pieces += [b"," + encode(name) + b":", *parts]
    return [*pieces, b"}"]


def listed(items: Iterable[list[bytes]]) -> list[bytes]:
    """Return the JSON of an array in pieces. The items are JSON in pieces."""
    pieces = [b"["]
    for number, item in enumerate(items):
        pieces += [b",", *item] if number else item
    return [*pieces, b"]"]


def folded(items: Iterable[bytes]) -> Iterator[bytes]:
    """Join the items of an array, many into each piece, so that no caller handles all of them at once."""
    for some in itertools.batched(items, _FOLD):
        yield b",".join(some)


def chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join consecutive pieces until they have at least `_CHUNK` bytes together."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def around(made: Callable[[str], bytes]) -> tuple[bytes, ...]:
    """Return the bytes around the JSON of a text: `encode(text).join(around(made))` is `made(text)`."""
    return tuple(made(_TEXT).split(encode(_TEXT)))
