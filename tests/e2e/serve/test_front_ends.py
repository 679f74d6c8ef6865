"""Front ends of a real engine are killed under load, and an engine that fails under load is restarted."""

import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server.fronts import Stream, front_ends, is_replaced
from tests.support.server.harness import until
from tests.support.server.processes import Process, started
from tests.support.tiny import ONE_SHAPE_FLAGS

TOKENS = 400
GREEDY: dict[str, Any] = {"ignore_eos": True, "temperature": 0}


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """The file to which the engine writes its plans: a step fails if the file may not grow."""
    return tmp_path / "plans"


@pytest.fixture
def server(plans: Path) -> Iterator[Process]:
    """Two front ends of an engine that is restarted when it fails."""
    command = ["-m", "jswa", "serve", "tiny", "--port", "0", "--api-server-count", "2", "--restart-engine"]
    with started([*command, *ONE_SHAPE_FLAGS], environ={"JSWA_DUMP_PLANS": str(plans)}) as process:
        yield process


def _load(server: Process) -> dict[str, int]:
    found: dict[str, int] = httpx2.get(server.url + "/server_info", timeout=30).json()["load"]
    return found


def _text(data: bytes) -> str:
    events = [json.loads(one) for one in re.findall(rb"data: (\{.*?\})\n\n", data)]
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


@pytest.mark.nightly  # tests/unit/server/processes/test_fleet.py has each of them on a fake engine
def test_processes_are_killed_and_engines_fail_under_load(server: Process, plans: Path) -> None:
    """Streams of the front end that is killed are cut, the others have the right tokens, and a new one starts."""
    wanted = _text(Stream(server, TOKENS, **GREEDY).rest())
    for _ in range(3):  # on a busy machine all streams may have ended before the signal
        before = front_ends(server)
        streams = [Stream(server, TOKENS, **GREEDY) for _ in range(12)]
        os.kill(before[0], signal.SIGKILL)
        ended = [stream.rest(60) for stream in streams]
        whole = [data for data in ended if b"data: [DONE]" in data]
        if len(whole) < 12:
            break
        until(partial(is_replaced, server, before[0]))
    assert 0 < len(whole) < 12, "the kernel has given each front end some of twelve connections"
    assert all(_text(data) == wanted for data in whole)
    assert all(wanted.startswith(_text(data)) for data in ended if data not in whole)
    until(lambda: is_replaced(server, before[0]))
    assert before[1] in front_ends(server)
    until(lambda: not any(_load(server)[name] for name in ("requests", "running", "waiting", "full_pages", "texts")))

    pids = front_ends(server)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    streams = [Stream(server, TOKENS, **GREEDY) for _ in range(4)]
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (plans.stat().st_size + 2_000, unlimited[1]))
    assert all(b'"code":"engine_dead"' in stream.rest(60) for stream in streams)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
    until(lambda: all(httpx2.get(server.url + "/ready", timeout=30).status_code == 200 for _ in range(6)), 120)
    assert all(_text(Stream(server, TOKENS, **GREEDY).rest()) == wanted for _ in range(4))
    assert front_ends(server) == pids
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
