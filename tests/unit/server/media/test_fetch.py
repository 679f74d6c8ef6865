"""Attacks on the fetching of images: names, addresses, redirects, lies, endless and slow answers.

A server on loopback plays every public address: the connector of the test notes where it should connect, and connects
there.
"""

import asyncio
import logging
import os
import ssl
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from server.http.errors import ApiError
from server.media.fetch import Fetcher

PUBLIC = "93.184.215.14"
FILE = b"\x89PNG" + bytes(5_000)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Net(httpcore2.AsyncNetworkBackend):
    """Connects to one port of loopback instead of any address, or fails.

    Attributes:
        names: what was resolved, in order.
        connected: the addresses that were connected to.
        asked: the requests that the server got.
        answers: addresses of the names, for each time that they are resolved.
        down: addresses that do not answer.
        port: the port.
    """

    def __init__(self, port: int, asked: list[bytes]) -> None:
        self.names: list[tuple[str, int]] = []
        self.connected: list[tuple[str, int]] = []
        self.asked = asked
        self.answers: list[list[str]] = [[PUBLIC]]
        self.down: set[str] = set()
        self.port = port

    async def resolve(self, name: str, port: int) -> list[str]:
        """Return the next addresses."""
        self.names.append((name, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the server of the test."""
        self.connected.append((host, port))
        if host in self.down:
            raise httpcore2.ConnectError("down")
        return await httpcore2.AnyIOBackend().connect_tcp("127.0.0.1", self.port, timeout)


@asynccontextmanager
async def answering(answer: bytes | Handler, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Net]:
    """Run a server with one answer."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield Net(server.sockets[0].getsockname()[1], asked)
    finally:
        server.close()


def fetcher(net: Net, timeout: float = 5.0) -> Fetcher:
    """A fetcher for two hosts."""
    return Fetcher(("a.example", "B.Example"), timeout, {None: 1.0}, net.resolve, net)


async def fetch(net: Net, url: str = "http://a.example/x.png", most: int = 10_000, timeout: float = 5.0) -> bytes:
    """Fetch a URL."""

    async def took(size: int) -> None:
        assert size <= most

    return await fetcher(net, timeout).fetch(url, "field", None, most, took)


def refusal(answer: bytes | Handler, *, prepare: Callable[[Net], object] = lambda _: None, **how: Any) -> str:
    """Return why a fetch is refused."""

    async def run() -> str:
        async with answering(answer) as net:
            prepare(net)
            with pytest.raises(ApiError) as refused:
                await fetch(net, **how)
            assert (refused.value.status, refused.value.param) == (400, "field")
            return refused.value.message

    return asyncio.run(run())


def whole(body: bytes = FILE) -> bytes:
    """An answer with a body."""
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_file_is_fetched_from_the_address_that_was_checked() -> None:
    async def run() -> None:
        async with answering(whole()) as net:
            assert await fetch(net, "http://B.example?a=b#c") == FILE
            assert net.names == [("b.example", 80)]
            assert net.connected == [(PUBLIC, 80)]
            request, *headers = net.asked[0].decode().split("\r\n")
            assert request == "GET /?a=b HTTP/1.1"
            said = {line.partition(":")[0].lower(): line.partition(": ")[2] for line in headers if line}
            assert said["host"] == "b.example"
            assert said["accept-encoding"] == "identity"
            assert not said.keys() & {"cookie", "authorization", "referer"}

    asyncio.run(run())


def test_the_certificate_must_be_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    command += ["-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=DNS:a.example"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def run() -> None:
        async with answering(whole(), tls) as net:
            with pytest.raises(ApiError, match=r"^field: could not be fetched$"):
                await fetch(net, "https://a.example/")
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
            assert await fetch(net, "https://a.example/") == FILE
            with pytest.raises(ApiError, match=r"^field: could not be fetched$"):
                await fetch(net, "https://b.example/")
            assert net.connected == [(PUBLIC, 443)] * 3
            assert len(net.asked) == 1

    asyncio.run(run())


def test_tls_has_the_name_of_the_host() -> None:
    """SNI names it; nothing is sent to a server that has no certificate for it."""
    hello = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello.extend(await reader.read(4_096))
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        net = Net(server.sockets[0].getsockname()[1], [])
        with pytest.raises(ApiError, match=r"^field: could not be fetched$"):
            await fetch(net, "https://a.example/x.png")
        assert net.connected == [(PUBLIC, 443)]
        server.close()

    asyncio.run(run())
    assert b"a.example" in hello
    assert b"x.png" not in hello


@pytest.mark.parametrize(
    "url",
    [
        "http://c.example/", "http://x.a.example/", "http://a.example.evil.com/", "http://a.example./",
        "http://.a.example/", "http://evila.example/", "http://a.examples/", "http://example/", "http://127.0.0.1/",
        "http://a.example:22/", "http://a.example:8080/", "http://a.example:0/", "http://a.example:99999/",
        "http://a.example:/", "http://u@a.example/", "http://u:p@a.example/", "http://a.example@c.example/",
        "http://a.example\\@c.example/", "http://c.example\\.a.example/", "http://a.example%2f@c.example/",
        "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://a.example%00.c.example/", "http:///a.example/",
        "http:a.example", "//a.example/", "a.example/", " http://a.example/", "http://a.example/ x",
        "http://a.example/\r\nHost: c.example", "http://a.example/\tx", "http://a.example\n.c.example/",
        "http://ａ.example/", "http://a.example/é", "https:/a.example/", "httpx://a.example/", "file://a.example/x",
        "ftp://a.example/x", "javascript:alert(1)", "gopher://a.example/", "blob:http://a.example/", "",
        f"http://a.example/{'a' * 3_000}",
    ],
)  # fmt: skip
def test_urls_that_reach_nothing(url: str) -> None:
    seen: list[Net] = []
    assert refusal(whole(), url=url, prepare=seen.append).startswith("field: ")
    assert not seen[0].names
    assert not seen[0].connected


def test_without_named_hosts_nothing_is_fetched() -> None:
    with pytest.raises(ApiError, match="no --allowed-media-hosts"):
        Fetcher((), 1.0, {None: 1.0}).remote("http://a.example/", "field")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"]
)
def test_addresses_that_are_not_public_are_not_connected_to(address: str) -> None:
    """The answer does not tell them from a host that is down."""
    seen: list[Net] = []

    def prepare(net: Net) -> None:
        net.answers = [[address]]
        seen.append(net)

    assert refusal(whole(), prepare=prepare) == "field: could not be fetched"
    assert not seen[0].connected
    down = refusal(whole(), prepare=lambda net: net.down.add(PUBLIC))
    assert down == "field: could not be fetched"


def test_of_several_addresses_only_public_ones_are_tried() -> None:
    async def run() -> None:
        async with answering(whole()) as net:
            net.answers = [["127.0.0.1", "8.8.4.4", "10.0.0.1", PUBLIC]]
            net.down = {"8.8.4.4"}
            assert await fetch(net) == FILE
            assert net.connected == [("8.8.4.4", 80), (PUBLIC, 80)]

    asyncio.run(run())


def test_a_name_that_changes_its_address_gains_nothing() -> None:
    """DNS rebinding: the first address is public, all later ones are not."""

    async def run() -> None:
        async with answering(whole()) as net:
            net.answers = [[PUBLIC], ["127.0.0.1"]]
            assert await fetch(net) == FILE
            assert net.connected == [(PUBLIC, 80)]
            assert len(net.names) == 1
            with pytest.raises(ApiError, match="could not be fetched"):
                await fetch(net)
            assert net.connected == [(PUBLIC, 80)]

    asyncio.run(run())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    answer = b"HTTP/1.1 %d x\r\nLocation: http://a.example/y\r\nContent-Length: 0\r\n\r\n" % status
    seen: list[Net] = []
    assert f"status {status}: redirects are not followed" in refusal(answer, prepare=seen.append)
    assert len(seen[0].connected) == len(seen[0].asked) == 1


@pytest.mark.parametrize("status", [204, 206, 401, 404, 500])
def test_only_status_200_is_taken(status: int) -> None:
    answer = b"HTTP/1.1 %d x\r\nContent-Length: 0\r\n\r\n" % status
    assert refusal(answer) == f"field: could not be fetched: its server answers with status {status}"


def test_a_file_that_is_larger_than_announced_or_than_allowed() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"10000\r\n%b\r\n" % bytes(2**16))
            await writer.drain()

    limit = "field: must have at most 10000 bytes (--max-image-size)"
    assert refusal(endless) == limit
    assert refusal(whole(bytes(10_001))) == limit
    assert refusal(HEAD + b"\r\n" + bytes(10_001)) == limit  # without a length
    assert (
        refusal(HEAD + b"Content-Length: 5\r\n\r\n" + FILE, most=4)
        == "field: must have at most 4 bytes (--max-image-size)"
    )
    assert refusal(HEAD + b"Content-Length: 9000\r\n\r\n" + FILE) == "field: could not be fetched"  # cut
    assert refusal(HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab") == "field: could not be fetched"


def test_a_file_that_is_compressed_is_refused() -> None:
    assert "compresses" in refusal(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na")


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000, b"\0" * 9_999]
)
def test_what_is_no_answer(answer: bytes) -> None:
    assert refusal(answer) == "field: could not be fetched"


def test_slow_answers_end_at_the_deadline() -> None:
    """It is that of the whole fetch: a byte now and then does not move it."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 9999\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    for slow in (trickle, waits):
        begin = time.monotonic()
        assert refusal(slow, timeout=0.4) == "field: could not be fetched within 0.4 s"
        assert time.monotonic() - begin < 3


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    assert os.environ["HTTP_PROXY"]
    test_a_file_is_fetched_from_the_address_that_was_checked()


def test_errors_go_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jswa.server"):
        assert refusal(b"SSH-2.0-secret\r\n") == "field: could not be fetched"
    assert "an image of a.example could not be fetched: RemoteProtocolError" in caplog.text


def test_pieces_are_counted_when_they_come() -> None:
    counted: list[int] = []

    async def took(size: int) -> None:
        counted.append(size)
        if sum(counted) > 3_000:
            raise ApiError(429, "full")

    async def run() -> None:
        async with answering(whole()) as net:
            with pytest.raises(ApiError, match="full"):
                await fetcher(net).fetch("http://a.example/", "field", None, 10_000, took)

    asyncio.run(run())
    assert 3_000 < sum(counted) <= len(FILE)


def test_one_key_does_not_occupy_all_connections() -> None:
    """Keys take turns: while the fetches of one key hang, another one's are done."""

    async def run() -> None:
        opened = asyncio.Event()

        async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await opened.wait()
            writer.write(whole())

        async def took(size: int) -> None:
            pass

        async with answering(hangs) as slow, answering(whole()) as fast:
            shared = Fetcher(("a.example",), 10.0, {"hog": 1.0, "other": 1.0}, slow.resolve, slow)
            hogs = [
                asyncio.ensure_future(shared.fetch("http://a.example/", "f", "hog", 10_000, took)) for _ in range(20)
            ]
            while len(slow.connected) < 7:
                await asyncio.sleep(0.01)
            assert shared.lanes.waiting == 13
            slow.port = fast.port
            assert await shared.fetch("http://a.example/", "f", "other", 10_000, took) == FILE
            opened.set()
            assert await asyncio.gather(*hogs) == [FILE] * 20

    asyncio.run(run())
