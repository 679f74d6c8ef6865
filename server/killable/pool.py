"""Some processes that answer questions, and are killed when an answer takes too long or nobody waits for it.

Keys take turns at them. There is always one process more than may be busy, so that nobody waits when one is killed, and
the next one is soon there: a process that has loaded everything forks it.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from ..core.fairness import Key, Lanes, Weights
from .processes import START_TIMEOUT, Origin, Process
from .worker import frame

_log = logging.getLogger("jswa.server")
_WORKERS = 2  # processes that may be busy at the same time
_MOST_WAITING = 256
_MOST_BYTES = 2**27  # of an answer: a prompt of the most characters has half of it


class EndedError(Exception):
    """A process has ended before it has answered."""


class NotStartedError(EndedError):
    """No process can be started, or none gets ready."""


class Pool:
    """Processes of one kind, and the keys' turns at them.

    `start` starts the first process, and `close` ends all.

    Args:
        kind: the module of this folder that says what the processes do.
        data: returns what they load; called in a thread.
        first: the first question of each.
        seconds: of the processor, the most that an answer may take.

    Attributes:
        killed: number of processes that were killed because an answer took too long.
    """

    def __init__(self, kind: str, data: Callable[[], bytes], first: bytes, seconds: float, weights: Weights) -> None:
        self.killed = 0
        self.lanes = Lanes(_WORKERS, weights, _MOST_WAITING)
        self._kind = kind
        self._first = first
        self._origin = Origin(kind, data, seconds)
        self._workers: list[Worker] = []  # processes that run or start
        self._idle: list[Worker] = []  # the last one is used first
        self._starting: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # set when a worker becomes idle, or when starting one has ended or failed

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run or start."""
        return [worker.pid for worker in self._workers]

    @property
    def idle(self) -> list[int]:
        """Process ids of the workers that have started and have no question."""
        return [worker.pid for worker in self._idle]

    async def start(self) -> None:
        """Start a worker, so that the first question does not wait for one. Raises NotStartedError."""
        await self._start_one()
        self.start_spare()

    async def close(self) -> None:
        """End the processes."""
        while (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait((starting,))
        for worker in list(self._workers):
            self._drop(worker)
        await asyncio.gather(*self._ending)
        await self._origin.close()

    async def ask[T](self, write: Callable[[], bytes], read: Callable[[bytearray], T], key: Key, timeout: float) -> T:
        """Return the answer to a question, as `Worker.ask` and `taken` do."""
        async with self.taken(key) as worker:
            return await worker.ask(write, read, timeout)

    @asynccontextmanager
    async def taken(self, key: Key) -> AsyncGenerator["Worker"]:
        """Occupy a process within the context. Raises ApiError (429), and NotStartedError."""
        async with self.lanes.lane(key):
            worker = await self._take()
            try:
                yield worker
            except TimeoutError:
                self.killed += 1
                raise
            finally:
                if worker.alive:
                    self._put(worker)
                else:
                    self._drop(worker)
                    self.start_spare()

    async def _take(self) -> "Worker":
        """Return an idle process; wait for one to start if there is none. Raises NotStartedError."""
        starting = None
        while True:
            dead = [worker for worker in self._idle if not worker.alive]
            self._idle = [worker for worker in self._idle if worker not in dead]
            for worker in dead:
                self._drop(worker)
            if self._idle:
                worker = self._idle.pop()
                self.start_spare()
                return worker
            if starting is not None and starting.done():
                starting.result()
            self.start_spare()
            starting = self._starting
            self._changed.clear()
            await self._changed.wait()

    def _put(self, worker: "Worker") -> None:
        self._idle.append(worker)
        self._changed.set()

    def start_spare(self) -> None:
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
            _log.error("%s", error)
        else:
            self.start_spare()

    async def _start_one(self) -> None:
        try:
            worker = Worker(await self._origin.fork())
        except (OSError, RuntimeError) as error:  # RuntimeError: the pool is closed
            raise NotStartedError(f"no process for {self._kind} could be started") from error
        self._workers.append(worker)
        try:
            await worker.ask(lambda: self._first, bytes, START_TIMEOUT)
        except BaseException as error:
            self._drop(worker)
            if isinstance(error, EndedError | TimeoutError):
                raise NotStartedError(f"a process for {self._kind} has ended at its start, or hangs") from error
            raise
        self._put(worker)

    def _drop(self, worker: "Worker") -> None:
        """Forget a process, and end it: whoever notices that it is lost may be cancelled before it has ended."""
        if worker in self._workers:
            self._workers.remove(worker)
            ending = asyncio.ensure_future(worker.end())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


class Worker:
    """One process of a pool. A thread of its own waits for its answers; killing the process ends the wait."""

    def __init__(self, process: Process) -> None:
        self._thread = ThreadPoolExecutor(1, "killable")
        self._process = process

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive

    async def ask[T](self, write: Callable[[], bytes], read: Callable[[bytearray], T], timeout: float) -> T:
        """Return the answer to a question, which must arrive within `timeout` seconds after the question was written.

        Raises what `write` raises; then the process stays. Raises TimeoutError, and EndedError if the process ends: in
        these cases, and if the caller is cancelled, the process is killed.

        Args:
            write, read: make the bytes of the question, and something of those of the answer, in a thread.
        """
        loop = asyncio.get_running_loop()
        written = asyncio.Event()

        def talk() -> T:
            question = _written(write)
            try:
                return read(_answer(self._process.connection, question, lambda: loop.call_soon_threadsafe(written.set)))
            except (OSError, struct.error) as error:
                raise EndedError("the process has ended") from error

        talking = asyncio.ensure_future(loop.run_in_executor(self._thread, talk))
        writing = asyncio.ensure_future(written.wait())
        try:
            # A healthy process reads at once.
            await asyncio.wait((talking, writing), timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(timeout):
                return await asyncio.shield(talking)
        except _NotWrittenError as error:
            raise error.reason from None
        finally:
            writing.cancel()
            # Kill a process that has not answered: a late answer would be read as that of the next question.
            if not talking.done() or not isinstance(talking.exception(), _NotWrittenError | None):
                self._process.kill()
                await asyncio.wait((talking,))
                talking.exception()  # retrieve the error, which asyncio would log otherwise
                await self.end()

    async def end(self) -> None:
        """Kill the process, and wait for its end."""
        self._process.kill()
        with contextlib.suppress(RuntimeError):  # the thread has ended
            await asyncio.get_running_loop().run_in_executor(self._thread, self._process.close)
        self._thread.shutdown(wait=False)


class _NotWrittenError(Exception):
    """A question could not be written."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _written(write: Callable[[], bytes]) -> bytes:
    try:
        return frame(write())
    except Exception as error:
        raise _NotWrittenError(error) from error


def _answer(connection: socket.socket, question: bytes, written: Callable[[], object]) -> bytearray:
    """Send a frame and wait for one. Raises OSError or struct.error if the process has ended."""
    connection.sendall(question)
    written()
    (length,) = struct.unpack("<I", _received(connection, 4))
    if length > _MOST_BYTES:
        raise BrokenPipeError("the answer is too long")
    return _received(connection, length)


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
