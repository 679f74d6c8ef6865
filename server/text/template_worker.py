"""The program of the processes that render chat templates, and can be killed. `Renderer` runs this file by its path.

    template_worker.py ROOT         read questions from stdin, and write answers to stdout
    template_worker.py ROOT fork    fork a process for each socket that comes over the one at stdin; it does the same

ROOT is the folder of jswa. The process that forks imports what rendering needs, which takes seconds, and sees nothing
of a checkpoint. The others have their limits before they read a byte, because jinja computes constants of a template
while it compiles it.

Questions and answers are frames: JSON after its length in four bytes. The first question has the templates, each later
one a conversation. An answer is JSON too, except the text of a prompt: the letter T and UTF-8, because parsing
megabytes of JSON would hold the server's GIL.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jswa.text.chat_template import ChatTemplate

MEMORY = 2 * 2**30  # bytes that a process may occupy
MAX_CHARS = 2**24  # of a prompt
FIRST_SECONDS = 10.0  # of the processor, to compile the templates and to render a first conversation
_FILES = 64


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the bytes of the next frame, or None at the end of the stream."""
    head = stream.read(4)
    return stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


def frame(value: Any) -> bytes:
    """Return a value as a frame; a string is the text of a prompt."""
    data = b"T" + value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()
    return struct.pack("<I", len(data)) + data


def main() -> None:
    """Do what the command line says, until the parent process closes the other end of stdin."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write between the frames
    sys.path.append(sys.argv[1])  # for sources that are not installed
    from jswa.errors import JswaError
    from jswa.text.chat_template import ChatTemplate

    with contextlib.suppress(JswaError):  # without jinja2, each conversation is answered with the reason
        ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render([{"role": "user", "content": ""}])
    if sys.argv[2:] == ["fork"]:
        connection = _forked(socket.socket(fileno=os.dup(0)))
        os.dup2(2, 0)  # the socket at stdin is the other process's
        answer_all(connection.makefile("rb"), connection.makefile("wb"))
    else:
        answer_all(os.fdopen(0, "rb"), replies)


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


def answer_all(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each question, whatever it is, until the stream ends. From here on the process has its limits."""
    from jswa.text.chat_template import ChatTemplate

    _set_limits()
    first = json.loads(read_frame(questions) or b"{}")
    template = ChatTemplate(first["sources"], first["special_tokens"])
    with _processor_time(FIRST_SECONDS):
        _answer(template, b'{"messages": [{"role": "user", "content": ""}], "variables": {}}')  # compiles the template
    answers.write(frame({"ready": True}))
    answers.flush()
    while (question := read_frame(questions)) is not None:
        with _processor_time(first.get("seconds", FIRST_SECONDS)):
            answer = _answer(template, question)
        answers.write(answer)
        answers.flush()


def _answer(template: "ChatTemplate", question: bytes) -> bytes:
    """Return the frame that answers a question."""
    from jswa.errors import RequestError

    try:
        job = json.loads(question)
        write = template.render if job.get("exact") else template.prompt
        text = write(job["messages"], **job["variables"])
        if len(text) <= MAX_CHARS:
            return frame(text)
        limit = f"the prompt has {len(text)} characters, at most {MAX_CHARS} are allowed"
        return frame({"refused": limit, "field": "messages"})
    except RequestError as error:
        return frame({"refused": error.limit, "field": error.field})
    except RecursionError:
        return frame({"refused": "is nested too deeply", "field": "messages"})
    except Exception as error:  # whatever a template and a conversation do, the next conversation needs the process
        return frame({"failed": f"{type(error).__name__}: {error!s:.1000}"})


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
