"""Calls and messages over a stream socket between two processes, on an event loop at each end.

A frame is the length of its body, its kind, the number of its call, and the body, which is MessagePack.
"""

import asyncio
import itertools
import logging
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

import msgspec

from ..http.errors import ApiError
from .frames import Problem, encode

_log = logging.getLogger("jswa.server")
_HEAD = struct.Struct("<IBI")
_TELL, _CALL, _REPLY, _ERROR, _CANCEL = range(5)
_LARGE = 2**16  # bytes of a call's body that is decoded in a thread


def _only(held: list[Any]) -> Any:
    [message] = held
    return message


class ProcessLost(Exception):
    """The other process has ended."""


class Channel(asyncio.Protocol):
    """One end of a socket.

    Args:
        decode: decodes what the other end calls and tells.
        answer: answers a call; an ApiError that it raises is raised at the caller. It is cancelled if the caller is.
        hear: gets what the other end tells, in its order.
        lost: called when the other process has ended.
        read: called when all messages of one read have been heard.
        join: makes one message of the parts that were held; by default of one part only.

    Attributes:
        socket: that of the transport, for `flush`.
    """

    def __init__(
        self,
        decode: Callable[[bytes], Any],
        answer: Callable[[Any], Coroutine[Any, Any, Any]],
        hear: Callable[[Any], None],
        lost: Callable[[], None],
        read: Callable[[], None] = lambda: None,
        join: Callable[[list[Any]], Any] = _only,
    ) -> None:
        self._decode = decode
        self._answer = answer
        self._hear = hear
        self._lost = lost
        self._read = read
        self._join = join
        self._buffer = bytearray()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.socket: socket.socket | None = None
        self._writing = threading.Lock()
        self._paused = False  # whether the transport has bytes to send
        self._held: list[Any] = []  # parts of the next message
        self._rest = b""  # what must be sent next
        self._woken = False  # whether the event loop knows of it

    @property
    def open(self) -> bool:
        """Whether the other process is there."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def holds(self) -> bool:
        """Whether a part waits for the next `flush`."""
        return bool(self._held)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._loop, self._transport = asyncio.get_running_loop(), cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        """Note that the transport keeps bytes that the socket does not take."""
        self._paused = True

    def resume_writing(self) -> None:
        """Note that it has sent them."""
        self._paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls, in both directions."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ProcessLost())
        for task in self._tasks.values():
            task.cancel()
        self._lost()

    def close(self) -> None:
        """Close the socket when all that was told has been sent."""
        if self._transport is not None:
            self._transport.close()

    def tell(self, message: Any) -> None:
        """Send a message without an answer. It is dropped if the other process has ended."""
        self._send(_TELL, 0, encode(message))

    def hold(self, part: Any) -> None:
        """Send a part of a message before the next message, or at the next `flush`. Any thread may call this."""
        with self._writing:
            if self.open:
                self._held.append(part)

    def flush(self) -> None:
        """Send what is held, from another thread than the event loop's, which is not woken if the socket takes all."""
        with self._writing:
            self._collect()
            if not self._rest or self._woken or not self.open:
                return
            assert self._loop is not None
            assert self.socket is not None
            try:
                if not self._paused:
                    self._rest = self._rest[self.socket.send(self._rest) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # the event loop will see that the other process has ended
            if self._rest:
                self._woken = True
                self._loop.call_soon_threadsafe(self._send_rest)

    async def call[T](self, message: Any, kind: type[T]) -> T:
        """Send a message and return its answer, a `kind`. Raises ApiError, and ProcessLost if the process ends."""
        if not self.open:
            raise ProcessLost
        number = next(self._numbers) % 2**32
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._send(_CALL, number, encode(message))
        try:
            return msgspec.msgpack.decode(await future, type=kind)
        except asyncio.CancelledError:
            self._send(_CANCEL, number, b"")
            raise
        finally:
            del self._calls[number]

    def data_received(self, data: bytes) -> None:
        """Handle all frames that are complete."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(buffer, at)
            end = at + _HEAD.size + size
            if len(buffer) < end:
                break
            body = bytes(buffer[at + _HEAD.size : end])
            at = end
            self._received(kind, number, body)
        del buffer[:at]
        self._read()

    def _received(self, kind: int, number: int, body: bytes) -> None:
        if kind == _TELL:
            self._hear(self._decode(body))
        elif kind == _CALL:
            task = self._tasks[number] = asyncio.ensure_future(self._run(number, body))
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif kind == _CANCEL:
            if number in self._tasks:
                self._tasks[number].cancel()
        elif (future := self._calls.get(number)) is not None and not future.done():
            if kind == _REPLY:
                future.set_result(body)
            else:
                future.set_exception(api_error(msgspec.msgpack.decode(body, type=Problem)))

    async def _run(self, number: int, body: bytes) -> None:
        try:
            message = self._decode(body) if len(body) < _LARGE else await asyncio.to_thread(self._decode, body)
            reply = encode(await self._answer(message))
        except ApiError as error:
            self._send(_ERROR, number, encode(problem(error)))
        except ProcessLost:
            self._send(_ERROR, number, encode(problem(ApiError(500, "the engine has failed", code="engine_dead"))))
        except Exception:
            _log.exception("a call between the server's processes has failed")
            self._send(_ERROR, number, encode(Problem(500, "internal error")))
        else:
            self._send(_REPLY, number, reply)

    def _send(self, kind: int, number: int, body: bytes) -> None:
        self._write(_HEAD.pack(len(body), kind, number) + body)

    def _send_rest(self) -> None:
        self._write(b"")

    def _write(self, frame: bytes) -> None:
        with self._writing:
            self._collect()
            frame, self._rest, self._woken = self._rest + frame, b"", False
            if frame and self._transport is not None and not self._transport.is_closing():
                self._transport.write(frame)

    def _collect(self) -> None:
        """Make a frame of what is held."""
        if self._held:
            body = encode(self._join(self._held))
            self._rest += _HEAD.pack(len(body), _TELL, 0) + body
            self._held.clear()


def problem(error: ApiError) -> Problem:
    """Return an error as a message."""
    return Problem(error.status, error.message, error.param, error.code, error.headers)


def api_error(found: Problem) -> ApiError:
    """Return the error of a message."""
    return ApiError(found.status, found.message, param=found.param, code=found.code, headers=found.headers)
