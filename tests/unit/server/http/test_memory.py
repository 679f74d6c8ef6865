"""Bounds of the memory that clients can occupy: bodies, events of slow streams, answers that are not read."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from server.http import limits
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until

PATH = "/v1/completions"


@contextmanager
def sent(client: Client, head: str, body: bytes = b"", *, buffer: int = 4096) -> Iterator[socket.socket]:
    """Send a request on a connection with a small receive buffer; yield the connection, from which nothing is read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(("127.0.0.1", int(client.url.rpartition(":")[2])))
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        yield connection


JSON = {"Content-Type": "application/json"}
LOCAL = "Host: localhost\r\nContent-Type: application/json\r\n"


def post(body: object, *more: str) -> tuple[str, bytes]:
    """Return head and body of a completion request."""
    data = json.dumps(body).encode()
    return "\r\n".join(
        [
            f"POST {PATH} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *more,
        ]
    ), data


def metric(client: Client, name: str) -> float:
    """Return the value of a metric without labels of its own."""
    found = re.search(rf"^jswa:{name}{{[^}}]*}} (\S+)$", client.get("/metrics").text, re.M)
    assert found is not None, name
    return float(found[1])


def test_bodies_in_flight_have_a_budget_that_is_asked_before_they_are_read() -> None:
    with serving(max_body_memory=100_000) as client:
        head = f"POST {PATH} HTTP/1.1\r\n{LOCAL}Content-Length: 90000"
        with sent(client, head, b"{"):  # 89,999 bytes have been announced and not sent
            until(lambda: client.used("bodies") == 90_000)
            client.complete()
            refused = client.post(PATH, {"prompt": "a" * 20_000})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "body_memory_full")
            assert refused.headers["retry-after"] == "1"
            pieces = [b'{"prompt": "', b"a" * 20_000, b'"}']
            refused = client.http.post(PATH, content=iter(pieces), headers=JSON)  # the request has no Content-Length
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "body_memory_full")
            assert metric(client, "request_body_bytes") == 90_000
            assert metric(client, "request_body_rejections_total") == 2
        until(lambda: client.used("bodies") == 0)
        assert client.http.post(PATH, content=iter(pieces), headers=JSON).status_code == 400, (
            "too long for the model only"
        )
        until(lambda: client.used("bodies") == 0)


def test_bodies_of_one_key_leave_room_for_another() -> None:
    with serving(max_body_memory=100_000, api_key=("hog", "other")) as client:
        head = f"POST {PATH} HTTP/1.1\r\n{LOCAL}Authorization: Bearer hog\r\nContent-Length: "
        with sent(client, head + "70000", b"{"), sent(client, head + "30000", b"{"):
            until(lambda: client.refused("bodies") == 1)
            body = {"prompt": "a", "user": "x" * 20_000}
            assert client.post(PATH, body, headers={"Authorization": "Bearer other"}).status_code == 200
            assert client.post(PATH, body, headers={"Authorization": "Bearer stranger"}).status_code == 401
        until(lambda: client.used("bodies") == 0)


def test_a_stream_that_is_read_too_slowly_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads each piece within WRITE_SECONDS, so it does not stall, but events arrive faster."""
    monkeypatch.setattr(limits, "MAX_BACKLOG_BYTES", 200_000)
    engine = FakeEngine(max_rows=8, max_model_len=1_000_000)
    with serving(engine) as client:
        body = {"prompt": "abc", "n": 8, "logprobs": 5, "stream": True, "max_tokens": 900_000}
        with sent(client, *post(body, "Connection: close")) as connection:
            until(lambda: client.refused("answers") == 1, 20)
            until(lambda: not engine.has_work())
            assert metric(client, "answer_rejections_total") == 1
            found = b""
            while piece := connection.recv(2**16):
                found += piece
        assert b'"code":"client_too_slow"' in found
        assert b"[DONE]" not in found
        until(lambda: client.used("answers") == 0)
        assert engine.steps < 100_000


def test_a_stream_that_is_read_holds_nothing() -> None:
    engine = FakeEngine(max_model_len=10_000)
    with serving(engine, max_answer_memory=70_000) as client:
        events = client.events(PATH, {"prompt": "abc", "max_tokens": 2_000})
        assert events[-1] == "[DONE]"
        until(lambda: client.used("answers") == 0)


def test_answers_that_are_collected_have_a_budget() -> None:
    engine = FakeEngine(max_rows=8, max_model_len=10_000)
    with serving(engine, max_answer_memory=400_000) as client:
        error = client.refusal(PATH, {"prompt": "abc", "max_tokens": 2_000})
        assert error["code"] == "answer_too_large"
        assert "100000 bytes" in error["message"]
        until(lambda: not engine.has_work())
        # Each of these answers is small enough, but together they exceed the budget.
        engine.delay = 0.002
        statuses: list[int] = []
        body = {"prompt": "abc", "max_tokens": 230}
        threads = [
            threading.Thread(target=lambda: statuses.append(client.post(PATH, body).status_code)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 503}
        until(lambda: client.used("answers") == 0)
        client.complete(max_tokens=200)
        until(lambda: client.used("answers") == 0)


def test_log_probabilities_of_generated_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_GENERATED_LOGPROBS", 240)
    with serving() as client:
        client.complete(max_tokens=5, n=2, logprobs=20)
        error = client.refusal(PATH, {"prompt": "a", "max_tokens": 6, "n": 2, "logprobs": 20})
        assert (error["param"], "at most 10 tokens" in error["message"]) == ("logprobs", True)
        client.complete(max_tokens=100, n=2)
        assert client.events(PATH, {"prompt": "a", "max_tokens": 6, "n": 2, "logprobs": 20})[-1] == "[DONE]"
    with serving(template="{{ messages[0].content }}") as client:
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
        error = client.refusal("/v1/chat/completions", chat)  # without max_tokens the whole context counts
        assert error["param"] == "logprobs"
        assert client.post("/v1/chat/completions", {**chat, "max_tokens": 10}).status_code == 200


@pytest.mark.parametrize("size", [1_000_000, 40_000], ids=["pieces", "one piece"])
def test_an_answer_that_nobody_reads_is_dropped(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, and its part of the budget is released."""
    monkeypatch.setattr(limits, "WRITE_SECONDS", 0.4)
    with serving(FakeEngine(max_model_len=1_000_000)) as client:
        data = json.dumps({"prompt": "a" * size}).encode()
        heads = f"POST /tokenize HTTP/1.1\r\n{LOCAL}Content-Length: {len(data)}"
        # The kernel buffers some hundred kilobytes, so many small answers must be sent on one connection.
        count = 1 if size > 100_000 else 40
        with sent(client, heads, data) as connection:
            for _ in range(count - 1):
                connection.sendall(heads.encode() + b"\r\n\r\n" + data)
            until(lambda: client.counted("unread_connections") == 1, 15)
        until(lambda: client.used("answers") == 0)
        assert metric(client, "unread_connections_total") == 1


def test_a_slow_reader_gets_all_of_a_large_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_SECONDS", 1.0)
    with serving(FakeEngine(max_model_len=1_000_000)) as client:
        data = json.dumps({"prompt": "a" * 100_000}).encode()
        head = f"POST /tokenize HTTP/1.1\r\n{LOCAL}Connection: close\r\nContent-Length: {len(data)}"
        found = b""
        with sent(client, head, data) as connection:
            pause = threading.Event()
            while piece := connection.recv(2**18):
                found += piece
                pause.wait(0.01)
        body = found.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["count"] == 100_001
        assert client.counted("unread_connections") == 0
        until(lambda: client.used("answers") == 0)
