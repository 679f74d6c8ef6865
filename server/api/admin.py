"""The routes for operators: metrics, server information, emptying the cache, and aborting requests."""

import asyncio
import dataclasses
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from jswa import __version__

from ..core.service import service_of
from ..http.errors import invalid
from ..http.sse import JsonResponse
from .schemas import Body, Id

_SECRET = (
    "api_key", "api_key_weight", "admin_api_key", "ssl_keyfile", "ssl_certfile", "uds", "chat_template",
    "otlp_traces_endpoint",
)  # fmt: skip


class AbortRequest(Body):
    """The body of POST /abort: the id of one request, or `abort_all`."""

    request_id: Id | None = None
    abort_all: bool | None = None


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    service = service_of(request)
    body = service.metrics.exposition(service.snapshot())
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


async def server_info(request: Request) -> Response:
    """Return the version, the options without keys and paths, and the current load."""
    service = service_of(request)
    now = service.snapshot()
    config = {k: v for k, v in dataclasses.asdict(service.config).items() if k not in _SECRET}
    load: dict[str, Any] = {**dataclasses.asdict(now.figures.rows), "requests": service.running}
    load |= {"tasks": len(asyncio.all_tasks()), "texts": service.bridge.active}
    return JsonResponse(
        {
            "version": __version__,
            "model": service.names[0],
            "server": config,
            "engine": dataclasses.asdict(now.limits),
            "load": load,
            "steps": dataclasses.asdict(now.figures.steps),
            "state": now.state,
            "restarts": now.restarts,
            "prefix_cache": dataclasses.asdict(now.figures.cache),
            "draining": service.draining,
        }
    )


async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache. Running requests keep their pages."""
    service = service_of(request)
    await service.bridge.call(lambda engine: engine.flush_cache())
    return JsonResponse({"status": "ok"})


async def abort(body: AbortRequest, request: Request) -> Response:
    """Abort requests: their texts end with the reason "abort"."""
    service = service_of(request)
    if (body.request_id is None) == (not body.abort_all):
        raise invalid("request_id", "set either request_id or abort_all = true")
    names = list(service.jobs) if body.request_id is None else [body.request_id]
    jobs = [job for name in names for job in service.jobs.get(name, ())]
    for job in jobs:
        job.abort()
    return JsonResponse({"aborted": len(jobs)})
