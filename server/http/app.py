"""The ASGI application: its routes, and handlers that give every error its API's shape."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jswa import __version__

from ..api import admin
from ..api.admin import (
    abort,
    flush_cache,
    load_lora_adapter,
    metrics,
    server_info,
    start_profile,
    stop_profile,
    unload_lora_adapter,
)  # fmt: skip
from ..api.anthropic import count_tokens, messages
from ..api.chat import chat_completions
from ..api.completions import completions
from ..api.responses import responses
from ..api.tokenize import detokenize, tokenize, tokenizer_info
from ..core.service import Service, service_of
from ..core.tracing import finish, telemetry
from ..pages.files import PAGES, page
from ..pages.live import feed_of, live_events
from .access import Access
from .auth import Gate, error_response, path_of
from .bodies import JsonRoute
from .cross_site import allowed_hosts, check_host, is_loopback
from .errors import ApiError, from_validation
from .sse import JsonResponse

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


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
        docs_url=None,  # this page loads scripts from other sites
        redoc_url=None,
        telemetry=traced,
    )
    app.state.service = service
    app.state.feed = feed_of(service)
    app.router.route_class = JsonRoute
    app.add_middleware(Gate, service=service)
    if service.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # for a public page that calls a server on this machine
        )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_routes(app)
    pages = tuple(PAGES) if service.config.pages else ()
    for path in pages:
        app.get(path, include_in_schema=False)(page)
        app.head(path, include_in_schema=False)(page)
    app.openapi_schema = _true_schema(app.openapi())
    app.add_middleware(Access, service=service, routes=[*app.openapi_schema["paths"], "/openapi.json", *pages])
    return app


def create_metrics_app(service: Service) -> ASGIApp:
    """Return the application of `--metrics-port`, which serves /metrics without a key.

    If it listens on loopback, it accepts the same Host headers as a server without API keys.
    """
    config = service.config
    host = config.metrics_host or config.host
    own = config.allowed_hosts if is_loopback(host) else ("*",)
    hosts = allowed_hosts(dataclasses.replace(config, host=host, uds=None, allowed_hosts=own), keys=False)
    app = Starlette(routes=[Route("/metrics", metrics)])
    app.state.service = service

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_host(Headers(scope=scope), hosts)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _add_routes(app: FastAPI) -> None:
    generating = _responses(400, 401, 404, 413, 429, 500, 503, 504)
    streaming = {
        **generating,
        200: {"description": "the response, or a stream of its chunks", "content": {"text/event-stream": {}}},
    }
    app.post("/v1/completions", responses=streaming)(completions)
    app.post("/v1/chat/completions", responses=streaming)(chat_completions)
    app.post("/v1/responses", responses=streaming)(responses)
    app.post("/v1/messages", responses=streaming)(messages)
    app.post("/v1/messages/count_tokens", responses=generating)(count_tokens)
    app.get("/v1/models", responses=_responses(401))(models)
    app.get("/v1/models/{model:path}", responses=_responses(401, 404))(model)
    app.post("/tokenize", responses=generating)(tokenize)
    app.post("/detokenize", responses=generating)(detokenize)
    app.get("/tokenizer_info", responses=_responses(401, 404))(tokenizer_info)
    app.get("/metrics", responses=_responses(401), response_class=PlainTextResponse)(metrics)
    app.head("/metrics", include_in_schema=False)(metrics)
    app.get("/server_info", responses=_responses(401))(server_info)
    app.post("/flush_cache", responses=_responses(401, 403, 500, 503))(flush_cache)
    app.post("/abort", responses=_responses(400, 401, 403, 413, 500))(abort)
    app.post("/start_profile", responses=_responses(400, 401, 403, 500, 503))(start_profile)
    app.post("/stop_profile", responses=_responses(400, 401, 403, 500, 503))(stop_profile)
    watching = {**_responses(401, 403, 429, 500), 200: {"description": "events", "content": {"text/event-stream": {}}}}
    app.get("/live/events", responses=watching)(live_events)
    errors = _responses(400, 401, 403, 404, 413, 500, 503)
    app.post("/v1/load_lora_adapter", responses=errors, response_class=PlainTextResponse)(load_lora_adapter)
    app.post("/v1/unload_lora_adapter", responses=errors, response_class=PlainTextResponse)(unload_lora_adapter)
    changes = _responses(400, 401, 403, 500, 503)
    app.post("/update_weights_from_disk", responses=errors)(admin.update_weights_from_disk)
    app.get("/weight_version", responses=changes)(admin.weight_version)
    app.post("/pause", responses=changes)(admin.pause)
    app.post("/resume", responses=changes)(admin.resume)
    app.get("/is_paused", responses=changes)(admin.is_paused)
    app.post("/sleep", responses=changes)(admin.sleep)
    app.post("/wake_up", responses=changes)(admin.wake_up)
    app.get("/is_sleeping", responses=changes)(admin.is_sleeping)
    app.get("/health", responses=_responses(503))(health)
    app.get("/ready", responses=_responses(503))(ready)
    app.get("/version", responses=_responses(401))(version)


async def models(request: Request) -> Response:
    """Return all names of the model and of its adapters."""
    service = service_of(request)
    return JsonResponse(
        {"object": "list", "data": [_card(service, name) for name in (*service.names, *service.engine.adapters)]}
    )


async def model(model: str, request: Request) -> Response:
    """Return one name of the model, or one adapter."""
    service = service_of(request)
    return JsonResponse(_card(service, service.check_model(model)))


async def health(request: Request) -> Response:
    """Return status 200 if the engine is up, else 503."""
    failure = service_of(request).failure
    if failure is not None:
        return error_response(ApiError(503, failure.message, code=failure.code))
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Return status 200 if the server accepts new requests, else 503."""
    if not service_of(request).ready:
        return error_response(ApiError(503, "the server accepts no new requests", code="not_ready"))
    return JsonResponse({"status": "ok"})


async def version() -> Response:
    """Return the version of jswa."""
    return JsonResponse({"version": __version__})


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "jswa", "root": service.names[0],
        "parent": service.names[0] if name in service.engine.adapters else None, "max_model_len": service.max_model_len,
    }  # fmt: skip


def _true_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove status 422 from the schema: FastAPI documents it for invalid requests, which get status 400 here."""
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    return schema


def _responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"description": "error", "content": {"application/json": {"schema": _ERROR}}} for status in statuses
    }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, path_of(request.scope))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(from_validation(error.errors()), path_of(request.scope))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 429: "body_memory_full"}
    return error_response(
        ApiError(error.status_code, str(error.detail), code=codes.get(error.status_code), headers=error.headers),
        path_of(request.scope),
    )
