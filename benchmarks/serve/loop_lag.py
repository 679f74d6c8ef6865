"""The longest time for which the server's event loop answers nothing while it handles one large request.

    python -m benchmarks.serve.loop_lag [--only NAME …] [--json FILE]

The server is `noop_server`, whose device answers at once. A second connection asks for /health all the time; the lag is
the longest wait for an answer, and the baseline is an idle server. Other programs on the machine lengthen the lag too.
So `cpu_ms` is the largest CPU time that the server's process used during a wait, an upper bound of a callback's time;
`loop_ms` is the largest CPU time of the event loop's own thread.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import result_file
from benchmarks.serve.load import Address, Answer, ask, server
from jswa.bench.report import percentile

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LENGTH = 131_072
USER = [{"role": "user", "content": "abc"}]
Trigger = tuple[str, Callable[[], bytes]]


def body(**fields: Any) -> Callable[[], bytes]:
    """Return a function that makes a request body."""
    return lambda: json.dumps(fields, separators=(",", ":")).encode()


def repeated(head: str, item: str, tail: str, size: int = 16 * 2**20 - 2**10) -> Callable[[], bytes]:
    """Return a function that makes a body of `size` bytes with many items."""
    return lambda: (head + ",".join([item] * ((size - len(head) - len(tail)) // (len(item) + 1))) + tail).encode()


def triggers() -> dict[str, Trigger]:
    """Return path and body of each request that has blocked the event loop for long, or might do so."""
    long = [5 + n % 200 for n in range(LENGTH - 100)]
    alphabet = "".join(chr(97 + n % 26) for n in range(1_023))
    text = "a b c d " * 2_000_000
    many = {"max_tokens": 200, "n": 128, "ignore_eos": True}
    return {
        "idle": ("", bytes),
        "plain streams, n = 128": (COMPLETION, body(prompt="abc", stream=True, **many)),
        "chat, top_logprobs 20, n = 128": (CHAT, body(messages=USER, logprobs=True, top_logprobs=20, **many)),
        "completions, logprobs 20, n = 128": (COMPLETION, body(prompt="abc", logprobs=20, **many)),
        "chat, prompt_logprobs 20, long": (
            CHAT, body(messages=[{"role": "user", "content": "a" * (LENGTH - 100)}], prompt_logprobs=20, max_tokens=2)
        ),
        "prompt_logprobs 20, long": (COMPLETION, body(prompt=long, prompt_logprobs=20, max_tokens=2)),
        "stream, echo, logprobs 20, long": (
            COMPLETION, body(prompt=long, echo=True, logprobs=20, stream=True, max_tokens=2)
        ),
        "16 stop strings, n = 128": (
            COMPLETION, body(prompt="abc", stop=[alphabet[:n] + "!" for n in range(1_008, 1_024)][:16], **many)
        ),
        "allowed_token_ids 300k, seed, n = 128": (
            COMPLETION,
            body(prompt="abc", allowed_token_ids=[100 + n % 26 for n in range(300_000)], seed=1, n=128, max_tokens=2),
        ),
        "/tokenize 16 MB": ("/tokenize", body(prompt=text, return_token_strs=True)),
        "/tokenize 2 MB": ("/tokenize", body(prompt=text[: 2**21], return_token_strs=True)),
        "/detokenize 1M": ("/detokenize", body(tokens=[100 + n % 26 for n in range(1_000_000)])),
        "16 MB of token ids": (COMPLETION, repeated('{"prompt":[', "123", "]}")),
        "16 MB of lists of ids": (COMPLETION, repeated('{"prompt":[', "[" + ",".join(["7"] * 9_000) + "]", "]}")),
        "16 MB of empty objects": (COMPLETION, repeated('{"prompt":"a","x":[', "{}", "]}")),
        "16 MB of escapes": (COMPLETION, lambda: b'{"prompt":"' + b"\\u0142" * 2_700_000 + b'"}'),
        "4,096 long messages": (CHAT, body(messages=[{"role": "user", "content": "żó " * 250}] * 4_096)),
        "300k wrong logit_bias": (COMPLETION, body(prompt="a", logit_bias={str(n): "" for n in range(300_000)})),
        "wrong bad_words": (COMPLETION, repeated('{"prompt":"a","bad_words":[', "1", "]}")),
        "1,024 prompts": (COMPLETION, body(prompt=["a b c d " * 900] * 1_024, max_tokens=1)),
    }  # fmt: skip


async def measure(at: Address, trigger: Trigger) -> dict[str, Any]:
    """Send a request and ask for /health until the request is answered; return the waits for /health."""
    path, make = trigger
    content = make()
    request = asyncio.ensure_future(ask(at, content, path=path) if path else asyncio.sleep(1.0, Answer()))
    reader, writer = await asyncio.open_connection(at.host, at.port)
    waits: list[float] = []
    cpu: list[float] = []
    loop: list[float] = []
    begin = time.monotonic()
    while not request.done() or len(waits) < 20:
        sent, used, own = time.monotonic(), run_time(at.pid), thread_time(at.pid, at.pid)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        waits.append(1000 * (time.monotonic() - sent))
        cpu.append(1000 * (run_time(at.pid) - used))
        loop.append(1000 * (thread_time(at.pid, at.pid) - own))
        await asyncio.sleep(0.001)
    writer.transport.abort()
    status = request.result().status
    return {
        "megabytes": len(content) / 2**20, "status": status, "seconds": time.monotonic() - begin,
        "lag_ms": max(waits), "cpu_ms": max(cpu), "loop_ms": max(loop),
        "p99_ms": percentile(waits, 99), "p50_ms": percentile(waits, 50),
    }  # fmt: skip


def run_time(pid: int) -> float:
    """Return the CPU seconds of a process, in nanoseconds' resolution."""
    return sum(thread_time(pid, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir())


def thread_time(pid: int, thread: int) -> float:
    """Return the CPU seconds of a thread; 0 if it has ended. The event loop runs in a process's first thread."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError):
        return 0.0


async def all_of(at: Address, only: list[str]) -> dict[str, Any]:
    """Measure the triggers, one after the other."""
    found = {}
    for name, trigger in triggers().items():
        if not only or any(part in name for part in only):
            found[name] = await measure(at, trigger)
            print(json.dumps({name: {k: round(v, 1) if v else v for k, v in found[name].items()}}), flush=True)
    return found


def main() -> None:
    """Measure, print the result, and write JSON if --json is set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="triggers whose names contain one of these")
    parser.add_argument("--json", type=Path, help="result file to write")
    given = parser.parse_args()
    with server(["-m", "benchmarks.serve.noop_server", "--rows", "128", "--length", str(LENGTH)]) as at:
        found = asyncio.run(all_of(at, given.only))
    if given.json is not None:
        result_file.write(given.json, {"lags": [{"trigger": name, **row} for name, row in found.items()]})


if __name__ == "__main__":
    main()
