"""Long work beside the event loop, a slice at a time: it stops when whoever waits for it is cancelled."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

SMALL = 4_096  # tokens, characters or entries that may be looked at on the event loop: about a millisecond
_SLICE = 0.05  # seconds of a slice; the threads are shared by all requests

Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a function in a thread


async def gathered[T](work: Iterator[T], size: int, run: Run = asyncio.to_thread) -> list[T]:
    """Return all items of an iterator that makes them in threads, if there is more to look at than `SMALL`.

    An item should take milliseconds: Python's lock changes hands between two of its steps, and cancellation waits for
    the end of an item.

    Args:
        size: tokens, characters or entries that the iterator looks at in all.
        run: runs a slice in a thread; `Helpers.run` gives API keys turns.
    """
    if size <= SMALL:
        return list(work)
    found: list[T] = []
    while await run(lambda: _slice(work, found)):
        pass
    return found


async def made[T](function: Callable[[], T], size: int, run: Run = asyncio.to_thread) -> T:
    """Return the result of a function that looks at `size` tokens, characters or entries; see `gathered`."""
    (found,) = await gathered((function() for _ in range(1)), size, run)
    return found


def _slice[T](work: Iterator[T], found: list[T]) -> bool:
    """Append items for as long as a slice takes; return whether there may be more."""
    end = time.monotonic() + _SLICE
    for item in work:
        found.append(item)
        if time.monotonic() > end:
            return True
    return False
