"""Chat templates, rendered in processes that are killed when rendering takes too long.

jinja2's sandbox bounds neither time nor memory, and a template is untrusted code of the checkpoint's author. Keys take
turns at the processes. There is always one process more than may be busy, so that nobody waits when one is killed, and
the next one is soon there: a process that has imported everything forks it.
"""

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jswa.errors import CheckpointError
from jswa.text.chat_template import ChatTemplate

from ..core.fairness import Key, Lanes, Weights
from ..http.errors import ApiError, invalid
from .template_processes import START_TIMEOUT, Origin, Process

_log = logging.getLogger("jswa.server")
_WORKERS = 2  # processes that may render at the same time
_MOST_WAITING = 256
_MOST_BYTES = 2**27  # of an answer: a prompt of the most characters has half of it


class Renderer:
    """The processes that render one set of templates, and the keys' turns at them.

    `start` starts the first process, and `close` ends all. `killed` counts processes that were killed because rendering
    took too long.
    """

    def __init__(self, template: ChatTemplate, timeout: float, weights: Weights) -> None:
        self.killed = 0
        self.lanes = Lanes(_WORKERS, weights, _MOST_WAITING)
        self._timeout = timeout
        self._first = {
            "sources": dict(template.sources),
            "special_tokens": dict(template.special_tokens),
            "seconds": timeout + 1,
        }
        self._origin = Origin()
        self._workers: list[_Worker] = []  # processes that run or start
        self._idle: list[_Worker] = []  # the last one is used first
        self._starting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set when a worker becomes idle, or when starting one has ended or failed

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run or start."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start a worker, so that the first request does not wait for one. Raises CheckpointError if it ends."""
        try:
            await self._start_one()
        except (ApiError, TimeoutError) as error:
            reason = "has ended the process that renders it, or takes too much time, with a first empty message"
            raise CheckpointError(f"the chat template {reason}") from error
        self._start_spare()

    async def close(self) -> None:
        """End the processes."""
        while (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait((starting,))
        for worker in list(self._workers):
            await self._end(worker)
        await self._origin.close()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        key: Key = None,
        *,
        exact: bool = False,
    ) -> str:
        """Return the prompt of a conversation. Raises ApiError if the template refuses it or takes too long.

        Args:
            exact: no message goes to another place; what the template leaves out is left out.
        """
        await self.lanes.acquire(key)
        try:
            answer = await self._render({"messages": messages, "variables": variables, "exact": exact})
        finally:
            self.lanes.release(key)
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise invalid(answer["field"], answer["refused"])
        _log.error("the chat template failed: %s", answer["failed"])
        raise ApiError(500, "the chat template failed")

    async def _render(self, conversation: dict[str, Any]) -> dict[str, Any]:
        """Return an answer. If its process ends meanwhile, another one is asked, once. Raises ApiError."""
        try:
            return await self._ask(conversation)
        except _EndedError:
            return await self._ask(conversation)

    async def _ask(self, conversation: dict[str, Any]) -> dict[str, Any]:
        worker = await self._take()
        try:
            return await worker.ask(conversation, self._timeout)
        except RecursionError:
            raise invalid("messages", "is nested too deeply") from None
        except TimeoutError:
            self.killed += 1
            raise invalid("messages", f"the chat template took more than {self._timeout:g} s") from None
        finally:
            if worker.alive:
                self._put(worker)
            else:
                await self._end(worker)
                self._start_spare()

    async def _take(self) -> "_Worker":
        """Return an idle process; wait for one to start if there is none. Raises ApiError if it does not start."""
        starting = None
        while True:
            dead = [worker for worker in self._idle if not worker.alive]
            self._idle = [worker for worker in self._idle if worker not in dead]
            for worker in dead:
                await self._end(worker)
            if self._idle:
                worker = self._idle.pop()
                self._start_spare()
                return worker
            if starting is not None and starting.done():
                starting.result()
            self._start_spare()
            starting = self._starting
            self._changed.clear()
            await self._changed.wait()

    def _put(self, worker: "_Worker") -> None:
        self._idle.append(worker)
        self._changed.set()

    def _start_spare(self) -> None:
        """Start a process in the background, unless there are enough or another one is starting."""
        if self._starting is None and len(self._workers) <= _WORKERS:
            self._starting = asyncio.ensure_future(self._start_one())
            self._starting.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        self._changed.set()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("a process for chat templates did not start: %s", error)
        else:
            self._start_spare()

    async def _start_one(self) -> None:
        try:
            worker = _Worker(await self._origin.fork())
        except OSError as error:
            raise ApiError(500, "no process for the chat template could be started") from error
        self._workers.append(worker)
        try:
            await worker.ask(self._first, START_TIMEOUT)
        except BaseException:
            await self._end(worker)
            raise
        self._put(worker)

    async def _end(self, worker: "_Worker") -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            await worker.end()


class _EndedError(ApiError):
    """A process has ended before it has answered."""

    def __init__(self) -> None:
        super().__init__(500, "the chat template could not be rendered")


class _Worker:
    """One process that renders. A thread of its own waits for its answers; killing the process ends the wait."""

    def __init__(self, process: Process) -> None:
        self._thread = ThreadPoolExecutor(1, "template")
        self._process = process

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive

    async def ask(self, value: Any, timeout: float) -> dict[str, Any]:
        """Send a value and return the answer, which must arrive within `timeout` seconds after the value was written.

        Raises RecursionError if the value is nested too deeply to be written; the process stays. Raises TimeoutError,
        and _EndedError if the process ends: in these cases, and if the caller is cancelled, the process is killed.
        """
        loop = asyncio.get_running_loop()
        written = asyncio.Event()
        talk = asyncio.ensure_future(
            loop.run_in_executor(
                self._thread, _talk, self._process.connection, value, lambda: loop.call_soon_threadsafe(written.set)
            )
        )
        writing = asyncio.ensure_future(written.wait())
        try:
            # A healthy process reads at once.
            await asyncio.wait((talk, writing), timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(timeout):
                return await asyncio.shield(talk)
        except (OSError, struct.error) as error:
            if isinstance(error, TimeoutError):
                raise
            raise _EndedError from error
        finally:
            writing.cancel()
            # Kill a process that has not answered: a late answer would be read as that of the next question.
            if not talk.done() or not isinstance(talk.exception(), RecursionError | None):
                self._process.kill()
                await asyncio.wait((talk,))
                talk.exception()  # retrieve the error, which asyncio would log otherwise
                await self.end()

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        with contextlib.suppress(RuntimeError):  # the thread has ended
            await asyncio.get_running_loop().run_in_executor(self._thread, self._process.close)
        self._thread.shutdown(wait=False)


def _talk(connection: socket.socket, value: Any, written: Callable[[], object]) -> dict[str, Any]:
    """Send a frame and wait for one. Raises OSError or struct.error if the process has ended.

    Raises RecursionError, before a byte is sent, if the value is nested too deeply.
    """
    data = b"".join(encoded(value))
    connection.sendall(struct.pack("<I", len(data)) + data)
    written()
    (length,) = struct.unpack("<I", _received(connection, 4))
    if length > _MOST_BYTES:
        raise BrokenPipeError("the answer is too long")
    return answer_of(_received(connection, length))


def _received(connection: socket.socket, size: int) -> bytearray:
    """Return the next `size` bytes. Raises OSError if the connection ends before."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise BrokenPipeError("the answer is cut")
        done += count
    return data


def encoded(value: Any, piece: int = 2**16) -> Iterator[bytes]:
    """Yield a value as JSON. A piece is made of at most `piece` characters: to make it holds Python's lock."""
    if isinstance(value, str) and len(value) > piece:
        yield b'"'
        for start in range(0, len(value), piece):
            yield json.dumps(value[start : start + piece])[1:-1].encode()
        yield b'"'
    elif isinstance(value, dict) and value:
        for number, (key, item) in enumerate(value.items()):
            yield b"," if number else b"{"
            yield from encoded(key, piece)
            yield b":"
            yield from encoded(item, piece)
        yield b"}"
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from encoded(item, piece)
        yield b"]"
    else:
        yield json.dumps(value).encode()


def answer_of(frame: bytes | bytearray) -> dict[str, Any]:
    """Return what a template's process has answered: a text as it is, after a T, or JSON."""
    if frame[:1] == b"T":
        return {"text": str(memoryview(frame)[1:], "utf-8", "surrogatepass")}
    answer: dict[str, Any] = json.loads(frame)
    return answer
