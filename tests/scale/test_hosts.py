"""A model on several hosts, which are processes here: tokens are those of one host, and lost hosts end the others."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.e2e.model.test_tensor_parallel import assert_same_text
from tests.support.nights import sample
from tests.support.server.harness import until
from tests.support.server.processes import ROOT, Process, started
from tests.support.shared_model import checkpoint

pytestmark = pytest.mark.scale
BOUND = 30  # seconds within which the others end when one is lost
ENVIRON = {**os.environ, "PJRT_NPROC": "16"}
OPTIONS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--kv-cache-memory-bytes", "8000000"]
OPTIONS += ["--deterministic", "--port", "0", "-tp", "2"]  # so that one program is compiled


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def process(log: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python process that writes to a file; it is killed at the end of the context."""
    with log.open("wb") as file:
        words = [sys.executable, "-m", *map(str, command)]
        child = subprocess.Popen(words, cwd=ROOT, env=ENVIRON, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            yield child
        finally:
            child.kill()
            child.wait()


@pytest.mark.parametrize(
    ("name", "devices", "nodes"),
    [
        ("gemma3", 2, 2),
        pytest.param("mimo_v2_flash", 4, 2, marks=pytest.mark.nightly),
        pytest.param("gpt_oss", 4, 4, marks=pytest.mark.nightly),
        pytest.param("llama4", 2, 2, marks=pytest.mark.nightly),
        pytest.param("llama", 8, 2, marks=pytest.mark.nightly),
        pytest.param("gemma3+drafts", 2, 2, marks=pytest.mark.nightly),
        pytest.param("llama+lora", 2, 2, marks=pytest.mark.nightly),
        pytest.param("llama+room", 2, 2, marks=pytest.mark.nightly),
        pytest.param("mimo_v2_flash+int8", 4, 2, marks=pytest.mark.nightly),
    ],
)
def test_several_hosts_give_the_tokens_of_one(name: str, devices: int, nodes: int, tmp_path: Path) -> None:
    """Cold, cached and revived turns, prompt log probabilities, and all kinds of sampling."""
    address = f"127.0.0.1:{free_port()}"
    found = {}
    for count in (1, nodes):
        command = ["tests.scale.shared_hosts", tmp_path, name, devices, count]
        logs = [tmp_path / f"{count} {rank}.log" for rank in range(count)]
        with ThreadPoolExecutor() as pool:

            def one(rank: int, command: list[object] = command, logs: list[Path] = logs) -> int:
                with process(logs[rank], *command, rank, address) as child:
                    return child.wait(240)

            statuses = list(pool.map(one, range(count)))
        assert statuses == [0] * count, "\n".join(log.read_text()[-3000:] for log in logs)
        found[count] = json.loads(logs[0].read_text().splitlines()[-1])
    assert_same_text(found[nodes], found[1])
    assert (found[nodes]["cached"], found[nodes]["revived"]) == (found[1]["cached"], found[1]["revived"])


@contextmanager
def served(folder: Path) -> Iterator[tuple[Process, subprocess.Popen[bytes], Path]]:
    """Return the first host, which serves, the second host, and the log of the second."""
    address = f"127.0.0.1:{free_port()}"
    several = [*OPTIONS, "--nnodes", "2", "--dist-init-addr", address, "--node-rank"]
    model, _ = checkpoint("gemma3", folder)
    log = folder / "second.log"
    with (
        process(log, "jswa", "serve", model, *several, 1) as second,
        started(["-m", "jswa", "serve", str(model), *several, "0"], environ=ENVIRON) as first,
    ):
        yield first, second, log


def ask(url: str, tokens: int, **more: object) -> httpx2.Response:
    body = {
        "prompt": [5, 6, 7, 8],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=60)


def busy(first: Process) -> int:
    load: dict[str, int] = httpx2.get(first.url + "/server_info").json()["load"]
    return load["running"]


def test_hosts_start_serve_drain_and_end_together(tmp_path: Path) -> None:
    with served(tmp_path) as (first, second, log), ThreadPoolExecutor(4) as pool:
        said = [ask(first.url, 20, logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"] for _ in range(2)]
        assert said[0] == said[1]
        assert len(said[0]) == 20
        running = [pool.submit(ask, first.url, 150) for _ in range(3)]
        until(lambda: busy(first) == 3)
        # Slurm and Kubernetes send the signal to all hosts at once. Running requests still finish.
        for child in (second, first.process):
            child.send_signal(signal.SIGTERM)
        assert [one.result().json()["usage"]["completion_tokens"] for one in running] == [150] * 3
        assert first.wait(BOUND) == 0
        assert second.wait(BOUND) == 0
        assert "SIGTERM: this host exits with host 0" in log.read_text()


@pytest.mark.parametrize("lost", sample(["second", "first"], 2))
def test_the_loss_of_a_host_ends_the_other(lost: str, tmp_path: Path) -> None:
    with served(tmp_path) as (first, second, log), ThreadPoolExecutor(4) as pool:
        assert ask(first.url, 5).status_code == 200
        running = [pool.submit(ask, first.url, 450, stream=True) for _ in range(4)]
        until(lambda: busy(first) == 4)
        begin = time.monotonic()
        if lost == "second":
            second.kill()
            replies = [one.result() for one in running]
            assert all("engine_dead" in reply.text or reply.status_code == 500 for reply in replies)
            assert first.wait(BOUND) == 1
            assert "host 1 (127.0.0.1) is gone" in "".join(first.log)
        else:
            first.process.kill()
            assert second.wait(BOUND) != 0
            text = log.read_text()
            assert "host 0 (127.0.0.1) is gone" in text or "another task died" in text
            for one in running:
                assert isinstance(one.exception(), httpx2.HTTPError)
        assert time.monotonic() - begin < BOUND


@pytest.mark.nightly
def test_a_signal_to_one_host_ends_all_hosts(tmp_path: Path) -> None:
    """Running requests finish; the exit status of the first host tells that it was not the one that got the signal."""
    with served(tmp_path) as (first, second, _), ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, first.url, 100) for _ in range(3)]
        until(lambda: busy(first) == 3)
        second.terminate()
        assert [one.result().json()["usage"]["completion_tokens"] for one in running] == [100] * 3
        assert first.wait(BOUND) == 1
        assert second.wait(BOUND) == 0
        assert "host 1 (127.0.0.1) has been told to end" in "".join(first.log)


@pytest.mark.parametrize("other", sample(["options", "weights"], 2))
def test_hosts_with_different_options_are_refused(other: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    models = [checkpoint("llama", tmp_path / str(rank))[0] for rank in range(2)]
    command = ["jswa", "generate", "a", "-tp", 2, "--nnodes", 2, "--dist-init-addr", address, "--node-rank"]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    last: list[object] = ["--model", models[1]]
    if other == "options":
        last += ["--max-model-len", 300]
    else:
        file = models[1] / "model.safetensors"
        stored = bytearray(file.read_bytes())
        stored[-1] ^= 1
        file.write_bytes(stored)
    with (
        process(logs[0], *command, 0, "--model", models[0]) as first,
        process(logs[1], *command, 1, *last) as second,
    ):
        assert [first.wait(60), second.wait(60)] == [2, 2]
    for log in logs:
        assert "nnodes = 2: hosts [1] have other options" in log.read_text()


@pytest.mark.parametrize("where", sample(["first", "second"], 2))
def test_a_host_that_cannot_load_the_model_says_why_and_ends_the_other(where: str, tmp_path: Path) -> None:
    broken = int(where == "second")
    address = f"127.0.0.1:{free_port()}"
    model, _ = checkpoint("llama+lora", tmp_path)
    adapters = [f"one={model / 'adapter'}"] * 2
    adapters[broken] = f"one={tmp_path / 'nowhere'}"
    command = ["jswa", "generate", "a", "--model", model, "-tp", 2, "--nnodes", 2, "--dist-init-addr", address]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    begin = time.monotonic()
    with (
        process(logs[0], *command, "--node-rank", 0, "--lora-modules", adapters[0]) as first,
        process(logs[1], *command, "--node-rank", 1, "--lora-modules", adapters[1]) as second,
    ):
        assert [first.wait(60), second.wait(60)] == [1, 1]
    assert time.monotonic() - begin < BOUND
    assert "ConfigError: lora_modules" in logs[broken].read_text()
    assert f"HostLost: host {broken} (127.0.0.1) is gone" in logs[1 - broken].read_text()


def test_hosts_with_other_adapters_of_a_name_are_refused(tmp_path: Path) -> None:
    """Each host reads its own folders; the digests of what they hold must be the same."""
    address = f"127.0.0.1:{free_port()}"
    model, _ = checkpoint("llama+lora", tmp_path)
    command = ["jswa", "generate", "a", "--model", model, "-tp", 2, "--nnodes", 2, "--dist-init-addr", address]
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    with (
        process(logs[0], *command, "--node-rank", 0, "--lora-modules", f"one={model / 'adapter'}") as first,
        process(logs[1], *command, "--node-rank", 1, "--lora-modules", f"one={model / 'other'}") as second,
    ):
        assert [first.wait(60), second.wait(60)] == [1, 1]
    for log in logs:
        assert "lora_modules = 'one': hosts [1] have other contents of these names" in log.read_text()
