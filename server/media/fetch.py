"""Fetch images from hosts that the operator has named, for clients that must not learn what else the server reaches.

    URL ─▶ host is named ─▶ resolved once ─▶ public addresses only ─▶ connected to one of them ─▶ status 200 ─▶ bytes
           exactly                                                  TLS and Host have the name

The connection goes to the address that was checked, so a name that resolves to another one later gains nothing.
httpcore2 follows no redirects, and reads no proxies or passwords from the environment.
"""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import httpcore2

from ..core.fairness import Key, Lanes, Weights
from ..http import limits
from ..http.errors import ApiError, invalid
from .addresses import is_public

_log = logging.getLogger("jswa.server")
_FETCHES = 8  # at the same time
_MOST_WAITING = 256
_MOST_ADDRESSES = 4  # of a host that are tried
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(https?)://([a-z0-9.-]{1,253})(?::([0-9]{1,5}))?([/?][!-~]*)?", re.IGNORECASE)
_HEADERS = ((b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"connection", b"close"))

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Remote(NamedTuple):
    """Where an image is: the parts of its URL."""

    scheme: str
    host: str
    port: int
    target: str


class Fetcher:
    """Fetches images. Keys take turns at its connections."""

    def __init__(
        self,
        hosts: Iterable[str],
        timeout: float,
        weights: Weights,
        resolve: Resolve | None = None,
        backend: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        """Prepare to fetch.

        Args:
            hosts: names of those from which images are fetched.
            timeout: seconds of a fetch.
            resolve, backend: find the addresses of a host, and connect to one.
        """
        self.hosts = frozenset(name.lower() for name in hosts)
        self.lanes = Lanes(_FETCHES, weights, _MOST_WAITING)
        self._timeout = timeout
        self._tls = ssl.create_default_context() if self.hosts else None  # reads the system's certificates
        self._backend = _Checked(resolve or _resolved, backend or httpcore2.AnyIOBackend())

    def remote(self, url: str, field: str) -> Remote:
        """Return where an image is. Raises ApiError, which names `field`, if it is not fetched."""
        if len(url) > limits.MAX_URL_CHARS:
            raise invalid(field, f"has {len(url)} characters, at most {limits.MAX_URL_CHARS} are allowed")
        found = _URL.fullmatch(url.partition("#")[0])
        if found is None:
            raise invalid(
                field, "must be a data: URL with base64, or an http or https URL of a host without a password"
            )
        scheme, host = found[1].lower(), found[2].lower()
        if not self.hosts:
            raise invalid(field, "is not fetched, as the server has no --allowed-media-hosts: send a data: URL")
        if host not in self.hosts:
            raise invalid(field, "is not fetched: --allowed-media-hosts of the server does not name its host")
        port = int(found[3] or _PORTS[scheme])
        if port not in _PORTS.values():
            raise invalid(field, "is not fetched: the port must be 80 or 443")
        target = found[4] or "/"
        return Remote(scheme, host, port, target if target.startswith("/") else f"/{target}")

    async def fetch(self, url: str, field: str, key: Key, most: int, took: Callable[[int], Awaitable[None]]) -> bytes:
        """Return the file at a URL. Raises ApiError, which names `field` and tells nothing of networks.

        Args:
            most: bytes of the file.
            took: called with the bytes of each piece that has come; may raise ApiError.
        """
        remote = self.remote(url, field)
        async with self.lanes.lane(key):
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._read(remote, field, most, took)
            except ApiError:
                raise
            except TimeoutError:
                raise invalid(field, f"could not be fetched within {self._timeout:g} s") from None
            except Exception as error:  # of many kinds: whatever a network and a stranger's server do
                _log.info("an image of %s could not be fetched: %s: %s", remote.host, type(error).__name__, error)
                raise invalid(field, "could not be fetched") from None

    async def _read(self, remote: Remote, field: str, most: int, took: Callable[[int], Awaitable[None]]) -> bytes:
        url = httpcore2.URL(scheme=remote.scheme, host=remote.host, port=remote.port, target=remote.target)
        host = remote.host if remote.port == _PORTS[remote.scheme] else f"{remote.host}:{remote.port}"
        parts, size = [], 0
        async with (
            httpcore2.AsyncConnectionPool(self._tls, network_backend=self._backend) as pool,
            pool.stream("GET", url, headers=[(b"host", host.encode()), *_HEADERS]) as response,
        ):
            if response.status != 200:
                more = ": redirects are not followed" if 300 <= response.status < 400 else ""
                raise invalid(field, f"could not be fetched: its server answers with status {response.status}{more}")
            said = {name.lower(): value for name, value in response.headers}
            coding = said.get(b"content-encoding", b"identity")
            if coding.strip().lower() != b"identity":
                raise invalid(field, "could not be fetched: its server compresses it, which is not asked for")
            async for piece in response.aiter_stream():
                size += len(piece)
                if size > most:
                    raise invalid(field, f"must have at most {most} bytes (--max-image-size)")
                await took(len(piece))
                parts.append(piece)
        return b"".join(parts)


class _Checked(httpcore2.AsyncNetworkBackend):
    """Connects to public addresses only: to one that the name of the host has when it is resolved here."""

    def __init__(self, resolve: Resolve, backend: httpcore2.AsyncNetworkBackend) -> None:
        self._resolve = resolve
        self._backend = backend

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to a host."""
        error: Exception = httpcore2.ConnectError("the host has no public address")
        for address in [one for one in await self._resolve(host, port) if is_public(one)][:_MOST_ADDRESSES]:
            try:
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as failed:
                error = failed
        raise error


async def _resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host, the best one first."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
