"""The gate in front of all routes: it checks keys, hosts and bodies, and refuses new work during a shutdown."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.service import Service
from ..pages.files import PAGES
from .cross_site import allowed_hosts, check_content_type, check_host, check_page
from .errors import ApiError
from .sse import JsonResponse

OPEN = ("/health", "/ready")  # routes for probes, which need no key
LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
CHANGES = (
    "/update_weights_from_disk",
    "/weight_version",
    "/pause",
    "/resume",
    "/is_paused",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
)
ADMIN = (
    "/flush_cache",
    "/abort",
    "/live/events",
    "/start_profile",
    "/stop_profile",
    *LORA,
    *CHANGES,
)  # routes that need the admin key
EITHER = ("/metrics",)  # routes that accept either kind of key


class Keys:
    """The keys of the routes: users need an API key if there are any, and the operator needs the admin key.

    Args:
        keys: API keys.
        admin: the admin key.
        pages: whether the server has pages.

    Attributes:
        free: the routes that need no key.
    """

    def __init__(self, keys: Collection[str], admin: str | None, *, pages: bool) -> None:
        self.free = (*OPEN, *PAGES) if pages else OPEN
        self._keys = [_digest(key) for key in keys]
        self._admin = [] if admin is None else [_digest(admin)]

    def check(self, scope: Scope, headers: Headers) -> str | None:
        """Return the key of a request for a user's route, None if no key is needed. Raises ApiError (401, 403)."""
        path = path_of(scope)
        if path in self.free:
            return None
        if path in ADMIN:
            if not self._admin:
                raise ApiError(403, "admin endpoints are off; start the server with --admin-api-key")
            self._authorize(headers, self._admin)
            return None
        accepted = [*self._keys, *self._admin] if path in EITHER else self._keys
        return self._authorize(headers, accepted) if self._keys else None

    def _authorize(self, headers: Headers, accepted: Iterable[bytes]) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme and "x-api-key" in headers:  # as Anthropic's clients send it
            scheme, key = "bearer", headers["x-api-key"]
        digest = _digest(key.strip())
        # Compare all keys, each in constant time, so that the response time reveals nothing about them.
        if scheme.lower() == "bearer" and sum([secrets.compare_digest(digest, one) for one in accepted]):
            return key.strip()
        raise ApiError(
            401, "Incorrect or missing API key.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


def path_of(scope: Scope) -> str:
    """Return the path of a request as routes see it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Gate:
    """ASGI middleware that checks requests, sets their API key in the scope, and bounds the memory of their bodies."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = Keys(service.config.api_key, service.config.admin_api_key, pages=service.config.pages)
        self._hosts = allowed_hosts(service.config, keys=bool(service.config.api_key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except ApiError as error:
            await error_response(error, path_of(scope))(scope, receive, send)
            return
        if path_of(scope) in (*self._keys.free, *ADMIN, *EITHER):
            await self._app(scope, self._bounded(receive, _any_size), send)
            return
        await self._with_budget(scope, receive, send, int(headers.get("content-length", "0")))

    async def _with_budget(self, scope: Scope, receive: Receive, send: Send, announced: int) -> None:
        """Pass a request on if there is memory for its body. The body counts until the response has ended."""
        budget, key, taken = self._service.engine.bodies, scope["jswa.key"], 0

        async def take(size: int) -> bool:
            nonlocal taken
            more = size - taken
            if more <= 0:
                return True
            fits = await budget.claim(key, more)
            taken += more if fits else 0
            return fits

        try:
            if await take(announced):
                await self._app(scope, self._bounded(receive, take), send)
            else:
                await error_response(_no_memory(), path_of(scope))(scope, receive, send)
        finally:
            budget.release(key, taken)

    def _bounded(self, receive: Receive, take: Callable[[int], Awaitable[bool]]) -> Receive:
        """Return a `receive` that counts the bytes of the body, for bodies whose length was not announced.

        It raises HTTPException (413, 429) for a body that is too large, or if `take`, which is called with the bytes so
        far, returns that there is no memory for them.
        """
        most, size = self._service.config.max_body_size, 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, _too_large().message)
            if not await take(size):
                error = _no_memory()
                raise HTTPException(error.status, error.message, error.headers)
            return message

        return bounded

    def _check(self, scope: Scope, headers: Headers) -> None:
        check_host(headers, self._hosts)
        if self._hosts is not None:
            check_page(scope["method"], headers, self._service.config.allowed_origins)
        key = self._keys.check(scope, headers)
        if path_of(scope) in self._keys.free:
            return
        check_content_type(scope["method"], headers)
        if path_of(scope) in ADMIN:
            return
        scope["jswa.key"] = key
        if int(headers.get("content-length", "0")) > self._service.config.max_body_size:
            raise _too_large()
        if scope["method"] == "POST":
            if self._service.failure is not None:
                raise self._service.failure
            if self._service.draining:
                raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def error_response(error: ApiError, path: str = "") -> JsonResponse:
    """Return the response for an error, in the form that clients of the route expect."""
    body = error.anthropic() if path.startswith("/v1/messages") else error.body()
    return JsonResponse(body, status_code=error.status, headers=error.headers)


async def _any_size(size: int) -> bool:
    return True


def _too_large() -> ApiError:
    return ApiError(413, "the body is too large", code="request_too_large")


def _no_memory() -> ApiError:
    return ApiError(
        429, "the bodies of other requests use all memory of --max-body-memory; try again later",
        code="body_memory_full", headers={"Retry-After": "1"},
    )  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
