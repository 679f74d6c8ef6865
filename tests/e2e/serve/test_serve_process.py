"""A `jswa serve tiny` process: options from all sources, TLS, draining, a second signal, a failing engine."""

import resource
import signal
import ssl
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server.harness import until
from tests.support.server.processes import ROOT, Process, started

KEY = {"Authorization": "Bearer from-environment"}


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    """A folder with a key and a self-signed certificate."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    return tmp_path


@pytest.fixture
def server(tls: Path) -> Iterator[Process]:
    """TLS by flags and API keys by the environment, both of which override the file with the other options."""
    options = "metrics-prefix: vllm\napi_key: [from-file]\nport: 1\nmax_num_seqs: 1\nshutdown_timeout: 60\n"
    options += "max_num_batched_tokens: 16\n"
    (tls / "options.yaml").write_text(options)
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", "--config", str(tls / "options.yaml")]
    command += ["--ssl-keyfile", str(tls / "key.pem"), "--ssl-certfile", str(tls / "cert.pem"), "--keep-alive", "0.1"]
    environ = {"PYTHONPATH": str(ROOT), "JSWA_API_KEY": "from-environment", "JSWA_CHECK": "1"}
    with started(command, folder=tls, environ=environ) as process:
        yield process


def test_tls_keys_priorities_and_draining(server: Process, tls: Path) -> None:
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(tls / "cert.pem"))
    with (
        httpx2.Client(base_url=server.url, verify=trusted, headers=KEY, timeout=60) as client,
        httpx2.Client(verify=trusted) as stranger,
        ThreadPoolExecutor(4) as pool,
    ):
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(server.url + "/health")  # the certificate is not trusted
        assert stranger.get(server.url + "/health").status_code == 200
        assert stranger.get(server.url + "/v1/models").status_code == 401
        denied = stranger.get(server.url + "/v1/models", headers={"Authorization": "Bearer from-file"})
        assert denied.status_code == 401
        page = client.get("/v1/models", headers={"Origin": "http://page"})
        assert page.status_code == 200
        assert not any(name.startswith("access-control") for name in page.headers)
        assert "vllm:kv_cache_usage_perc" in client.get("/metrics").text

        def post(**body: Any) -> str:
            return client.post("/v1/completions", json={"prompt": "The cat", "ignore_eos": True, **body}).text

        def running() -> dict[str, int]:
            load: dict[str, int] = client.get("/server_info").json()["load"]
            return load

        # max_num_seqs is 1: one request runs, the others wait in order of priority and get keep-alive comments.
        first = pool.submit(post, max_tokens=1000, stream=True)
        until(lambda: running()["running"] == 1)
        low = pool.submit(post, max_tokens=300, priority=5, stream=True)
        until(lambda: running()["requests"] == 2)
        high = pool.submit(post, max_tokens=30, stream=True)
        until(lambda: running()["requests"] == 3)
        assert high.result(60).startswith(": keep-alive\n\n")
        assert not low.done()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/ready").status_code == 503)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert first.result(60).endswith("data: [DONE]\n\n"), "a running request must finish"
        assert not low.done()
        server.process.send_signal(signal.SIGTERM)
        assert '"finish_reason":"abort"' in low.result(10)
    assert server.wait(20) == 0


# The command line with a compiler that takes 1,000 s for each program beside the steps.
SLOW = """
import sys, threading, time
from jswa.commands.cli import main
from jswa.engine import Engine
from jswa.exec.compile import steps

def compile_slowly(*given, right=steps.compile_step):
    if threading.current_thread().name in ("prepare", "compile beside"):
        print("compiling beside", file=sys.stderr, flush=True)
        time.sleep(1000)
    return right(*given)

def close(self, right=Engine.close):
    right(self)
    print("closed", file=sys.stderr, flush=True)

steps.compile_step, Engine.close = compile_slowly, close
main()
"""


def test_a_process_that_compiles_closes_its_engine_and_exits_at_once() -> None:
    """Without a warning of it: nobody waits for the program any more, and nothing is lost with it."""
    command = ["-c", SLOW, "serve", "tiny", "--port", "0", "--shutdown-timeout", "0"]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "512"]
    with started(command) as server:
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(server.url + "/v1/completions", json={"prompt": "a", "logprobs": 1}, timeout=0.5)
        until(lambda: "compiling beside\n" in server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 0
        assert server.log[-1] == "closed\n"
        assert not any("does not stop" in line for line in server.log)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], ["--restart-engine"]], ids=["ends", "restarts"])
def test_a_failing_engine_ends_the_process_or_is_rebuilt(flags: list[str], tmp_path: Path) -> None:
    """A step fails because the engine writes its plans to a file whose size is limited."""
    plans = tmp_path / "plans"
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    greedy = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    with started([*command, *flags], environ={"JSWA_DUMP_PLANS": str(plans)}) as server:
        path, unlimited = server.url + "/v1/completions", (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        wanted = httpx2.post(path, json=greedy, timeout=60).json()["choices"][0]["text"]
        limit = (plans.stat().st_size + 2_000, resource.RLIM_INFINITY)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limit)
        failed = httpx2.post(path, json={"prompt": "a", "max_tokens": 400, "ignore_eos": True}, timeout=60)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_dead")
        assert httpx2.get(server.url + "/health").status_code == 503
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
        if not flags:
            assert server.wait(20) == 1
            return
        until(lambda: httpx2.get(server.url + "/ready").status_code == 200, 120)
        assert httpx2.post(path, json=greedy, timeout=60).json()["choices"][0]["text"] == wanted
