"""POST /v1/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jswa.plan import ChoiceLogprobs

from ..core.fairness import Key
from ..core.request import Delta, Job
from ..core.service import Service, key_of, service_of
from ..http.errors import ApiError, unsupported
from ..http.sse import DONE, EventStream, event, unless_gone
from ..text.logprobs import legacy, of_prompt, prompt_offsets
from ..text.prompts import Prompt, check_length, encode, split_off_loop, truncated
from .foreign import refuse_foreign
from .params import check_texts, refuse_unsupported, sampling_params
from .schemas import CompletionRequest, Generation

_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Reply:
    """What all parts of a response share."""

    service: Service
    body: CompletionRequest
    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def scores_only(self) -> bool:
        """Whether nothing is to be generated."""
        return self.body.max_tokens == 0

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A response, or one chunk of it."""
        return {
            "id": f"cmpl-{self.name}", "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices, **more,
        }  # fmt: skip


async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service = service_of(request)
    reply = Reply(service, body, body.request_id or request.scope["jswa.request_id"], service.check_model(body.model))
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    if body.suffix:
        raise unsupported("suffix", "is not supported")
    if reply.scores_only and not body.echo:
        raise ApiError(400, "max_tokens: must be at least 1 without echo", param="max_tokens", code="invalid_value")
    prompts = await _prompts(service, body, key_of(request))
    job = await service.start(request, body, prompts, _params(service, body, prompts), reply.name)
    if body.stream:
        return EventStream(_stream(reply, job), lambda: service.end(job, reply.name), service.config.keep_alive)
    try:
        done = await unless_gone(request.receive, _collect(reply, job))
    finally:
        service.end(job, reply.name)
    return service.answer(request, done) if done is not None else Response(status_code=499)


def usage(job: Job) -> dict[str, Any]:
    """Tokens of a request, so far."""
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "total_tokens": job.prompt_tokens + job.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }


def usage_of(body: Generation, job: Job) -> dict[str, Any]:
    """What a chunk says of usage: nothing, null, or the count so far."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return {}
    return {"usage": usage(job) if options.continuous_usage_stats else None}


async def _prompts(service: Service, body: CompletionRequest, key: Key) -> list[Prompt]:
    parts = await split_off_loop(body.prompt, service.helpers, key)
    check_texts(len(parts), body.n or 1)
    texts = [part for part in parts if isinstance(part, str)]
    if texts:
        prompts = await encode(
            texts, service.tokenizer, service.helpers, key, special=body.add_special_tokens is not False
        )
    else:
        prompts = [Prompt(None, part) for part in parts if not isinstance(part, str)]
    prompts = [truncated(prompt, body.truncate_prompt_tokens, service.max_model_len) for prompt in prompts]
    for prompt in prompts:
        check_length(prompt, body.max_tokens, service.max_model_len)
    return prompts


def _params(service: Service, body: CompletionRequest, prompts: list[Prompt]) -> Any:
    default = max(min(_DEFAULT_TOKENS, *(service.max_model_len - len(prompt.ids) for prompt in prompts)), 1)
    echoed = body.logprobs if body.echo else None
    wanted = [value for value in (body.prompt_logprobs, echoed) if value is not None]
    return sampling_params(
        body,
        service.default_sampling,
        max_tokens=default if body.max_tokens is None else max(body.max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=max(wanted, default=None),
    )


async def _collect(reply: Reply, job: Job) -> dict[str, Any]:
    texts: dict[int, list[Delta]] = {}
    async for delta in job.deltas():
        texts.setdefault(delta.text.index, []).append(delta)
    parts = [part for _, part in sorted(texts.items())]
    shown = reply.body.logprobs is not None or bool(reply.body.echo)
    long = shown and sum(len(part[0].text.prompt.ids) for part in parts) > 2_000

    def make() -> list[dict[str, Any]]:
        return [_choice(reply, part) for part in parts]

    choices = await asyncio.to_thread(make) if long else make()
    return reply.whole(choices, usage=usage(job))


def _choice(reply: Reply, deltas: list[Delta]) -> dict[str, Any]:
    """One choice of a response that is not streamed."""
    body, text = reply.body, deltas[0].text
    shown = "" if reply.scores_only else "".join(delta.new for delta in deltas)
    logprobs = None
    prompt_text, offsets = "", [0]
    if body.echo:
        prompt_text, offsets = prompt_offsets(
            text.prompt, reply.service.tokenizer, skip_special_tokens=text.params.skip_special_tokens
        )
    if body.logprobs is not None:
        logprobs = _logprobs(reply, deltas, offsets, len(prompt_text))
    choice = {
        "index": text.index, "text": prompt_text + shown, "logprobs": logprobs,
        "finish_reason": "length" if reply.scores_only else deltas[-1].finish_reason,
        "stop_reason": None if reply.scores_only else deltas[-1].stop_reason,
    }  # fmt: skip
    if body.prompt_logprobs is not None:
        entries = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), [])
        choice["prompt_logprobs"] = of_prompt(entries, body.prompt_logprobs, reply.service.texts)
    return choice


def _logprobs(reply: Reply, deltas: list[Delta], offsets: list[int], base: int) -> dict[str, Any]:
    """Of one choice, or of one chunk of it: its new tokens, and with echo the prompt's."""
    entries: list[tuple[ChoiceLogprobs | int, int]] = []
    prompt = deltas[0].text.prompt
    for delta in deltas:
        if reply.body.echo and delta.prompt_logprobs is not None:
            first: list[ChoiceLogprobs | int] = [int(prompt.ids[0])]
            entries += zip([*first, *delta.prompt_logprobs], offsets, strict=True)
        if delta.logprobs is not None and not reply.scores_only:
            entries.append((delta.logprobs, base + delta.offset))
    return legacy(entries, reply.body.logprobs or 0, reply.service.texts)


async def _stream(reply: Reply, job: Job) -> AsyncGenerator[bytes]:
    try:
        begun: dict[int, tuple[str, list[int]]] = {}
        async for delta in job.deltas():
            if (chunk := _chunk(reply, delta, begun)) is not None:
                yield event(reply.whole([chunk], **usage_of(reply.body, job)))
        options = reply.body.stream_options
        if options is not None and options.include_usage:
            yield event(reply.whole([], usage=usage(job)))
        yield DONE
    except ApiError as error:
        yield event(error.body())


def _chunk(reply: Reply, delta: Delta, begun: dict[int, tuple[str, list[int]]]) -> dict[str, Any] | None:
    """What one event brings, None where it is nothing that a client can see. `begun`: echoed prompts by choice."""
    body, text = reply.body, delta.text
    new = "" if reply.scores_only else delta.new
    prompt_text, offsets = begun.get(text.index, ("", [0]))
    if body.echo and text.index not in begun:
        prompt_text, offsets = begun[text.index] = prompt_offsets(
            text.prompt, reply.service.tokenizer, skip_special_tokens=text.params.skip_special_tokens
        )
        new = prompt_text + new
    wants = body.logprobs is not None and (delta.logprobs is not None or delta.prompt_logprobs is not None)
    if not new and not wants and delta.finish_reason is None:
        return None
    return {
        "index": text.index, "text": new,
        "logprobs": _logprobs(reply, [delta], offsets, len(prompt_text)) if wants else None,
        "finish_reason": "length" if reply.scores_only else delta.finish_reason,
        "stop_reason": None if reply.scores_only else delta.stop_reason,
    }  # fmt: skip
