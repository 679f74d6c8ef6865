"""The application in several processes: `Replica` runs it beside an engine, `Relay` forwards requests to replicas.

The two exchange ASGI's own messages, so that a route behaves the same with and without a relay. The transport of the
messages is up to the implementation of `Replicas`.
"""

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..gate.gate import admitted
from ..gate.keys import Keys
from ..gate.table import Replicas as Asks
from ..gate.table import Table, path_of
from ..http.access import request_id_of
from ..http.errors import ApiError, error_response
from ..http.sse import event, unless_gone
from .merge import Answer, merged

_log = logging.getLogger("jswa.server")
_PIECES = 64  # messages of an answer that may wait to be forwarded
_BLOCK, _BLOCKS = 32, 2_048  # characters of a block, and largest number of blocks, by which the replica is chosen
_SEEN = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # methods whose bodies are ignored


class ReplicaLost(Exception):
    """The loss of a replica while it was answering a request."""


class Replicas(Protocol):
    """The transport to the replicas. Both methods raise ApiError if no replica accepts the request."""

    def one(self, prefix: str | None, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Iterate over the ASGI messages of one replica's answer. Raises ReplicaLost.

        Args:
            prefix: key of the request's prefix (`prefix_of`); a replica that may have it cached is preferred. None: any
                replica.
        """
        ...

    async def all(self, scope: Mapping[str, Any], body: bytes) -> dict[str, Answer]:
        """Return the answers of all replicas by name, without those of replicas that are lost meanwhile."""
        ...


class Replica:
    """An application that answers requests whose scope and body arrive as messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def messages(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Answer a request with a complete body. Closing the generator ends the request like a client's disconnect."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue(_PIECES)
        bodies = [body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.Event().wait()  # a disconnect cancels the whole task instead
            raise AssertionError

        async def run() -> None:
            try:
                await self._app({"asgi": {"version": "3.0"}, **scope}, receive, sent.put)
            except Exception:
                _log.exception("a request has failed")  # the application has sent its answer, with status 500
            await sent.put(None)

        task = asyncio.ensure_future(run())
        try:
            ended = False
            while not ended:
                pieces = [await sent.get(), *(sent.get_nowait() for _ in range(sent.qsize()))]
                ended = pieces[-1] is None
                yield [piece for piece in pieces if piece is not None]
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> Answer:
        """Answer a request with a complete body, and return the complete response."""
        status, headers, parts = 500, [], []
        async for pieces in self.messages(scope, body):
            for piece in pieces:
                if piece["type"] == "http.response.start":
                    status, headers = piece["status"], list(piece["headers"])
                else:
                    parts.append(piece.get("body", b""))
        return Answer(status, headers, b"".join(parts))


class Relay:
    """An ASGI application that forwards requests to replicas.

    Args:
        table: the routes of the replicas, which check requests again.
        keys: the keys of the replicas. Without a key, the relay neither reads nor hashes a
            body.
        max_body_size: the limit of the replicas, in bytes. They refuse a longer body; the relay reads only as much of
            it as shows that it is too long.
        retries: how often a request is sent to another replica when its replica is lost: 0 or 1, since the request may
            be the cause of the loss.
        hidden: names of response headers, in lower case, that the proxy in front of the relay sends itself.
    """

    def __init__(
        self,
        replicas: Replicas,
        table: Table,
        keys: Keys,
        max_body_size: int,
        retries: int,
        hidden: Collection[bytes] = (),
    ) -> None:
        self._replicas = replicas
        self._table = table
        self._keys = keys
        self._max_body_size = max_body_size
        self._retries = retries
        self._hidden = hidden

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        if scope["type"] != "http":
            return

        async def send_shown(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown = [(name, value) for name, value in message["headers"] if name.lower() not in self._hidden]
                message = {**message, "headers": shown}
            await send(message)

        headers = Headers(scope=scope)
        asks: Asks = "one"
        try:
            if scope["method"] != "OPTIONS":  # a browser sends a CORS preflight without a key
                asks = admitted(self._table.find(scope), scope, headers, self._keys)[0].replicas
        except ApiError as error:
            error.headers["x-request-id"] = request_id_of(headers)
            await _refuse(error, scope, send_shown)
            return
        body = await self._read(scope, receive) if scope["method"] not in _WITHOUT_BODY else b""
        if body is None:
            return
        if asks == "none":
            await _refuse(_fixed(), scope, send_shown)
            return
        seen, path = {name: scope[name] for name in _SEEN if name in scope}, path_of(scope)
        work = self._ask_all if asks == "all" and scope["method"] != "HEAD" else self._ask_one
        await unless_gone(receive, work(path, seen, body, send_shown))

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or None if the client has disconnected. Of a body that is too long, return a part.

        The part is longer than the limit, unless the Content-Length header already shows that the body is too long.
        """
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_body_size:
            return b""  # the replica sees from the header that the body is too long
        parts, size = [], 0
        while size <= self._max_body_size:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body", False):
                break
        return b"".join(parts)

    async def _ask_all(self, path: str, scope: dict[str, Any], body: bytes, send: Send) -> None:
        try:
            answers = await self._replicas.all(scope, body)
            answer = merged(path, answers)
        except ApiError as error:
            await _refuse(error, scope, send)
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})

    async def _ask_one(self, path: str, scope: dict[str, Any], body: bytes, send: Send) -> None:
        prefix = prefix_of(path, Headers(raw=scope["headers"]), body) if scope["method"] == "POST" else None
        for tries_left in range(self._retries, -1, -1):
            passed = _Passed(send)
            messages = self._replicas.one(prefix, scope, body)
            try:
                async for pieces in messages:
                    await passed.on(pieces)
                return
            except ApiError as error:
                await _refuse(error, scope, send)
                return
            except ReplicaLost:
                _log.warning("a replica is lost; %s", "half an answer too" if passed.begun else "asking another one")
                if passed.begun:
                    await passed.give_up()
                    return
                if not tries_left:
                    await _refuse(replica_lost(), scope, send)
            finally:
                await messages.aclose()


class _Passed:
    """The part of an answer that was forwarded to the client.

    The start of the answer is sent with its first piece. Until then another replica may answer instead.
    """

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send
        self._start: Message | None = None
        self._streams = False

    async def on(self, pieces: list[Message]) -> None:
        for piece in pieces:
            if piece["type"] == "http.response.start":
                self._start = piece
                kind = Headers(raw=list(piece["headers"])).get("content-type", "")
                self._streams = kind.startswith("text/event-stream")
                continue
            if self._start is not None:
                start, self._start, self.begun = self._start, None, True
                await self._send(start)
            await self._send(piece)

    async def give_up(self) -> None:
        """End an answer that cannot be completed. The last event of a stream is an error."""
        body = event(replica_lost().body()) if self._streams else b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _fixed() -> ApiError:
    return ApiError(
        400, "adapters and weights cannot be loaded on several replicas, nor can these sleep, since one that starts "
        "later would differ: start the replicas with lora_modules and other weights", code="unsupported",
    )  # fmt: skip


def replica_lost() -> ApiError:
    """Return the error (500) for a request whose replica was lost."""
    return ApiError(500, "the replica that ran this request has failed", code="replica_lost")


def prefix_of(path: str, headers: Headers, body: bytes) -> str | None:
    """Return the key by which a request's replica is chosen, with one character for each block of the request's text.

    Each character is a hash of the text up to the end of its block. So two keys have as many characters in common at
    their start as the texts have blocks, and accidental matches of a few characters do not count. Each message begins a
    new block: the next request of a conversation has all blocks of the one before. The hash starts with the API key,
    the cache salt and the model: texts that differ in these never have a common prefix. Return None for a request that
    generates nothing or is malformed; a replica then refuses it.
    """
    if path not in _TEXTS:
        return None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    whose = [headers.get("authorization") or headers.get("x-api-key"), fields.get("cache_salt"), fields.get("model")]
    digest = hashlib.blake2b(msgspec.json.encode(whose), digest_size=4)
    parts = _TEXTS[path](fields)
    blocks = (part[at : at + _BLOCK] for part in parts for at in range(0, max(len(part), 1), _BLOCK))
    text = ""
    for block in itertools.islice(blocks, _BLOCKS):
        digest.update(b"%d:" % len(block) + block.encode("utf-8", "surrogatepass"))
        text += chr(0x10000 + int.from_bytes(digest.digest()) % 0x100000)  # code points above all surrogates
    return text


def _prompt(prompt: Any) -> str:
    """Return the text of the first prompt; each token id becomes a character."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return "".join(chr(one % 0x110000) for one in prompt[: _BLOCK * _BLOCKS] if isinstance(one, int))
    return prompt if isinstance(prompt, str) else ""


def _input(given: Any) -> list[str]:
    return _messages([{"content": given}] if isinstance(given, str) else given)


def _messages(messages: Any) -> list[str]:
    texts = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = [part.get("text") if isinstance(part, dict) else part for part in _listed(content)]
        texts.append("\n".join(part for part in parts if isinstance(part, str)))
    return texts or [""]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# The texts of a request, by its path.
_TEXTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "/v1/completions": lambda fields: [_prompt(fields.get("prompt"))],
    "/v1/chat/completions": lambda fields: _messages(fields.get("messages")),
    "/v1/responses": lambda fields: [*_input(fields.get("instructions")), *_input(fields.get("input"))],
    "/v1/messages": lambda fields: [
        *_messages([{"content": fields.get("system")}]),
        *_messages(fields.get("messages")),
    ],
}


async def _refuse(error: ApiError, scope: Scope, send: Send) -> None:
    response = error_response(error, path_of(scope))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge start and stop: the relay has nothing to start or to stop."""
    for _ in range(2):
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
