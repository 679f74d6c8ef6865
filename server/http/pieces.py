"""JSON that is encoded as it comes and sent in pieces: no callback of the event loop handles all of a long response."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
_FOLD = 256  # items that are joined to one piece
_CHUNK = 2**16  # bytes that are sent at a time, unless a piece has more


class JsonList:
    """A JSON array that grows at its end. Adding an item costs the same however many there are."""

    def __init__(self) -> None:
        self._folded: list[bytes] = []
        self._items: list[bytes] = []

    def add(self, item: bytes) -> None:
        """Add an item, in JSON."""
        self._items.append(item)
        if len(self._items) == _FOLD:
            self._fold()

    def pieces(self, before: "JsonList | None" = None) -> list[bytes]:
        """Return the array in pieces, which joined are JSON; the items of `before` come first."""
        parts = [*(before.parts if before is not None else ()), *self.parts]
        return listed([part] for part in parts)

    @property
    def parts(self) -> list[bytes]:
        """The items, many of them joined."""
        self._fold()
        return self._folded

    def _fold(self) -> None:
        if self._items:
            self._folded.append(b",".join(self._items))
            self._items = []


def with_fields(value: Mapping[str, Any], fields: Mapping[str, Iterable[bytes]]) -> list[bytes]:
    """Return an object that is not empty in pieces, with more fields whose values are JSON in pieces."""
    pieces = [encode(value)[:-1]]
    for name, parts in fields.items():
        pieces += [b"," + encode(name) + b":", *parts]
    return [*pieces, b"}"]


def listed(items: Iterable[list[bytes]]) -> list[bytes]:
    """Return an array of items in pieces, in pieces."""
    pieces = [b"["]
    for number, item in enumerate(items):
        pieces += [b",", *item] if number else item
    return [*pieces, b"]"]


def folded(items: Iterable[bytes]) -> Iterator[bytes]:
    """Join items of an array, many to a piece, so that nobody has to go through all of them at once."""
    for some in itertools.batched(items, _FOLD):
        yield b",".join(some)


def chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces, and leave large ones alone."""
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
