"""Replicas behind Ray Serve, started by its command line, nightly.

Two replicas of the embedded model on two CPUs. This file does not import Ray: it finds and kills processes by title.
"""

import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server.harness import until
from tests.support.server.processes import ROOT

pytestmark = [pytest.mark.scale, pytest.mark.usefixtures("ray_environment"), pytest.mark.nightly]
SERVE = ROOT / ".venv-ray" / "bin" / "serve"
# Programs that other tests have compiled already.
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "max_num_batched_tokens": 64, "deterministic": True}
CONVERSATIONS = 2  # at once
ENGINE, TREE = "ray::ServeReplica:jswa:Engine", "ray::PrefixTreeActor"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Cluster:
    """A cluster on one machine, and a client of its proxy."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, headers: Mapping[str, str]) -> None:
        self.process = process
        self.log = log
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=dict(headers), timeout=120)

    def ready(self) -> bool:
        """Return whether a replica accepts requests."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return self.http.get("/ready").status_code == 200
        except httpx2.HTTPError:
            return False

    def complete(self, prompt: str, **more: Any) -> httpx2.Response:
        """Request a completion."""
        return self.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 3, "temperature": 0, **more})

    def samples(self, name: str) -> dict[str, float]:
        """Return a metric by replica, summed over its other labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"jswa:{name}":
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0) + sample.value
        return found

    def pids(self, name: str) -> list[int]:
        """Return the processes of this cluster with a title, oldest first."""
        listed = subprocess.run(
            ["ps", "-eo", "pid,args", "--sort=start_time"], capture_output=True, text=True, check=True
        )
        found = [line.split(None, 1) for line in listed.stdout.splitlines()]
        return [int(pid) for pid, title in found if title.startswith(name) and self._is_ours(int(pid))]

    def _is_ours(self, pid: int) -> bool:
        try:
            return str(self.log.parent).encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


@contextmanager
def cluster(
    headers: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Cluster]:
    """Run `serve run` on a file with these options; a replica is ready inside the context."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # it contains sockets, so the path must be short
    config = yaml.safe_load((ROOT / "docs" / "deploy" / "ray-serve.yaml").read_text(encoding="utf-8"))
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["applications"][0]["args"] = {"model": "tiny", **SMALL, **options}
    file, log = folder / "serve.yaml", folder / "log"
    file.write_text(json.dumps(config))  # JSON is YAML
    environ = {
        **os.environ,
        **(environ or {}),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # Beside other tests: replicas that are as nice (Ray: 15), and more patience with the proxy (Ray: 5 and 10 s).
        "RAY_worker_niceness": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }
    with log.open("wb") as out:
        process = subprocess.Popen([SERVE, "run", file], cwd=folder, env=environ, stdout=out, stderr=out)
    try:
        running = Cluster(process, port, log, headers or {})
        until(running.ready, 300)  # two replicas load and compile, beside other tests
        yield running
        running.http.close()
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


KEY, ADMIN = {"Authorization": "Bearer k"}, {"Authorization": "Bearer a"}


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Return a cluster of two replicas.

    Its router never sees conversations as an imbalance, whichever replica has them: at most it counts the last request
    of each, whose end it may learn after the client, and the next request of all but one.
    """
    options: dict[str, Any] = {"api_key": ["k", "l"], "admin_api_key": "a", "health_check_period": 1}
    with cluster(KEY, min_replicas=2, imbalanced_threshold=2 * CONVERSATIONS - 1, **options) as running:
        until(lambda: len(running.samples("num_requests_running")) == 2, 60)
        yield running


def test_conversations_stay_with_the_replica_that_has_their_prefix(two: Cluster) -> None:
    """While the replicas' loads differ by no more than `imbalanced_threshold`."""
    before = two.samples("prompt_tokens_total")

    def talk(user: int) -> list[tuple[int, int]]:
        """Return the numbers of prompt tokens and cached tokens of each turn."""
        messages = [{"role": "user", "content": f"{user} " * 20 + f"My name is user {user}."}]
        found = []
        for turn in range(3):
            body = {"messages": messages, "max_tokens": 12, "temperature": 0}
            reply = two.http.post(CHATS, json=body)
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            messages = [*messages, reply.json()["choices"][0]["message"]]
            messages.append({"role": "user", "content": f"And what is {turn} + {user}?"})
        return found

    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        talks = list(pool.map(talk, range(8)))
    for turns in talks:
        for (earlier, _), (_, cached) in itertools.pairwise(turns):
            assert cached >= earlier - 16, turns  # at most a page is computed again
    work = {name: tokens - before[name] for name, tokens in two.samples("prompt_tokens_total").items()}
    assert min(work.values()) >= sum(work.values()) / 5, "a replica got too few requests"


def test_ray_serve_runs_the_same_server(two: Cluster) -> None:
    wanted = two.complete("Once upon a time", max_tokens=20).json()["choices"][0]["text"]
    stream = two.complete("Once upon a time", max_tokens=20, stream=True)
    *events, done = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert done == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == wanted
    assert two.complete("a", temperature=-1).json()["error"]["param"] == "temperature"
    assert two.complete("a", model="nobody").status_code == 404
    assert two.complete("a" * 2**24).status_code == 413
    assert two.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"Authorization": "x"}).status_code == 401
    assert two.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert two.http.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert two.http.post("/flush_cache", headers=ADMIN).json() == {"status": "ok"}
    found = two.http.get("/version", headers={"x-request-id": "mine"})
    assert found.headers.get_list("x-request-id") == ["mine"]


def test_a_client_that_disconnects_frees_its_rows(two: Cluster) -> None:
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
    for stream in (True, False):
        with pytest.raises(httpx2.ReadTimeout):
            two.http.post(COMPLETIONS, json={**body, "stream": stream}, timeout=0.02 if stream else 0.5)
        assert sum(two.samples("num_requests_running").values()) <= 1
        until(lambda: sum(two.samples("num_requests_running").values()) == 0, 20)


def test_requests_are_served_when_the_tree_of_prefixes_is_lost(two: Cluster) -> None:
    (tree,) = two.pids(TREE)
    os.kill(tree, signal.SIGKILL)
    long = "This text is long enough to be found again. " * 6
    assert [two.complete(long).status_code for _ in range(3)] == [200] * 3
    usage = two.complete(long).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 17
    assert two.pids(TREE) not in ([], [tree])


def test_other_requests_survive_the_death_of_a_replica(two: Cluster) -> None:
    until(lambda: len(two.samples("num_requests_running")) == 2, 60)
    assert sum(two.samples("num_requests_running").values()) == 0
    failed = two.samples("request_failed_total")

    def ask(number: int) -> tuple[bool, httpx2.Response]:
        stream = number % 2 == 0
        return stream, two.complete(f"{number} " * 8, max_tokens=100, ignore_eos=True, stream=stream)

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask, number) for number in range(20)]
        until(lambda: all(rows >= 2 for rows in two.samples("num_requests_running").values()), 20)
        victim = two.pids(ENGINE)[0]
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        later = [two.complete(f"later {number}") for number in range(8)]
        answers = [one.result(60) for one in asked]
    took = time.monotonic() - begin
    assert [one.status_code for one in later] == [200] * 8, "a later request failed"
    whole = [reply for stream, reply in answers if not stream]
    assert [reply.status_code for reply in whole] == [200] * 10, "a request without output was not repeated"
    cut = [reply.text for stream, reply in answers if stream and not reply.text.endswith("data: [DONE]\n\n")]
    assert len(cut) <= 4, "more requests failed than a replica has rows"
    for text in cut:
        error = json.loads(text.splitlines()[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("replica_lost", "server_error")
    until(lambda: len(two.samples("num_requests_running")) == 2, 60)
    again = two.samples("request_failed_total")
    (other,) = set(failed) & set(again)
    assert again[other] == failed[other], "a request of the other replica failed"
    print(
        f"{len(cut)} of 10 streams cut, all ended {took:.1f} s after the kill; a new replica after "
        f"{time.monotonic() - begin:.1f} s"
    )


def test_a_router_falls_back_for_replicas_that_it_does_not_know() -> None:
    case = ROOT / "tests" / "scale" / "router_case.py"
    command = [SERVE.parent / "python", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_replicas_come_and_go_with_the_load() -> None:
    scale: dict[str, Any] = {
        "upscale_delay": 1,
        "downscale_delay": 2,
        "target_ongoing_requests": 2,
        "imbalanced_threshold": 2,
    }
    with cluster(min_replicas=1, max_replicas=2, **scale) as running, ThreadPoolExecutor(9) as pool:
        busy = threading.Event()
        done = threading.Event()

        def ask(number: int, stop: threading.Event) -> list[str]:
            texts: list[str] = []
            while not stop.is_set():
                reply = running.complete(f"{number} {len(texts)}", max_tokens=200, ignore_eos=True, stream=True)
                texts.append(reply.text if reply.status_code == 200 else f"{reply.status_code} {reply.text}")
            return texts

        crowd = [pool.submit(ask, number, busy) for number in range(8)]
        one = pool.submit(ask, 8, done)
        try:
            until(lambda: len(running.samples("num_requests_running")) == 2, 120)
            until(lambda: min(running.samples("prompt_tokens_total").values()) > 0, 30)
            busy.set()
            until(lambda: len(running.samples("num_requests_running")) == 1, 180)
        finally:
            busy.set()
            done.set()
        texts = [text for asked in (*crowd, one) for text in asked.result(60)]
    wrong = [text[-300:] for text in texts if not text.endswith("data: [DONE]\n\n")]
    assert not wrong, "a replica was removed before its requests ended"


@pytest.mark.nightly
def test_a_replica_whose_engine_dies_is_replaced(tmp_path: Path) -> None:
    """The engine writes plans to a file that may not grow, so that a step fails."""
    plans = tmp_path / "plans"
    with cluster(environ={"JSWA_DUMP_PLANS": str(plans)}, min_replicas=1, health_check_period=1) as running:
        assert running.complete("a").status_code == 200
        (victim,) = running.pids(ENGINE)
        limit = (plans.stat().st_size + 2_000, resource.RLIM_INFINITY)
        resource.prlimit(victim, resource.RLIMIT_FSIZE, limit)
        failed = running.complete("a", max_tokens=400, ignore_eos=True)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_dead")
        assert running.http.get("/health").status_code == 503
        until(lambda: running.pids(ENGINE) not in ([], [victim]), 60)
        assert running.complete("a").status_code == 200, "the request did not wait for the new replica"
        assert running.http.get("/health").status_code == 200
