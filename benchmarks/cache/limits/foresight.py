"""An offline policy: jswa's cache, with victims chosen by what the requests to come will ask for.

It looks up every request to come as if it came now, and sees what the request would find: the leaf at the end of its
text, and the window at which it would resume. The loss of an item is the number of tokens by which the first request
that finds it would start later without it, per slot, and per request until then. What no request finds goes first.

That is a heuristic: what it reaches can be reached, and the best policy lies between it and the bound (`program`).
To evict first what the plan of the bound gives up reaches the same.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from benchmarks.cache.traces import TraceRequest
from jswa.cache.prefix.cache import PrefixCache
from jswa.cache.prefix.edges import Node, Window
from jswa.cache.prefix.learned.policy import Learned
from jswa.cache.prefix.learned.victims import Victims

_CHOSEN = 8  # items chosen before the requests to come are looked up again


class Foresight(Victims):
    """Knows all requests.

    Args:
        begun: returns the number of requests that have begun; they begin in their order.
    """

    def __init__(self, prefix: PrefixCache, requests: list[TraceRequest], begun: Callable[[], int]) -> None:
        policy = prefix.policy
        assert isinstance(policy, Learned)
        super().__init__(prefix.tree, policy.places, policy.ageing)
        self._requests = requests
        self._begun = begun
        self._needed: dict[Node | Window, tuple[int, int]] = {}  # tokens lost, requests until then
        policy.victims = self

    def _best(
        self, sample: Int[np.ndarray, " n"], count: int, under_cursors: bool = False
    ) -> list[tuple[Node | Window, int]]:
        candidates = self._tree.candidates
        self._look_up()
        for index, item in enumerate(candidates.items):
            candidates.values[index] = self.value(item)
        found: list[tuple[Node | Window, int]] = []
        for index in candidates.values[: len(candidates.items)].argsort(kind="stable").tolist():
            item = candidates.items[index]
            if candidates.values[index] == math.inf or len(found) == _CHOSEN:
                break
            if under_cursors or isinstance(item, Window) or not item.cursors:
                found.append((item, item.last))
        return found[::-1]

    def _look_up(self) -> None:
        """Find what the requests to come would resume with."""
        begun = self._begun()
        self._needed = {}
        root = self._tree.roots.get("")
        if root is None:
            return
        for number in range(begun, len(self._requests)):
            prompt = self._requests[number].prompt[:-1]
            if int(prompt[0]) in root.children:
                self._need(prompt, number - begun)

    def _need(self, prompt: Int[np.ndarray, " T"], wait: int) -> None:
        """Note what a request would resume with, unless an earlier one needs it."""
        path, agreed = self._tree.walk("", prompt)
        if not path:
            return
        node = path[-1]
        start = self._resumes_at(node, agreed, agreed)
        if not node.children:
            self._needed.setdefault(node, (start - self._resumes_at(node, node.start, node.start), wait))
        for edge in reversed(path):
            if start in edge.windows:
                lost = start - self._resumes_at(edge, start - 1, agreed)
                self._needed.setdefault(edge.windows[start], (lost, wait))
            if edge.start < start:
                break

    def value(self, item: Node | Window) -> float:
        value = super().value(item)
        if value == math.inf:
            return value
        lost, wait = self._needed.get(item, (0, 0))
        m = self._pool.pages_per_slab
        if isinstance(item, Window):
            free = item.slabs[self._pool.local_owners[item.slabs] == 1]
            slots = m * float((1.0 / self._tree.uses[free]).sum())
        else:
            slots = len(item.full) + m * int(np.count_nonzero(item.local))
        return lost / slots / (1 + wait)
