"""Renders chat templates, in a process of its own that can be killed. Run by its path; speaks on stdin and stdout.

A frame is four bytes of length and JSON. The first one has the templates, each later one a conversation. An answer is
JSON too, but for the text of a prompt: a T and UTF-8, because to parse megabytes of JSON would hold the server's lock.
"""

import contextlib
import json
import os
import resource
import struct
import sys
from typing import Any, BinaryIO

MEMORY = 2 * 2**30  # bytes that rendering may take beyond what the process needs to start
MAX_CHARS = 2**24  # of a prompt


def read_frame(stream: BinaryIO) -> Any:
    """The next frame, None at the end."""
    head = stream.read(4)
    return json.loads(stream.read(struct.unpack("<I", head)[0])) if len(head) == 4 else None


def frame(value: Any) -> bytes:
    """A frame; a string is a prompt."""
    data = b"T" + value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()
    return struct.pack("<I", len(data)) + data


def main() -> None:
    """Serve one parent until it goes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    sys.path.append(sys.argv[1])  # where jswa is, for sources that are not installed
    from jswa.errors import JswaError, RequestError
    from jswa.text.chat_template import ChatTemplate

    first = read_frame(sys.stdin.buffer)
    template = ChatTemplate(first["sources"], first["special_tokens"])
    with contextlib.suppress(JswaError):  # this imports what is needed; the template may insist on something else
        template.render([{"role": "user", "content": ""}])
    _limit_memory()
    replies.write(frame({"ready": True}))
    replies.flush()
    while (job := read_frame(sys.stdin.buffer)) is not None:
        try:
            text = template.render(job["messages"], **job["variables"])
            answer: Any = text
            if len(text) > MAX_CHARS:
                answer = {"refused": f"make a prompt of {len(text)} characters", "field": "messages"}
        except RequestError as error:
            answer = {"refused": error.limit, "field": error.field}
        except (JswaError, MemoryError, RecursionError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        replies.write(frame(answer))
        replies.flush()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
