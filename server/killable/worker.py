"""The program of the processes that can be killed. `Origin` runs this file by its path.

    worker.py ROOT KIND SECONDS         read questions from stdin, and write answers to stdout
    worker.py ROOT KIND SECONDS fork    do so at each socket that comes over the one at stdin, in a process of its own

ROOT is the folder of jswa, and KIND a module beside this one (`Kind` says what it has). The process that forks imports
and loads what all need, which takes seconds, and sees nothing that a stranger has written. The others have their limits
before they read a byte of it. SECONDS of the processor are the most that an answer may take.

Questions and answers are frames: bytes after their length, which has four. The first frame is for `load`, and has no
answer. The second one is for `begin`; its answer is empty. Each later one is a question.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

MEMORY = 2 * 2**30  # bytes that a process may occupy
NICE = 5  # of processes that a step of the engine precedes
FIRST_SECONDS = 10.0  # of the processor, for `begin`
_FILES = 64

Answer = Callable[[bytes], bytes]


class Kind(Protocol):
    """What processes of a kind do."""

    def load(self, data: bytes) -> Any:
        """Return what all processes share. `data` is trusted."""

    def begin(self, loaded: Any, first: bytes) -> Answer:
        """Return what answers a question, whatever it is. The process has its limits already."""


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the bytes of the next frame, or None at the end of the stream."""
    head = stream.read(4)
    return stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


def frame(data: bytes) -> bytes:
    """Return bytes as a frame."""
    return struct.pack("<I", len(data)) + data


def main() -> None:
    """Do what the command line says, until the parent process closes the other end of stdin."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write between the frames
    sys.path.append(sys.argv[1])  # for sources that are not installed
    from jswa.commands.server_package import load_server

    kind: Any = load_server(f"killable.{sys.argv[2]}")
    seconds = float(sys.argv[3])
    if sys.argv[4:] == ["fork"]:
        control = socket.socket(fileno=os.dup(0))
        with control.makefile("rb", buffering=0) as stream:  # what follows the frame has sockets with it
            loaded = kind.load(_whole_frame(stream))
        connection = _forked(control)
        os.dup2(2, 0)  # the socket at stdin is the other process's
        answer_all(kind, loaded, seconds, connection.makefile("rb"), connection.makefile("wb"))
    else:
        questions = os.fdopen(0, "rb")
        answer_all(kind, kind.load(read_frame(questions) or b""), seconds, questions, replies)


def _whole_frame(stream: Any) -> bytes:
    """Return the next frame of a stream that returns what there is."""
    parts, left = list[bytes](), 4
    for step in ("length", "bytes"):
        while left:
            part = stream.read(left)
            if not part:
                sys.exit()
            parts.append(part)
            left -= len(part)
        if step == "length":
            left, parts = struct.unpack("<I", b"".join(parts))[0], []
    return b"".join(parts)


def _forked(control: socket.socket) -> socket.socket:
    """Fork a process for each socket that `control` brings, and return there, with the socket; here, never return.

    Replies with the process id of the new process and a descriptor of it, which stays right when the id is used again.
    """
    gc.collect()
    gc.freeze()  # the processes share the memory of objects until someone writes to it
    while (found := socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]) != []:
        with contextlib.suppress(ChildProcessError):  # remove those that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        connection = socket.socket(fileno=found[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            return connection
        connection.close()
        process = os.pidfd_open(pid)
        socket.send_fds(control, [struct.pack("<I", pid)], [process])
        os.close(process)
    sys.exit()


def answer_all(kind: Kind, loaded: Any, seconds: float, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each question, whatever it is, until the stream ends. From here on the process has its limits."""
    _set_limits()
    much = _resident() + MEMORY // 8
    first = read_frame(questions)
    if first is None:
        return
    with _processor_time(FIRST_SECONDS):
        answer = kind.begin(loaded, first)
    answers.write(frame(b""))
    answers.flush()
    while (question := read_frame(questions)) is not None:
        with _processor_time(seconds):
            found = answer(question)
            if _resident() > much:
                gc.collect()  # what an error has left in cycles, such as its frames: the next question needs it
        answers.write(frame(found))
        answers.flush()


def _resident() -> int:
    """Return the bytes that this process occupies."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """End the process if the block computes longer. The server's clock is faster, but the server may be gone."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _set_limits() -> None:
    """Limit memory, files and dumps of this process for good."""
    limits = {
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _FILES,
    }
    for name, most in limits.items():
        _, hard = resource.getrlimit(name)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (value, value))


if __name__ == "__main__":
    main()
