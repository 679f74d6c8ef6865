"""What the learned policy sees of requests: at which ages texts are used again, and where on them.

A row that starts *visits* the text that it shares with the cache. The conversation of that text goes on at its end, or
at an earlier *place*: the end of a prompt or of a text, so many turns ago, or where texts diverge. What a text held
beyond is *left* then, and ages as another kind from that moment on. Where more than three texts diverge (a prompt that
many conversations share) none is left when another goes on.

A text that is evicted goes on ageing, as a ghost, so the policy learns what the eviction cost.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
from jaxtyping import Int

from jswa.cache.prefix.edges import BRANCH, DEPTHS, PROMPT_END, TEXT_END, UNKNOWN, Node, Window
from jswa.cache.prefix.ghosts import LastUse
from jswa.cache.prefix.learned.ageing import LEFT, NEW, USED, Ageing
from jswa.cache.prefix.learned.places import Places
from jswa.cache.prefix.learned.victims import Victims
from jswa.cache.prefix.radix import RadixTree

_LEARN_EVERY = 64  # visits, and more where many ghosts are to be counted
_FORKS = 3


class Learned:
    """Learns from what it sees of a tree, and chooses by it (`policy.Policy`).

    Args:
        places: those of another policy, which sees the same rows and counts the places of texts that have ended.
    """

    def __init__(self, tree: RadixTree, places: Places | None = None) -> None:
        self.ageing = Ageing()
        self.places = places or Places()
        self.victims = Victims(tree, self.places, self.ageing)
        self._tree = tree
        self._shows = places is None
        self._until_learning = _LEARN_EVERY
        self._share = self.places.share  # with which values were computed

    def beside(self, tree: RadixTree) -> "Learned":
        return Learned(tree, self.places)

    def started(self, path: Sequence[Node], text: int, found: int) -> None:
        if path:
            if text > found:
                # Only this tree knows where the row goes on if it has more of the text.
                self._ask(path, text)
            for node in path:
                if node.kind == LEFT and node.parent is not None:
                    self._leave_others(node.parent, node)
            last = path[-1]
            if last.children:
                self._leave_others(last)
            else:
                self._count_use(last)
            for node in path:
                node.kind = USED if node is last or node.kind != NEW else NEW
                self._tree.use(node)
        self._until_learning -= 1
        if self._until_learning <= 0:
            self._learn()

    def appended(self, above: Node) -> None:
        self._leave_others(above, visited=False)

    def ended(self, node: Node, published: int, prompt: int, end: int) -> None:
        """Count the places on the path anew from its end: those of this turn, one turn ago, …, whatever lies beside."""
        kinds: list[int] = []
        seen = [int(end > published), int(prompt > published)]  # ends of texts and of prompts, from the last one on
        node.last = self._tree.clock
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
                    kind = first + 2 * min(seen[first], DEPTHS - 1)
                    seen[first] += 1
                above.places[at] = kind
                kinds.append(kind)
            for window in above.windows.values():
                self._tree.candidates.forget(window)
            above = above.parent
        if self._shows:
            self.places.show(kinds)

    def outcome(self, age: int, kind: int, *, used: bool) -> None:
        self.ageing.count(age, kind, used=used)

    def victim(self) -> tuple[Node | Window, int]:
        return self.victims.next()

    def evicted(self, item: Node | Window) -> None:
        if isinstance(item, Window):
            self.victims.prefer(item.node)

    def _leave_others(self, above: Node, node: Node | None = None, *, visited: bool = True) -> None:
        """Count as left what continues an edge, but not with `node`: its conversation goes on elsewhere.

        `visited`: this is a use of it, which has not been counted.
        """
        if len(above.children) > _FORKS:
            return
        for other in above.children.values():
            top: Node | None = other if other is not node else None
            while top is not None and top.kind != LEFT and not top.cursors:
                if visited and not top.children:
                    self._count_use(top)
                # Not as late as the visit itself: what was visited is restored first.
                top.kind, top.last = LEFT, max(top.last, self._tree.clock - 1)
                self._tree.candidates.refresh(top)
                below = (child for child in top.children.values() if child.kind != LEFT)
                top = max(below, key=lambda child: child.last, default=None)

    def _ask(self, path: Sequence[Node], text: int) -> None:
        """Count the last place from which a text could go on that agrees with a path up to `text`."""
        for node in reversed(path):
            # A prompt that is sent again agrees with itself but for its last token.
            found = max((at for at in node.places if at <= text + 1), default=None)
            if found is not None:
                self.places.ask(node.places[found])
                return

    def _count_use(self, node: Node) -> None:
        self.ageing.count(self._tree.clock - node.last, node.kind, used=True)

    def _learn(self) -> None:
        candidates, ghosts = self._tree.candidates, self._tree.ghosts
        slots = candidates.slots_of_edges()
        last, kinds = candidates.last[slots], candidates.kinds[slots]
        self.ageing.learn(partial(_with_ghosts, self._tree.clock, last, kinds, ghosts.last_uses()))
        self.places.learn()
        if self.places.share is not self._share:
            self._share = self.places.share
            candidates.values[: len(candidates.items)] = UNKNOWN
        self._until_learning = _LEARN_EVERY + len(ghosts) // 16


def _with_ghosts(
    clock: int, last: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"], evicted: list[LastUse]
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]]:
    """Return the ages and kinds of texts and of ghosts, given last use and kind of each."""
    ghosts = np.fromiter(chain.from_iterable(evicted), np.int64).reshape(-1, 2)
    return clock - np.concatenate([last, ghosts[:, 0]]), np.concatenate([kinds, ghosts[:, 1]])
