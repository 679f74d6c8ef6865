"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..core.request import Delta, Job
from ..core.service import Service, key_of, service_of
from ..http.errors import ApiError
from ..http.sse import DONE, EventStream, event, unless_gone
from ..text.logprobs import of_chat, of_prompt
from ..text.messages import chat_prompt
from ..text.prompts import check_length, truncated
from .completions import usage, usage_of
from .foreign import refuse_foreign
from .params import refuse_unsupported, sampling_params
from .schemas import ChatRequest


@dataclass(frozen=True)
class Reply:
    """What all parts of a response share."""

    service: Service
    body: ChatRequest
    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A response, or one chunk of it."""
        return {
            "id": f"chatcmpl-{self.name}", "object": kind, "created": self.created, "model": self.model,
            "choices": choices, **more,
        }  # fmt: skip

    def logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        """Of new tokens."""
        if not self.body.logprobs:
            return None
        top, texts = self.body.top_logprobs or 0, self.service.texts
        content = [of_chat(delta.logprobs, top, texts) for delta in deltas if delta.logprobs is not None]
        return {"content": content, "refusal": None}


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    reply = Reply(service, body, body.request_id or request.scope["jswa.request_id"], service.check_model(body.model))
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(
        body,
        service.default_sampling,
        max_tokens=max_tokens if max_tokens is not None else service.default_sampling.get("max_tokens"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = truncated(
        await chat_prompt(service, body, key_of(request)), body.truncate_prompt_tokens, service.max_model_len
    )
    # More tokens than the context has left are cut to what is left, by the engine: clients send a fixed number.
    check_length(prompt, 1, service.max_model_len)
    job = await service.start(request, body, [prompt], params, reply.name)
    if body.stream:
        return EventStream(_stream(reply, job), lambda: service.end(job, reply.name), service.config.keep_alive)
    try:
        done = await unless_gone(request.receive, _collect(reply, job))
    finally:
        service.end(job, reply.name)
    return service.answer(request, done) if done is not None else Response(status_code=499)


async def _collect(reply: Reply, job: Job) -> dict[str, Any]:
    texts: dict[int, list[Delta]] = {}
    async for delta in job.deltas():
        texts.setdefault(delta.text.index, []).append(delta)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(delta.new for delta in deltas), "refusal": None},
            "logprobs": reply.logprobs(deltas),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        for index, deltas in sorted(texts.items())
    ]
    more: dict[str, Any] = {"usage": usage(job)}
    wanted = reply.body.prompt_logprobs
    if wanted is not None:
        entries = next((d.prompt_logprobs for d in texts[0] if d.prompt_logprobs is not None), [])
        more["prompt_logprobs"] = of_prompt(entries, wanted, reply.service.texts)
    return reply.whole("chat.completion", choices, **more)


async def _stream(reply: Reply, job: Job) -> AsyncGenerator[bytes]:
    kind, body = "chat.completion.chunk", reply.body
    try:
        for index in range(body.n or 1):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield event(reply.whole(kind, [{**first, "finish_reason": None}], **usage_of(body, job)))
        async for delta in job.deltas():
            for choice in _chunks(reply, delta):
                yield event(reply.whole(kind, [choice], **usage_of(body, job)))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(reply.whole(kind, [], usage=usage(job)))
        yield DONE
    except ApiError as error:
        yield event(error.body())


def _chunks(reply: Reply, delta: Delta) -> list[dict[str, Any]]:
    """What one event brings: new text, and the end in a chunk of its own."""
    chunks: list[dict[str, Any]] = []
    index = delta.text.index
    wants = bool(reply.body.logprobs) and delta.logprobs is not None
    if delta.new or wants:
        chunks.append(
            {"index": index, "delta": {"content": delta.new}, "logprobs": reply.logprobs([delta]) if wants else None,
             "finish_reason": None}
        )  # fmt: skip
    if delta.finish_reason is not None:
        chunks.append(
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason,
             "stop_reason": delta.stop_reason}
        )  # fmt: skip
    return chunks
