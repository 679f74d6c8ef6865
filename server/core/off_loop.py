"""Long work in threads, a slice at a time. The work stops when the coroutine that waits for it is cancelled."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

SMALL = 4_096  # tokens, characters or entries that may be processed on the event loop: about a millisecond
_SLICE = 0.05  # seconds of a slice; all requests share the threads

Run = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a function in a thread


async def gathered[T](work: Iterator[T], size: int, run: Run = asyncio.to_thread) -> list[T]:
    """Return all items of an iterator, which are made in threads if the work is larger than `SMALL`.

    An item should take milliseconds: other threads get the GIL between the bytecodes of an item, but a cancellation
    waits for its end.

    Args:
        size: tokens, characters or entries that the iterator processes in all.
        run: runs a slice in a thread. With `Helpers.run`, API keys take turns at the threads.
    """
    if size <= SMALL:
        return list(work)
    found: list[T] = []
    while await run(lambda: _slice(work, found)):
        pass
    return found


async def made[T](function: Callable[[], T], size: int, run: Run = asyncio.to_thread) -> T:
    """Return the result of a function that processes `size` tokens, characters or entries; see `gathered`."""
    (found,) = await gathered((function() for _ in range(1)), size, run)
    return found


def _slice[T](work: Iterator[T], found: list[T]) -> bool:
    """Append items for the time of a slice; return whether the iterator may have more."""
    end = time.monotonic() + _SLICE
    for item in work:
        found.append(item)
        if time.monotonic() > end:
            return True
    return False
