"""The route POST /v1/chat/completions."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jswa.plan import ChoiceLogprobs, PromptLogprobs
from jswa.text.answers.message import AnswerText, new_call_id
from jswa.types import AnswerEvent

from ..core.off_loop import gathered
from ..core.request import Job
from ..core.service import Service, key_of, service_of
from ..core.texts import Delta, Frames
from ..http.errors import ApiError
from ..http.pieces import JsonList, around, folded, listed, with_fields
from ..http.sse import DONE, event, unless_gone
from ..media.album import Album
from ..text.forms import answer_form
from ..text.logprobs import of_chat, of_prompt
from ..text.messages import answering, chat_prompt
from ..text.prompts import check_length, truncated
from .completions import counts_usage, last_timings, timings, usage, usage_of
from .foreign import refuse_foreign
from .params import refuse_unsupported, sampling_params
from .schemas import ChatRequest
from .structured import form_of

_REASONING = ("reasoning_content", "reasoning")  # both names of the field that clients read
_WIDTH = 8  # work for a position of log probabilities, compared with a token


@dataclass(frozen=True)
class ChatReply:
    """The values that all parts of a response share."""

    service: Service
    body: ChatRequest
    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, kind: str, **more: Any) -> dict[str, Any]:
        """Return a response or one chunk of it, with `more` fields."""
        head = {"id": f"chatcmpl-{self.name}", "object": kind, "created": self.created, "model": self.model}
        return {**head, **more}

    def entry(self, delta: Delta) -> bytes | None:
        """Return the log probabilities of a new token in JSON; None if the request asks for none."""
        if not self.body.logprobs or delta.logprobs is None:
            return None
        return of_chat(delta.logprobs, self.body.top_logprobs or 0, self.service.texts)


@dataclass
class ChatChoice:
    """One choice of a response that is not streamed.

    Attributes:
        answer: its texts and tool calls.
        logprobs: entries in JSON, encoded when their tokens arrive.
        last: the last delta, without its log probabilities.
    """

    answer: AnswerText = field(default_factory=AnswerText)
    logprobs: JsonList = field(default_factory=JsonList)
    last: Delta | None = None

    def pieces(self, index: int, *, scored: bool, reasoning: bool) -> list[bytes]:
        """Return the JSON of the choice in pieces. `scored`: with log probabilities; `reasoning`: with reasoning."""
        assert self.last is not None
        message = self.answer.message()
        if not reasoning:
            message = {key: value for key, value in message.items() if key not in _REASONING}
        choice = {
            "index": index,
            "message": {**message, "refusal": None},
            "finish_reason": finish_reason(self.last),
            "stop_reason": self.last.stop_reason,
        }
        logprobs = [b'{"refusal":null,"content":', *self.logprobs.pieces(), b"}"] if scored else [b"null"]
        return with_fields(choice, {"logprobs": logprobs})


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    service = service_of(request)
    reply = ChatReply(
        service, body, body.request_id or request.scope["jswa.request_id"], service.check_model(body.model)
    )
    job = await unless_gone(request.receive, start_chat(service, body, request, reply.name))
    if job is None:
        return Response(status_code=499)
    events = _stream(reply, job) if body.stream else None
    return await service.respond(
        request, job, reply.name, stream=events, whole=lambda: _collect(reply, job), frames=partial(_frames, reply, job)
    )


async def start_chat(
    service: Service, body: ChatRequest, request: Request, name: str, album: Album | None = None
) -> Job:
    """Queue a chat and return its job, whose deltas have answer events; the caller must end it. Raises ApiError.

    Args:
        album: of the request, if other prompts of it were made before.
    """
    if album is None:
        async with Album(service, key_of(request)) as own:
            return await start_chat(service, body, request, name, own)
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    form = form_of(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = await sampling_params(
        body,
        service.default_sampling,
        max_tokens=max_tokens if max_tokens is not None else service.default_sampling.get("max_tokens"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    key = key_of(request)
    prompt = truncated(await chat_prompt(body, album), body.truncate_prompt_tokens, service.max_model_len)
    # The engine cuts max_tokens to the room that the context has left, since many clients send a fixed number.
    check_length(prompt, 1, service.max_model_len)
    reading = replace(answering(service, body), form=None if form is None else form.spec)
    spec = await answer_form(service, body, form, reading, prompt, key)
    params = params if spec is None else replace(params, structured_outputs=spec)
    return await service.start(request, body, [prompt], params, name, reading)


def finish_reason(delta: Delta) -> str | None:
    """Return the reason why a choice has ended, in OpenAI's words; None if it has not."""
    answer = delta.text.generated.parser
    called = answer is not None and answer.calls > 0
    return "tool_calls" if delta.finish_reason == "stop" and called else delta.finish_reason


def chat_usage(job: Job) -> dict[str, Any]:
    """Return the `usage` of a chat so far, with the tokens of its reasoning."""
    found = usage(job)
    details = {"reasoning_tokens": job.reasoning_tokens, **found.get("completion_tokens_details", {})}
    return {**found, "completion_tokens_details": details}


async def _collect(reply: ChatReply, job: Job) -> list[bytes]:
    body, choices = reply.body, defaultdict[int, ChatChoice](ChatChoice)
    of_prompts: Collection[ChoiceLogprobs] | PromptLogprobs = ()
    async for delta in job.deltas():
        choice = choices[delta.text.index]
        for one in delta.events:
            choice.answer.add(one)
        choice.last = delta._replace(logprobs=None, prompt_logprobs=None)
        if (entry := reply.entry(delta)) is not None:
            choice.logprobs.add(entry)
        if delta.prompt_logprobs is not None and delta.text.index == 0:
            of_prompts = delta.prompt_logprobs
    scored, reasoning = bool(body.logprobs), body.include_reasoning is not False
    finished = (choice.pieces(index, scored=scored, reasoning=reasoning) for index, choice in sorted(choices.items()))
    fields = {"choices": listed(await gathered(finished, job.completion_tokens))}
    if body.prompt_logprobs is not None:
        items = of_prompt(of_prompts, body.prompt_logprobs, reply.service.texts)
        fields["prompt_logprobs"] = listed([part] for part in await gathered(folded(items), _WIDTH * len(of_prompts)))
    return with_fields(reply.whole("chat.completion", usage=chat_usage(job), timings=timings(job)), fields)


async def _stream(reply: ChatReply, job: Job) -> AsyncGenerator[bytes]:
    kind, body = "chat.completion.chunk", reply.body
    try:
        for index in range(body.n or 1):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield event(
                reply.whole(kind, choices=[{**first, "finish_reason": None}], **usage_of(body, job, chat_usage))
            )
        async for delta in job.deltas():
            if delta.error is not None:
                yield event({**delta.error.body(), "index": delta.text.index})
                continue
            for choice in _chunks(reply, delta):
                last = {} if choice["finish_reason"] is None else last_timings(body, job)
                yield event(reply.whole(kind, choices=[choice], **usage_of(body, job, chat_usage), **last))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(reply.whole(kind, choices=[], usage=chat_usage(job), timings=timings(job)))
        yield DONE
    except ApiError as error:
        yield event(error.body())


def _frames(reply: ChatReply, job: Job, index: int) -> Frames:
    """Return how a stream writes new content and reasoning of a choice; empty if each event has other numbers too."""
    if counts_usage(reply.body) or reply.body.logprobs or reply.body.include_reasoning is False:
        return {}

    def made(kind: Literal["content", "reasoning"]) -> tuple[bytes, ...]:
        def whole(text: str) -> bytes:
            choice = _chunk(index, _delta(AnswerEvent(kind, text)))
            return event(reply.whole("chat.completion.chunk", choices=[choice], **usage_of(reply.body, job)))

        return around(whole)

    return {"content": made("content"), "reasoning": made("reasoning")}


def _chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _chunks(reply: ChatReply, delta: Delta) -> list[dict[str, Any]]:
    """Return the chunks for one delta: a chunk for each event, and the finish reason in a chunk of its own.

    The log probabilities of a token go with its first event, or with an empty content.
    """
    index, entry = delta.text.index, reply.entry(delta)
    logprobs = None if entry is None else {"content": [msgspec.Raw(entry)], "refusal": None}
    hidden = reply.body.include_reasoning is False
    new = [_delta(one) for one in delta.events if one.kind != "end" and not (hidden and one.kind == "reasoning")]
    if not new and logprobs is not None:
        new = [{"content": ""}]
    chunks: list[dict[str, Any]] = [_chunk(index, one, None if number else logprobs) for number, one in enumerate(new)]
    if delta.finish_reason is not None:
        chunks.append(
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason(delta),
             "stop_reason": delta.stop_reason}
        )  # fmt: skip
    return chunks


def _delta(event: AnswerEvent) -> dict[str, Any]:
    """Return the `delta` of a chunk for an event."""
    if event.kind == "content":
        return {"content": event.text}
    if event.kind == "reasoning":
        return dict.fromkeys(_REASONING, event.text)
    if event.kind == "call":
        begun = {"id": new_call_id(), "type": "function", "function": {"name": event.text, "arguments": ""}}
        return {"tool_calls": [{"index": event.call, **begun}]}
    return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
