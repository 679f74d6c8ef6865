"""The table of routes: what a route is, and which one a request names.

The table alone decides which route a request reaches. The gate looks it up once, and keys, budgets, metrics, the
handlers of the application and the relay in front of replicas all use what was found.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from starlette.responses import Response
from starlette.types import Scope

from ..http.errors import ApiError

type Whose = Literal["nobody", "user", "operator", "either"]
type Replicas = Literal["one", "all", "none"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # Unicode's separators of lines and paragraphs too
_REST = ":path}"  # the end of a path whose last part may have slashes


@dataclass(frozen=True)
class Route:
    """One route of the server.

    Attributes:
        path: as a client writes it; a last part `{name:path}` stands for any text.
        methods: HTTP methods; no other one reaches the handler.
        handler: FastAPI calls it.
        about: what the route is for, as Markdown.
        whose: the key that a request needs: nobody's, a user's, the operator's, or either of these.
        replicas: whether, among several replicas, one answers, all of them do, or none may.
        options: what FastAPI's description of the route says besides.
        described: whether the description of the API has the route.
    """

    path: str
    methods: tuple[str, ...]
    handler: Callable[..., Awaitable[Response]]
    about: str
    whose: Whose = "user"
    replicas: Replicas = "one"
    options: Mapping[str, Any] = field(default_factory=dict)
    described: bool = True

    @property
    def name(self) -> str:
        """The path as the description of the API and the metrics write it."""
        return self.path.replace(_REST, "}")

    def check_method(self, method: str) -> None:
        """Raise ApiError (405) if the route has no such method."""
        if method not in self.methods:
            allowed = ", ".join(self.methods)
            raise ApiError(405, "Method Not Allowed", code="method_not_allowed", headers={"Allow": allowed})


class RouteMatch(NamedTuple):
    """The route that a request names, and the values of the parameters in its path."""

    route: Route
    params: dict[str, str]


class Table:
    """Routes by their paths. Raises ValueError if two of them have the same path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact = {route.path: route for route in routes}
        self._open = [route for route in routes if route.path.endswith(_REST)]
        self._offered = ", ".join(route.path for route in routes if _is_offered(route))
        if len(self._exact) != len(routes):
            raise ValueError("a path is listed twice")

    def __iter__(self) -> Iterator[Route]:
        """Iterate over the routes in their order."""
        return iter(self._exact.values())

    def find(self, scope: Scope) -> "RouteMatch | ApiError":
        """Return the route of a request, whatever its method; without one, the error: 400 for a control character, 404.

        What is found is set in the scope.
        """
        path = path_of(scope)
        if control := _CONTROL.search(path):
            reason = f"the path has the control character U+{ord(control[0]):04X}, which no path may have"
            return ApiError(400, reason, code="invalid_path")
        found = scope["jswa.found"] = self._named(path)
        return found or ApiError(404, self._missing(path), code="not_found")

    def _missing(self, path: str) -> str:
        """Return what a client is told that calls a path of another API: what there is instead."""
        offered = f"; it has {self._offered}, and GET /openapi.json describes them" if self._offered else ""
        return f"Not Found: this server has no {path[:200]}{offered}"

    def _named(self, path: str) -> RouteMatch | None:
        if path in self._exact and not path.endswith(_REST):
            return RouteMatch(self._exact[path], {})
        for route in self._open:
            start, _, name = route.path.removesuffix(_REST).rpartition("{")
            if path.startswith(start):
                return RouteMatch(route, {name: path.removeprefix(start)})
        return None


def _is_offered(route: Route) -> bool:
    return route.described and route.whose == "user" and not route.path.endswith(_REST)


def path_of(scope: Scope) -> str:
    """Return the path of a request as the table has it, without the path under which a proxy shows the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def found_in(scope: Scope) -> RouteMatch | None:
    """Return the route that the gate has found for a request; None if it has found none."""
    found: RouteMatch | None = scope.get("jswa.found")
    return found
