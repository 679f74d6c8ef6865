"""The edges of the tree with their windows and cursors, and in arrays which of them may be evicted.

Windows and leaves may be. A sample of them is scored by a few numpy calls.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

UNKNOWN = -1.0
# Kinds of places, for `Node.places`: the end of a text 0 turns ago, of a prompt 0 turns ago, of a text 1 turn ago, …
TEXT_END, PROMPT_END = 0, 1
DEPTHS = 5  # turns that are told apart
BRANCH = 2 * DEPTHS  # where texts diverge
Ghost = tuple[str, int, bytes]  # text that was evicted: salt, start, next tokens


@dataclass(eq=False, slots=True)
class Window:
    """The local pages that a query at `end` sees, kept together because requests are likely to resume there.

    `branch`: texts diverge here. `hits`: rows that started here. `last`: the tree's clock at the last such start.
    """

    end: int
    node: "Node"
    slabs: Int[np.ndarray, " n"]
    branch: bool
    last: int
    hits: int = 0
    index: int = -1  # among the candidates for eviction

    @property
    def edge(self) -> "Node":
        """The edge whose age counts."""
        return self.node


@dataclass(eq=False, slots=True)
class Cursor:
    """How far a running row's text is in the tree; each edge knows the cursors that stand on it.

    Attributes:
        node: the edge that holds the last published token, or a root; None: the row publishes nothing.
        published: tokens of the row that are in the tree, page aligned until the row ends.
        detached: the tree has other pages for the row's text, or has lost them: the row publishes at its end only.
    """

    node: "Node | None" = None
    published: int = 0
    detached: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """An edge of the tree, or the root of one (no tokens). `hits` and `index` as in `Window`.

    `last`: the tree's clock at the last use; the policy says what one is. `kind`: of text, for the policy. `slot`:
    where the candidates have both. `places`: kinds of the positions at which requests may go on. `ghosts`: what was
    evicted behind it. `buffers`: arrays with room to grow, of which tokens, full and local are the first part; None:
    there is no room.
    """

    start: int
    tokens: Int[np.ndarray, " n"]
    full: Int[np.ndarray, " pages"]
    local: Int[np.ndarray, " pages"]
    parent: "Node | None"
    salt: str
    last: int = 0
    hits: int = 0
    kind: int = 0
    slot: int = -1
    index: int = -1
    places: dict[int, int] = field(default_factory=dict)
    ghosts: list[Ghost] = field(default_factory=list)
    children: dict[int, "Node"] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    cursors: set[Cursor] = field(default_factory=set)
    buffers: list[Int[np.ndarray, " room"]] | None = None

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)

    @property
    def edge(self) -> "Node":
        """Itself."""
        return self


class Candidates:
    """Items in no order, with their numbers in arrays by index; adding and discarding cost O(1).

    Edges have slots: `refresh` after each change of `last` or `kind`. Entries past the last item are stale, and so are
    those of slots that no edge has. `values` are for the policy; the tree only says when one has become unknown.

    Attributes:
        values: loss per slot if the item is evicted, at an age at which every request uses it: UNKNOWN, or infinite if
            evicting it would free nothing.
        slots: by index, the slot of the item's edge.
        edges: by index, whether the item is an edge.
        last, kinds: by slot, as in `Node`.
    """

    def __init__(self) -> None:
        self.items: list[Node | Window] = []
        self.values: Float[np.ndarray, " room"] = np.empty(256)
        self.slots: Int[np.ndarray, " room"] = np.empty(256, np.intp)
        self.edges: Bool[np.ndarray, " room"] = np.empty(256, bool)
        self.last: Int[np.ndarray, " edges"] = np.empty(256, np.int64)
        self.kinds: Int[np.ndarray, " edges"] = np.empty(256, np.intp)
        self._edges: list[Node | None] = [None] * 256
        self._free = list(range(256))

    def add(self, item: Node | Window) -> None:
        """Add an item of unknown value if it is absent."""
        if item.index >= 0:
            return
        item.index = len(self.items)
        self.items.append(item)
        if len(self.items) > len(self.values):
            arrays = (self.values, self.slots, self.edges)
            self.values, self.slots, self.edges = (np.concatenate([array, array]) for array in arrays)
        self.edges[item.index] = item.edge is item
        self.forget(item)

    def discard(self, item: Node | Window) -> None:
        """Remove an item if it is present."""
        index = item.index
        if index < 0:
            return
        last = self.items.pop()
        if last is not item:
            self.items[index], at = last, last.index
            self.values[index], self.slots[index], self.edges[index] = self.values[at], self.slots[at], self.edges[at]
            last.index = index
        item.index = -1

    def slots_of_edges(self) -> Int[np.ndarray, " n"]:
        """Return the slots of the items that are edges."""
        found: Int[np.ndarray, " n"] = self.slots[: len(self.items)][self.edges[: len(self.items)]]
        return found

    def forget(self, item: Node | Window) -> None:
        """Count an item's value as unknown, and follow it to another edge, if it is present."""
        if item.index >= 0:
            self.values[item.index] = UNKNOWN
            self.slots[item.index] = item.edge.slot

    def refresh(self, edge: Node) -> None:
        """Follow a change of `last` or `kind` of an edge; give it a slot if it has none."""
        if edge.slot < 0:
            if not self._free:
                self._free = list(range(len(self.last), 2 * len(self.last)))
                self._edges += [None] * len(self.last)
                self.last, self.kinds = (np.concatenate([array, array]) for array in (self.last, self.kinds))
            edge.slot = self._free.pop()
            self._edges[edge.slot] = edge
        self.last[edge.slot], self.kinds[edge.slot] = edge.last, edge.kind

    def release(self, edge: Node) -> None:
        """Take the slot of an edge, which has no items any more."""
        self._free.append(edge.slot)
        self._edges[edge.slot], edge.slot = None, -1

    def edge_at(self, slot: int) -> Node | None:
        """Return the edge that has a slot."""
        return self._edges[slot]

    def check(self) -> None:
        """Assert that arrays, items and edges agree."""
        for index, item in enumerate(self.items):
            edge = item.edge
            assert item.index == index
            assert self.edges[index] == isinstance(item, Node)
            assert self.slots[index] == edge.slot >= 0, "an item has moved to another edge"
            assert (self.last[edge.slot], self.kinds[edge.slot]) == (edge.last, edge.kind), "a use was not refreshed"
        slots = {item.edge.slot for item in self.items}
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not slots & set(self._free), "a slot is taken and free"
