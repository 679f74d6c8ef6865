"""Requests that a web page can make its visitor's browser send to a server on the same machine are refused."""

from typing import Any

import httpx2
import pytest

from jswa.errors import ConfigError
from server.gate.cross_site import is_loopback
from server.options import ServeConfig
from tests.support.server.harness import Client, serving

PATH = "/v1/completions"
CONTENT = b'{"prompt": "abc", "max_tokens": 4}'
JSON = {"content-type": "application/json"}
ANY = "0.0.0.0"  # noqa: S104 - nothing listens there


def send(client: Client, headers: dict[str, str], method: str = "POST", path: str = PATH) -> httpx2.Response:
    return client.http.request(method, path, content=CONTENT if method == "POST" else None, headers=headers)


def code(response: httpx2.Response) -> str:
    found: str = response.json()["error"]["code"]
    return found


@pytest.mark.parametrize(
    "path",
    [PATH, "/v1/chat/completions", "/tokenize", "/detokenize", "/abort", "/flush_cache", "/v1/load_lora_adapter"],
)
def test_a_body_must_be_declared_as_json_whatever_the_route(path: str) -> None:
    kinds = [
        None, "text/plain", "text/plain; application/json", "text/plain,application/json", "multipart/form-data",
        "application/x-www-form-urlencoded", "application/json-seq", "text/json", "",
    ]  # fmt: skip
    with serving(template="x", admin_api_key="root") as client:
        for kind in kinds:
            given = {"authorization": "Bearer root"} | ({} if kind is None else {"content-type": kind})
            response = send(client, given, path=path)
            assert (response.status_code, code(response)) == (400, "invalid_content_type"), kind
            assert "application/json" in response.json()["error"]["message"]
            chunked = client.http.post(path, content=iter([CONTENT]), headers=given)
            assert code(chunked) == "invalid_content_type", kind
        assert not client.engine.seen
        assert not client.engine.flushed


def test_json_by_any_of_its_names_is_accepted() -> None:
    with serving(admin_api_key="root") as client:
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.openai+json"):
            assert send(client, {"content-type": kind}).status_code == 200
        # A request without a body needs no Content-Type.
        assert client.http.post("/flush_cache", headers={"authorization": "Bearer root"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS", "HEAD"])
def test_other_hosts_are_refused_on_loopback_without_keys(method: str) -> None:
    with serving() as client:
        paths = [PATH] if method in ("POST", "OPTIONS") else ["/metrics", "/v1/models", "/server_info", "/health"]
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
                     "a@localhost", ANY, "[::1].evil.example", "192.168.0.1", "localhost:80:90", ""):  # fmt: skip
            for path in paths:
                response = send(client, {**JSON, "host": host}, method, path)
                assert response.status_code == 403, (host, path)
                if method != "HEAD":
                    assert code(response) == "host_not_allowed"
        assert not client.engine.seen
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost."):
            for path in paths:
                wanted = 405 if method == "OPTIONS" else 200
                response = send(client, {**JSON, "host": host}, method, path)
                assert response.status_code in (wanted, 405 if method == "HEAD" else wanted), (host, path)


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        ({"allowed_hosts": ("my.lan",)}, "my.lan:80", 200),
        ({"allowed_hosts": ("my.lan",)}, "localhost", 200),
        ({"allowed_hosts": ("my.lan",)}, "a.my.lan", 403),
        ({"allowed_hosts": ("*.my.lan",)}, "a.my.lan", 200),
        ({"allowed_hosts": ("*.my.lan",)}, "my.lan", 403),
        ({"allowed_hosts": ("*",)}, "evil.example", 200),
        ({"host": ANY}, "any.example", 200),
        ({"host": ANY, "allowed_hosts": ("my.lan",)}, "any.example", 403),
        ({"uds": "unused.sock"}, "any", 200),
        ({"ssl_keyfile": "k", "ssl_certfile": "c"}, "evil.example", 403),
        ({"admin_api_key": "root"}, "evil.example", 403),
        ({"api_key": ("one",)}, "any.example", 200),
        ({"api_key": ("one",), "allowed_hosts": ("my.lan",)}, "any.example", 403),
    ],
    ids=str,
)
def test_which_hosts_are_allowed(options: dict[str, Any], host: str, status: int) -> None:
    # The server of this test listens on loopback; the options decide only which hosts it allows.
    with serving(**options) as client:
        assert send(client, {**JSON, "host": host, "authorization": "Bearer one"}).status_code == status


def test_pages_of_allowed_origins_can_use_the_server() -> None:
    page = {"origin": "http://page.example", "sec-fetch-site": "cross-site"}
    ask = {**page, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    ask |= {"access-control-request-private-network": "true"}
    with serving(allowed_origins=("http://page.example",)) as client:
        preflight = send(client, ask, "OPTIONS")
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        assert preflight.headers["access-control-allow-private-network"] == "true"
        response = send(client, {**JSON, **page})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page.example"
        assert send(client, {**page, "content-type": "text/plain"}).status_code == 400
        for other in ("http://other.example", "null"):
            response = send(client, {**JSON, **page, "origin": other})
            assert (response.status_code, code(response)) == (403, "origin_not_allowed")
            assert "access-control-allow-origin" not in response.headers
    with serving(allowed_origins=("*",)) as client:
        assert send(client, {**JSON, **page}).status_code == 200


def test_without_allowed_origins_no_page_of_another_origin_is_served() -> None:
    with serving() as client:
        for site in ("cross-site", "same-site"):
            for more in ({"origin": "null"}, {"origin": "http://localhost:3000"}, {}):
                assert send(client, {**JSON, **more, "sec-fetch-site": site}).status_code == 403
            assert send(client, {"sec-fetch-site": site}, "DELETE", "/v1/responses/x").status_code == 403
        assert not client.engine.seen
        for site in ("same-origin", "none"):
            assert send(client, {**JSON, "sec-fetch-site": site}).status_code == 200
        # A GET request is answered: it changes nothing, and without a CORS header the page cannot read the answer.
        response = send(client, {"sec-fetch-site": "cross-site", "origin": "http://x"}, "GET", "/v1/models")
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_no_get_route_changes_anything(shared: Client) -> None:
    schema = shared.get("/openapi.json").json()
    reading = {path for path, methods in schema["paths"].items() if "get" in methods}
    assert reading == {
        "/v1/models", "/v1/models/{model}", "/tokenizer_info", "/metrics", "/server_info", "/health", "/ready",
        "/version", "/live/events", "/weight_version", "/is_paused", "/is_sleeping", "/v1/responses/{response_id}",
        "/ping", "/load",
    }  # fmt: skip
    assert not reading & {path for path, methods in schema["paths"].items() if "post" in methods}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), (ANY, False),
        ("::", False), ("", False), ("10.0.0.1", False), ("no-such-host.invalid", False),
    ],
)  # fmt: skip
def test_loopback_addresses_are_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "a/b", "[::1]", "*a", "a.*"])
def test_allowed_hosts_are_names(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServeConfig(allowed_hosts=(name,))
