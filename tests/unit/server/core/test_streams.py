"""Streams whose tokens are written as they come say what the whole answer says."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jswa.text.assembler import Assembler
from tests.support.nights import sample
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.harness import Client, serving, until
from tests.support.server.scripted import ask, scripted
from tests.support.text.transcripts import TRANSCRIPTS

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
KINDS = ("content", "reasoning_content")


def texts(chunks: list[Any]) -> list[str]:
    """Return the text of each chunk of a completion's stream."""
    assert chunks[-1] == "[DONE]"
    return [chunk["choices"][0]["text"] for chunk in chunks[:-1]]


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("more", [{}, {"stop": "mnop"}, {"stop": "zz", "min_tokens": 5}], ids=["plain", "stop", "none"])
def test_a_stream_has_the_whole_text_whatever_the_interval(interval: int, more: dict[str, Any]) -> None:
    with serving(stream_interval=interval) as client:
        body = {"prompt": "abc", "max_tokens": 20, **more}
        whole = client.complete(**body)
        chunks = client.events(PATH, body)
        assert "".join(texts(chunks)) == whole["choices"][0]["text"]
        assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        usage = client.events(PATH, {**body, "stream_options": {"include_usage": True}})[-2]["usage"]
        assert usage == whole["usage"]
        if not more:
            lengths = [len(text) for text in texts(chunks)]
            full = [interval] * (19 // interval)
            assert lengths == [1, *full, *([19 % interval] if 19 % interval else [])], "the first is sent at once"


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("family", sample(sorted({one.family for one in TRANSCRIPTS}), 8))
def test_chats_of_every_family(family: str, interval: int) -> None:
    one = next(one for one in TRANSCRIPTS if one.family == family)
    with scripted(one, stream_interval=interval) as client:
        whole = client.post(CHAT, ask(one)).json()
        chunks = client.events(CHAT, ask(one, stream_options={"include_usage": True}))[:-1]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        message = whole["choices"][0]["message"]
        for kind in KINDS:
            assert "".join(delta.get(kind) or "" for delta in deltas) == (message.get(kind) or "")
        assert chunks[-1]["usage"] == whole["usage"]


def test_a_stream_that_is_read_late_is_whole() -> None:
    """Its tokens wait in the connection, then in the request, and come in their order."""
    with serving(FakeEngine(max_model_len=30_000)) as client:
        body = f'{{"prompt":"abc","max_tokens":12000,"stream":true,"request_id":"{"x" * 100}"}}'
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        with socket.socket() as late:
            late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            late.connect(("127.0.0.1", int(client.url.rpartition(":")[2])))
            late.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            until(lambda: client.used("answers") > 0)  # the connection takes no more
            data = bytearray()
            while piece := late.recv(2**20):
                data += piece
        found = b"".join(part.partition(b'"')[0] for part in bytes(data).split(b'"text":"')[1:])
        alphabet = "".join(chr(97 + (4 + n) % 26) for n in range(12_000))
        assert found.decode() == alphabet


def test_each_token_is_counted_once(shared: Client) -> None:
    before = shared.counted("generation_tokens")
    shared.events(PATH, {"prompt": "abc", "max_tokens": 20, "n": 2})
    shared.complete(max_tokens=20)
    assert shared.counted("generation_tokens") - before == 60


def test_a_stream_whose_text_cannot_be_read_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has an error, and streams before and behind it in each step have all of their tokens."""
    first, add, seen = list[Assembler](), Assembler.add, [0]

    def fails(self: Assembler, token: int) -> str:
        first[:] = first or [self]
        seen[0] += self is first[0]
        if self is first[0] and seen[0] > 5:
            raise IndexError("a fault of the tokenizer")
        return add(self, token)

    monkeypatch.setattr(Assembler, "add", fails)
    engine = FakeEngine()
    engine.delay = 0.01
    with serving(engine) as client, ThreadPoolExecutor(5) as pool:
        body = {"prompt": "abc", "max_tokens": 40}
        bad = pool.submit(client.post, PATH, {**body, "max_tokens": 200, "stream": True})
        until(lambda: seen[0] > 0)
        good = [pool.submit(client.events, PATH, body) for _ in range(4)]
        assert [len("".join(texts(one.result(30)))) for one in good] == [40] * 4
        assert '"error"' in bad.result(30).text
        assert client.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
        until(lambda: client.counted("request_failed") == 1)
