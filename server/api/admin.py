"""The routes for operators: metrics, server information, emptying the cache, aborting requests, LoRA adapters."""

import asyncio
import dataclasses
from typing import Annotated, Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jswa import __version__

from ..core.service import service_of
from ..http import limits
from ..http.errors import engine_errors, invalid
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


class LoadAdapter(Body):
    """The body of POST /v1/load_lora_adapter, as vLLM has it. The path is one of the server's machine."""

    lora_name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)]
    lora_path: Annotated[str, Field(min_length=1, max_length=limits.MAX_PATH_CHARS)]
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    """The body of POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)]


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(service_of(request).metrics(), headers={"content-type": CONTENT_TYPE_LATEST})


async def server_info(request: Request) -> Response:
    """Return the version, the options without keys and paths, and the current load."""
    service = service_of(request)
    now = service.snapshot()
    config = {k: v for k, v in dataclasses.asdict(service.config).items() if k not in _SECRET}
    load: dict[str, Any] = {**dataclasses.asdict(now.figures.rows), "requests": service.running}
    load |= {"tasks": len(asyncio.all_tasks()), "texts": service.engine_thread.active}
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
    with engine_errors():
        await service.engine_thread.call(lambda engine: engine.flush_cache())
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


async def load_lora_adapter(body: LoadAdapter, request: Request) -> Response:
    """Load a LoRA adapter from a folder of this machine; requests may name it as their model from then on."""
    service = service_of(request)
    if body.lora_name in service.names:
        raise invalid("lora_name", f"{body.lora_name!r} is a name of the model itself: must be another one")
    await service.load_lora(body.lora_name, body.lora_path, replace=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> Response:
    """Unload a LoRA adapter: new requests for it are refused, those that run end as they would have."""
    await service_of(request).unload_lora(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
