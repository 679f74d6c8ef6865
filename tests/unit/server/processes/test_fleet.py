"""Front ends as processes: some are killed, the engine fails, and all of them drain."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server.fronts import Stream, front_ends, is_replaced
from tests.support.server.harness import until
from tests.support.server.processes import Process, started

SCRIPT = str(Path(__file__).parents[3] / "support" / "server" / "fake_process.py")
ROOT = str(Path(__file__).parents[4])
PATH = "/v1/completions"


@contextmanager
def serving(engine: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Process]:
    options = {"api_server_count": 2, "admin_api_key": "root", **options}
    with started([SCRIPT, json.dumps(engine or {}), json.dumps(options)], environ={"PYTHONPATH": ROOT}) as process:
        yield process


def load(server: Process) -> dict[str, int]:
    found: dict[str, int] = httpx2.get(server.url + "/server_info").json()["load"]
    return found


def sample(server: Process, name: str) -> float:
    text = httpx2.get(server.url + "/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(f"jswa:{name}")).rpartition(" ")[2])


def test_a_front_end_that_is_killed_takes_only_its_own_connections() -> None:
    with serving({"delay": 0.01}, max_queued_requests=64) as server:
        before = front_ends(server)
        assert len(before) == 2
        streams = [Stream(server, 150) for _ in range(8)]
        until(lambda: load(server)["requests"] == 8)
        killed, stays = before
        os.kill(killed, signal.SIGKILL)
        ended = [stream.rest() for stream in streams]
        whole = [data for data in ended if data.endswith(b"0\r\n\r\n") and b"data: [DONE]" in data]
        cut = len(ended) - len(whole)
        assert 0 < len(whole) < 8, "the kernel has given each front end some of eight connections"
        assert all(data.count(b"data: {") == 150 for data in whole)
        until(lambda: is_replaced(server, killed))
        assert stays in front_ends(server)
        until(lambda: load(server)["requests"] == 0)
        now = load(server)
        assert (now["running"], now["waiting"], now["full_pages"], now["texts"]) == (0, 0, 0, 0), "they were aborted"
        for _ in range(8):  # both front ends answer
            found = httpx2.post(server.url + PATH, json={"prompt": "abc", "max_tokens": 3})
            assert found.json()["choices"][0]["text"] == "efg"
        assert sample(server, "request_failed") == cut
        assert sample(server, "generation_tokens_total") >= 150 * len(whole) + 24
        assert sample(server, "num_requests_without_token") == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "has ended with status -9" in "".join(server.log)


def test_no_connection_waits_for_a_front_end_that_starts() -> None:
    """While one starts anew, the kernel gives all connections to the other one."""
    with serving() as server:
        before = front_ends(server)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: is_replaced(server, before[0]))
        begins = next(pid for pid in front_ends(server) if pid not in before)
        os.kill(begins, signal.SIGSTOP)  # it does not listen yet
        try:
            assert all(httpx2.get(server.url + "/health", timeout=10).status_code == 200 for _ in range(16))
        finally:
            os.kill(begins, signal.SIGCONT)
        until(lambda: load(server)["requests"] == 0)


def test_all_front_ends_drain_and_count_together() -> None:
    with serving({"delay": 0.01}, metrics_port=0) as server:
        streams = [Stream(server, 500) for _ in range(8)]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(server.url + "/ready").status_code == 503)
        for _ in range(4):
            refused = httpx2.post(server.url + PATH, json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert httpx2.get(server.url + "/health").status_code == 200
        assert sample(server, 'http_requests_total{model_name="fake",route="/v1/completions",status="503"}') == 4
        assert all(stream.rest().count(b"data: {") == 500 for stream in streams)
        assert server.wait() == 0
        assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.nightly  # as in one process: tests/unit/server/http/test_process.py
def test_requests_that_outlast_the_shutdown_timeout_are_aborted() -> None:
    with serving({"delay": 0.01}, shutdown_timeout=0.3) as server:
        streams = [Stream(server, 50_000) for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        assert all(b'"finish_reason":"abort"' in stream.rest() for stream in streams)
        assert server.wait() == 0


def test_an_engine_that_fails_is_rebuilt_and_front_ends_stay() -> None:
    with serving({"delay": 0.01, "steps_left": 30}, restart_engine=True) as server:
        before, body = front_ends(server), {"prompt": "a", "max_tokens": 100}
        streams = [Stream(server, 100) for _ in range(4)]
        assert all(b'"code":"engine_dead"' in stream.rest() for stream in streams)
        until(lambda: all(httpx2.get(server.url + "/ready").status_code == 200 for _ in range(6)))
        for _ in range(4):
            short = httpx2.post(server.url + PATH, json={**body, "max_tokens": 4}, timeout=10)
            assert short.json()["usage"]["completion_tokens"] == 4
        assert sample(server, "engine_restarts_total") == 1
        assert front_ends(server) == before
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.nightly
def test_the_process_exits_with_1_if_the_engine_dies() -> None:
    with serving({"delay": 0.01, "steps_left": 5}) as server:
        response = httpx2.post(server.url + PATH, json={"prompt": "a", "max_tokens": 100}, timeout=10)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
        assert httpx2.get(server.url + "/health").status_code == 503
        assert server.wait() == 1


def test_front_ends_end_with_the_engines_process() -> None:
    with serving({"delay": 0.01}) as server:
        stream, pids = Stream(server, 50_000), front_ends(server)
        server.process.kill()
        assert b'"code":"engine_dead"' in stream.rest()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


def is_whole(stream: Stream) -> bool:
    """Return whether a stream ends; not if nothing comes for six seconds."""
    try:
        return b"data: [DONE]" in stream.rest(6)
    except TimeoutError:
        return False


def test_a_front_end_that_stops_holds_up_no_other() -> None:
    """The engine waits a second for it, and no longer."""
    with serving({"delay": 0.005}) as server:
        streams = [Stream(server, 400) for _ in range(8)]
        stopped = front_ends(server)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            with ThreadPoolExecutor(len(streams)) as pool:
                assert any(pool.map(is_whole, streams))
            assert time.monotonic() - begin < 30
        finally:
            os.kill(stopped, signal.SIGCONT)


def test_a_front_end_never_imports_jax() -> None:
    with serving() as server:
        for pid in front_ends(server):
            assert "jaxlib" not in Path(f"/proc/{pid}/maps").read_text()
