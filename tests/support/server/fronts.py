"""Front ends of a server process, and streams that tell how their connections end."""

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

from tests.support.server.processes import Process


def front_ends(server: Process) -> list[int]:
    """Return the processes of the front ends."""
    pid = server.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if "front_end" in Path(f"/proc/{one}/cmdline").read_text()]


def is_replaced(server: Process, killed: int) -> bool:
    """Return whether another one of two front ends runs in the place of one that was killed."""
    now = front_ends(server)  # asked once: the killed one vanishes before the other is there
    return len(now) == 2 and killed not in now


class Stream:
    """A stream of tokens on a connection of its own."""

    def __init__(self, server: Process, tokens: int, **more: Any) -> None:
        body = json.dumps({"prompt": "abc", "max_tokens": tokens, "stream": True, **more})
        self._socket = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.data = self._socket.recv(2**16)
        while b"data: {" not in self.data:
            self.data += self._socket.recv(2**16)

    def rest(self, seconds: float = 30.0) -> bytes:
        """Return all that is sent until the connection is closed. Raises TimeoutError."""
        self._socket.settimeout(seconds)
        with self._socket, contextlib.suppress(ConnectionResetError):
            while piece := self._socket.recv(2**16):
                self.data += piece
        return self.data
