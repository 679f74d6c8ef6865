"""A server with a fake engine, on a free port of localhost, in a thread of this process."""

import asyncio
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import uvicorn
from starlette.types import ASGIApp

from jswa.text.answers.template import AnswerTemplate
from jswa.text.chat_template import ChatTemplate
from jswa.text.tokenizer import Tokenizer
from server.core.request import Job
from server.core.service import Served, Service
from server.engine.local import LocalEngine
from server.http.app import create_app
from server.http.process import HeaderLimit, Server
from server.options import ServeConfig
from server.processes.hub import Hub
from server.processes.remote import RemoteEngine
from server.processes.supervisor import facts_of, same_port
from tests.support.server.fake_engine import FakeEngine

BYTES = Path(__file__).parent / "bytes"  # a tokenizer with one token per byte: id = byte + 3


class Client:
    """An HTTP client of a server, with the server's objects for inspection."""

    engine: FakeEngine  # set if the server has a fake engine

    def __init__(self, service: Service, url: str, headers: Mapping[str, str]) -> None:
        self.service = service
        self.url = url
        # To read the list of certificate authorities takes longer than most tests.
        self.http = httpx2.Client(base_url=url, headers=dict(headers), timeout=120, verify=False)

    @property
    def services(self) -> list[Service]:
        """The services of all front ends."""
        return self.service.services if isinstance(self.service, Apart) else [self.service]

    def used(self, budget: Literal["bodies", "answers"]) -> int:
        """Return the bytes of a budget that are in use."""
        return sum(getattr(one.engine, budget).used for one in self.services)

    def refused(self, budget: Literal["bodies", "answers"]) -> int:
        """Return how often a budget has refused something."""
        return sum(getattr(one.engine, budget).refused for one in self.services)

    def counted(self, name: str) -> int:
        """Return a count that /metrics shows, without its prefix and suffix."""
        text = self.get("/metrics").text
        return int(float(re.findall(rf"jswa:{name}_total{{[^}}]*}} (\S+)", text)[0]))

    def post(self, path: str, body: object = None, **more: Any) -> httpx2.Response:
        """Send a POST request with a JSON body."""
        return self.http.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx2.Response:
        """Send a GET request."""
        return self.http.get(path, **more)

    def complete(self, **body: Any) -> Any:
        """Send a completion request that must succeed; return its body."""
        response = self.post("/v1/completions", {"prompt": "abc", "max_tokens": 4, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, body: object, status: int = 400) -> Any:
        """Send a request that must be refused with this status; return the error object."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "/work" not in error["message"]
        assert "Traceback" not in error["message"]
        return error

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Send a streaming request; check the framing of its events and return them parsed."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.content.endswith(b"\n\n")
        found: list[Any] = []
        for block in response.content.decode().removesuffix("\n\n").split("\n\n"):
            if block.startswith(":"):
                continue
            assert block.startswith("data: ")
            assert "\n" not in block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        return found

    def events_named(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Send a streaming request whose events have names; return their values, whose `type` is the name."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        found: list[Any] = []
        for block in response.content.decode().removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@contextmanager
def serving(
    engine: FakeEngine | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    answers: AnswerTemplate | None = None,
    headers: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **options: Any,
) -> Iterator[Client]:
    """Run a server with a fake engine and these options; `wrap` wraps its ASGI application."""
    engine = engine or FakeEngine()
    tokenizer = tokenizer or Tokenizer.load(BYTES)
    chat = None if template is None else ChatTemplate({"default": template}, {"eos_token": "<eos>"})
    with serve(
        Served(lambda: engine, tokenizer, chat, answers, defaults or {}, "acme/fake"), headers, wrap=wrap, **options
    ) as client:
        client.engine = engine
        yield client


@contextmanager
def serve(
    served: Served,
    headers: Mapping[str, str] | None = None,
    *,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **options: Any,
) -> Iterator[Client]:
    """Run a server for a model with these options."""
    config = ServeConfig(**{"served_model_name": ("fake", "alias"), "port": 0, **options})
    if forms.front_ends:
        with split(served, config, headers or {}, wrap, forms.front_ends) as client:
            yield client
        return
    service = Service(served, config)
    settings = uvicorn.Config(wrap(create_app(service)), port=0, http=HeaderLimit, log_config=None, access_log=False)
    server = PromptServer(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        client = Client(service, f"http://127.0.0.1:{port}", headers or {})
        try:
            yield client
        finally:
            client.http.close()
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


class PromptServer(Server):
    """A server that ends 0.01 s after `should_exit`, not 0.1: hundreds of tests start one."""

    async def main_loop(self) -> None:
        """Wait for `should_exit`."""
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.01)


class _Forms:
    """How `serve` runs servers: with so many front ends apart from the engine, or with none."""

    front_ends = 0


forms = _Forms()


class Apart:
    """What tests look at in a server whose front ends are apart from the engine, as `Service` has it."""

    def __init__(self, engine: LocalEngine, services: list[Service]) -> None:
        self.local = engine
        self.services = services

    @property
    def jobs(self) -> dict[str, set[Job]]:
        """The jobs of all front ends."""
        return {f"{number} {name}": jobs for number, one in enumerate(self.services) for name, jobs in one.jobs.items()}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer."""
        return self.services[0].tokenizer

    @property
    def draining(self) -> bool:
        """Whether all front ends refuse new requests."""
        return all(one.draining for one in self.services)

    @draining.setter
    def draining(self, value: bool) -> None:
        for one in self.services:
            one.draining = value

    @property
    def running(self) -> int:
        """The requests of all front ends."""
        return sum(one.running for one in self.services)


@contextmanager
def split(
    served: Served, config: ServeConfig, headers: Mapping[str, str], wrap: Callable[[ASGIApp], ASGIApp], count: int
) -> Iterator[Client]:
    """Run a server with front ends, which are in this process and talk to the engine over sockets."""
    engine = LocalEngine(served.build, served.tokenizer, config)
    hub, sockets = Hub(engine), same_port("127.0.0.1", 0, count)
    services, servers, stop = list[Service](), list[Server](), threading.Event()
    counters = list[int]()

    async def run() -> None:
        engine.thread.start()
        for _ in sockets:
            own, other = socket.socketpair()
            for end in (own, other):
                end.setblocking(False)
            counter = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # the hub's
            await hub.connect(own, counter)
            counters.append(os.dup(counter))
            remote = RemoteEngine(other, counters[-1], facts_of(engine.thread.engine), config)
            services.append(Service(served, config, remote, services[0].created if services else None))
            app = wrap(create_app(services[-1]))
            settings = uvicorn.Config(app, http=HeaderLimit, log_config=None, access_log=False)
            servers.append(PromptServer(settings, says=None))
        serving = [asyncio.ensure_future(one.serve([at])) for one, at in zip(servers, sockets, strict=True)]
        while not stop.is_set():
            await asyncio.sleep(0.02)
            hub.check()
        for one in servers:
            one.should_exit = True
        await asyncio.gather(*serving)
        await engine.close()
        for counter in counters:
            os.close(counter)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        until(lambda: len(servers) == count and all(one.started for one in servers))
        apart: Any = Apart(engine, services)
        client = Client(apart, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", headers)
        # A connection stays with its front end: a new one for each request reaches all of them.
        client.http.headers["connection"] = "close"
        try:
            yield client
        finally:
            client.http.close()
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition is true, or fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.005)
