"""Checks of requests that a web page makes its visitor's browser send to this server.

A browser sends some POST requests to any server without a CORS preflight: those with a form's content type, and those
without a content type. Hence a body must be declared as JSON, which a page can send only if CORS allows it. By DNS
rebinding, a page's own host name can point at this machine, and the page then has the server's origin. The Host header
reveals such a name.
"""

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.datastructures import Headers

from ..http.errors import ApiError
from ..options import ServeConfig

LOCAL = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:/@\[\]\s]+))(?::[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine can reach a server on this host name or IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None) if host else []  # "" means every address of the machine
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def allowed_hosts(config: ServeConfig, *, keys: bool) -> Collection[str] | None:
    """Return the names that the Host header may give the server; None means any name.

    With `--allowed-hosts` these are its names and the machine's own. Without it, they are the machine's own if the
    server listens on loopback and needs no `keys`, and any name otherwise. Web pages cannot reach a Unix socket.
    """
    if "*" in config.allowed_hosts:
        return None
    if config.allowed_hosts or (not keys and config.uds is None and is_loopback(config.host)):
        return (*LOCAL, config.host.lower(), *(name.lower() for name in config.allowed_hosts))
    return None


def check_host(headers: Headers, hosts: Collection[str] | None) -> None:
    """Refuse a request whose Host header has another name. Raises ApiError (403)."""
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
    """Refuse a request that changes something and that a page of another origin has sent, as the browser says.

    Only browsers send the header `Sec-Fetch-Site`. A browser should not send such a request at all if the page's origin
    is not among `origins` (`--allowed-origins`); this check does not rely on that. Raises ApiError (403).
    """
    if method not in ("POST", "DELETE") or headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
        return
    origin = headers.get("origin", "null")
    if "*" not in origins and origin not in origins:
        raise ApiError(
            403,
            f"web pages of the origin {origin[:200]!r} may not use this server: it is not one of --allowed-origins",
            code="origin_not_allowed",
        )


def check_content_type(method: str, headers: Headers) -> None:
    """Refuse a POST body that is not declared as JSON. Raises ApiError (400)."""
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
