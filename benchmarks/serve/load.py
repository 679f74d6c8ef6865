"""Load for a server process: raw HTTP streams, which need little CPU time of the client, and samples of the process."""

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATH = "/v1/completions"
_EVENT = re.compile(rb"data: (\{.*?\})\n\n")


@dataclass(frozen=True)
class Address:
    """The address of a server and the pid of its process."""

    host: str
    port: int
    pid: int


@dataclass
class Answer:
    """The response to a request. `left`: the client disconnected before its end."""

    status: int = 0
    raw: bytes = b""
    events: int = 0
    left: bool = False
    error: str | None = None

    @property
    def text(self) -> str:
        """Return the text of a completion's stream."""
        found = (json.loads(data) for data in _EVENT.findall(self.raw))
        return "".join(choice["text"] for event in found for choice in event.get("choices", ()))

    @property
    def reason(self) -> str | None:
        """Return the last finish reason in the stream."""
        found = re.findall(rb'"finish_reason":"(\w+)"', self.raw)
        return found[-1].decode() if found else None


@contextmanager
def server(arguments: Sequence[str], tree: Path = ROOT) -> Iterator[Address]:
    """Start a server by `python` with these arguments; stop it by SIGTERM and assert that it exits without an error.

    `tree`: the checkout whose server it is; this Python runs it.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    log = deque[str](maxlen=20)
    try:
        for line in process.stderr:
            if found := re.search(r"listening on http://([\w.]+):(\d+)", line):
                break
            log.append(line)
        else:
            raise SystemExit(f"the server ended before it listened; its last lines:\n{''.join(log)}")
        drain = _Drain(process)
        yield Address(found[1], int(found[2]), process.pid)
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
        assert status == 0, f"exit status {status}"
        assert "Traceback" not in drain.read(), drain.read()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class _Drain:
    """The log of a process after it began to listen, without INFO lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        import threading

        assert process.stderr is not None
        self._lines: list[str] = []
        self._stream = process.stderr
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            if "INFO" not in line:
                self._lines.append(line)

    def read(self) -> str:
        self._thread.join(5)
        return "".join(self._lines)


def head(path: str, method: str, length: int, key: str, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the head of a request on a connection of its own, without headers whose value is empty."""
    fields = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"}
    fields |= {"Content-Length": str(length), "Authorization": f"Bearer {key}" if key else "", **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()


async def ask(
    at: Address, body: bytes, *, path: str = PATH, method: str = "POST", leave_after: int | None = None, key: str = "",
    headers: Mapping[str, str] | None = None,
) -> Answer:  # fmt: skip
    """Send a request on a connection of its own, which is closed after `leave_after` events; return the answer."""
    answer = Answer()
    try:
        reader, writer = await asyncio.open_connection(at.host, at.port, limit=2**26)
    except OSError as error:
        answer.error = f"connect: {error}"
        return answer
    try:
        writer.write(head(path, method, len(body), key, headers) + body)
        parts: list[bytes] = []
        while piece := await reader.read(2**16):
            parts.append(piece)
            answer.events += piece.count(b"data: {")
            if leave_after is not None and answer.events >= leave_after:
                answer.left = True
                writer.transport.abort()
                break
        answer.raw = b"".join(parts)
        if answer.raw:
            answer.status = int(answer.raw[9:12])
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        writer.transport.abort()
    return answer


async def hold(at: Address, sent: bytes, seconds: float) -> None:
    """Send some bytes, read nothing for `seconds`, and close the connection."""
    reader, writer = await asyncio.open_connection(at.host, at.port, limit=1)  # so that asyncio reads little ahead
    try:
        writer.write(sent)
        await asyncio.sleep(seconds)
    finally:
        del reader
        writer.transport.abort()


async def get_text(at: Address, path: str, key: str = "") -> str:
    """Return the body of a route's response."""
    answer = await ask(at, b"", path=path, method="GET", key=key)
    return answer.raw.partition(b"\r\n\r\n")[2].decode()


async def get_json(at: Address, path: str, key: str = "") -> Any:
    """Return the JSON of a route."""
    return json.loads(await get_text(at, path, key))


@dataclass
class Watch:
    """Samples of memory, tasks and open files of a server's process. `key`: an API key, if the server needs one."""

    at: Address
    key: str = ""
    samples: list[dict[str, float]] = field(default_factory=list)

    async def run(self, every: float = 0.5) -> None:
        """Take a sample every `every` seconds until the task is cancelled."""
        begin = time.monotonic()
        while True:
            asked = time.monotonic()
            await get_json(self.at, "/health")
            health = 1000 * (time.monotonic() - asked)
            load = (await get_json(self.at, "/server_info", self.key))["load"]
            self.samples.append(
                {
                    "seconds": time.monotonic() - begin,
                    "health_ms": health,
                    **of_process(self.at.pid),
                    **{name: load[name] for name in ("tasks", "running", "waiting", "requests", "full_pages")},
                }
            )
            await asyncio.sleep(every)

    def growth(self, warm_up: float, span: float = 10.0) -> float:
        """Return the relative growth of memory from the first to the last `span` seconds after the warm-up.

        The first sample after the warm-up begins them: a busy server may answer late.
        """
        last = self.samples[-1]["seconds"]
        first = next((s["seconds"] for s in self.samples if s["seconds"] >= warm_up), last)
        early = [s["rss_mib"] for s in self.samples if first <= s["seconds"] < first + span]
        late = [s["rss_mib"] for s in self.samples if s["seconds"] >= last - span]
        return statistics.median(late) / statistics.median(early) - 1


def processes(pid: int) -> list[int]:
    """Return the processes of a server: its own, and then its front-ends."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = {int(one): Path(f"/proc/{one}/cmdline").read_text() for one in children}
    return [pid, *(one for one, name in names.items() if "front_end" in name)]


def of_process(pid: int) -> dict[str, float]:
    """Return memory, threads and open files of a server's processes together."""
    found: dict[str, float] = {"rss_mib": 0.0, "threads": 0.0, "files": 0.0}
    for one in processes(pid):
        status = Path(f"/proc/{one}/status").read_text()
        memory = re.search(r"VmRSS:\s+(\d+).*Threads:\s+(\d+)", status, re.DOTALL)
        assert memory is not None
        found["rss_mib"] += int(memory[1]) / 1024
        found["threads"] += int(memory[2])
        found["files"] += len(os.listdir(f"/proc/{one}/fd"))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a server's processes have used together."""
    return sum(map(used_seconds, processes(pid)))


def used_seconds(pid: int) -> float:
    """Return the CPU seconds that one process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
