"""Notes of what changes in a tree of cached text, in order, for another thread to publish.

Only whole pages are noted. A note costs the engine copies of tokens and page ids; digests are computed by the reader.
"""

import queue
from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxtyping import Int
from numpy import ndarray

Kind = Literal["full", "local"]
Medium = Literal["GPU", "CPU"]


class Stored(NamedTuple):
    """Pages came into the tree.

    Attributes:
        key: of the tree (`tree_key`).
        before: kind and id of the page before the first one, whose digest theirs continue; None: `text` has it.
        text: tokens before the first page, if no page tells their digest.
        tokens: of the pages.
    """

    medium: Medium
    kind: Kind
    key: str
    before: tuple[Kind, int] | None
    text: Int[ndarray, " T"]
    tokens: Int[ndarray, " n"]
    ids: list[int]


class Removed(NamedTuple):
    """Pages left the tree; of some no `Stored` told."""

    medium: Medium
    kind: Kind
    ids: list[int]


class Moved(NamedTuple):
    """A full page has another id now."""

    medium: Medium
    source: int
    target: int


class Cleared(NamedTuple):
    """The cache was emptied."""


Change = Stored | Removed | Moved | Cleared


class Journal:
    """The notes of one engine, which its threads write and one thread reads.

    Args:
        room: notes that may wait; a writer waits for room.
    """

    def __init__(self, room: int) -> None:
        self._notes: queue.Queue[Change] = queue.Queue(room)
        self.closed = False

    def put(self, change: Change) -> None:
        """Write a note; after `closed` it is forgotten."""
        while not self.closed:
            try:
                return self._notes.put(change, timeout=0.5)
            except queue.Full:
                continue

    def take(self, most: int, seconds: float) -> list[Change]:
        """Return up to `most` notes, oldest first; wait up to `seconds` for the first."""
        found: list[Change] = []
        try:
            found.append(self._notes.get(timeout=seconds))
            while len(found) < most:
                found.append(self._notes.get_nowait())
        except queue.Empty:
            pass
        return found


def runs(ids: Iterable[int]) -> list[tuple[int, list[int]]]:
    """Return the runs of ids that are not 0, each with the place of its first."""
    found: list[tuple[int, list[int]]] = []
    follows = False
    for place, page in enumerate(ids):
        if page and follows:
            found[-1][1].append(page)
        elif page:
            found.append((place, [page]))
        follows = bool(page)
    return found
