"""What the prefix cache learns from requests: at which ages texts are used again, and where on them.

A request *visits* a text that it shares with the cache. The conversation of that text goes on at its end, or at an
earlier *place*: the end of a prompt or of a text, so many turns ago, or where texts part. What a text held beyond is
*left* then, and ages as another kind from that moment on. Where more than three texts part (a prompt that many
conversations share) none is left when another goes on.

A text that is evicted stays known for a while by its next tokens (a *ghost*), so that it is learned what it cost.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.ageing import LEFT, NEW, USED, Ageing
from jswa.cache.prefix.edges import UNKNOWN, Ghost, Node
from jswa.cache.prefix.radix import RadixTree

# Kinds of places, for `Node.places`: the end of a text 0 turns ago, of a prompt 0 turns ago, of a text 1 turn ago, …
TEXT_END, PROMPT_END = 0, 1
_DEPTHS = 5  # turns that are told apart
BRANCH = 2 * _DEPTHS
_GHOSTS = 8_192
_FEW_GHOSTS = 32  # behind one edge that are counted when it is cut
_GHOST_TOKENS = 8
_LEARN_EVERY = 64  # visits, and more where many ghosts are to be counted
_FORKS = 3
_DECAY_AT = 4096.0  # turns after which the past counts half
# A turn is expected to go on at its end; what it goes on from otherwise, a few turns teach.
_PRIOR_TURNS, _PRIOR_AT_END, _PRIOR_ELSEWHERE = 8.0, 4.0, 0.1
# The last message may be edited at any time, after however many turns without an edit.
_LEAST_AT_LAST_TURN = 1 / 32
_WRONG_BY = 0.1  # of a share: less does not change which items are worth least


class Places:
    """How often requests go on from each kind of place. `share`: by kind, for `Node.places`."""

    def __init__(self) -> None:
        self._asked = [_PRIOR_ELSEWHERE] * (BRANCH + 1)
        self._asked[TEXT_END] = _PRIOR_AT_END
        self._shown = [_PRIOR_TURNS] * (BRANCH + 1)
        self.share = self._shares()

    def ask(self, kind: int) -> None:
        """Count a request that goes on from such a place."""
        self._asked[kind] += 1.0

    def show(self, kinds: list[int]) -> None:
        """Count the places of a text that has ended: its next request may go on from any."""
        for kind in kinds:
            self._shown[kind] += 1.0

    def learn(self) -> None:
        """Compute the shares anew, if one has changed by so much that values computed with it are wrong."""
        share = self._shares()
        if self._shown[TEXT_END] > _DECAY_AT:
            self._asked = [0.5 * count for count in self._asked]
            self._shown = [0.5 * count for count in self._shown]
        if any(abs(new - old) > _WRONG_BY * old for new, old in zip(share, self.share, strict=True)):
            self.share = share

    def _shares(self) -> list[float]:
        """Return the shares. Each new turn makes a place one turn older: its share is the best mean over these ages."""
        share = [min(1.0, asked / shown) for asked, shown in zip(self._asked, self._shown, strict=True)]
        share[TEXT_END + 2] = max(share[TEXT_END + 2], _LEAST_AT_LAST_TURN)
        for kind in range(BRANCH):  # a place of more turns ago has not been changed yet
            turns = share[kind:BRANCH:2]
            share[kind] = max(total / count for count, total in enumerate(accumulate(turns), 1))
        return share


class Visits:
    """Follows the texts of a tree. `clock` counts the rows that have started."""

    def __init__(self, tree: RadixTree) -> None:
        self.clock = 0
        self.ageing = Ageing()
        self.places = Places()
        self._tree = tree
        self._ghosts: dict[Ghost, tuple[int, int]] = {}  # last use and kind
        self._until_learning = _LEARN_EVERY
        self._share = self.places.share  # with which values were computed

    def visit(self, path: Sequence[Node], text: int, ghost: Ghost | None, *, asks: bool = True) -> None:
        """Count the start of a row whose text agrees with a path up to `text`, and with a ghost beyond.

        `asks`: whether the place from which it goes on is counted here.
        """
        self.clock += 1
        if ghost is not None and ghost in self._ghosts:
            self._count(*self._ghosts.pop(ghost), used=True)
        if path:
            if asks:
                self._ask(path, text)
            for node in path:
                if node.kind == LEFT and node.parent is not None:
                    self.leave_others(node.parent, node)
            last = path[-1]
            if last.children:
                self.leave_others(last)
            else:
                self._count(last.last, last.kind, used=True)
            for node in path:
                node.last, node.kind = self.clock, USED if node is last or node.kind != NEW else NEW
                self._tree.candidates.refresh(node)
            last.hits += 1
        self._until_learning -= 1
        if self._until_learning <= 0:
            self._learn()

    def leave_others(self, above: Node, node: Node | None = None, *, used: bool = True) -> None:
        """Count as left what continues an edge, but not with `node`: its conversation goes on elsewhere.

        `used`: it was visited now, and has not been counted.
        """
        if len(above.children) > _FORKS:
            return
        for other in above.children.values():
            top: Node | None = other if other is not node else None
            while top is not None and top.kind != LEFT and not top.cursors:
                if used and not top.children:
                    self._count(top.last, top.kind, used=True)
                # Not as late as the visit itself: what was visited is restored first.
                top.kind, top.last = LEFT, max(top.last, self.clock - 1)
                self._tree.candidates.refresh(top)
                below = (child for child in top.children.values() if child.kind != LEFT)
                top = max(below, key=lambda child: child.last, default=None)

    def end_turn(self, node: Node, published: int, prompt: int, end: int) -> list[int]:
        """Count the places on a path anew from its end: those of this turn, one turn ago, …, whatever lies beside.

        Return their kinds, for `Places.show`. The text may go on from `published` to `end` where this tree lacks it.
        """
        kinds: list[int] = []
        seen = [int(end > published), int(prompt > published)]  # ends of texts and of prompts, from the last one on
        node.last = self.clock
        above: Node | None = node
        while above is not None:
            above.kind = USED if above.kind == LEFT else above.kind
            self._tree.candidates.refresh(above)
            for at in sorted(above.places, reverse=True):
                if at > published:
                    continue
                kind = TEXT_END if at == end else PROMPT_END if at == prompt else above.places[at]
                if kind != BRANCH:
                    first = kind % 2
                    kind = first + 2 * min(seen[first], _DEPTHS - 1)
                    seen[first] += 1
                above.places[at] = kind
                kinds.append(kind)
            for window in above.windows.values():
                self._tree.candidates.forget(window)
            above = above.parent
        return kinds

    def cut(self, node: Node, at: int) -> None:
        """Note that a leaf's text is evicted from `at` on."""
        for old in node.ghosts:
            # What was cut before is behind `at`. If the leaf was used since, a use of it is not one of what was cut.
            if old in self._ghosts:
                last, kind = self._ghosts.pop(old)
                if last < node.last:
                    self._count(last, kind, used=False)
        ghost = (node.salt, at, node.tokens[at - node.start :][:_GHOST_TOKENS].tobytes())
        node.ghosts = [ghost]
        self._ghosts[ghost] = node.last, node.kind
        if len(self._ghosts) > _GHOSTS:
            self._count(*self._ghosts.pop(next(iter(self._ghosts))), used=False)

    def inherit(self, above: Node, node: Node) -> None:
        """Let an edge know what was evicted behind an edge that continued it, and is gone."""
        above.ghosts += node.ghosts
        if len(above.ghosts) > 2 * _FEW_GHOSTS:
            above.ghosts = [ghost for ghost in above.ghosts[-_FEW_GHOSTS:] if ghost in self._ghosts]

    def ghost(self, salt: str, tokens: Int[np.ndarray, " T"], at: int) -> Ghost | None:
        """Return what was evicted of this text beyond `at`, if that was not too long ago."""
        if not self._ghosts:
            return None
        ghost = salt, at, tokens[at : at + _GHOST_TOKENS].tobytes()
        return ghost if ghost in self._ghosts else None

    def _ask(self, path: Sequence[Node], text: int) -> None:
        """Count the last place from which a text could go on that agrees with a path up to `text`."""
        for node in reversed(path):
            # A prompt that is sent again agrees with itself but for its last token.
            found = max((at for at in node.places if at <= text + 1), default=None)
            if found is not None:
                self.places.ask(node.places[found])
                return

    def _count(self, last: int, kind: int, *, used: bool) -> None:
        self.ageing.count(self.clock - last, kind, used=used)

    def _learn(self) -> None:
        candidates = self._tree.candidates
        clock, slots, evicted = self.clock, candidates.slots_of_edges(), list(self._ghosts.values())
        last, kinds = candidates.last[slots], candidates.kinds[slots]
        self.ageing.learn(partial(_with_ghosts, clock, last, kinds, evicted))
        self.places.learn()
        if self.places.share is not self._share:
            self._share = self.places.share
            candidates.values[: len(candidates.items)] = UNKNOWN
        self._until_learning = _LEARN_EVERY + len(self._ghosts) // 16


def _with_ghosts(
    clock: int, last: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"], evicted: list[tuple[int, int]]
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Return the ages and kinds of texts and of ghosts, given last use and kind of each."""
    ghosts = np.fromiter(chain.from_iterable(evicted), np.int64).reshape(-1, 2)
    return clock - np.concatenate([last, ghosts[:, 0]]), np.concatenate([kinds, ghosts[:, 1]])
