"""A front end's part of a budget that all processes share. The engine's process grants it, so the whole is bounded."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..core.fairness import Key

_PARTS = 256  # of a budget; a front end asks for one part more than it needs
_AGAIN = 0.05  # seconds until a part that was refused is asked for again, and until one that nobody uses goes back


class Leases:
    """What API keys use here of a budget, and what the engine's process has granted to this one.

    `claim` waits for a grant. `hold` does not: it asks for more ahead of need, and what was held without a grant is
    made good by the next `fits`, which refuses until the grant covers what is held.

    Args:
        most: the whole budget.
        ask: asks for an amount for a key, at least and at best; returns what is granted.
        give_back: returns an amount of a key.
    """

    def __init__(
        self,
        most: float,
        ask: Callable[[Key, int, int], Awaitable[int]],
        give_back: Callable[[Key, int], None],
    ) -> None:
        self.most = most
        self.refused = 0
        self._ask = ask
        self._give_back = give_back
        self._part = max(1, int(most) // _PARTS)
        self._used: Counter[Key] = Counter()
        self._granted: Counter[Key] = Counter()
        self._turn = asyncio.Lock()
        self._asking: set[Key] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._denied: dict[Key, float] = {}  # when a key was refused last
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def used(self) -> int:
        """The amount that this process uses."""
        return self._used.total()

    async def claim(self, key: Key, amount: int) -> bool:
        """Acquire an amount for a key and return True, or return False if it does not fit."""
        async with self._turn:  # what is granted to one caller must not be taken by another
            while (lacks := self._used[key] + amount - self._granted[key]) > 0:
                # What is granted counts, also if the caller is cancelled meanwhile.
                if not await asyncio.shield(self._task(self._asked(key, lacks))):
                    self.refused += 1
                    return False
            self._used[key] += amount
        return True

    def fits(self, key: Key, amount: int) -> bool:
        """Return whether a key may have an amount more, as far as this process knows."""
        if self._used[key] + amount <= self._granted[key] or key not in self._denied:
            return True
        self._grow(key, amount)
        return False

    def hold(self, key: Key, amount: int) -> None:
        """Acquire an amount for a key even if it does not fit."""
        self._used[key] += amount
        if self._used[key] + self._part // 2 > self._granted[key]:
            self._grow(key, 0)

    def release(self, key: Key, amount: int) -> None:
        """Release an amount that a key has acquired."""
        self._used[key] -= amount
        spare = self._granted[key] - self._used[key]
        if spare > 3 * self._part and key not in self._denied:
            self._give()  # another process may need it now; of a key that lacks memory, requests here need it first
        elif spare > 3 * self._part or (spare > 0 and not self._used[key]):
            self._later()

    def _grow(self, key: Key, amount: int) -> None:
        """Ask for what a key lacks, unless that was asked just now."""
        now = asyncio.get_running_loop().time()
        if key not in self._asking and now - self._denied.get(key, 0.0) > _AGAIN:
            self._asking.add(key)
            self._task(self._grown(key, amount))

    async def _grown(self, key: Key, amount: int) -> None:
        try:
            granted = await self._asked(key, max(1, self._used[key] + amount - self._granted[key]))
        finally:
            self._asking.discard(key)
        if granted:
            self._denied.pop(key, None)
        else:
            self._denied[key] = asyncio.get_running_loop().time()
            self._later()

    async def _asked(self, key: Key, least: int) -> int:
        granted = await self._ask(key, least, least + self._part)
        self._granted[key] += granted
        self._later()
        return granted

    def _task(self, work: Coroutine[Any, Any, int | None]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _later(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_AGAIN, self._give)

    def _give(self) -> None:
        """Give back what no key uses."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for key in list(self._granted):
            keep = self._used[key] + (self._part if self._used[key] else 0)  # one part more, while it is in use
            spare = self._granted[key] - keep
            if spare > 0:
                self._granted[key] -= spare
                self._give_back(key, spare)
            if not self._granted[key] and key not in self._asking:
                self._denied.pop(key, None)
