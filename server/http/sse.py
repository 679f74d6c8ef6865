"""Responses that end when the client has gone: streams of server-sent events, and JSON that takes a while."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from . import limits
from .pieces import chunks, encode

DONE = b"data: [DONE]\n\n"
_WHOLE = 2**18  # bytes of a response that are sent at once
KEEP_ALIVE = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    """One event."""
    return b"data: %b\n\n" % encode(value)


class EventStream(Response):
    """Sends events as they come; `done` is called in the end, also where the client leaves before the first one."""

    def __init__(
        self, events: AsyncGenerator[bytes], done: Callable[[], None], media_type: str = "text/event-stream"
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._done: Callable[[], None] | None = done
        self._sending: float | None = None  # since when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, unless the client leaves."""
        try:
            await unless_gone(receive, self._send(send), self._stalled)
        finally:
            self._finish()

    def _stalled(self) -> bool:
        """Whether the client does not take in what is sent."""
        return self._sending is not None and time.monotonic() - self._sending > limits.WRITE_SECONDS

    def _finish(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._events:
                self._sending = time.monotonic()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending = None
            self._finish()  # before the end of the response, which ends its span
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


def json_in_pieces(pieces: Sequence[bytes]) -> Response:
    """A response of JSON in pieces; a long one is sent piece by piece, as the client takes it in."""
    size = sum(map(len, pieces))
    if size <= _WHOLE:
        return Response(b"".join(pieces), media_type=JsonResponse.media_type)
    response = EventStream(_each(pieces), lambda: None, JsonResponse.media_type)
    response.headers["content-length"] = str(size)
    return response


async def _each(pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
    for chunk in chunks(pieces):
        yield chunk
        await asyncio.sleep(0)


class JsonResponse(Response):
    """JSON by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode(content)


async def unless_gone[T](
    receive: Receive, work: Coroutine[Any, Any, T], stalled: Callable[[], bool] = lambda: False
) -> T | None:
    """The result of some work; None where the client went away first, or stalled, and the work has been cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive, stalled))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.wait((task, watcher))


async def _gone(receive: Receive, stalled: Callable[[], bool]) -> None:
    while not stalled():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.WRITE_SECONDS / 4):
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
