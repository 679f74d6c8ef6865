"""The program of a process that renders chat templates, and can be killed. `Renderer` runs this file by its path.

It reads frames from stdin and writes frames to stdout. A frame is JSON after its length in four bytes. The first frame
has the templates, each later one a conversation. An answer is JSON too, except the text of a prompt: the letter T and
UTF-8, because parsing megabytes of JSON would hold the server's GIL.
"""

import contextlib
import json
import os
import resource
import struct
import sys
from typing import Any, BinaryIO

MEMORY = 2 * 2**30  # bytes that rendering may occupy, besides the memory of the process after its start
MAX_CHARS = 2**24  # of a prompt


def read_frame(stream: BinaryIO) -> Any:
    """Return the value of the next frame, or None at the end of the stream."""
    head = stream.read(4)
    return json.loads(stream.read(struct.unpack("<I", head)[0])) if len(head) == 4 else None


def frame(value: Any) -> bytes:
    """Return a value as a frame; a string is the text of a prompt."""
    data = b"T" + value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()
    return struct.pack("<I", len(data)) + data


def main() -> None:
    """Render conversations until the parent process closes stdin."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write between the frames
    sys.path.append(sys.argv[1])  # the folder of jswa, for sources that are not installed
    from jswa.errors import JswaError, RequestError
    from jswa.text.chat_template import ChatTemplate

    first = read_frame(sys.stdin.buffer)
    template = ChatTemplate(first["sources"], first["special_tokens"])
    with contextlib.suppress(JswaError):  # imports the modules of rendering; the template may refuse this message
        template.render([{"role": "user", "content": ""}])
    _limit_memory()
    replies.write(frame({"ready": True}))
    replies.flush()
    while (job := read_frame(sys.stdin.buffer)) is not None:
        try:
            text = template.render(job["messages"], **job["variables"])
            answer: Any = text
            if len(text) > MAX_CHARS:
                answer = {
                    "refused": f"the prompt has {len(text)} characters, at most {MAX_CHARS} are allowed",
                    "field": "messages",
                }
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
