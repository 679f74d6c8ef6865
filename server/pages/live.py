"""The event stream of /live: what the KV cache holds, and its changes. Ids and counts, never text.

One task looks at the engine for all watchers, between two steps: at most ten times a second, and so seldom that looking
takes at most 1 % of the engine's time. Without watchers nobody looks.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from starlette.requests import Request
from starlette.responses import Response

from jswa.cache.view import CacheView

from ..core.service import Service, service_of
from ..http.errors import ApiError
from ..http.sse import EventStream, event

_INTERVAL = 0.1  # seconds between two looks, at least
_SHARE = 0.01  # largest share of the engine's time
_EDGES = 200  # of the prefix tree
_TREE_EVERY = 10  # looks: the tree costs more than all else, and changes little
_BEHIND = 4  # events that may wait for a watcher; one that is further behind gets the whole view again
_MOST_WATCHERS = 16

Slots = UInt8[np.ndarray, " slots"]
Look = Callable[[int], Awaitable[CacheView]]


class Feed:
    """The watchers of a server, and the task that looks for them.

    Args:
        look: returns the view with so many edges of the prefix tree. Raises ApiError.
        ended: whether the server is shutting down.
        model: the model's name.
    """

    def __init__(self, look: Look, ended: Callable[[], bool], model: str) -> None:
        self._look = look
        self._ended = ended
        self._model = model
        self._watchers: dict[asyncio.Queue[bytes | None], bool] = {}  # with whether it has the view before the next
        self._task: asyncio.Task[None] | None = None
        self.looks = 0

    def join(self) -> asyncio.Queue[bytes | None]:
        """Return the queue of a new watcher, who must `leave`. Raises ApiError (429)."""
        if len(self._watchers) >= _MOST_WATCHERS:
            raise ApiError(429, f"{_MOST_WATCHERS} clients watch already", headers={"Retry-After": "5"})
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers[queue] = False
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return queue

    async def events(self, queue: asyncio.Queue[bytes | None]) -> AsyncGenerator[bytes]:
        """Iterate over the events for a watcher: the whole view, then changes, until the server shuts down."""
        while (new := await queue.get()) is not None:
            yield new

    def leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Forget a watcher."""
        self._watchers.pop(queue, None)

    async def _run(self) -> None:
        last: CacheView | None = None
        try:
            while self._watchers and not self._ended():
                edges = _EDGES if self.looks % _TREE_EVERY == 0 or not all(self._watchers.values()) else 0
                now = await self._look(edges)
                self.looks += 1
                await self._tell(last, now, tree=edges > 0)
                last = now
                await asyncio.sleep(max(_INTERVAL, now.seconds / _SHARE))
        except ApiError as error:
            failed = event(error.body())
            for queue in self._watchers:
                queue.put_nowait(failed)
        finally:
            for queue in self._watchers:
                queue.put_nowait(None)

    async def _tell(self, last: CacheView | None, now: CacheView, *, tree: bool) -> None:
        whole: bytes | None = None
        changed: bytes | None = None
        for queue, follows in list(self._watchers.items()):
            if queue.qsize() >= _BEHIND:
                self._watchers[queue] = False  # it skips what it cannot read in time
            elif follows and last is not None:
                if changed is None:
                    changed = await asyncio.to_thread(changes, last, now, tree=tree)
                queue.put_nowait(changed)
            elif tree:
                whole = whole or await asyncio.to_thread(complete, now, self._model)
                queue.put_nowait(whole)
                self._watchers[queue] = True


def complete(view: CacheView, model: str) -> bytes:
    """Return the event with a whole view, and the model's name."""
    pools = {"arena": _all(view.slots), "host": _all(view.host)}
    named = {"type": "whole", "model": model, "geometry": view.geometry._asdict()}
    return event({**named, **pools, **_lists(view, tree=True)})


def changes(before: CacheView, now: CacheView, *, tree: bool) -> bytes:
    """Return the event with the changes between two views."""
    pools = {"arena": _changed(before.slots, now.slots), "host": _changed(before.host, now.host)}
    return event({"type": "changes", **pools, **_lists(now, tree=tree)})


def _changed(before: Slots, now: Slots) -> dict[str, Any]:
    """Return the runs of changed slots, or all slots if more than an eighth of them have changed.

    A run is first slot, number and code; the runs are one list.
    """
    changed = np.flatnonzero(before != now)
    if len(changed) > len(now) // 8:
        return _all(now)
    return {"runs": _runs(changed, now) if len(changed) else []}


def _runs(changed: Int[np.ndarray, " n"], slots: Slots) -> list[int]:
    codes = slots[changed]
    begins = np.flatnonzero(np.diff(changed, prepend=-2) - 1 | np.diff(codes.astype(np.int16), prepend=-1))
    counts = np.diff(begins, append=len(changed))
    found: list[int] = np.stack([changed[begins], counts, codes[begins]], axis=1).ravel().tolist()
    return found


def _lists(view: CacheView, *, tree: bool) -> dict[str, Any]:
    fields = {"rows": view.rows.ravel().tolist(), "micros": round(1e6 * view.seconds)}
    return {**fields, "tree": view.tree.tolist(), "windows": view.windows.ravel().tolist()} if tree else fields


def _all(slots: Slots) -> dict[str, str]:
    return {"slots": base64.b64encode(slots.tobytes()).decode()}


def feed_of(service: Service) -> Feed:
    """Return the feed of a server."""
    return Feed(lambda edges: service.engine.view(edges), lambda: service.draining, service.config.served_model_name[0])


async def live_events(request: Request) -> Response:
    """Stream what the KV cache holds, and its changes, ten times a second at most."""
    feed: Feed = request.app.state.feed
    queue = feed.join()
    return EventStream(feed.events(queue), partial(feed.leave, queue), service_of(request).config.keep_alive)
