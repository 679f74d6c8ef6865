"""Behavior of all routes: keys, limits, malformed requests, overload, disconnected clients, a dead engine."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.gate.routes import ROUTES
from server.http import limits
from tests.support.nights import sample
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until
from tests.support.server.processes import ROOT, started

PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 4}
JSON = {"content-type": "application/json"}
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_the_probes_needs_an_api_key() -> None:
    with serving(api_key=("one", "two"), template="x") as client:
        for route in ROUTES:
            url = route.path.replace("{model:path}", "fake")
            for headers in (
                {},
                bearer("three"),
                {"Authorization": "Bearer"},
                {"Authorization": "Basic one"},
                bearer("ônе"),
            ):
                given = {k: v.encode() for k, v in headers.items()}
                response = client.http.request(route.methods[0], url, headers=given, json=BODY)  # type: ignore[arg-type]
                if route.whose == "nobody":
                    assert response.status_code == 200
                elif route.whose == "operator":
                    assert response.status_code == 403
                else:
                    assert response.status_code == 401, url
                    assert response.json()["error"]["message"] == "Incorrect or missing API key."
        assert client.get("/openapi.json").status_code == 401
        assert client.get("/nothing").status_code == 401
        for key in ("one", "two"):
            assert client.post(PATH, BODY, headers=bearer(key)).status_code == 200
        salts = {request.cache_salt for request in client.engine.seen}
        assert len(salts) == 2, "two keys must not share cached prefixes"
        assert not any("one" in salt or "two" in salt for salt in salts)
        client.post(PATH, {**BODY, "cache_salt": "s"}, headers=bearer("one"))
        assert client.engine.seen[-1].cache_salt.endswith("/s")


def test_a_server_without_keys_ignores_authorization_headers() -> None:
    with serving() as client:
        for headers in ({"Authorization": "Bearer"}, bearer("fake"), {"Authorization": "x"}):
            assert client.post(PATH, BODY, headers=headers).status_code == 200
        assert client.engine.seen[-1].cache_salt == ""


def test_admin_routes_need_the_admin_key() -> None:
    with serving(api_key=("user",), admin_api_key="root") as client:
        client.engine.delay = 0.01
        assert client.post("/flush_cache", headers=bearer("user")).status_code == 401
        assert client.post("/flush_cache", headers=bearer("root")).json() == {"status": "ok"}
        assert client.engine.flushed == 1
        found: list[Any] = []
        body = {"prompt": "abc", "max_tokens": 200, "request_id": "mine"}
        thread = threading.Thread(target=lambda: found.append(client.post(PATH, body, headers=bearer("user"))))
        thread.start()
        until(lambda: bool(client.engine.running))
        assert client.post("/abort", {}, headers=bearer("root")).status_code == 400
        assert client.post("/abort", {"request_id": "other"}, headers=bearer("root")).json() == {"aborted": 0}
        assert client.post("/abort", {"request_id": "mine"}, headers=bearer("root")).json() == {"aborted": 1}
        thread.join()
        assert found[0].json()["choices"][0]["finish_reason"] == "abort"
        assert not client.engine.has_work()


def test_keys_are_checked_behind_a_proxy_too() -> None:
    options = {"root_path": "/llm", "api_key": ["user"], "admin_api_key": "root"}
    script = str(Path(__file__).parents[3] / "support" / "server" / "fake_process.py")
    with started([script, "{}", json.dumps(options)], environ={"PYTHONPATH": str(ROOT)}) as process:
        assert httpx2.get(process.url + "/health").status_code == 200
        assert httpx2.get(process.url + "/v1/models").status_code == 401
        for path, body in (("/flush_cache", {}), ("/abort", {"abort_all": True})):
            assert httpx2.post(process.url + path, json=body, headers=bearer("user")).status_code == 401
            assert httpx2.post(process.url + path, json=body, headers=bearer("root")).status_code == 200


def test_a_body_over_the_limit_gets_413() -> None:
    with serving(max_body_size=1000) as client:
        pad = len('{"prompt": "abc", "max_tokens": 4, "x": ""}')
        for size, status in ((1000, 200), (1001, 413)):
            content = '{"prompt": "abc", "max_tokens": 4, "x": "' + "x" * (size - pad) + '"}'
            assert len(content) == size
            response = client.http.post(PATH, content=content, headers=JSON)
            assert response.status_code == status
            chunked = client.http.post(PATH, content=iter([content.encode()]), headers=JSON)
            assert chunked.status_code == status
        assert response.json()["error"]["code"] == "request_too_large"


LARGE: dict[str, tuple[str, object, int]] = {
    "text": (PATH, {"prompt": "abc d" * 1_000_000}, 400),
    "tokens": (PATH, {"prompt": [[5] * 4_000] * 500}, 400),
    "tokenize": ("/tokenize", {"prompt": "abc d" * 1_000_000}, 400),
    "detokenize": ("/detokenize", {"tokens": [100] * 1_000_000}, 200),
}


@pytest.mark.parametrize("name", sample(list(LARGE), 4))
def test_large_bodies_do_not_block_other_requests(shared: Client, name: str) -> None:
    path, body, status = LARGE[name]
    content, waits = json.dumps(body), []
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(shared.http.post, path, content=content, headers=JSON, timeout=60)
        begin = time.monotonic()
        while not large.done():
            at = time.monotonic()
            assert shared.get("/health").status_code == 200
            waits.append(time.monotonic() - at)
        took = time.monotonic() - begin
    assert large.result().status_code == status
    # Parsing the JSON of a body holds the GIL; nothing else may.
    assert max(waits) < max(0.5, took / 2), f"{max(waits):.2f} s of {took:.2f} s"


def test_headers_over_the_limit_get_400() -> None:
    with serving() as client:
        assert client.post(PATH, BODY, headers={"x-much": "x" * (limits.MAX_HEADER_BYTES - 1000)}).status_code == 200
        assert client.post(PATH, BODY, headers={"x-much": "x" * limits.MAX_HEADER_BYTES}).status_code == 400
        many = {f"x-{i}": "x" * 100 for i in range(1000)}
        assert client.post(PATH, BODY, headers=many).status_code == 400
        assert client.post(PATH, BODY, headers={"x-request-id": "x" * 128}).headers["x-request-id"] == "x" * 128
        assert client.post(PATH, BODY, headers={"x-request-id": "x" * 129}).headers["x-request-id"] != "x" * 129


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"3", b'"a"', b"\xff\xfe", b"{}{}", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "top_k": -Infinity}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "model": "\\udfff"}',
    ],
    ids=lambda content: repr(content[:30]),
)  # fmt: skip
def test_malformed_bodies_get_400(shared: Client, content: bytes) -> None:
    for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = shared.http.post(path, content=content, headers=JSON)
        assert response.status_code in (400, 404) or (path == "/tokenize" and b"prompt" in content), response.text
        if response.status_code != 200:
            assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_unknown_routes_and_methods(shared: Client) -> None:
    assert shared.get("/v2/nothing").json()["error"]["code"] == "not_found"
    response = shared.get(PATH)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert shared.http.request("HEAD", "/metrics").status_code == 200
    assert shared.get("/version").json()["version"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_disconnected_client_frees_its_rows_within_two_steps(streamed: bool) -> None:
    engine = FakeEngine()
    engine.delay = 0.01
    with serving(engine) as client:
        content = '{"prompt": "abc", "max_tokens": 200, "n": 3, "stream": %s}' % ("true" if streamed else "false")
        request = HEAD + f"Content-Length: {len(content)}\r\n\r\n{content}"
        with socket.create_connection(("127.0.0.1", int(client.url.rpartition(":")[2]))) as connection:
            connection.sendall(request.encode())
            until(lambda: len(engine.running) == 3)
        # The event loop needs a moment to see the disconnect; the limit of two steps counts from then on.
        until(lambda: not client.service.jobs)
        before = engine.steps
        until(lambda: not engine.running)
        assert engine.steps - before <= 2
        assert engine.steps < 100
        assert client.service.local.admission.texts == 0


def test_a_client_that_stops_reading_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_SECONDS", 0.4)
    engine = FakeEngine(max_rows=64, max_model_len=100_000)
    with serving(engine) as client:
        content = '{"prompt": "abc", "n": 64, "logprobs": 20, "stream": true, "max_tokens": 5000}'
        request = HEAD + f"Content-Length: {len(content)}\r\n\r\n{content}"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(client.url.rpartition(":")[2])))
            connection.sendall(request.encode())
            until(lambda: bool(engine.running))
            until(lambda: not client.service.jobs and not engine.has_work(), 20)
        assert engine.steps < 5_000, "the request must be aborted, not run to its end"


@pytest.mark.parametrize("streamed", ["true", "false"])
def test_clients_that_disconnect_at_once_leave_nothing_behind(shared: Client, streamed: str) -> None:
    content = f'{{"prompt": "abc", "max_tokens": 100, "stream": {streamed}}}'
    request = HEAD + f"Content-Length: {len(content)}\r\n\r\n{content}"
    before = len(shared.engine.seen)
    for index in range(40):
        with socket.create_connection(("127.0.0.1", int(shared.url.rpartition(":")[2]))) as connection:
            connection.sendall(request.encode())
            time.sleep(index * 0.0002)
    until(lambda: shared.get("/health").status_code == 200 and len(shared.engine.seen) > before)
    until(lambda: not shared.service.jobs and not shared.engine.has_work())
    assert shared.service.local.admission.texts == 0
    assert shared.service.local.admission.tokens == 0
    assert shared.service.local.thread.active == 0


HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD.encode() + b"Content-Length: 99\r\n\r\n{"])
def test_connections_without_a_complete_request_are_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_SECONDS", 0.3)
    engine = FakeEngine()
    engine.delay = 0.01
    with serving(engine) as client:
        at = ("127.0.0.1", int(client.url.rpartition(":")[2]))
        with socket.create_connection(at, timeout=10) as connection:
            connection.sendall(sent)
            begin = time.monotonic()
            assert client.complete(max_tokens=60), "a response may take longer than the limit for its request"
            assert connection.recv(100) == b""
            assert 0.2 < time.monotonic() - begin < 5
        until(lambda: not client.service.jobs)


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    engine = FakeEngine(max_rows=1)
    engine.delay = 0.005
    with serving(engine, max_queued_requests=4, max_queued_tokens=100, admin_api_key="root") as client:
        body = {"prompt": "abc", "max_tokens": 100, "stream": True}
        threads = [threading.Thread(target=client.post, args=(PATH, {**body, "n": n})) for n in (1, 2, 2)]
        threads[0].start()
        until(lambda: bool(engine.running) and client.service.local.admission.texts == 0)
        threads[1].start()
        threads[2].start()
        until(lambda: client.service.local.admission.texts == 4)
        assert client.refusal(PATH, {**BODY, "n": 3})["param"] == "n", "more than half of the queue"
        response = client.post(PATH, BODY)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert client.post("/abort", {"abort_all": True}, headers=bearer("root")).status_code == 200
        for thread in threads:
            thread.join()
        assert client.service.local.admission.texts == 0
        assert client.post(PATH, BODY).status_code == 200


def test_a_request_ends_at_its_timeout() -> None:
    engine = FakeEngine()
    engine.delay = 0.02
    with serving(engine, request_timeout=0.2) as client:
        error = client.refusal(PATH, {"prompt": "abc", "max_tokens": 200}, 504)
        assert error["code"] == "deadline_exceeded"
        *chunks, last = client.events(PATH, {"prompt": "abc", "max_tokens": 200})
        assert len(chunks) > 2
        assert last["error"]["code"] == "deadline_exceeded"
        until(lambda: not engine.has_work())
        assert client.complete()["choices"][0]["text"] == "efgh"


def test_waiting_streams_get_keep_alive_comments() -> None:
    engine = FakeEngine(max_rows=1)
    engine.delay = 0.01
    with serving(engine, keep_alive=0.1) as client:
        first = threading.Thread(target=client.post, args=(PATH, {"prompt": "abc", "max_tokens": 60}))
        first.start()
        until(lambda: bool(engine.running))
        response = client.post(PATH, {**BODY, "stream": True})
        assert response.content.startswith(b": keep-alive\n\n: keep-alive\n\n")
        assert response.content.endswith(b"data: [DONE]\n\n")
        first.join()


def test_a_draining_server_refuses_new_requests() -> None:
    with serving() as client:
        client.service.draining = True
        response = client.post(PATH, BODY)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 200


def test_after_the_engine_dies_health_fails_and_requests_get_500_at_once() -> None:
    engine = FakeEngine()
    engine.steps_left = 3
    with serving(engine, template="x") as client:
        assert client.refusal(PATH, {"prompt": "abc", "max_tokens": 100}, 500)["code"] == "engine_dead"
        begin = time.monotonic()
        assert client.refusal(PATH, BODY, 500)["code"] == "engine_dead"
        assert client.refusal("/v1/chat/completions", {"messages": []}, 500)["code"] == "engine_dead"
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        assert client.get("/metrics").status_code == 200
        assert time.monotonic() - begin < 2


def test_streams_end_with_an_error_if_the_engine_dies() -> None:
    engine = FakeEngine()
    engine.steps_left = 3
    with serving(engine) as client:
        *chunks, last = client.events(PATH, {"prompt": "abc", "max_tokens": 100})
        assert len(chunks) == 3
        assert last["error"]["code"] == "engine_dead"


def test_web_pages_need_an_allowed_origin() -> None:
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    with serving(api_key=("a",)) as client:
        assert client.http.options(PATH, headers=headers).status_code == 401
    with serving(allowed_origins=("http://page",), api_key=("a",)) as client:
        response = client.http.options(PATH, headers=headers)
        assert response.headers["access-control-allow-origin"] == "http://page"
        assert client.http.options(PATH, headers={**headers, "Origin": "http://other"}).status_code == 400
