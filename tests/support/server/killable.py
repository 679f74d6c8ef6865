"""Processes that tests kill, and an event loop that outlives them."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.server.harness import until


class Looped:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def begin[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine, and return the future of its result; to cancel that cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns."""
        return self.begin(work).result(60)

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def state(pid: int, name: str = "State") -> str:
    """Return a value of a process's status: its state as a letter, X if it is gone; or its parent, as PPid."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)[name].split()[0]


def origin(pid: int) -> int | None:
    """Return the process that has forked a process; None if it is gone."""
    parent = state(pid, "PPid")
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(parent) if "worker.py" in Path(f"/proc/{parent}/cmdline").read_text() else None
    return None


def kill(*ids: int) -> None:
    """Kill processes, and wait for their end."""
    for pid in ids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(state(pid) in "ZX" for pid in ids))


def stop(*ids: int) -> None:
    """Stop processes, and wait until they have stopped: as if their work had no end."""
    for pid in ids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(state(pid) == "T" for pid in ids))
