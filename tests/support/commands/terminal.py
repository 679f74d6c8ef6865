"""A program on a terminal of its own, driven by what it shows."""

import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fcntl import ioctl
from types import TracebackType
from typing import Self

_PATIENCE = 60.0  # seconds without output after which a test is given up: it guards against a hang, nothing else
# Before it begins, the program gets the terminal as its own, and the reaction to Ctrl-C that a shell would leave it.
_BEFORE = (
    "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "signal.signal(signal.SIGINT, signal.default_int_handler)"
)
_MAIN = "from jswa.commands.cli import main; main()"


class TerminalText(io.StringIO):
    """A text that says that it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class Terminal:
    """`jswa` on a terminal. Leaving the context kills it if it still runs."""

    def __init__(self, *arguments: str, environ: Mapping[str, str], columns: int = 60, without: str = "") -> None:
        """Start it with these arguments.

        Args:
            without: a module that cannot be imported.
        """
        absent = f"sys.modules[{without!r}] = None" if without else "pass"
        self._end, other = pty.openpty()
        ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        variables = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{_BEFORE}; {absent}; {_MAIN}", *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        os.close(other)
        self._new = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)

    def type(self, keys: str) -> None:
        """Press keys: a carriage return is Enter, and U+0003 Ctrl-C."""
        os.write(self._end, keys.encode())

    def wait_for(self, *texts: str) -> str:
        """Return what is shown up to the end of these texts, which come in this order, after what was returned before.

        Raises AssertionError with what is shown instead.
        """
        end, deadline = self._found(texts), time.monotonic() + _PATIENCE
        while end is None:
            assert time.monotonic() < deadline, f"no {texts} in {self._new!r}"
            assert self._read(), f"the program has ended without {texts}: {self._new!r}"
            end = self._found(texts)
        shown, self._new = self._new[:end], self._new[end:]
        return shown

    def status(self) -> int:
        """Wait for the end of the program; return its exit status."""
        while self._read():
            pass
        return self._process.wait(_PATIENCE)

    def _found(self, texts: Sequence[str]) -> int | None:
        end = 0
        for text in texts:
            at = self._new.find(text, end)
            if at < 0:
                return None
            end = at + len(text)
        return end

    def _read(self) -> bool:
        """Read something; return whether the program still has the terminal."""
        ready, _, _ = select.select([self._end], [], [], 1.0)
        if not ready:
            return True
        with suppress(OSError):  # Linux's answer once nobody has the other end
            if data := os.read(self._end, 65_536):
                self._new += data.decode(errors="replace")
                return True
        return False
