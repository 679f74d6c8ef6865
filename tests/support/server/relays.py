"""A relay in front of a server of this process, in place of the transport of a cluster."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.cluster.merge import Answer
from server.cluster.relay import Relay, Replica, ReplicaLost
from server.gate.keys import Keys
from server.gate.routes import table
from server.http.errors import ApiError
from tests.support.server.harness import Client, serving

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
                    raise ReplicaLost("gone")
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
        most = options.get("max_body_size", 10_000)
        relay = Relay(ways[0], table(pages=True), keys, most, retries=1, hidden=[b"x-hidden"])

        async def both(scope: Scope, receive: Receive, send: Send) -> None:
            await (app if scope["type"] == "lifespan" else relay)(scope, receive, send)

        return both

    with serving(template=TEMPLATE, wrap=wrap, **{"max_body_size": 10_000, **options}) as client:
        yield client, ways[0]
