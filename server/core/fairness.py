"""Fairness between API keys in front of the engine: shares of what is bounded, and turns at what works for all.

The engine's own share-out of rows, memory and steps is the scheduler's (`jswa.sched.turns`).
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from ..http.errors import ApiError

Key = str | None
Weights = Mapping[Key, float]


def weights_of(keys: Sequence[str], weights: Sequence[float]) -> dict[Key, float]:
    """Return the weight of each key; a server without keys has one tenant."""
    return dict(zip(keys, weights or [1.0] * len(keys), strict=True)) if keys else {None: 1.0}


class Budget:
    """An amount of something that keys share. `refused` counts refusals.

    Half of it is first come, first served. The other half is reserved for the keys in proportion to their weights.
    """

    def __init__(self, most: float, weights: Weights | None = None) -> None:
        weights = weights or {None: 1.0}
        whole = 2 * sum(weights.values()) if len(weights) > 1 else float("inf")
        self.most = most
        self.refused = 0
        self._reserved = {key: most * weight / whole for key, weight in weights.items()}
        self._used = dict.fromkeys(weights, 0)

    @property
    def used(self) -> int:
        """The amount that is taken."""
        return sum(self._used.values())

    def fits(self, key: Key, amount: int) -> bool:
        """Return whether a key may take so much. Whoever comes while nothing is taken may take any amount."""
        others = (max(used, self._reserved[other]) for other, used in self._used.items() if other != key)
        return self._used[key] + amount + sum(others) <= self.most or not self.used

    def take(self, key: Key, amount: int) -> bool:
        """Take so much for a key, if it fits."""
        fits = self.fits(key, amount)
        if fits:
            self._used[key] += amount
        else:
            self.refused += 1
        return fits

    def take_anyway(self, key: Key, amount: int) -> None:
        """Take so much for a key, whether it fits or not: what is there already has to be counted."""
        self._used[key] += amount

    def give_back(self, key: Key, amount: int) -> None:
        """Give back what was taken."""
        self._used[key] -= amount


class Admission:
    """The bounded queue of accepted texts without a token, limited by count and by prompt tokens; beyond that: 429."""

    def __init__(self, most_texts: int, most_tokens: int, weights: Weights | None = None) -> None:
        self.refused = 0
        self._texts = Budget(most_texts, weights)
        self._tokens = Budget(most_tokens, weights)

    @property
    def texts(self) -> int:
        """Number of waiting texts."""
        return self._texts.used

    @property
    def tokens(self) -> int:
        """Prompt tokens of the waiting texts."""
        return self._tokens.used

    def check_size(self, texts: int, tokens: int) -> None:
        """Refuse a request of more than half of the queue: it would shut out everybody else. Raises ApiError (400)."""
        for param, new, queue, option, unit in (
            ("n", texts, self._texts, "--max-queued-requests", "texts (prompts x n)"),
            ("prompt", tokens, self._tokens, "--max-queued-tokens", "prompt tokens (of all texts)"),
        ):
            most = max(1, int(queue.most) // 2)
            if new > most:
                raise ApiError(
                    400,
                    f"{param}: the request has {new} {unit}; at most {most} are allowed, half of {option}",
                    param=param,
                    code="invalid_value",
                )

    def admit(self, key: Key, texts: int, tokens: int) -> None:
        """Admit texts with `tokens` prompt tokens in all. An empty queue admits any request. Raises ApiError (429)."""
        if self.texts and not (self._texts.fits(key, texts) and self._tokens.fits(key, tokens)):
            self.refused += 1
            raise ApiError(
                429,
                f"the queue is full: {self.texts} texts with {self.tokens} prompt tokens wait; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.release(key, -texts, -tokens)

    def release(self, key: Key, texts: int, tokens: int) -> None:
        """Release texts that have their first token or have ended."""
        self._texts.give_back(key, texts)
        self._tokens.give_back(key, tokens)


class Lanes:
    """Places for work that takes a while. Keys take turns at them; with several, one key never has all of them.

    Args:
        most_waiting: more do not wait but get status 429; the keys share these places as they share the queue.
    """

    def __init__(self, count: int, weights: Weights, most_waiting: int) -> None:
        self._count = count
        self._most = count - 1 if count > 1 and len(weights) > 1 else count  # of one key
        self._busy: Counter[Key] = Counter()
        self._waiting: dict[Key, deque[asyncio.Future[None]]] = {}  # whose turn it is next comes first
        self._places = Budget(most_waiting, weights)

    @property
    def refused(self) -> int:
        """Number of refusals so far."""
        return self._places.refused

    @property
    def waiting(self) -> int:
        """Number of those who wait."""
        return self._places.used

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncGenerator[None]:
        """Hold a place. Raises ApiError (429)."""
        await self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    async def enter(self, key: Key) -> None:
        """Wait for a place; `leave` gives it back. Raises ApiError (429)."""
        if self._free_for(key):
            self._busy[key] += 1
            return
        if not self._places.take(key, 1):
            raise ApiError(
                429, "too many requests are being prepared; try again later", code="queue_full",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.done() and not called.cancelled():
                self.leave(key)
            raise
        finally:
            self._places.give_back(key, 1)

    def leave(self, key: Key) -> None:
        """Give a place back, and call whoever is next."""
        self._busy[key] -= 1
        while next_ones := [k for k in self._waiting if self._free_for(k)]:
            following = next_ones[0]
            line = self._waiting.pop(following)
            called = line.popleft()
            if line:
                self._waiting[following] = line  # behind the others
            if not called.done():
                self._busy[following] += 1
                called.set_result(None)

    def _free_for(self, key: Key) -> bool:
        return self._busy.total() < self._count and self._busy[key] < self._most


class Helpers:
    """Threads for work on large requests, such as tokenizing megabytes; keys take turns at them."""

    def __init__(self, threads: int, weights: Weights, most_waiting: int = 1_024) -> None:
        self.lanes = Lanes(threads, weights, most_waiting)
        self._pool = ThreadPoolExecutor(threads, "helper")

    async def run[T](self, key: Key, work: Callable[[], T]) -> T:
        """Run something in a thread, whose place is taken until it ends, awaited or not. Raises ApiError (429)."""
        loop = asyncio.get_running_loop()
        await self.lanes.enter(key)

        def ended(_: "Future[T]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.lanes.leave, key)

        try:
            future = self._pool.submit(work)
        except RuntimeError:  # the server goes down
            self.lanes.leave(key)
            raise
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)
