"""Texts that were evicted, known for a while by their next tokens: why a request missed, and what an eviction cost."""

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import Ghost, Node

_GHOSTS = 8_192
_FEW_GHOSTS = 32  # behind one edge that are forgotten when it is cut
_GHOST_TOKENS = 8

LastUse = tuple[int, int]  # clock and kind of an edge when it was evicted


class Ghosts:
    """The ghosts of a tree, at most 8,192."""

    def __init__(self) -> None:
        self._ghosts: dict[Ghost, LastUse] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def last_uses(self) -> list[LastUse]:
        """Return the last uses of all, the first evicted first."""
        return list(self._ghosts.values())

    def find(self, salt: str, tokens: Int[np.ndarray, " T"], at: int) -> Ghost | None:
        """Return what was evicted of this text beyond `at`, if that was not too long ago."""
        if not self._ghosts:
            return None
        ghost = salt, at, tokens[at : at + _GHOST_TOKENS].tobytes()
        return ghost if ghost in self._ghosts else None

    def pop(self, ghost: Ghost) -> LastUse | None:
        """Forget a ghost, whose text is used again; return its last use, or None if it is forgotten already."""
        return self._ghosts.pop(ghost, None)

    def cut(self, node: Node, at: int) -> list[LastUse]:
        """Remember what is about to be evicted from a leaf, from `at` on; return the last uses of what is forgotten.

        What was cut before lies after `at`, and the new ghost stands for it too, unless the leaf was used since.
        """
        gone = [self._ghosts.pop(old) for old in node.ghosts if old in self._ghosts]
        gone = [(last, kind) for last, kind in gone if last < node.last]
        ghost = (node.salt, at, node.tokens[at - node.start :][:_GHOST_TOKENS].tobytes())
        node.ghosts = [ghost]
        self._ghosts[ghost] = node.last, node.kind
        if len(self._ghosts) > _GHOSTS:
            gone.append(self._ghosts.pop(next(iter(self._ghosts))))
        return gone

    def inherit(self, above: Node, node: Node) -> None:
        """Let an edge know what was evicted behind an edge that continued it, and is gone."""
        above.ghosts += node.ghosts
        if len(above.ghosts) > 2 * _FEW_GHOSTS:
            above.ghosts = [ghost for ghost in above.ghosts[-_FEW_GHOSTS:] if ghost in self._ghosts]
