"""Responses that end when the client disconnects: streams of server-sent events, and large JSON."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from . import limits
from .pieces import chunks, encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    """Return a server-sent event with a value as JSON."""
    return b"data: %b\n\n" % encode(value)


def named_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a value as JSON, under the name that its field `type` has."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), encode(value))


class EventStream(Response):
    """A response that sends events as they arrive, until all are sent or the client disconnects or stops reading.

    Args:
        done: called once at the end, also if the client disconnects before the first event.
        keep_alive: seconds without an event after which the stream sends a comment, so that proxies do not close the
            connection.
        attach: gets the connection once events may be written to it directly, if the server allows that.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        done: Callable[[], None],
        keep_alive: float,
        attach: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._done: Callable[[], None] | None = done
        self._sending: float | None = None  # when the current write began
        self._keep_alive = keep_alive
        self._sent = 0.0  # when the last write began
        self._attach = attach
        self._writer: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects."""
        self._writer = scope.get("jswa.writer")
        try:
            await unless_gone(receive, self._send(send), self._stalled)
        finally:
            self._finish()

    def _stalled(self) -> bool:
        """Return whether the client has not read for too long."""
        return _late(self._sending)

    def _finish(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done()

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent = time.monotonic()
            if self._writer is not None:
                self._attach(self._writer)
            beat = asyncio.ensure_future(self._beat(send))
            try:
                async for chunk in self._events:
                    await self._piece(send, chunk)
            finally:
                beat.cancel()
                await asyncio.wait((beat,))
            self._finish()  # before the end of the response, which also ends its span
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()

    async def _piece(self, send: Send, piece: bytes) -> None:
        self._sending = self._sent = time.monotonic()
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending = None

    async def _beat(self, send: Send) -> None:
        """Send comments while no events arrive. Each write is one whole piece, so comments never split an event."""
        while True:
            sent = self._sent if self._writer is None else max(self._sent, self._writer.sent)
            idle = time.monotonic() - sent
            if idle < self._keep_alive:
                await asyncio.sleep(self._keep_alive - idle)
            elif self._sending is None:
                await self._piece(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive)  # the client has not read the current piece


class JsonResponse(Response):
    """A JSON response: a value that msgspec encodes, or JSON text in `pieces`.

    A large response is sent in pieces, each after the client has read those before it.

    Attributes:
        size: bytes of the body.
        done: called when the response has been sent, or when the client disconnects or stops reading.
    """

    media_type = "application/json"

    def __init__(
        self,
        content: Any = None,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        pieces: Sequence[bytes] | None = None,
    ) -> None:
        self._pieces = [encode(content)] if pieces is None else pieces
        self.size = sum(map(len, self._pieces))
        self.done: Callable[[], None] | None = None
        self._sending: float | None = None  # when the current write began
        whole = self.size <= limits.PIECE_BYTES
        super().__init__(b"".join(self._pieces) if whole else b"", status_code, headers)
        self.headers["content-length"] = str(self.size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            if self.size <= limits.PIECE_BYTES:
                await super().__call__(scope, receive, send)
            else:
                await unless_gone(receive, self._send(send), lambda: _late(self._sending))
        finally:
            if self.done is not None:
                self.done()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._parts():
            self._sending = time.monotonic()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        self._sending = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _parts(self) -> Iterator[bytes]:
        for chunk in chunks(self._pieces):
            for start in range(0, len(chunk), limits.PIECE_BYTES):
                yield chunk[start : start + limits.PIECE_BYTES]


def _late(since: float | None) -> bool:
    return since is not None and time.monotonic() - since > limits.WRITE_SECONDS


async def unless_gone[T](
    receive: Receive, work: Coroutine[Any, Any, T], stalled: Callable[[], bool] = lambda: False
) -> T | None:
    """Return the result of some work. If the client disconnects or stalls first, cancel the work and return None."""
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
