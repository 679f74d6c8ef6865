"""The routes that say what a server is: names of its models, health, version, and the description of its API."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jswa import __version__

from ..core.service import Service, service_of
from .errors import ApiError, error_response
from .sse import JsonResponse


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


async def load(request: Request) -> Response:
    """Return how many requests are in progress, as vLLM does."""
    return JsonResponse({"server_load": (await service_of(request).engine.info()).load["requests"]})


async def version() -> Response:
    """Return the version of jswa."""
    return JsonResponse({"version": __version__})


async def openapi(request: Request) -> Response:
    """Return the description of the API; its addresses begin with the path under which a proxy shows the server."""
    # FastAPI writes it once, at the first request: that takes 0.2 s, which a start need not wait for.
    described = _as_answered(await asyncio.to_thread(request.app.openapi))
    root = request.scope.get("root_path", "").rstrip("/")
    return JsonResponse({**described, "servers": [{"url": root}]} if root else described)


def _as_answered(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a description without status 422, which FastAPI writes for invalid requests: they get status 400 here."""
    paths = {
        path: {method: {**said, "responses": _without(said["responses"], "422")} for method, said in methods.items()}
        for path, methods in schema["paths"].items()
    }
    parts = schema.get("components", {})
    schemas = _without(parts.get("schemas", {}), "HTTPValidationError", "ValidationError")
    return {**schema, "paths": paths, "components": {**parts, "schemas": schemas}}


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "jswa", "root": service.root,
        "parent": service.names[0] if name in service.engine.adapters else None, "max_model_len": service.max_model_len,
    }  # fmt: skip
