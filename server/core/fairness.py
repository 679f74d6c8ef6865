"""Fairness between API keys in front of the engine: shares of bounded resources, and turns at shared threads.

The scheduler shares out rows, KV memory and steps of the engine (`jswa.sched.fair_queue`).
"""

import asyncio
import os
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
    """A bounded amount that API keys share, such as bytes or waiting requests. `refused` counts refusals.

    Half of the amount is first come, first served. The other half is reserved for the keys in proportion to their
    weights.
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
        """The amount in use."""
        return sum(self._used.values())

    def fits(self, key: Key, amount: int) -> bool:
        """Return whether a key may acquire an amount. While nothing is in use, any amount fits."""
        others = (max(used, self._reserved[other]) for other, used in self._used.items() if other != key)
        return self._used[key] + amount + sum(others) <= self.most or not self.used

    def acquire(self, key: Key, amount: int) -> bool:
        """Acquire an amount for a key and return True, or return False if it does not fit."""
        fits = self.fits(key, amount)
        if fits:
            self._used[key] += amount
        else:
            self.refused += 1
        return fits

    async def claim(self, key: Key, amount: int) -> bool:
        """Acquire an amount, as `acquire` does."""
        return self.acquire(key, amount)

    def hold(self, key: Key, amount: int) -> None:
        """Acquire an amount for a key even if it does not fit, for memory that is in use already."""
        self._used[key] += amount

    def release(self, key: Key, amount: int) -> None:
        """Release an amount that a key has acquired."""
        self._used[key] -= amount


class Admission:
    """The bounded queue of accepted texts that have no token yet.

    It is limited by texts and by prompt tokens; a request beyond a limit gets status 429.
    """

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
        self._texts.hold(key, texts)
        self._tokens.hold(key, tokens)

    def release(self, key: Key, texts: int, tokens: int) -> None:
        """Release texts that have their first token or have ended."""
        self._texts.release(key, texts)
        self._tokens.release(key, tokens)


def check_size(queue_texts: int, queue_tokens: int, texts: int, tokens: int) -> None:
    """Refuse a request for more than half of the queue, which would shut out all others. Raises ApiError (400).

    Args:
        queue_texts, queue_tokens: the size of the queue.
    """
    for param, new, queue, option, unit in (
        ("n", texts, queue_texts, "--max-queued-requests", "texts (prompts x n)"),
        ("prompt", tokens, queue_tokens, "--max-queued-tokens", "prompt tokens (of all texts)"),
    ):
        most = max(1, queue // 2)
        if new > most:
            raise ApiError(
                400,
                f"{param}: the request has {new} {unit}; at most {most} are allowed, half of {option}",
                param=param,
                code="invalid_value",
            )


class Lanes:
    """A number of lanes, each for one piece of long work at a time. Keys take turns at them.

    With several keys, one key never occupies all lanes.

    Args:
        most_waiting: largest number of callers that wait for a lane; further ones get status 429. The keys share this
            number as a `Budget`.
    """

    def __init__(self, count: int, weights: Weights, most_waiting: int) -> None:
        self._count = count
        self._most = count - 1 if count > 1 and len(weights) > 1 else count  # lanes that one key may occupy
        self._busy: Counter[Key] = Counter()
        self._waiting: dict[Key, deque[asyncio.Future[None]]] = {}  # the key whose turn is next comes first
        self._queue = Budget(most_waiting, weights)

    @property
    def refused(self) -> int:
        """Number of refusals so far."""
        return self._queue.refused

    @property
    def busy(self) -> int:
        """Number of lanes that are occupied."""
        return self._busy.total()

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a lane."""
        return self._queue.used

    @asynccontextmanager
    async def lane(self, key: Key) -> AsyncGenerator[None]:
        """Occupy a lane within the context. Raises ApiError (429)."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def acquire(self, key: Key) -> None:
        """Wait for a lane and occupy it; `release` frees it. Raises ApiError (429)."""
        if self._free_for(key):
            self._busy[key] += 1
            return
        if not self._queue.acquire(key, 1):
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
                self.release(key)
            raise
        finally:
            self._queue.release(key, 1)

    def release(self, key: Key) -> None:
        """Free a lane, and wake the next caller that waits."""
        self._busy[key] -= 1
        while next_ones := [k for k in self._waiting if self._free_for(k)]:
            following = next_ones[0]
            line = self._waiting.pop(following)
            called = line.popleft()
            if line:
                self._waiting[following] = line  # behind the other keys
            if not called.done():
                self._busy[following] += 1
                called.set_result(None)

    def _free_for(self, key: Key) -> bool:
        return self._busy.total() < self._count and self._busy[key] < self._most


def helper_threads() -> int:
    """Return the number of helper threads: half of the processors, since the engine and the event loop need some."""
    return max(2, min(8, (os.cpu_count() or 1) // 2))


class Helpers:
    """Threads for work on large requests, such as tokenizing megabytes; keys take turns at them."""

    def __init__(self, threads: int, weights: Weights, most_waiting: int = 1_024) -> None:
        self.lanes = Lanes(threads, weights, most_waiting)
        self._pool = ThreadPoolExecutor(threads, "helper")

    async def run[T](self, key: Key, work: Callable[[], T]) -> T:
        """Run a function in a thread and return its result. Raises ApiError (429).

        The lane is occupied until the function ends, even if the caller is cancelled before.
        """
        loop = asyncio.get_running_loop()
        await self.lanes.acquire(key)

        def ended(_: "Future[T]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.lanes.release, key)

        try:
            future = self._pool.submit(work)
        except RuntimeError:  # the server is shutting down
            self.lanes.release(key)
            raise
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End each thread after the function that it runs; the functions that wait are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
