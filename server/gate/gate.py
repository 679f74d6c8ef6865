"""The gate in front of all routes: it checks keys, hosts and bodies, and refuses new work during a shutdown."""

from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.service import Service
from ..http.errors import ApiError, error_response, no_body_memory
from .cross_site import allowed_hosts, check_content_type, check_host, check_page
from .keys import Keys
from .table import Route, RouteMatch, Table, path_of


def admitted(found: RouteMatch | ApiError, scope: Scope, headers: Headers, keys: Keys) -> tuple[Route, str | None]:
    """Return the route that was found for a request, and the request's key. Raises ApiError.

    A request that names no route needs a key all the same: strangers learn nothing about the server.
    """
    if isinstance(found, ApiError):
        if found.status == 404:
            keys.check("either", headers)
        raise found
    key = keys.check(found.route.whose, headers)
    found.route.check_method(scope["method"])
    return found.route, key


class Gate:
    """ASGI middleware that checks requests, and bounds the memory of their bodies.

    It sets a request's route and key in the scope; what the table does not list is refused.
    """

    def __init__(self, app: ASGIApp, service: Service, table: Table) -> None:
        self._app = app
        self._service = service
        self._table = table
        self._keys = Keys(service.config.api_key, service.config.admin_api_key)
        self._hosts = allowed_hosts(service.config, keys=bool(service.config.api_key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        try:
            route = self._check(scope, headers)
        except ApiError as error:
            await error_response(error, path_of(scope))(scope, receive, send)
            return
        if route.whose == "user":
            await self._with_budget(scope, receive, send, int(headers.get("content-length", "0")))
        else:
            await self._app(scope, self._bounded(receive, _any_size), send)

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
                await error_response(no_body_memory(), path_of(scope))(scope, receive, send)
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
                error = no_body_memory()
                raise HTTPException(error.status, error.message, error.headers)
            return message

        return bounded

    def _check(self, scope: Scope, headers: Headers) -> Route:
        found = self._table.find(scope)
        check_host(headers, self._hosts)
        if self._hosts is not None:
            check_page(scope["method"], headers, self._service.config.allowed_origins)
        route, key = admitted(found, scope, headers, self._keys)
        if route.whose == "nobody":
            return route
        check_content_type(scope["method"], headers)
        if route.whose == "operator":
            return route
        scope["jswa.key"] = key
        if int(headers.get("content-length", "0")) > self._service.config.max_body_size:
            raise _too_large()
        if scope["method"] == "POST":
            if self._service.failure is not None:
                raise self._service.failure
            if self._service.draining:
                raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        return route


async def _any_size(size: int) -> bool:
    return True


def _too_large() -> ApiError:
    return ApiError(413, "the body is too large", code="request_too_large")
