"""Chat templates, rendered in processes that are killed when they take too long.

jinja2's sandbox bounds neither time nor memory, and a template is code of whoever made the checkpoint.
"""

import asyncio
import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jswa
from jswa.text.chat_template import ChatTemplate

from ..http.errors import ApiError, invalid

_log = logging.getLogger("jswa.server")
_WORKERS = 2
_MOST_WAITING = 256
_START_TIMEOUT = 60.0
_SCRIPT = Path(__file__).with_name("template_worker.py")


class Renderer:
    """Workers for one set of templates; they start when they are needed."""

    def __init__(self, template: ChatTemplate, timeout: float) -> None:
        self._timeout = timeout
        self._workers = [_Worker(template) for _ in range(_WORKERS)]
        self._waiting = 0
        # The last one put is the first one taken, so that the second starts only when the first is busy.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have been started."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start one worker, so that the first request need not wait. Raises ApiError where it does not start."""
        worker = await self._free.get()
        try:
            await worker.start()
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            await worker.end()

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt of a conversation. Raises ApiError where the template refuses, or takes too long."""
        if self._waiting >= _MOST_WAITING:
            raise ApiError(429, "too many chats wait", code="queue_full", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            worker = await self._free.get()
        finally:
            self._waiting -= 1
        try:
            answer = await worker.ask({"messages": messages, "variables": variables}, self._timeout)
        except TimeoutError:
            raise invalid("messages", f"the chat template took more than {self._timeout:g} s") from None
        finally:
            self._free.put_nowait(worker)
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise invalid(answer["field"], answer["refused"])
        _log.error("the chat template failed: %s", answer["failed"])
        raise ApiError(500, "the chat template failed")


class _Worker:
    """One process, or none while it is not needed. A thread waits for its answers; killing it ends the wait."""

    def __init__(self, template: ChatTemplate) -> None:
        self._first = {"sources": dict(template.sources), "special_tokens": dict(template.special_tokens)}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None before the process is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        await self.end()
        environ = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "USE_TORCH": "0", "HF_HUB_OFFLINE": "1"}
        root = str(Path(jswa.__file__).parent.parent)
        self._process = subprocess.Popen(  # noqa: ASYNC220 - uvloop's forks, which jax's threads do not bear
            # -P: the script's folder, this one, is not put before the libraries.
            [sys.executable, "-P", str(_SCRIPT), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # a Ctrl-C is for the server
        )
        await self._exchange(self._process, self._first, _START_TIMEOUT)

    async def ask(self, value: Any, timeout: float) -> dict[str, Any]:
        """One question. Raises TimeoutError, and ends the process then."""
        await self.start()
        assert self._process is not None
        return await self._exchange(self._process, value, timeout)

    async def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.communicate)

    async def _exchange(self, process: subprocess.Popen[bytes], value: Any, timeout: float) -> dict[str, Any]:
        talk = asyncio.ensure_future(asyncio.to_thread(_talk, process, value))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(talk)
        except (OSError, struct.error) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ApiError(500, "the chat template could not be rendered") from error
        finally:
            # One that answers late must not answer the next question.
            if not talk.done() or talk.exception() is not None:
                process.kill()
                await asyncio.wait((talk,))
                await self.end()


def _talk(process: subprocess.Popen[bytes], value: Any) -> dict[str, Any]:
    """Send a frame and wait for one. Raises OSError or struct.error where the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    data = json.dumps(value).encode()
    process.stdin.write(struct.pack("<I", len(data)) + data)
    process.stdin.flush()
    (length,) = struct.unpack("<I", process.stdout.read(4))
    data = process.stdout.read(length)
    if len(data) < length:
        raise BrokenPipeError("the answer is cut")
    answer: dict[str, Any] = json.loads(data)
    return answer
