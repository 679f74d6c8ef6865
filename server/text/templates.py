"""Chat templates, rendered in processes that are killed when rendering takes too long.

jinja2's sandbox bounds neither time nor memory, and a template is untrusted code of the checkpoint's author. Keys take
turns at the processes. A new process takes seconds to start. So with several keys there is one spare process besides
those that can be busy. If not even the spare one is left after a process was killed, the lane of the key whose
conversation caused this stays occupied until a new process has started.
"""

import asyncio
import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jswa
from jswa.text.chat_template import ChatTemplate

from ..core.fairness import Key, Lanes, Weights
from ..http.errors import ApiError, invalid

_log = logging.getLogger("jswa.server")
_WORKERS = 2  # processes that may render at the same time
_MOST_WAITING = 256
_START_TIMEOUT = 60.0
_SLOW = 0.5  # seconds of rendering after which a spare process is started, since the slow one may have to be killed
_SCRIPT = Path(__file__).with_name("template_worker.py")


class Renderer:
    """The processes that render one set of templates, and the keys' turns at them.

    With one key, all processes but the first are started when they are needed. `start` starts the first process, and
    `close` ends all. `killed` counts processes that were killed because rendering took too long.
    """

    def __init__(self, template: ChatTemplate, timeout: float, weights: Weights) -> None:
        self.killed = 0
        self.lanes = Lanes(_WORKERS, weights, _MOST_WAITING)
        self._timeout = timeout
        self._several = len(weights) > 1
        self._first = {"sources": dict(template.sources), "special_tokens": dict(template.special_tokens)}
        self._workers: list[_Worker] = []  # processes that run or start
        self._idle: list[_Worker] = []  # the last one is used first
        self._starting: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set when a worker becomes idle, or when starting one has ended or failed

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run or start."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start a worker, so that the first request does not wait for one. Raises ApiError if it does not start."""
        await self._start_one()
        if self._several:
            self._start_spare()

    async def close(self) -> None:
        """End the processes."""
        if self._starting is not None:
            self._starting.cancel()
        for worker in list(self._workers):
            await self._end(worker)

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], key: Key = None) -> str:
        """Return the prompt of a conversation. Raises ApiError if the template refuses it or takes too long."""
        await self.lanes.acquire(key)
        try:
            answer = await self._render({"messages": messages, "variables": variables})
        finally:
            if self._several and self._starting is not None and len(self._workers) <= _WORKERS:
                self._starting.add_done_callback(lambda _: self.lanes.release(key))
            else:
                self.lanes.release(key)
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise invalid(answer["field"], answer["refused"])
        _log.error("the chat template failed: %s", answer["failed"])
        raise ApiError(500, "the chat template failed")

    async def _render(self, conversation: dict[str, Any]) -> dict[str, Any]:
        worker = await self._take()
        slow = asyncio.get_running_loop().call_later(_SLOW, self._start_spare)
        try:
            return await worker.ask(conversation, self._timeout)
        except TimeoutError:
            self.killed += 1
            raise invalid("messages", f"the chat template took more than {self._timeout:g} s") from None
        finally:
            slow.cancel()
            if worker.alive:
                self._put(worker)
            else:
                await self._end(worker)
                if self._several:
                    self._start_spare()

    async def _take(self) -> "_Worker":
        """Return an idle process; start one if necessary, and wait for it. Raises ApiError if it does not start."""
        starting = None
        while True:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                await self._end(worker)
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
        enough = len(self._workers) > _WORKERS if self._several else self._idle
        if not enough and self._starting is None and len(self._workers) <= _WORKERS:
            self._starting = asyncio.ensure_future(self._start_one())
            self._starting.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a process for chat templates did not start: %s", error)
        elif self._several and not task.cancelled():
            self._start_spare()

    async def _start_one(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        try:
            await worker.ask(self._first, _START_TIMEOUT)
        except BaseException:
            await self._end(worker)
            raise
        self._put(worker)

    async def _end(self, worker: "_Worker") -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            await worker.end()


class _Worker:
    """One process that renders. A thread of its own waits for its answers; killing the process ends the wait."""

    def __init__(self) -> None:
        environ = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "USE_TORCH": "0", "HF_HUB_OFFLINE": "1"}
        root = str(Path(jswa.__file__).parent.parent)
        self._thread = ThreadPoolExecutor(1, "template")
        self._process = subprocess.Popen(  # not asyncio's: uvloop forks, which jax's threads do not survive
            # With -P the folder of the script, which is this one, does not precede the libraries on the module path.
            [sys.executable, "-P", str(_SCRIPT), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # Ctrl-C must reach the server only
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    async def ask(self, value: Any, timeout: float) -> dict[str, Any]:
        """Send a value and return the answer, which must arrive within `timeout` seconds after the value was written.

        Raises TimeoutError, and ApiError (500) if the process ends. In both cases, and if the caller is cancelled, the
        process is killed.
        """
        loop = asyncio.get_running_loop()
        written = asyncio.Event()
        talk = asyncio.ensure_future(
            loop.run_in_executor(
                self._thread, _talk, self._process, value, lambda: loop.call_soon_threadsafe(written.set)
            )
        )
        writing = asyncio.ensure_future(written.wait())
        try:
            # A healthy process reads at once.
            await asyncio.wait((talk, writing), timeout=_START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(timeout):
                return await asyncio.shield(talk)
        except (OSError, struct.error) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ApiError(500, "the chat template could not be rendered") from error
        finally:
            writing.cancel()
            # Kill a process that has not answered: a late answer would be read as that of the next question.
            if not talk.done() or talk.exception() is not None:
                self._process.kill()
                await asyncio.wait((talk,))
                talk.exception()  # retrieve the error, which asyncio would log otherwise
                await self.end()

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        with contextlib.suppress(RuntimeError):  # the thread has ended
            await asyncio.get_running_loop().run_in_executor(self._thread, self._process.communicate)
        self._thread.shutdown(wait=False)


def _talk(process: subprocess.Popen[bytes], value: Any, written: Callable[[], object]) -> dict[str, Any]:
    """Send a frame and wait for one. Raises OSError or struct.error if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    data = b"".join(encoded(value))
    process.stdin.write(struct.pack("<I", len(data)) + data)
    process.stdin.flush()
    written()
    (length,) = struct.unpack("<I", process.stdout.read(4))
    data = process.stdout.read(length)
    if len(data) < length:
        raise BrokenPipeError("the answer is cut")
    return answer_of(data)


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


def answer_of(frame: bytes) -> dict[str, Any]:
    """Return what a template's process has answered: a text as it is, after a T, or JSON."""
    if frame[:1] == b"T":
        return {"text": str(memoryview(frame)[1:], "utf-8", "surrogatepass")}
    answer: dict[str, Any] = json.loads(frame)
    return answer
