"""The application, spread over processes: `Replica` runs it where the engine is, `Relay` stands where requests come in.

What passes between them are ASGI's own messages, so that a route behaves alike whether a replica is between or not.
Nothing here knows how messages travel.
"""

import asyncio
import hashlib
import itertools
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.access import request_id_of
from ..http.auth import Keys, error_response, path_of
from ..http.errors import ApiError
from ..http.sse import event, unless_gone
from .merge import Answer, merged

_log = logging.getLogger("jswa.server")
_PIECES = 64  # messages of an answer that may wait to be passed on
_BLOCK, _BLOCKS = 32, 2_048  # characters of a block, and blocks at most, that decide about a request's replica
_SEEN = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # nothing reads what comes with these
_HEALTH = ("/health", "/ready")
_ALL = (*_HEALTH, "/metrics", "/flush_cache", "/abort")  # routes that every replica is asked


class Lost(Exception):
    """A replica has gone, and with it the answer that it was giving."""


class Replicas(Protocol):
    """The way to the replicas. Both methods raise ApiError where no replica takes a request."""

    def one(self, prefix: str | None, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """The messages with which a replica answers. Raises Lost. With a prefix: of the one that may hold it."""
        ...

    async def all(self, scope: Mapping[str, Any], body: bytes) -> dict[str, Answer]:
        """The answer of each replica by name, but of those that are lost meanwhile."""
        ...


class Replica:
    """An application that is asked by messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def messages(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Answer a request whose body is all there. To close the generator is to go away, as a client does."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue(_PIECES)
        bodies = [body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.Event().wait()  # who goes away cancels
            raise AssertionError

        async def run() -> None:
            try:
                await self._app({"asgi": {"version": "3.0"}, **scope}, receive, sent.put)
            except Exception:
                _log.exception("a request has failed")  # its answer, a 500, is on its way
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
        """The same, in one piece."""
        status, headers, parts = 500, [], []
        async for pieces in self.messages(scope, body):
            for piece in pieces:
                if piece["type"] == "http.response.start":
                    status, headers = piece["status"], list(piece["headers"])
                else:
                    parts.append(piece.get("body", b""))
        return Answer(status, headers, b"".join(parts))


class Relay:
    """ASGI application that passes requests on to replicas.

    Args:
        keys: of the replicas. They check again; here a stranger's body is neither read nor hashed.
        max_body_size: as the replicas have it. They refuse what is longer; here no more is read than shows it.
        retries: how often a request whose replica is lost goes to another one: at most once, since it may be the cause.
        hidden: headers of responses that whatever stands before the relay sends itself, in lower case.
    """

    def __init__(
        self, replicas: Replicas, keys: Keys, max_body_size: int, retries: int, hidden: Collection[bytes] = ()
    ) -> None:
        self._replicas = replicas
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

        try:
            if scope["method"] != "OPTIONS":  # a browser asks without a key whether it may ask
                self._keys.check(scope, Headers(scope=scope))
        except ApiError as error:
            error.headers["x-request-id"] = request_id_of(Headers(scope=scope))
            await _refuse(error, scope, send_shown)
            return
        body = await self._read(scope, receive) if scope["method"] not in _WITHOUT_BODY else b""
        if body is None:
            return
        seen, path = {name: scope[name] for name in _SEEN if name in scope}, path_of(scope)
        work = self._ask_all if path in _ALL and scope["method"] != "HEAD" else self._ask_one
        await unless_gone(receive, work(path, seen, body, send_shown))

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client has gone. Of one that is too long, enough to see that."""
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_body_size:
            return b""  # the header says it all
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
            except Lost:
                _log.warning("a replica is lost; %s", "half an answer too" if passed.begun else "asking another one")
                if passed.begun:
                    await passed.give_up()
                    return
                if not tries_left:
                    await _refuse(replica_lost(), scope, send)
            finally:
                await messages.aclose()


class _Passed:
    """What a client has had of an answer. Its start goes with its first piece: until then, another may begin anew."""

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
        """End an answer that will not be completed: a stream with an error, as its last event."""
        body = event(replica_lost().body()) if self._streams else b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def replica_lost() -> ApiError:
    """The replica that was answering has gone."""
    return ApiError(500, "the replica that ran this request has failed", code="replica_lost")


def prefix_of(path: str, headers: Headers, body: bytes) -> str | None:
    """Return the key by which a request's replica is chosen: a character per block of its text.

    Each character is a hash of the text up to the end of its block. So two requests share as many characters as
    blocks, and short accidents count for nothing. Messages begin blocks of their own: a conversation that goes on has
    all blocks that it had. The hash begins with the API key, the cache salt and the model: texts that differ in these
    never share a prefix. Return None for a request that generates nothing or is malformed; a replica will say so.
    """
    if path not in ("/v1/completions", "/v1/chat/completions"):
        return None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    whose = [headers.get("authorization"), fields.get("cache_salt"), fields.get("model")]
    digest = hashlib.blake2b(msgspec.json.encode(whose), digest_size=4)
    parts = [_prompt(fields.get("prompt"))] if "chat" not in path else _messages(fields.get("messages"))
    blocks = (part[at : at + _BLOCK] for part in parts for at in range(0, max(len(part), 1), _BLOCK))
    text = ""
    for block in itertools.islice(blocks, _BLOCKS):
        digest.update(b"%d:" % len(block) + block.encode("utf-8", "surrogatepass"))
        text += chr(0x10000 + int.from_bytes(digest.digest()) % 0x100000)  # those beyond all surrogates
    return text


def _prompt(prompt: Any) -> str:
    """The first prompt; token ids as a character each."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return "".join(chr(one % 0x110000) for one in prompt[: _BLOCK * _BLOCKS] if isinstance(one, int))
    return prompt if isinstance(prompt, str) else ""


def _messages(messages: Any) -> list[str]:
    texts = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        parts = [part.get("text") if isinstance(part, dict) else part for part in _listed(content)]
        texts.append("\n".join(part for part in parts if isinstance(part, str)))
    return texts or [""]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


async def _refuse(error: ApiError, scope: Scope, send: Send) -> None:
    response = error_response(error)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing is to be started or stopped."""
    for _ in range(2):
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
