"""The gate in front of all routes: keys, hosts, declared bodies, and no new work for a server that goes down."""

import hashlib
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.service import Service
from .cross_site import allowed_hosts, check_content_type, check_host, check_page
from .errors import ApiError
from .sse import JsonResponse

OPEN = ("/health", "/ready")  # without a key: what probes ask
ADMIN = ("/flush_cache", "/abort")  # with the admin key only
EITHER = ("/metrics",)  # with either kind of key


class Gate:
    """ASGI middleware. Puts the request's API key into the scope."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = [_digest(key) for key in service.config.api_key]
        admin = service.config.admin_api_key
        self._admin = [] if admin is None else [_digest(admin)]
        self._hosts = allowed_hosts(service.config, keys=bool(self._keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let it through, or answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """Count a body whose length was not announced."""
        most, size = self._service.config.max_body_size, 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, _too_large().message)
            return message

        return bounded

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as routes see it
        check_host(headers, self._hosts)
        if self._hosts is not None:
            check_page(scope["method"], headers, self._service.config.allowed_origins)
        if path in OPEN:
            return
        if path in ADMIN:
            if not self._admin:
                raise ApiError(403, "admin endpoints are off; start the server with --admin-api-key")
            self._authorize(headers, self._admin)
            check_content_type(scope["method"], headers)
            return
        accepted = [*self._keys, *self._admin] if path in EITHER else self._keys
        scope["jswa.key"] = self._authorize(headers, accepted) if self._keys else None
        check_content_type(scope["method"], headers)
        if int(headers.get("content-length", "0")) > self._service.config.max_body_size:
            raise _too_large()
        if scope["method"] == "POST":
            if self._service.bridge.failure is not None:
                raise self._service.bridge.failure
            if self._service.draining:
                raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})

    def _authorize(self, headers: Headers, accepted: Iterable[bytes]) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        # All are compared, each in constant time, so that the time tells nothing.
        if scheme.lower() == "bearer" and sum([secrets.compare_digest(digest, one) for one in accepted]):
            return key.strip()
        raise ApiError(
            401, "Incorrect or missing API key.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


def error_response(error: ApiError) -> JsonResponse:
    """An error as a response."""
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


def _too_large() -> ApiError:
    return ApiError(413, "the body is too large", code="request_too_large")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
