"""The routes /v1/responses: OpenAI's Responses API, as a renderer of a chat's answer events."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from jswa.text.answers.message import AnswerText, Call
from jswa.types import AnswerEvent

from ..core.request import Job
from ..core.service import Service, key_of, service_of
from ..core.texts import Delta
from ..http import limits
from ..http.errors import ApiError, invalid, unsupported
from ..http.pieces import encode
from ..http.sse import JsonResponse, named_event, unless_gone
from ..media.album import Album
from ..text.items import (
    call_item,
    message_item,
    messages_of,
    output_items,
    own_tools,
    reasoning_item,
    text_part,
    tools_of,
    turns_of,
    with_instructions,
)
from ..text.messages import chat_prompt, chat_request
from ..text.prompts import TOO_LONG, check_length
from .chat import start_chat
from .foreign import unknown
from .schemas import VERBOSITIES, Body, ChatRequest, Id
from .structured import form_of_format

# Keeps an answer for previous_response_id, and the response.
Store = Callable[[AnswerText, dict[str, Any]], Awaitable[None]]
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("background", (None, False), "is not supported"),
    ("conversation", (None,), "is not supported: send the whole conversation, or previous_response_id"),
    ("prompt", (None,), "is not supported: send instructions and input"),
    ("max_tool_calls", (None,), "is not supported: the server runs no tools"),
    ("truncation", (None, "disabled", "auto"), 'must be "auto" or "disabled"'),
)


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[Any], Field(max_length=limits.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


@dataclass(frozen=True)
class ResponsesReply:
    """The values that all parts of a response share."""

    service: Service
    body: ResponsesRequest
    name: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, job: Job, output: list[dict[str, Any]], status: str, **more: Any) -> dict[str, Any]:
        """Return the response object."""
        body = self.body
        return {
            "id": f"resp_{self.name}", "object": "response", "created_at": self.created, "status": status,
            "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "model": self.model, "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "reasoning": body.reasoning or {},
            "store": body.store is not False, "temperature": body.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": body.tool_choice or "auto", "tools": own_tools(body.tools or ()), "top_p": body.top_p,
            "truncation": body.truncation or "disabled", "metadata": body.metadata or {},
            "usage": _usage(job) if status in ("completed", "incomplete") else None, **more,
        }  # fmt: skip

    def ended(self, job: Job, output: list[dict[str, Any]], last: Delta) -> dict[str, Any]:
        """Return the response object at its end."""
        if last.finish_reason == "stop":
            return self.whole(job, output, "completed")
        reason = "max_output_tokens" if last.finish_reason == "length" else "cancelled"
        return self.whole(job, output, "incomplete", incomplete_details={"reason": reason})


async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Generate the response to a conversation."""
    service, key = service_of(request), key_of(request)
    reply = ResponsesReply(service, body, request.scope["jswa.request_id"], service.check_model(body.model))
    messages = await _messages(service, body, key)
    service.count_unknown(unknown(body, _HARMLESS))
    job = await unless_gone(request.receive, _start(reply, request, messages))
    if job is None:
        return Response(status_code=499)

    async def store(answer: AnswerText, response: dict[str, Any]) -> None:
        if body.store is not False:
            kept = {"messages": [*messages, answer.message()], "response": response}
            await service.engine.store(key, response["id"], encode(kept))

    events = _stream(reply, job, store) if body.stream else None
    return await service.respond(request, job, reply.name, stream=events, whole=lambda: _collect(reply, job, store))


async def response(response_id: str, request: Request) -> Response:
    """Return a response that is kept, or with DELETE keep it no longer. Raises ApiError (404) if none is kept."""
    engine, key = service_of(request).engine, key_of(request)
    if request.query_params.get("stream") == "true":
        raise unsupported("stream", "is not supported: a response that is kept is sent whole")
    try:
        kept = msgspec.json.decode(await engine.stored(key, response_id))
    except ApiError as error:
        if error.status != 404:
            raise
        reason = f"the server keeps the last responses for {limits.STORED_SECONDS} s"
        message = f"Response with id {response_id[:100]!r} not found: {reason}."
        raise ApiError(404, message, param="response_id", code="not_found") from None
    if request.method == "DELETE":
        await engine.store(key, response_id, b"")
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})
    return JsonResponse(kept["response"])


_HARMLESS = frozenset(
    """user safety_identifier prompt_cache_key prompt_cache_retention service_tier include stream_options
    client_metadata""".split()  # noqa: SIM905
)  # fields that do not change the answer


async def _messages(service: Service, body: ResponsesRequest, key: str | None) -> list[dict[str, Any]]:
    """Return the conversation without the instructions, which apply to one response only. Raises ApiError."""
    for name, accepted, message in _ONLY:
        if getattr(body, name) not in accepted:
            raise unsupported(name, message)
    new = messages_of(body.input)
    if body.previous_response_id is None:
        return new
    before = msgspec.json.decode(await service.engine.stored(key, body.previous_response_id))
    return [*before["messages"], *new]


async def _start(reply: ResponsesReply, request: Request, messages: list[dict[str, Any]]) -> Job:
    """Queue the chat and return its job. Raises ApiError.

    With `truncation` "auto", the oldest turns are left out, as few as the context needs: what is left begins with a
    message of the user, after what the operator said first.
    """
    async with Album(reply.service, key_of(request)) as album:
        return await _start_fitting(reply, request, messages, album)


async def _start_fitting(reply: ResponsesReply, request: Request, messages: list[dict[str, Any]], album: Album) -> Job:
    body, service = reply.body, reply.service

    def chat(rest: list[dict[str, Any]]) -> ChatRequest:
        return chat_request(_chat(body, with_instructions(body.instructions, rest)))

    try:
        return await start_chat(service, chat(messages), request, reply.name, album)
    except ApiError as error:
        first, turns = turns_of(messages)
        if body.truncation != "auto" or error.code != TOO_LONG or not turns:
            raise
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(chat([*messages[:first], *messages[turns[middle] :]]), album):
            high = middle
        else:
            low = middle + 1
    return await start_chat(service, chat([*messages[:first], *messages[turns[low] :]]), request, reply.name, album)


async def _fits(chat: ChatRequest, album: Album) -> bool:
    """Return whether a chat's prompt fits the context. Raises ApiError if it is wrong in another way."""
    try:
        check_length(await chat_prompt(chat, album), 1, album.service.max_model_len)
    except ApiError as error:
        if error.code != TOO_LONG:
            raise
        return False
    return True


def _chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of the chat that the request asks for."""
    form = (body.text or {}).get("format")
    if form is not None:
        form_of_format(form, "text.format")
    verbosity = (body.text or {}).get("verbosity")
    if verbosity not in (None, *VERBOSITIES):
        raise invalid("text.verbosity", f"must be one of {', '.join(VERBOSITIES)}")
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort", "must be a string")
    return {
        "model": body.model, "messages": messages, "tools": tools_of(body.tools or ()),
        "tool_choice": body.tool_choice, "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p,
        "reasoning_effort": effort, "verbosity": verbosity, "stream": body.stream, "response_format": form,
    }  # fmt: skip


def _usage(job: Job) -> dict[str, Any]:
    return {
        "input_tokens": job.prompt_tokens,
        "input_tokens_details": {"cached_tokens": job.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": job.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": job.reasoning_tokens},
        "total_tokens": job.prompt_tokens + job.completion_tokens,
    }


async def _collect(reply: ResponsesReply, job: Job, store: Store) -> list[bytes]:
    answer, last = AnswerText(), None
    async for delta in job.deltas():
        for one in delta.events:
            answer.add(one)
        last = delta
    assert last is not None
    names = [f"{reply.name}_{number}" for number in range(2 + len(answer.calls))]
    response = reply.ended(job, output_items(answer.message(), names), last)
    await store(answer, response)
    return [encode(response)]


async def _stream(reply: ResponsesReply, job: Job, store: Store) -> AsyncGenerator[bytes]:
    number = 0
    async for one in _events(reply, job, store):
        yield named_event({**one, "sequence_number": number})
        number += 1


async def _events(reply: ResponsesReply, job: Job, store: Store) -> AsyncGenerator[dict[str, Any]]:
    items, last = _Items(reply.name), None
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": reply.whole(job, [], "in_progress")}
    try:
        async for delta in job.deltas():
            for new in delta.events:
                for one in items.add(new):
                    yield one
            last = delta
    except ApiError as error:
        about = {"code": error.code or "server_error", "message": error.message}
        yield {"type": "response.failed", "response": reply.whole(job, items.done, "failed", error=about)}
        return
    assert last is not None
    for one in items.close():
        yield one
    response = reply.ended(job, items.done, last)
    await store(items.answer, response)
    yield {"type": f"response.{response['status']}", "response": response}


class _Items:
    """The output items of a stream: each run of events of one kind is an item.

    Attributes:
        done: the items that have ended.
        answer: the answer so far.
    """

    def __init__(self, name: str) -> None:
        self.done: list[dict[str, Any]] = []
        self.answer = AnswerText()
        self._name = name
        self._kind = ""  # of the item that is open
        self._text: list[str] = []
        self._call: Call | None = None

    def add(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Return the stream's events for an event of the answer."""
        self.answer.add(event)
        kind = "call" if event.call >= 0 else event.kind
        if event.kind == "call" or kind != self._kind:
            yield from self.close()
            yield from self._open(kind)
        if event.kind in ("content", "reasoning", "arguments"):
            self._text.append(event.text)
            yield {"type": f"response.{_DELTAS[kind]}.delta", **self._place(kind), "delta": event.text, **_MORE[kind]}

    def close(self) -> Iterator[dict[str, Any]]:
        """Return the events at the end of the item that is open."""
        kind, text = self._kind, "".join(self._text)
        if not kind:
            return
        item = self._item(text, "completed")
        place, name = self._place(kind), f"response.{_DELTAS[kind]}.done"
        if kind == "call":
            yield {"type": name, **place, "name": item["name"], "arguments": text}
        else:
            yield {"type": name, **place, "text": text, **_MORE[kind]}
            yield {"type": "response.content_part.done", **place, "part": item["content"][0]}
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": item}
        self.done.append(item)
        self._kind, self._text = "", []

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        self._kind = kind
        self._call = self.answer.calls[-1] if kind == "call" else None
        item = self._item(None, "in_progress")
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": item}
        if kind != "call":
            part = text_part("") if kind == "content" else {"type": "reasoning_text", "text": ""}
            yield {"type": "response.content_part.added", **self._place(kind), "part": part}

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        name = f"{self._name}_{len(self.done)}"
        if self._call is not None:
            return call_item(name, self._call.id, self._call.name, text or "", status)
        return (message_item if self._kind == "content" else reasoning_item)(name, text, status)

    def _place(self, kind: str) -> dict[str, Any]:
        prefix = {"content": "msg", "reasoning": "rs", "call": "fc"}[kind]
        place = {"item_id": f"{prefix}_{self._name}_{len(self.done)}", "output_index": len(self.done)}
        return place if kind == "call" else {**place, "content_index": 0}


_DELTAS = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_MORE: dict[str, dict[str, Any]] = {"content": {"logprobs": []}, "reasoning": {}, "call": {}}
