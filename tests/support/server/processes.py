"""Server processes: start one and wait until it listens."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Process:
    """A server process that listens at `url`. `log`: the lines that it has written to stderr so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.log.extend(stream)

    def _wait(self) -> str:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            found = re.search(r"listening on (https?://[\w.:]+|unix:\S+)", "".join(self.log))
            if found:
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError("the server does not start:\n" + "".join(self.log))

    def wait(self, seconds: float = 20) -> int:
        """Wait for the process to exit and return its status.

        A process that does not exit in time is aborted, so that the error shows its log and the stacks of its threads.
        """
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER writes the stacks
            self.process.wait(10)
            self._reader.join(5)
            raise AssertionError(f"the server has not exited in {seconds} s:\n" + "".join(self.log)) from None
        self._reader.join(5)
        return status


@contextmanager
def started(
    command: Sequence[str], *, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Start a server with this Python and these arguments; kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder or ROOT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environ or {})},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Process(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
