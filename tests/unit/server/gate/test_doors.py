"""Every route of the running application, with every kind of key, in every spelling: only the right key opens it."""

import dataclasses
import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.gate import routes
from server.gate.routes import ROUTES
from server.gate.table import Route, Table, Whose
from tests.support.server.harness import Client, serving
from tests.support.server.relays import relayed

KEYS = {"nobody": "", "stranger": "other", "user": "one", "operator": "root"}
OPENS: dict[Whose, set[str]] = {
    "nobody": set(KEYS),
    "user": {"user"},
    "operator": {"operator"},
    "either": {"user", "operator"},
}  # whose keys open the routes of each kind, if the server has keys
OVERRIDES = ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE")
BROKEN = ("%0A", "%0D", "%0D%0A", "%09", "%00", "%0B", "%0C", "%1F", "%7F", "%C2%85", "%E2%80%A8", "%E2%80%A9")
ENDS = ("/", "//", "/.", "/..", ";x", ".json", "?", "?x=%0A", "#x", "%20", "%3F", "%23", "%2F", "%2E", "%FF", "%C2%A0")


def spellings(path: str) -> Iterator[str]:
    """Targets of requests that something may take for a path."""
    yield path
    for broken in BROKEN:
        yield from (path + broken, f"{path}{broken}?x=1", f"/{broken}{path[1:]}", f"{path[:2]}{broken}{path[2:]}")
    yield from (path + end for end in ENDS)
    yield from (f"/{path}", path.replace("/", "//"), f"/.{path}", f"/x/..{path}", f"/v1/models/..{path}")
    yield from (
        path.upper(),
        path.title(),
        f"/{path[1:].replace('/', '%2F')}",
        f"/{path[1:].replace('/', '%5C')}",
        path[:-1],
    )
    yield "/" + "".join(f"%{ord(one):02x}" for one in path[1:])
    yield "/" + "".join(f"%25{ord(one):02X}" for one in path[1:])
    yield from (f"http://localhost{path}", f"http://localhost{path}%0A", f"//localhost{path}")


def spelled(target: str) -> str:
    """The path that a target spells."""
    target = urlsplit(target).path if target.startswith("http:") else target.partition("?")[0].partition("#")[0]
    return unquote(target)


class Walker:
    """Sends requests that no client library would send, and says whose handlers they reach.

    Attributes:
        reached: the paths of the routes whose handlers were called.
    """

    def __init__(self) -> None:
        self.reached: list[str] = []
        self._client: Client | None = None
        self._socket: socket.socket | None = None

    def handler(self, route: Route) -> Route:
        """Return a route that only says that it was reached."""

        async def handler(request: Request) -> Response:
            self.reached.append(route.path)
            return PlainTextResponse("" if route.path == "/metrics" else '{"aborted": 0}')  # as a relay merges them

        return dataclasses.replace(route, handler=handler, options={})

    @contextmanager
    def of(self, client: Client) -> Iterator[None]:
        """Send to this server within the context."""
        self._client = client
        try:
            yield
        finally:
            self._close()

    def ask(self, method: str, target: str, key: str, *headers: str) -> tuple[int, set[str]]:
        """Send a request; return the status of its answer, and the routes that it has reached."""
        assert self._client is not None
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
        lines += [f"Authorization: Bearer {key}"] if key else []
        body = "{}" if method == "POST" else ""
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
        if self._socket is None:
            at = urlsplit(self._client.url)
            self._socket = socket.create_connection((at.hostname, at.port), timeout=20)
        self.reached.clear()
        self._socket.sendall(("\r\n".join(lines) + f"\r\n\r\n{body}").encode())
        response = http.client.HTTPResponse(self._socket, method=method)
        response.begin()
        response.read()
        if response.will_close:
            self._close()
        return response.status, set(self.reached)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@pytest.fixture
def walker(monkeypatch: pytest.MonkeyPatch) -> Walker:
    """A walker through servers whose routes only say that they were reached."""
    found = Walker()
    monkeypatch.setattr(routes, "ROUTES", tuple(map(found.handler, ROUTES)))
    return found


@contextmanager
def server(form: Literal["plain", "relay"], **options: Any) -> Iterator[Client]:
    """A server, by itself or behind a relay."""
    with relayed(**options) if form == "relay" else serving(**options) as found:
        yield found[0] if isinstance(found, tuple) else found


def reaches(form: str, method: str, target: str, key: str, *, keys: bool = True) -> set[str]:
    """The routes that a request may reach. Without `keys` users need none, and what is an operator's is off."""
    path = spelled(target)
    found = [one for one in ROUTES if one.path == path] or [
        one for one in ROUTES if ":path" in one.path and path.startswith(one.path.partition("{")[0])
    ]
    opened = [one for one in found if (key in OPENS[one.whose] if keys else one.whose != "operator")]
    return {one.path for one in opened if method in one.methods and (form == "plain" or one.replicas != "none")}


@pytest.mark.parametrize("form", ["plain", "relay"])
def test_only_its_key_opens_a_route_however_it_is_spelled(form: Literal["plain", "relay"], walker: Walker) -> None:
    with server(form, api_key=("one",), admin_api_key="root") as client, walker.of(client):
        for route in ROUTES:
            for target in dict.fromkeys(spellings(route.path.replace("{model:path}", "fake"))):
                broken = any(ord(one) < 32 or one in "\x7f\x85\u2028\u2029" for one in spelled(target))
                for name, key in KEYS.items():
                    status, reached = walker.ask(route.methods[0], target, key)
                    may = set() if broken else reaches(form, route.methods[0], target, name)
                    assert reached == may, (route.methods[0], target, name)
                    assert status == 400 or not broken, (route.methods[0], target, name, status)


@pytest.mark.parametrize("form", ["plain", "relay"])
def test_only_listed_methods_reach_a_route(form: Literal["plain", "relay"], walker: Walker) -> None:
    with server(form, api_key=("one",), admin_api_key="root") as client, walker.of(client):
        for route in ROUTES:
            path = route.path.replace("{model:path}", "fake")
            for name, key in KEYS.items():
                for method in METHODS:
                    others = [f"{header}: {route.methods[0]}" for header in OVERRIDES]
                    target = f"{path}?_method={route.methods[0]}"
                    assert walker.ask(method, target, key, *others)[1] == reaches(form, method, path, name), method
                for header in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Path", "X-Forwarded-Prefix"):
                    _, reached = walker.ask("GET", "/version", key, f"{header}: {path}")
                    assert reached <= {"/version"}, header


@pytest.mark.parametrize("form", ["plain", "relay"])
def test_without_keys_the_routes_of_operators_are_off(form: Literal["plain", "relay"], walker: Walker) -> None:
    with server(form) as client, walker.of(client):
        for route in ROUTES:
            for target in dict.fromkeys(spellings(route.path.replace("{model:path}", "fake"))):
                for key in ("", "root"):
                    _, reached = walker.ask(route.methods[0], target, key)
                    assert reached <= reaches(form, route.methods[0], target, "nobody", keys=False), target
            if route.whose == "operator":
                assert walker.ask(route.methods[0], route.path, "root") == (403, set())


def test_a_wrong_key_is_401_and_a_path_that_is_not_listed_needs_a_key_too(walker: Walker) -> None:
    with server("plain", api_key=("one",), admin_api_key="root") as client, walker.of(client):
        for route in ROUTES:
            for name, key in KEYS.items():
                status, _ = walker.ask(route.methods[0], route.path, key)
                assert status == (200 if name in OPENS[route.whose] else 401), (route.path, name)
        for name, key in KEYS.items():
            listed = name in ("user", "operator")
            assert walker.ask("GET", "/nothing", key)[0] == (404 if listed else 401)
            assert walker.ask("PUT", "/version", key)[0] == (405 if name == "user" else 401)
            assert walker.ask("PUT", "/flush_cache", key)[0] == (405 if name == "operator" else 401)


def test_a_route_that_is_not_in_the_table_does_not_exist(walker: Walker) -> None:
    """Neither a route that was added to the application, nor one of the framework's own."""

    async def added(request: Request) -> Response:
        walker.reached.append("/added")
        return PlainTextResponse("")

    def with_more(app: Any) -> Any:
        app.add_route("/added", added)
        app.get("/added")(added)
        return app

    with serving(api_key=("one",), wrap=with_more) as client, walker.of(client):
        for path in ("/added", "/docs", "/redoc", "/docs/oauth2-redirect"):
            assert walker.ask("GET", path, "one") == (404, set())


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/audio/speech", "/api/chat", "/generate", "/v1", "/x" * 999])
def test_a_path_of_another_api_is_answered_with_the_paths_that_are_there(path: str) -> None:
    """Not to those without a key, who learn nothing about the server."""
    with server("plain", api_key=("one",)) as client:
        error = client.post(path, {}, headers={"authorization": "Bearer one"}).json()["error"]
        assert error["code"] == "not_found"
        assert error["message"].startswith(f"Not Found: this server has no {path[:200]}; it has /v1/completions, ")
        for named in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "GET /openapi.json"):
            assert named in error["message"]
        assert "/flush_cache" not in error["message"]
        assert "it has" not in client.post(path, {}).text


def test_no_path_is_listed_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        Table([ROUTES[0], dataclasses.replace(ROUTES[1], path=ROUTES[0].path)])
