"""The routes for operators: metrics, server information, the cache, aborting requests, LoRA adapters, new weights."""

import dataclasses
from typing import Annotated, Literal

from fastapi import Query
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jswa import __version__

from ..core.service import service_of
from ..http import limits
from ..http.errors import ApiError, invalid
from ..http.sse import JsonResponse
from ..pages.hints import chat_hints
from .schemas import Body, Id

_SECRET = (
    "api_key", "api_key_file", "api_key_weight", "admin_api_key", "ssl_keyfile", "ssl_certfile", "uds", "chat_template",
    "profile_dir", "otlp_traces_endpoint",
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


class UpdateWeights(Body):
    """The body of POST /update_weights_from_disk, as SGLang has it. The path is one of the server's machine.

    Attributes:
        in_flight: what unfinished requests do: "continue" with the new weights, "finish" with the old ones, or "abort".
        abort_all_requests: SGLang's name for "abort".
    """

    model_path: Annotated[str, Field(min_length=1, max_length=limits.MAX_PATH_CHARS)]
    in_flight: Literal["continue", "finish", "abort"] | None = None
    abort_all_requests: bool | None = None


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(await service_of(request).engine.metrics(), headers={"content-type": CONTENT_TYPE_LATEST})


async def server_info(request: Request) -> Response:
    """Return the version, the options without keys and paths, the current load, and what a chat shows."""
    service = service_of(request)
    info = await service.engine.info()
    config = {k: v for k, v in dataclasses.asdict(service.config).items() if k not in _SECRET}
    return JsonResponse(
        {
            "version": __version__,
            "model": service.names[0],
            "server": config,
            "engine": dataclasses.asdict(service.limits),
            "load": info.load,
            **info.rest,
            "chat": await chat_hints(request),
            "draining": service.draining,
        }
    )


async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache. Running requests keep their pages."""
    service = service_of(request)
    await service.engine.operate("flush_cache")
    return JsonResponse({"status": "ok"})


async def start_profile(request: Request) -> Response:
    """Begin a profile of the device and the engine's thread, in the folder of --profile-dir.

    Raises ApiError without that option.
    """
    folder = service_of(request).config.profile_dir
    if folder is None:
        raise ApiError(400, "profiles are off; start the server with --profile-dir", code="profiles_off")
    return await _profile(request, str(folder))


async def stop_profile(request: Request) -> Response:
    """End the profile and write it: XProf, TensorBoard and Perfetto read it."""
    return await _profile(request, None)


async def _profile(request: Request, folder: str | None) -> Response:
    await service_of(request).engine.operate("profile", folder)
    return JsonResponse({"status": "ok"})


async def abort(body: AbortRequest, request: Request) -> Response:
    """Abort requests: their texts end with the reason "abort". Raises ApiError unless the body names one, or all."""
    service = service_of(request)
    if (body.request_id is None) == (not body.abort_all):
        raise invalid("request_id", "set either request_id or abort_all = true")
    return JsonResponse({"aborted": await service.engine.abort_named(body.request_id)})


async def load_lora_adapter(body: LoadAdapter, request: Request) -> Response:
    """Load a LoRA adapter from a folder of this machine; requests may name it as their model from then on.

    Raises ApiError if its name is one of the model itself.
    """
    service = service_of(request)
    if body.lora_name in service.names:
        raise invalid("lora_name", f"{body.lora_name!r} is a name of the model itself: must be another one")
    await service.engine.operate("load_lora", body.lora_path, body.lora_name, bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> Response:
    """Unload a LoRA adapter: new requests for it are refused, those that run end as they would have."""
    await service_of(request).engine.operate("unload_lora", body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def update_weights_from_disk(body: UpdateWeights, request: Request) -> Response:
    """Change the weights between two steps; they are read from a folder of this machine."""
    in_flight = body.in_flight or ("abort" if body.abort_all_requests else "continue")
    version = await service_of(request).engine.operate("update_weights", body.model_path, in_flight)
    return JsonResponse({"success": True, "weight_version": version})


async def weight_version(request: Request) -> Response:
    """Return the version of the weights: 0 at the start, and one more with each change."""
    return JsonResponse({"weight_version": (await service_of(request).engine.standing()).version})


async def pause(request: Request, mode: Literal["abort", "keep", "wait"] = "abort") -> Response:
    """Run no step until /resume. Unfinished requests end ("abort"), wait ("keep"), or run to their end first ("wait").

    New requests wait in the queue.
    """
    await service_of(request).engine.operate("pause", mode)
    return JsonResponse({"status": "paused"})


async def resume(request: Request) -> Response:
    """Run steps again."""
    await service_of(request).engine.operate("resume")
    return JsonResponse({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused."""
    return JsonResponse({"is_paused": (await service_of(request).engine.standing()).paused})


async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    """Pause, and free the KV arena (1), and the weights too (2). Unfinished requests wait."""
    await service_of(request).engine.operate("sleep", level)
    return JsonResponse({"status": "ok"})


async def wake_up(request: Request) -> Response:
    """Take the memory back, and run steps again."""
    await service_of(request).engine.operate("wake")
    return JsonResponse({"status": "ok"})


async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps."""
    return JsonResponse({"is_sleeping": (await service_of(request).engine.standing()).level > 0})
