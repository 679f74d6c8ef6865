"""The class of the application's routes: which requests they answer, and where their bodies are parsed."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from ..core.off_loop import made
from ..gate.table import found_in
from .bodies import SMALL, parse, parse_whole


class JsonRequest(Request):
    """A request with a JSON body, which is parsed before FastAPI asks for its value."""

    _value: Any = None

    async def parse(self) -> None:
        """Read and parse the body, if there is one: in a thread if it is large. Raises ApiError if it is not JSON."""
        body = await self.body()
        if len(body) > SMALL:
            self._value = await made(partial(parse, body), len(body))
        elif body:
            self._value = parse_whole(body)

    async def json(self) -> Any:
        """Return the value of the body."""
        return self._value


class JsonRoute(APIRoute):
    """A route with a JSON body. It answers a request only if the gate has found it in the table."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the gate has found this route."""
        found = found_in(scope)
        if found is None or found.route.path != self.path or scope["method"] not in (self.methods or ()):
            return Match.NONE, {}
        return Match.FULL, {"endpoint": self.endpoint, "path_params": found.params, "route": self}

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route's requests."""
        handle = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            request = JsonRequest(request.scope, request.receive)
            try:
                await (request.body() if self.body_field is None else request.parse())
            except ClientDisconnect:
                return Response(status_code=499)
            return await handle(request)

        return parsed
