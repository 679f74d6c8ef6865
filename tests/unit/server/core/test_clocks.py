"""Durations are of a monotonic clock: a wall clock that jumps changes the dates of answers, and nothing else."""

import ast
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.http import limits
from tests.support.server.harness import Client, serving

ROOT = Path(__file__).parents[4]
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
# Where the wall clock is read: the `created` of answers and models, and the age of files.
READERS = {
    *("server/api/chat.py", "server/api/completions.py", "server/api/embeddings.py", "server/api/responses.py"),
    *("server/core/service.py", "server/processes/supervisor.py", "jswa/exec/compile/store.py"),
    *("server/core/metrics.py", "jswa/kv_events/publisher.py"),  # times that others read
}
DAY = 86_400.0


def numbers(value: Any) -> list[float]:
    """Return all numbers in a value of JSON."""
    if isinstance(value, dict | list):
        return [one for item in (value.values() if isinstance(value, dict) else value) for one in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server with all timeouts."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with serving(template=template, request_timeout=60.0, step_timeout=60.0) as found:
        yield found


def test_a_wall_clock_that_jumps_harms_no_request(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a day early or late at each look. Nothing times out, no time is negative, and stored responses stay."""
    wall, jumps = time.time, itertools.cycle((0.0, DAY, -DAY))
    monkeypatch.setattr(time, "time", lambda: wall() + next(jumps))
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    for _ in range(4):
        answer = client.post("/v1/chat/completions", hello).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert abs(answer["created"] - wall()) < 1.5 * DAY
        assert min(numbers(answer["timings"])) >= 0
        assert max(numbers(answer["timings"])) < 60e3, "milliseconds"
        *chunks, last, done = client.events("/v1/chat/completions", hello)
        assert done == "[DONE]"
        assert len({chunk["created"] for chunk in [*chunks, last]}) == 1
        first = client.post("/v1/responses", {"input": "a", "max_output_tokens": 5}).json()
        more = {"input": "b", "previous_response_id": first["id"], "max_output_tokens": 5}
        assert client.post("/v1/responses", more).status_code == 200
    values = re.findall(r"^[^#\s]+(?:{[^}]*})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert min(map(float, values)) >= 0
    assert len(values) > 50
    assert min(numbers(json.loads(client.get("/server_info").text)["steps"])) >= 0


def test_stored_responses_end_by_the_monotonic_clock(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there until the last of their seconds, and not after it."""
    later = 0.0
    monotonic = time.monotonic
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: monotonic() + later)})
    monkeypatch.setattr("server.engine.responses.time", clock)
    name = client.post("/v1/responses", {"input": "a", "max_output_tokens": 5}).json()["id"]
    more = {"input": "b", "previous_response_id": name, "max_output_tokens": 5, "store": False}
    later = limits.STORED_SECONDS - 300.0
    assert client.post("/v1/responses", more).status_code == 200
    later = limits.STORED_SECONDS + 1.0
    assert client.refusal("/v1/responses", more, 404)["param"] == "previous_response_id"


def test_few_places_read_the_wall_clock() -> None:
    """A new one must be neither a duration nor a deadline."""
    found = set()
    for path in itertools.chain.from_iterable((ROOT / folder).rglob("*.py") for folder in ("jswa", "server")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if (owner, node.attr) in WALL:
                    found.add(str(path.relative_to(ROOT)))
            elif isinstance(node, ast.ImportFrom):
                assert not any((node.module, name.name) in WALL for name in node.names), path
    assert found == READERS
