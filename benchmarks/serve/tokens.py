"""What does a streamed token cost? Processor time by process, and tokens per second, without a device.

    python -m benchmarks.serve.tokens [--streams 256] [--front-ends 0 1 2] [--step-ms 0] [--kind completion]
        [--interval 1] [--seconds 8] [--json FILE]

The server is `noop_server`. The client is one thread on epoll that counts events and parses nothing; its processor time
is counted apart. With `--step-ms` the device is a clock: a step ends so many milliseconds after its launch, and the
rate of steps is compared with the same engine driven without a server.
"""

import argparse
import json
import os
import selectors
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_file
from benchmarks.serve.load import Address, head, processes, server, used_seconds
from benchmarks.serve.noop_server import NoDevice, engine_of
from jswa.types import SamplingParams

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
_EVENT = b"data: {"


class Streams:
    """Open streams of a server, read by one thread that does nothing but count events."""

    def __init__(self, at: Address, count: int, path: str, body: dict[str, Any]) -> None:
        """Send `count` requests, each on a connection of its own."""
        self.events = 0
        self._selector = selectors.EpollSelector()
        data = json.dumps(body).encode()
        request = head(path, "POST", len(data), "") + data
        for _ in range(count):
            connection = socket.create_connection((at.host, at.port))
            connection.sendall(request)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)

    def read(self, seconds: float, until: int | None = None) -> None:
        """Count events for some seconds, or until there are `until` in all."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (until is None or self.events < until):
            for key, _ in self._selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(2**16)
                self.events += data.count(_EVENT)
                assert data, "a stream has ended: it is too short for the measurement"
                assert data[:9] != b"HTTP/1.1 " or data[9:12] == b"200", data[:300]

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def measured(at: Address, count: int, path: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return what streams cost while all of them run."""
    streams = Streams(at, count, path, body)
    streams.read(60, until=2 * count)
    streams.read(2.0)
    pids = processes(at.pid)
    events, own = streams.events, time.process_time()
    cpu, begin = {pid: used_seconds(pid) for pid in pids}, time.monotonic()
    streams.read(seconds)
    took, more = time.monotonic() - begin, streams.events - events
    used = [1e6 * (used_seconds(pid) - cpu[pid]) / more for pid in pids]
    found = {
        "tokens_per_second": more / took, "steps_per_second": more / took / count, "cpu_us_per_token": sum(used),
        "engine_us": used[0], "front_ends_us": used[1:], "client_us": 1e6 * (time.process_time() - own) / more,
        "tokens_per_second_of_two_cores": 2e6 / sum(used),
    }  # fmt: skip
    streams.close()
    return found


def alone(rows: int, step_ms: float, seconds: float) -> dict[str, Any]:
    """Return what the same engine costs in this process, driven without a server."""
    engine = engine_of("gemma-3-27b", rows, 131_072, NoDevice(step_ms / 1e3))
    prompt, params = np.full(4, 80), SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0)
    for number in range(rows):
        engine.add(engine.request(str(number), prompt, params))
    for _ in range(20):
        engine.step()
    tokens, steps, cpu, begin = 0, 0, time.process_time(), time.monotonic()
    while time.monotonic() < begin + seconds:
        tokens += len(engine.step())
        steps += 1
    took = time.monotonic() - begin
    return {"steps_per_second": steps / took, "cpu_us_per_token": 1e6 * (time.process_time() - cpu) / tokens}


def main() -> None:
    """Measure each number of front-ends; print the figures, and write them if --json is set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="streams at a time")
    parser.add_argument("--front-ends", type=int, nargs="+", default=[0], help="each --api-server-count to measure")
    parser.add_argument("--step-ms", type=float, default=0.0, help="milliseconds of a step; 0: none")
    parser.add_argument("--kind", choices=("completion", "chat", "parsed"), default="completion")
    parser.add_argument("--interval", type=int, default=1, help="--stream-interval")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of a measurement")
    parser.add_argument("--json", type=Path, help="result file to write")
    given = parser.parse_args()
    long: dict[str, Any] = {"max_tokens": 100_000, "ignore_eos": True, "stream": True, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "abc"}], **long}
    path, body = (COMPLETION, {"prompt": "abc", **long}) if given.kind == "completion" else (CHAT, chat)
    rows: list[dict[str, Any]] = [{"front_ends": None, **alone(given.streams, given.step_ms, given.seconds)}]
    print(json.dumps(rows[0]), flush=True)
    for count in given.front_ends:
        arguments = ["-m", "benchmarks.serve.noop_server", "--rows", str(given.streams), "--length", "131072"]
        arguments += ["--step-ms", str(given.step_ms), "--stream-interval", str(given.interval)]
        arguments += ["--api-server-count", str(count), *(["--parsed"] if given.kind == "parsed" else [])]
        with server(arguments) as at:
            row = {"front_ends": count, "streams": given.streams, "kind": given.kind, "interval": given.interval}
            rows.append({**row, **measured(at, given.streams, path, body, given.seconds)})
        print(json.dumps(rows[-1]), flush=True)
    if given.json is not None:
        result_file.write(given.json, {"cores": os.cpu_count(), "step_ms": given.step_ms, "rows": rows})


if __name__ == "__main__":
    main()
