"""The server behind a relay: clients see no difference, even if a replica is lost during a request."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from server.cluster.merge import Answer, merged, merged_metrics
from server.cluster.relay import Relay, Replica
from server.gate.keys import Keys
from server.gate.routes import table
from server.http.errors import ApiError
from tests.support.server.harness import Client, serving, until
from tests.support.server.relays import TEMPLATE, Way, relayed

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def front() -> Iterator[tuple[Client, Way]]:
    """A server behind a relay."""
    with relayed(api_key=("k",), admin_api_key="a", headers={"Authorization": "Bearer k"}) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> Iterator[Client]:
    """The same server without a relay."""
    options: dict[str, Any] = {"api_key": ("k",), "admin_api_key": "a", "max_body_size": 10_000}
    with serving(template=TEMPLATE, headers={"Authorization": "Bearer k"}, **options) as found:
        yield found


REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", PATH, {"prompt": "abc", "max_tokens": 4, "n": 2}),
    ("POST", PATH, {"prompt": [100, 101], "max_tokens": 4, "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ("POST", PATH, {"prompt": "abc", "temperature": -1}),
    ("POST", PATH, {"prompt": "abc", "model": "nobody"}),
    ("POST", PATH, b"{"),
    ("POST", PATH, {"prompt": "a" * 10_000}),
    ("POST", "/tokenize", {"prompt": "ab"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/nowhere", None),
    ("DELETE", PATH, None),
    ("HEAD", "/metrics", None),
    ("POST", "/flush_cache", None),
    ("OPTIONS", PATH, None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS, ids=lambda value: str(value)[:40])
def test_routes_answer_as_without_a_relay(
    method: str, path: str, body: Any, front: tuple[Client, Way], plain: Client
) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    found, wanted = (c.http.request(method, path, headers={"x-request-id": "r"}, **sent) for c in (front[0], plain))
    assert found.status_code == wanted.status_code
    assert _timeless(found.text) == _timeless(wanted.text)
    hidden = {"date", "server"}
    # The numbers in metrics and timings change.
    length = {"content-length"} if path == "/metrics" or "timings" in found.text else set()
    compared = [{k: v for k, v in r.headers.items() if k not in hidden | length} for r in (found, wanted)]
    assert compared[0] == compared[1]


def _timeless(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    values = [json.loads(line) if line.startswith("{") else line for line in lines]
    for value in values:
        if isinstance(value, dict):
            value.pop("created", None)
            value.pop("timings", None)
            for card in value.get("data", ()):
                card.pop("created")
    return values


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_replicas_load_no_adapters(path: str, front: tuple[Client, Way]) -> None:
    """A replica that starts later would lack them. The key is checked first."""
    client, _ = front
    body = {"lora_name": "a", "lora_path": "/b"}
    assert client.post(path, body).status_code == 401
    refused = client.post(path, body, headers={"Authorization": "Bearer a"})
    assert refused.status_code == 400
    assert "start the replicas with lora_modules" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/live", "/pages/page.css", "/health", "/v1/models", "/live/events"])
def test_pages_need_a_key_where_they_need_one_without_a_relay(
    path: str, front: tuple[Client, Way], plain: Client
) -> None:
    found, wanted = (c.http.get(path, headers={"Authorization": ""}) for c in (front[0], plain))
    assert (found.status_code, found.content) == (wanted.status_code, wanted.content)


def test_a_request_without_a_key_gets_401(front: tuple[Client, Way]) -> None:
    client, _ = front
    found = httpx2.post(client.url + PATH, json={"prompt": "a"})
    assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_chunked_body_over_the_limit_gets_413(front: tuple[Client, Way]) -> None:
    found = front[0].http.post(PATH, content=iter([b" " * 6_000] * 3), headers={"content-type": "application/json"})
    assert (found.status_code, found.json()["error"]["code"]) == (413, "request_too_large")


def test_metrics_and_admin_routes_reach_all_replicas(front: tuple[Client, Way]) -> None:
    client, _ = front
    samples = {
        (sample.name, sample.labels["replica"]): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "jswa:num_requests_running"
    }
    assert samples == {("jswa:num_requests_running", name): 0 for name in ("one", "two")}
    admin = {"Authorization": "Bearer a"}
    assert client.post("/abort", {"abort_all": True}, headers=admin).json() == {"aborted": 0}
    before = client.engine.flushed
    assert client.post("/flush_cache", headers=admin).json() == {"status": "ok"}
    assert client.engine.flushed == before + 2


def test_a_disconnected_client_frees_its_rows() -> None:
    with relayed() as (client, _):
        client.engine.delay = 0.01
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
        with client.http.stream("POST", PATH, json={**body, "stream": True}) as response:
            lines = response.iter_lines()  # when the context drops the iterator, the connection closes
            next(lines)
            assert client.service.running == 1
        until(lambda: client.service.running == 0)
        with pytest.raises(httpx2.ReadTimeout):
            client.http.post(PATH, json=body, timeout=0.2)
        until(lambda: client.service.running == 0)
        until(lambda: not client.engine.running)


def test_a_request_is_retried_if_its_replica_is_lost_before_the_answer(front: tuple[Client, Way]) -> None:
    client, way = front
    for stream in (False, True):
        way.lose = [0]
        asked = len(way.prefixes)
        found = client.post(PATH, {"prompt": "abc", "max_tokens": 4, "stream": stream})
        assert found.status_code == 200
        assert len(way.prefixes) == asked + 2
    until(lambda: client.service.running == 0)
    way.lose, asked = [0, 0, 0], len(way.prefixes)
    assert client.refusal(PATH, {"prompt": "abc"}, 500)["code"] == "replica_lost"
    assert len(way.prefixes) == asked + 2, "a request that kills its replica must not take a third"
    way.lose.clear()


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", PATH, [], 401),
        ("POST", PATH, [(b"authorization", b"Bearer wrong")], 401),
        ("POST", "/tokenize", [(b"authorization", b"Bearer a")], 401),
        ("GET", "/metrics", [], 401),
        ("POST", "/abort", [(b"authorization", b"Bearer k")], 401),
        ("OPTIONS", PATH, [], 0),
        ("GET", "/health", [], 0),
    ],
)
def test_nothing_of_a_body_is_read_before_the_key_is_known(
    method: str, path: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """A refused request reaches no replica. Routes that need no key are not refused: `status` is 0 for these."""
    asked: list[bytes] = []
    sent: list[Message] = []
    read: list[None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Message:
        assert not status, "the body of a stranger is read"
        read.append(None)
        return {"type": "http.request", "body": b"x" * 50, "more_body": True} if len(read) == 1 else await never()

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    relay = Relay(Way(app), table(pages=True), Keys(("k",), "a"), 100, retries=1)
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    asyncio.run(relay(scope, receive, send))
    assert sent[0]["status"] == (status or 200)
    assert set(asked) == ({b""} if not status else set())


def test_a_stream_ends_with_an_error_if_its_replica_is_lost(front: tuple[Client, Way]) -> None:
    client, way = front
    client.engine.delay = 0.01
    way.lose = [4]
    *pieces, last = client.events(PATH, {"prompt": "abc", "max_tokens": 50, "ignore_eos": True})
    client.engine.delay = 0
    assert 0 < len(pieces) < 50
    assert (last["error"]["code"], last["error"]["type"]) == ("replica_lost", "server_error")
    until(lambda: client.service.running == 0)


def test_a_refusal_of_the_cluster_reaches_the_client() -> None:
    with relayed() as (client, way):
        way.refuses = ApiError(429, "too many", code="queue_full", headers={"Retry-After": "1"})
        found = client.post(PATH, {"prompt": "abc"})
        assert (found.status_code, found.headers["retry-after"]) == (429, "1")
        assert client.get("/health").status_code == 429


def test_messages_before_a_failure_of_the_application_are_sent() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    async def ask() -> list[list[Message]]:
        return [pieces async for pieces in Replica(fails).messages({"type": "http"}, b"")]

    assert [piece["type"] for pieces in asyncio.run(ask()) for piece in pieces] == ["http.response.start"]


def test_metrics_of_all_replicas_are_merged() -> None:
    text = '# HELP jswa:a_total A\n# TYPE jswa:a_total counter\njswa:a_total{m="x"} 1.0\n'
    found = merged_metrics({"one": text, "two": text}).decode()
    assert found.count("# TYPE jswa:a_total counter") == 1
    assert 'jswa:a_total{m="x",replica="one"} 1.0' in found
    assert 'jswa:a_total{m="x",replica="two"} 1.0' in found


def test_answers_of_all_replicas_are_merged() -> None:
    up, down = Answer(200, [], b'{"aborted":1}'), Answer(503, [], b"{}")
    assert merged("/health", {"a": down, "b": up}) == up
    assert merged("/health", {"a": down}) == down
    assert merged("/flush_cache", {"a": up, "b": down}) == down, "one replica has not flushed its cache"
    assert merged("/abort", {"a": up, "b": up}).body == b'{"aborted":2}'
    with pytest.raises(ApiError, match="no replica"):
        merged("/health", {})
