"""The server behind a relay: clients see no difference, even if a replica is lost during a request."""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jswa.errors import ConfigError
from server.cluster.merge import Answer, merged, merged_metrics
from server.cluster.relay import Lost, Relay, Replica, prefix_of
from server.cluster.replicas import ReplicaConfig, read_options
from server.http.auth import Keys
from server.http.errors import ApiError
from tests.support.server.harness import Client, serving, until

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Way:
    """A transport to one replica in this process.

    Attributes:
        lose: for each request, the number of message batches before its replica is lost.
        prefixes: the keys of all requests so far.
        refuses: error for every request, if set.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.replica = Replica(app)
        self.lose: list[int] = []
        self.prefixes: list[str | None] = []
        self.refuses: ApiError | None = None

    async def one(self, prefix: str | None, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        self.prefixes.append(prefix)
        if self.refuses is not None:
            raise self.refuses
        left = self.lose.pop(0) if self.lose else None
        answer = self.replica.messages(scope, body)
        try:
            async for pieces in answer:
                if left == 0:
                    raise Lost("gone")
                left = None if left is None else left - 1
                yield pieces
        finally:
            await answer.aclose()

    async def all(self, scope: Mapping[str, Any], body: bytes) -> dict[str, Answer]:
        if self.refuses is not None:
            raise self.refuses
        return {name: await self.replica.answer(scope, body) for name in ("one", "two")}


@contextmanager
def relayed(**options: Any) -> Iterator[tuple[Client, Way]]:
    """A server behind a relay."""
    ways: list[Way] = []

    def wrap(app: ASGIApp) -> ASGIApp:
        ways.append(Way(app))
        keys = Keys(options.get("api_key", ()), options.get("admin_api_key"))
        relay = Relay(ways[0], keys, options.get("max_body_size", 10_000), retries=1, hidden=[b"x-hidden"])

        async def both(scope: Scope, receive: Receive, send: Send) -> None:
            await (app if scope["type"] == "lifespan" else relay)(scope, receive, send)

        return both

    with serving(template=TEMPLATE, wrap=wrap, **{"max_body_size": 10_000, **options}) as client:
        yield client, ways[0]


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
    length = {"content-length"} if path == "/metrics" else set()  # the numbers in the metrics change
    compared = [{k: v for k, v in r.headers.items() if k not in hidden | length} for r in (found, wanted)]
    assert compared[0] == compared[1]


def _timeless(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    values = [json.loads(line) if line.startswith("{") else line for line in lines]
    for value in values:
        if isinstance(value, dict):
            value.pop("created", None)
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

    relay = Relay(Way(app), Keys(("k",), "a"), 100, retries=1)
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


HEADERS = Headers({"authorization": "Bearer k"})


def blocks(fields: Any, path: str = PATH, headers: Headers = HEADERS) -> str:
    found = prefix_of(path, headers, json.dumps(fields).encode())
    assert found is not None
    return found


LONG = "".join(chr(97 + number % 26) for number in range(1_000))


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"model": "adapter"}, {"prompt": "b" + LONG[1:]}], ids=str)
def test_prefixes_of_different_models_salts_or_keys_share_no_blocks(other: dict[str, str]) -> None:
    mine, theirs = blocks({"prompt": LONG}), blocks({"prompt": LONG, **other})
    assert len(mine) == len(theirs) == 32
    assert not set(mine) & set(theirs), "equal text behind different text is another prefix"
    stranger = blocks({"prompt": LONG}, headers=Headers({"authorization": "Bearer l"}))
    assert not set(mine) & set(stranger)


def test_texts_share_blocks_up_to_where_they_diverge() -> None:
    mine, theirs = blocks({"prompt": LONG}), blocks({"prompt": LONG[:500] + "?" * 500})
    assert mine[:15] == theirs[:15]
    assert mine[15] != theirs[15]
    assert len(blocks({"prompt": "a" * 100_000})) == 2_048
    assert blocks({"prompt": ["a", "b"]}) == blocks({"prompt": "a"})


@pytest.mark.parametrize("path", [CHATS, "/v1/messages", "/v1/responses"])
@given(st.lists(st.text(max_size=70), min_size=1, max_size=4), st.text(max_size=8), st.booleans())
def test_the_next_turn_extends_the_prefix_of_a_conversation(path: str, said: list[str], more: str, parts: bool) -> None:
    def messages(texts: list[str]) -> dict[str, Any]:
        contents = [[{"type": "text", "text": text}] if parts else text for text in texts]
        name = "input" if path == "/v1/responses" else "messages"
        return {name: [{"role": "user", "content": content} for content in contents]}

    first, second = (blocks(messages(texts), path) for texts in (said, [*said, more]))
    assert second.startswith(first)
    assert len(second) == len(first) + 1
    assert blocks(messages([*said[:-1], said[-1] + "!"]), path)[-1] != first[-1]


def test_what_the_operator_says_is_part_of_the_prefix() -> None:
    """Under the names that the agents' APIs have for it."""
    for path, name, field in (("/v1/messages", "system", "messages"), ("/v1/responses", "instructions", "input")):
        mine, theirs = (blocks({name: said, field: [{"content": "a"}]}, path) for said in ("x", "y"))
        assert len(mine) == 2
        assert not set(mine) & set(theirs)
        key = Headers({"x-api-key": "l"})
        assert not set(mine) & set(blocks({name: "x", field: [{"content": "a"}]}, path, key))
    assert blocks({"input": "a"}, "/v1/responses") == blocks({"input": [{"content": "a"}]}, "/v1/responses")


@given(st.lists(st.integers(0, 2_000_000), min_size=32, max_size=64), st.lists(st.integers(0, 300_000)))
def test_token_ids_have_prefixes_too(ids: list[int], more: list[int]) -> None:
    first, second = blocks({"prompt": ids}), blocks({"prompt": [[*ids, *more], [1]]})
    assert first[: len(ids) // 32] == second[: len(ids) // 32]
    second.encode()  # raises an error for surrogates


@given(
    st.binary(max_size=40)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_an_invalid_body_has_at_most_one_block(body: bytes) -> None:
    found = prefix_of(PATH, HEADERS, body)
    assert found is None or len(found) == 1, found


@pytest.mark.parametrize("prompt", [None, 1, {}, [], [None], [[]], [[None, "a"]], ["a", 1]])
def test_an_invalid_prompt_still_has_a_prefix(prompt: Any) -> None:
    assert blocks({"prompt": prompt})
    assert blocks({"messages": prompt}, CHATS)


def test_only_routes_that_generate_have_prefixes() -> None:
    assert prefix_of("/tokenize", HEADERS, b'{"prompt": "a"}') is None


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


def test_options_are_read_by_name() -> None:
    given = {"model": "m", "max_replicas": "4", "prefix_cache": "false", "api_key": ["a", "b"], "num_gpus": None}
    options = read_options(given)
    assert (options.model, options.server.served_model_name) == ("m", ("m",))
    assert (options.replicas.most, options.engine.prefix_cache) == (4, False)
    assert options.server.api_key == ("a", "b")
    assert read_options({}).replicas == ReplicaConfig()
    assert read_options({}).server.allowed_hosts == ("*",), "where Ray's proxy listens is not known"
    assert read_options({"allowed_hosts": ["a", "b"]}).server.allowed_hosts == ("a", "b")


def test_options_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSWA_API_KEY", "one two")
    monkeypatch.setenv("JSWA_MIN_REPLICAS", "3")
    options = read_options({"min_replicas": 2})
    assert (options.server.api_key, options.replicas.min_replicas) == (("one", "two"), 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_replica": 4}, "max-replicas"),
        ({"retries": 2}, "retries"),
        ({"max_num_seqs": "x"}, "int"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_replicas": 1, "min_replicas": 2}, "min_replicas"),
        ({"target_ongoing_requests": 500}, "max_ongoing_requests"),
        ({"min_replicas": 0}, "at least 1"),
        ({"num_gpus": -1}, "at least 0"),
        ({"upscale_delay": "nan"}, "at least 0"),
        ({"port": 8001}, "Ray"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "one host"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_options(wrong)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "jswa.cluster.ray_serve", raising=False)
    with pytest.raises(ConfigError, match=r"jswa\[ray\]"):
        importlib.import_module("jswa.cluster.ray_serve")
