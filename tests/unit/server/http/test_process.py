"""The server process with a fake engine: signals, engine failures, exit statuses, logs."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.core.service import Served
from server.options import ServeConfig
from server.processes.supervisor import run
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import until
from tests.support.server.processes import Process, started

SCRIPT = str(Path(__file__).parents[3] / "support" / "server" / "fake_process.py")
ROOT = str(Path(__file__).parents[4])
PATH = "/v1/completions"


@contextmanager
def serving(engine: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Process]:
    with started([SCRIPT, json.dumps(engine or {}), json.dumps(options)], environ={"PYTHONPATH": ROOT}) as process:
        yield process


class Stream(threading.Thread):
    """A thread that reads a stream."""

    def __init__(self, url: str, tokens: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._headers = dict(headers or {})
        self._url = url
        self._tokens = tokens
        self.start()
        until(lambda: "data:" in self.text)

    def run(self) -> None:
        body = {"prompt": "abc", "max_tokens": self._tokens, "stream": True}
        with httpx2.stream("POST", self._url + PATH, json=body, headers=self._headers, timeout=20) as response:
            for piece in response.iter_text():
                self.text += piece


def test_sigterm_drains_requests_and_refuses_new_ones() -> None:
    with serving({"delay": 0.01}) as server:
        stream = Stream(server.url, 150)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(server.url + "/ready").status_code == 503)
        assert httpx2.get(server.url + "/health").status_code == 200
        refused = httpx2.post(server.url + PATH, json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        stream.join(20)
        assert stream.text.count("data:") == 151
        assert '"finish_reason":"length"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        assert server.wait() == 0


def test_requests_that_outlast_the_shutdown_timeout_are_aborted() -> None:
    with serving({"delay": 0.01}, shutdown_timeout=0.3) as server:
        stream = Stream(server.url, 50_000)
        server.process.send_signal(signal.SIGTERM)
        stream.join(10)
        assert '"finish_reason":"abort"' in stream.text
        assert server.wait() == 0


def test_a_second_sigterm_does_not_wait() -> None:
    with serving({"delay": 0.01}) as server:
        stream = Stream(server.url, 50_000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(server.url + "/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0
        stream.join(5)
    log = "".join(server.log)
    assert "second signal" in log
    assert "Traceback" not in log
    assert "does not stop" not in log


def test_the_process_exits_with_1_if_the_engine_dies() -> None:
    with serving({"delay": 0.01, "steps_left": 5}) as server:
        response = httpx2.post(server.url + PATH, json={"prompt": "a", "max_tokens": 100}, timeout=10)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_dead"
        assert httpx2.get(server.url + "/health").status_code == 503
        assert server.wait(10) == 1
        assert "killed by a test" in "".join(server.log)


def test_a_dead_engine_is_rebuilt_in_the_same_process() -> None:
    with serving({"delay": 0.01, "steps_left": 30}, restart_engine=True) as server:
        body = {"prompt": "a", "max_tokens": 100}
        assert httpx2.post(server.url + PATH, json=body, timeout=10).status_code == 500
        until(lambda: httpx2.get(server.url + "/ready").status_code == 200)
        assert httpx2.get(server.url + "/health").status_code == 200
        short = httpx2.post(server.url + PATH, json={**body, "max_tokens": 4}, timeout=10)
        assert short.json()["usage"]["completion_tokens"] == 4
        assert 'engine_restarts_total{model_name="fake"} 1.0' in httpx2.get(server.url + "/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0


@pytest.mark.nightly
def test_the_process_exits_if_the_engine_hangs() -> None:
    with serving({"delay": 1000}, step_timeout=0.2) as server:
        response = httpx2.post(server.url + PATH, json={"prompt": "a"}, timeout=10)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
        assert httpx2.get(server.url + "/health").status_code == 503
        assert server.wait(10) == 1
        assert "the engine hangs" in "".join(server.log)


def test_sigterm_ends_a_process_that_compiles() -> None:
    with serving({"prepare_delay": 1000}, shutdown_timeout=0) as server:
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(server.url + PATH, json={"prompt": "a", "logprobs": 1}, timeout=0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert "does not stop" not in "".join(server.log)


@pytest.mark.nightly
def test_a_request_that_waits_for_compilation_is_drained() -> None:
    with serving({"prepare_delay": 1.0}) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a", "logprobs": 1, "max_tokens": 2}
        reply = pool.submit(httpx2.post, server.url + PATH, json=body, timeout=20)
        until(lambda: httpx2.get(server.url + "/server_info").json()["load"]["requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert reply.result().json()["usage"]["completion_tokens"] == 2
        assert server.wait(10) == 0


def test_an_idle_server_stops_at_once_and_its_log_has_json_lines_with_request_ids() -> None:
    with serving(log_format="json") as server:
        httpx2.post(server.url + PATH, json={"prompt": "a", "max_tokens": 3}, headers={"x-request-id": "me"})
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 0
        lines = [json.loads(line) for line in server.log]
        (line,) = [line for line in lines if line.get("request_id") == "me"]
        assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (2, 3, "length")
        assert line["total_s"] >= line["first_token_s"] >= 0


@pytest.mark.nightly
def test_a_port_in_use_is_an_error() -> None:
    with serving() as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(AssertionError, match="address already in use"), serving(port=port):
            pass


def test_the_engines_thread_gets_the_interpreter_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's default switch interval of 5 ms is as long as a step."""
    asked: list[float] = []

    def build() -> FakeEngine:
        raise RuntimeError("far enough")

    monkeypatch.setattr(sys, "setswitchinterval", asked.append)
    with pytest.raises(RuntimeError, match="far enough"):
        run(Served(build, None), ServeConfig(served_model_name=("fake",)))
    assert asked
    assert asked[0] < 1e-3


@pytest.mark.nightly
def test_metrics_have_a_port_of_their_own_without_a_key() -> None:
    options = {"api_key": ["one"], "metrics_port": 0, "metrics_host": "localhost"}
    with serving({"delay": 0.01}, **options) as server:
        until(lambda: "metrics are at" in "".join(server.log))
        (url,) = re.findall(r"metrics are at (http://.*)/metrics", "".join(server.log))
        assert url != server.url
        assert httpx2.get(server.url + "/metrics").status_code == 401
        found = httpx2.get(url + "/metrics")
        assert found.status_code == 200
        assert 'engine_up{model_name="fake"} 1.0' in found.text
        assert httpx2.head(url + "/metrics").status_code == 200
        for path in ("/v1/models", "/server_info", "/health", "/openapi.json"):
            assert httpx2.get(url + path).status_code == 404
        assert httpx2.post(url + PATH, json={"prompt": "a"}).status_code == 404
        assert httpx2.get(url + "/metrics", headers={"host": "evil.example"}).status_code == 403
        assert "no --api-key" not in "".join(server.log)
        # Another server on the same metrics port ends with an error. It listens on all addresses without a key, and
        # warns of that first.
        other = {"metrics_port": int(url.rpartition(":")[2]), "metrics_host": "localhost", "host": "0.0.0.0"}  # noqa: S104
        done = subprocess.run(
            [sys.executable, SCRIPT, "{}", json.dumps(other)],
            env={**os.environ, "PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 3
        warning, error = done.stderr.splitlines()
        assert "no --api-key: every client that reaches 0.0.0.0" in warning
        assert "ddress already in use" in error
        stream = Stream(server.url, 100, {"Authorization": "Bearer one"})
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx2.get(server.url + "/ready").status_code == 503)
        assert "num_requests_running" in httpx2.get(url + "/metrics").text, "also while the server goes down"
        stream.join(20)
        assert server.wait() == 0
