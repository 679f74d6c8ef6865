"""Requests that a web page has its visitor's browser send: which of them are refused.

A browser sends some POST requests to any server without asking it (no CORS preflight): those of a form's content types,
and those without one. So a body must be declared as JSON, which a page can send only where CORS allows it. And a page
whose host name comes to point at this machine (DNS rebinding) is of one origin with the server; its Host header tells.
"""

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.datastructures import Headers

from ..options import ServeConfig
from .errors import ApiError

LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:/@\[\]\s]+))(?::[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens on this host name or IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None) if host else []  # "" is every address of the machine
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def allowed_hosts(config: ServeConfig, *, keys: bool) -> Collection[str] | None:
    """The names by which the Host header may call the server; None: any.

    With `--allowed-hosts`, those and this machine's own. Without it, this machine's own where the server listens on
    loopback and asks for no `keys`. A web page reaches no Unix socket.
    """
    if "*" in config.allowed_hosts:
        return None
    if config.allowed_hosts or (not keys and config.uds is None and is_loopback(config.host)):
        return (*LOCAL, config.host.lower(), *(name.lower() for name in config.allowed_hosts))
    return None


def check_host(headers: Headers, hosts: Collection[str] | None) -> None:
    """Refuse a request that calls the server by another name. Raises ApiError."""
    given = headers.getlist("host")
    if hosts is None or (len(given) == 1 and _is_one_of(given[0], hosts)):
        return
    raise ApiError(
        403,
        f"the Host header {', '.join(given)[:200]!r} is not allowed: this server answers to localhost, 127.0.0.1, [::1]"
        " and the names of --allowed-hosts; with API keys and without --allowed-hosts, to any",
        code="host_not_allowed",
    )


def check_page(method: str, headers: Headers, origins: Collection[str]) -> None:
    """Refuse a POST request of which the browser says that a page of another origin has sent it. Raises ApiError.

    The header comes from browsers only. Without `origins` (those of `--allowed-origins`) no browser should send such a
    request after all; this does not rely on it.
    """
    if method != "POST" or headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
        return
    origin = headers.get("origin", "null")
    if "*" not in origins and origin not in origins:
        raise ApiError(
            403,
            f"web pages of the origin {origin[:200]!r} may not use this server: it is not one of --allowed-origins",
            code="origin_not_allowed",
        )


def check_content_type(method: str, headers: Headers) -> None:
    """Refuse a body that is not declared as JSON. Raises ApiError."""
    if method != "POST" or not ("transfer-encoding" in headers or int(headers.get("content-length", "0"))):
        return
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    got = f"not {given[:100]!r}" if given else "and it is missing"
    raise ApiError(
        400,
        f"the Content-Type header must be application/json, {got}; with curl: -H 'Content-Type: application/json'",
        code="invalid_content_type",
    )


def _is_one_of(header: str, hosts: Collection[str]) -> bool:
    match = _HOST.fullmatch(header.lower())
    if match is None:
        return False
    name = (match[1] or match[2]).removesuffix(".")
    return name in hosts or any(host.startswith("*.") and name.endswith(host[1:]) for host in hosts)
