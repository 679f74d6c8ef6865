"""The routes POST /v1/completions/render and /v1/chat/completions/render: the tokens of a request, and no answer.

Routers that follow KV events ask an engine for them, to look up who has a prompt cached. Paths and fields are vLLM's
(docs/serving/renderer.md).
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jswa.images.tokens import shown

from ..core.service import Service, key_of, service_of
from ..http.pieces import listed, with_fields
from ..http.sse import unless_gone
from ..media.album import Album
from ..text.messages import chat_prompt
from ..text.prompts import Prompt, truncated
from .completions import prompts_of
from .foreign import refuse_foreign
from .params import refuse_unsupported
from .schemas import ChatRequest, CompletionRequest, Generation
from .tokenize import ids_in_json

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n",
    "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


async def render_completions(body: CompletionRequest, request: Request) -> Response:
    """Return a list with the tokens of each prompt. Raises ApiError."""
    service = service_of(request)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    prompts = await unless_gone(request.receive, prompts_of(service, body, service.run_for(request)))
    if prompts is None:
        return Response(status_code=499)
    name = f"cmpl-{_name(body, request)}"
    found = [await _rendered(service, body, model, f"{name}-{index}", one) for index, one in enumerate(prompts)]
    return service.answer(request, listed(found))


async def render_chat(body: ChatRequest, request: Request) -> Response:
    """Return the tokens of a conversation. Raises ApiError."""
    service = service_of(request)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    async with Album(service, key_of(request)) as album:
        prompt = await unless_gone(request.receive, chat_prompt(body, album))
    if prompt is None:
        return Response(status_code=499)
    prompt = truncated(prompt, body.truncate_prompt_tokens, service.max_model_len)
    found = await _rendered(service, body, model, f"chatcmpl-{_name(body, request)}", prompt)
    return service.answer(request, found)


def _name(body: Generation, request: Request) -> str:
    name: str = body.request_id or request.scope["jswa.request_id"]
    return name


async def _rendered(service: Service, body: Generation, model: str, name: str, prompt: Prompt) -> list[bytes]:
    """Return vLLM's GenerateRequest in JSON, in pieces; sampling parameters are those that the request gives."""
    images = service.engine.images
    ids = shown(prompt.ids, None if images is None else images.tokens)
    params: dict[str, Any] = body.model_dump(include=set(_SAMPLING), exclude_none=True)
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens
    return with_fields(
        {"request_id": name, "model": model, "sampling_params": params}, {"token_ids": await ids_in_json(ids)}
    )
