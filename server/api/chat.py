"""The route POST /v1/chat/completions."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jswa.plan import ChoiceLogprobs, PromptLogprobs

from ..core.off_loop import gathered
from ..core.request import Delta, Job
from ..core.service import Service, key_of, service_of
from ..http.errors import ApiError
from ..http.pieces import JsonList, folded, listed, with_fields
from ..http.sse import DONE, EventStream, event, unless_gone
from ..text.logprobs import of_chat, of_prompt
from ..text.messages import chat_prompt
from ..text.prompts import check_length, truncated
from .completions import usage, usage_of
from .foreign import refuse_foreign
from .params import refuse_unsupported, sampling_params
from .schemas import ChatRequest

_WIDTH = 8  # work for a position of log probabilities, compared with a token


@dataclass(frozen=True)
class Reply:
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
class Choice:
    """One choice of a response that is not streamed.

    Attributes:
        logprobs: entries in JSON, encoded when their tokens arrive.
        last: the last delta, without its log probabilities.
    """

    text: StringIO = field(default_factory=StringIO)
    logprobs: JsonList = field(default_factory=JsonList)
    last: Delta | None = None

    def pieces(self, index: int, *, scored: bool) -> list[bytes]:
        """Return the JSON of the choice in pieces. `scored`: with log probabilities."""
        assert self.last is not None
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": self.text.getvalue(), "refusal": None},
            "finish_reason": self.last.finish_reason,
            "stop_reason": self.last.stop_reason,
        }
        logprobs = [b'{"refusal":null,"content":', *self.logprobs.pieces(), b"}"] if scored else [b"null"]
        return with_fields(choice, {"logprobs": logprobs})


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    service = service_of(request)
    reply = Reply(service, body, body.request_id or request.scope["jswa.request_id"], service.check_model(body.model))
    refuse_unsupported(body)
    service.count_unknown(refuse_foreign(body))
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = await sampling_params(
        body,
        service.default_sampling,
        max_tokens=max_tokens if max_tokens is not None else service.default_sampling.get("max_tokens"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = truncated(
        await chat_prompt(service, body, key_of(request)), body.truncate_prompt_tokens, service.max_model_len
    )
    # The engine cuts max_tokens to the room that the context has left, since many clients send a fixed number.
    check_length(prompt, 1, service.max_model_len)
    job = await unless_gone(request.receive, service.start(request, body, [prompt], params, reply.name))
    if job is None:
        return Response(status_code=499)
    if body.stream:
        return EventStream(_stream(reply, job), lambda: service.end(job, reply.name), service.config.keep_alive)
    try:
        done = await unless_gone(request.receive, _collect(reply, job))
    finally:
        service.end(job, reply.name)
    return service.answer(request, done) if done is not None else Response(status_code=499)


async def _collect(reply: Reply, job: Job) -> list[bytes]:
    body, choices = reply.body, defaultdict[int, Choice](Choice)
    of_prompts: Collection[ChoiceLogprobs] | PromptLogprobs = ()
    async for delta in job.deltas():
        choice = choices[delta.text.index]
        choice.text.write(delta.new)
        choice.last = delta._replace(logprobs=None, prompt_logprobs=None)
        if (entry := reply.entry(delta)) is not None:
            choice.logprobs.add(entry)
        if delta.prompt_logprobs is not None and delta.text.index == 0:
            of_prompts = delta.prompt_logprobs
    finished = (choice.pieces(index, scored=bool(body.logprobs)) for index, choice in sorted(choices.items()))
    fields = {"choices": listed(await gathered(finished, job.completion_tokens))}
    if body.prompt_logprobs is not None:
        items = of_prompt(of_prompts, body.prompt_logprobs, reply.service.texts)
        fields["prompt_logprobs"] = listed([part] for part in await gathered(folded(items), _WIDTH * len(of_prompts)))
    return with_fields(reply.whole("chat.completion", usage=usage(job)), fields)


async def _stream(reply: Reply, job: Job) -> AsyncGenerator[bytes]:
    kind, body = "chat.completion.chunk", reply.body
    try:
        for index in range(body.n or 1):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield event(reply.whole(kind, choices=[{**first, "finish_reason": None}], **usage_of(body, job)))
        async for delta in job.deltas():
            for choice in _chunks(reply, delta):
                yield event(reply.whole(kind, choices=[choice], **usage_of(body, job)))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event(reply.whole(kind, choices=[], usage=usage(job)))
        yield DONE
    except ApiError as error:
        yield event(error.body())


def _chunks(reply: Reply, delta: Delta) -> list[dict[str, Any]]:
    """Return the chunks for one delta: new text, and the finish reason in a chunk of its own."""
    chunks: list[dict[str, Any]] = []
    index = delta.text.index
    entry = reply.entry(delta)
    if delta.new or entry is not None:
        logprobs = None if entry is None else {"content": [msgspec.Raw(entry)], "refusal": None}
        chunks.append({"index": index, "delta": {"content": delta.new}, "logprobs": logprobs, "finish_reason": None})
    if delta.finish_reason is not None:
        chunks.append(
            {"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason,
             "stop_reason": delta.stop_reason}
        )  # fmt: skip
    return chunks
