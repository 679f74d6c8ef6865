"""The ASGI application: its routes, and handlers that give every error its API's shape."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jswa import __version__

from ..api.admin import metrics
from ..core.service import Service
from ..core.tracing import finish, telemetry
from ..gate.cross_site import allowed_hosts, check_host, is_loopback
from ..gate.gate import Gate, admitted
from ..gate.keys import Keys
from ..gate.routes import table
from ..gate.table import Route, Table, path_of
from ..pages.live import feed_of
from .access import Access
from .errors import ApiError, error_response, from_validation
from .json_route import JsonRoute


def create_app(service: Service) -> FastAPI:
    """Return the application of a server. Its lifespan starts and shuts down `service`."""
    traced = telemetry(service.config.otlp_traces_endpoint)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[dict[str, Service]]:
        await service.start_up()
        yield {"service": service}  # for `HeaderLimit`, which has no request to find it by
        await service.shut_down()
        await asyncio.to_thread(finish, traced)

    app = FastAPI(
        title="jswa",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # the table has a route for it
        redirect_slashes=False,  # a path that is not in the table is no route's
        telemetry=traced,
    )
    app.state.service = service
    app.state.feed = feed_of(service)
    app.router.route_class = JsonRoute
    routes = table(pages=service.config.pages)
    app.add_middleware(Gate, service=service, table=routes)
    if service.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,  # for a public page that calls a server on this machine
        )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_routes(app, routes)
    app.add_middleware(Access, service=service)
    return app


def _add_routes(app: FastAPI, routes: Table) -> None:
    for route in routes:
        for method in route.methods:
            shown = route.described and method != "HEAD"
            add = app.api_route(route.path, methods=[method], include_in_schema=shown, **route.options)
            add(route.handler)


def create_metrics_app(service: Service) -> ASGIApp:
    """Return the application of `--metrics-port`, which serves /metrics without a key.

    If it listens on loopback, it accepts the same Host headers as a server without API keys.
    """
    config = service.config
    host = config.metrics_host or config.host
    own = config.allowed_hosts if is_loopback(host) else ("*",)
    hosts = allowed_hosts(dataclasses.replace(config, host=host, uds=None, allowed_hosts=own), keys=False)
    only = Table([Route("/metrics", ("GET", "HEAD"), metrics, "", whose="nobody")])
    app = Starlette()
    app.add_route("/metrics", metrics)
    app.state.service = service

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_host(Headers(scope=scope), hosts)
            admitted(only.find(scope), scope, Headers(scope=scope), Keys((), None))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, path_of(request.scope))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(from_validation(error.errors()), path_of(request.scope))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {413: "request_too_large", 429: "body_memory_full"}
    return error_response(
        ApiError(error.status_code, str(error.detail), code=codes.get(error.status_code), headers=error.headers),
        path_of(request.scope),
    )
