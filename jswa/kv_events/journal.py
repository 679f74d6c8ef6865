"""Notes of what changes in a tree of cached text, in order, for another thread to publish.

A note costs the engine copies of tokens and page ids. Digests are computed by the reader.
"""

import time
from collections import deque
from typing import Literal, NamedTuple

from jaxtyping import Int
from numpy import ndarray

_LOOK = 0.005  # seconds between two looks
Kind = Literal["full", "local"]
Medium = Literal["GPU", "CPU"]


class Stored(NamedTuple):
    """Pages came into the tree.

    Attributes:
        key: of the tree (`tree_key`).
        before: kind and id of the page before the first one, whose digest theirs continue; None: `text` has it.
        text: tokens before the first page, if no page tells their digest.
        tokens: of the pages.
        full, local: ids of the pages by position; 0 where there is none. No local ones unless windows are announced.
    """

    medium: Medium
    key: str
    before: tuple[Kind, int] | None
    text: Int[ndarray, " T"]
    tokens: Int[ndarray, " n"]
    full: Int[ndarray, " pages"]
    local: Int[ndarray, " pages"]


class Removed(NamedTuple):
    """Pages left the tree; of some no `Stored` told."""

    medium: Medium
    kind: Kind
    ids: Int[ndarray, " pages"]


class Moved(NamedTuple):
    """A full page has another id now."""

    medium: Medium
    source: int
    target: int


class Cleared(NamedTuple):
    """The cache was emptied."""


Change = Stored | Removed | Moved | Cleared


class Journal:
    """The notes of one engine, which one thread writes and another reads.

    The reader looks for notes again and again: to wake it would cost the engine more than a note does.

    Args:
        room: notes that may wait; the writer waits for room.
    """

    def __init__(self, room: int) -> None:
        self._notes: deque[Change] = deque()
        self._room = room
        self.closed = False

    def put(self, change: Change) -> None:
        """Write a note; after `closed` it is forgotten."""
        while len(self._notes) >= self._room and not self.closed:
            time.sleep(_LOOK)
        if not self.closed:
            self._notes.append(change)

    def take(self, most: int, seconds: float) -> list[Change]:
        """Return up to `most` notes, oldest first; wait up to `seconds` for the first."""
        until = time.monotonic() + seconds
        while not self._notes and time.monotonic() < until:
            time.sleep(_LOOK)
        return [self._notes.popleft() for _ in range(min(most, len(self._notes)))]
