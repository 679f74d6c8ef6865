"""The processes of `worker.py`: one that has loaded everything, and those that it forks."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jswa

from .worker import frame

START_TIMEOUT = 60.0  # seconds
_ROOT = Path(jswa.__file__).parent.parent
_SCRIPT = Path(__file__).with_name("worker.py")


class Process:
    """A process that answers questions. Owns the connection to it, and its descriptor, until `close`.

    Any thread may call it.
    """

    def __init__(self, connection: socket.socket, pid: int, descriptor: int) -> None:
        self.connection = connection
        self.pid = pid
        self._descriptor = descriptor
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._closed and not self._ends(0)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if not self._closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Wait for the end of a process that was killed, and release what it had here. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._ends(None)
            self.connection.close()
            os.close(self._descriptor)

    def _ends(self, timeout: float | None) -> bool:
        """Whether the process ends within `timeout` milliseconds; None: wait for it."""
        poll = select.poll()  # select.select() takes no descriptor from 1024
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(timeout))


class Origin:
    """The process that forks those that work: it is started when one is wanted and it is not there.

    The server itself must not fork: jax's threads would not survive that. Calls wait for each other in a thread.

    Args:
        kind: the module of this folder that says what the processes do.
        data: returns what they load; called in a thread.
        seconds: of the processor, the most that an answer may take.
    """

    def __init__(self, kind: str, data: Callable[[], bytes], seconds: float) -> None:
        self._kind = kind
        self._data = data
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, "processes")
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def fork(self) -> Process:
        """Return a new process. Raises OSError if none can be started."""
        forked = asyncio.get_running_loop().run_in_executor(self._thread, self._fork)
        try:
            return await asyncio.shield(forked)
        except asyncio.CancelledError:
            forked.add_done_callback(_end_unused)
            raise

    async def close(self) -> None:
        """End the process. Those that it has forked stay."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
        self._thread.shutdown(wait=False)

    def _fork(self) -> Process:
        """Ask the process for another one. If it has ended, or ends, a new one is started, once."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                return self._ask()
        self._end()
        try:
            self._start()
            return self._ask()
        except OSError:
            self._end()
            raise

    def _start(self) -> None:
        environ = {
            **os.environ, "TRANSFORMERS_VERBOSITY": "error", "USE_TORCH": "0", "HF_HUB_OFFLINE": "1",
            "OPENBLAS_NUM_THREADS": "1",  # a process that forks must have no other threads
        }  # fmt: skip
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_TIMEOUT)
        with theirs:
            self._process = subprocess.Popen(  # not asyncio's: uvloop forks
                # With -P the folder of the script, which is this one, does not precede the libraries on the path.
                [sys.executable, "-P", _SCRIPT, _ROOT, self._kind, str(self._seconds), "fork"],
                stdin=theirs.fileno(),
                env=environ,
                start_new_session=True,  # Ctrl-C must reach the server only
            )
        self._control.sendall(frame(self._data()))

    def _ask(self) -> Process:
        """Return a process that the running one forks. Raises OSError."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            data, found, _, _ = socket.recv_fds(self._control, 4, 1, socket.MSG_CMSG_CLOEXEC)
            if not found:
                raise BrokenPipeError("the process has ended")
            return Process(ours, struct.unpack("<I", data)[0], found[0])
        except OSError:
            ours.close()
            raise

    def _end(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._process = self._control = None


def _end_unused(forked: "asyncio.Future[Process]") -> None:
    """End a process that nobody waits for any more."""
    if not forked.cancelled() and forked.exception() is None:
        forked.result().kill()
        forked.result().close()
