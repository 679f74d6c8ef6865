"""The routes POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as a renderer of answer events."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from jswa.text.answers.message import AnswerText, new_call_id
from jswa.text.history.arguments import call_arguments
from jswa.types import AnswerEvent

from ..core.request import Job
from ..core.service import Service, key_of, service_of
from ..core.texts import Delta
from ..http import limits
from ..http.errors import ApiError, invalid, unsupported
from ..http.pieces import encode
from ..http.sse import JsonResponse, named_event, unless_gone
from ..media.album import Album
from ..text.blocks import messages_of, tools_of
from ..text.messages import chat_prompt, chat_request
from .chat import finish_reason, start_chat
from .foreign import unknown
from .schemas import Body
from .structured import form_of_format

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_HARMLESS = frozenset(
    """metadata service_tier speed container inference_geo cache_control betas context_management diagnostics fallbacks
    fallback_credit_token billing_policy user_profile_id workspace_id""".split()  # noqa: SIM905
)  # fields that do not change the answer
SIGNATURE = "jswa"  # of all thinking. The server checks none, but clients do not send back thinking without one.
_THREAD = "is not supported: send the whole conversation"


class CountRequest(Body):
    """The body of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)] | None = None
    messages: Annotated[list[Any], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    system: Any = None
    tools: Annotated[list[Any], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: Any = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thread: Any = None
    compaction: Any = None


@dataclass(frozen=True)
class MessagesReply:
    """The values that all parts of a message share."""

    service: Service
    name: str
    model: str

    def message(self, job: Job, content: list[dict[str, Any]], last: Delta | None = None) -> dict[str, Any]:
        """Return the message, at its end or, without a `last` delta, at its begin."""
        return {
            "id": f"msg_{self.name}", "type": "message", "role": "assistant", "model": self.model, "content": content,
            **({"stop_reason": None, "stop_sequence": None} if last is None else _stop(last)), "usage": _usage(job),
        }  # fmt: skip


async def messages(body: MessagesRequest, request: Request) -> Response:
    """Generate the next message of a conversation. Raises ApiError if the request is refused."""
    service = service_of(request)
    reply = MessagesReply(service, request.scope["jswa.request_id"], service.check_model(body.model))
    if body.thread is not None:  # the SDK goes on without a thread if it reads these details
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, f"thread: {_THREAD}", param="thread", code="unsupported_value", details=details)
    if body.compaction is not None:
        raise unsupported("compaction", "is not supported")
    sampling: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
    }
    sampling |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    chat = chat_request({**_chat(body), **sampling})
    service.count_unknown(unknown(body, _HARMLESS))
    job = await unless_gone(request.receive, start_chat(service, chat, request, reply.name))
    if job is None:
        return Response(status_code=499)
    events = _stream(reply, job) if body.stream else None
    return await service.respond(request, job, reply.name, stream=events, whole=lambda: _collect(reply, job))


async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Return the number of tokens of a conversation's prompt."""
    service = service_of(request)
    service.check_model(body.model)
    chat = chat_request(_chat(body))
    async with Album(service, key_of(request)) as album:
        prompt = await unless_gone(request.receive, chat_prompt(chat, album))
    return Response(status_code=499) if prompt is None else JsonResponse({"input_tokens": len(prompt.ids)})


def _chat(body: CountRequest) -> dict[str, Any]:
    """Return the fields of the chat that the request asks for. Raises ApiError."""
    choice = _choice(body.tool_choice or {})
    effort = (body.output_config or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("output_config.effort", "must be a string")
    form = (body.output_config or {}).get("format")
    if form is not None:
        form_of_format(form, "output_config.format")
    if body.mcp_servers:
        raise unsupported("mcp_servers", "are not supported: the server runs no tools")
    thinking = (body.thinking or {}).get("type")
    if thinking not in (None, "enabled", "adaptive", "disabled"):
        raise invalid("thinking.type", 'must be "enabled", "adaptive" or "disabled"')
    variables = {"enable_thinking": True, "thinking": True} if thinking in ("enabled", "adaptive") else None
    found = messages_of(body.system, body.messages)
    last = found[-1]
    goes_on = last["role"] == "assistant" and "tool_calls" not in last and bool(last.get("content"))
    return {
        "model": body.model, "messages": found, "tools": tools_of(body.tools or ()),
        "continue_final_message": goes_on, "add_generation_prompt": not goes_on,
        "tool_choice": choice, "chat_template_kwargs": variables,
        "parallel_tool_calls": not (body.tool_choice or {}).get("disable_parallel_tool_use"),
        "reasoning_effort": "none" if thinking == "disabled" else effort, "response_format": form,
    }  # fmt: skip


def _choice(asked: dict[str, Any]) -> Any:
    """Return `tool_choice` as a chat has it. Raises ApiError."""
    kind = asked.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": asked.get("name")}}
    if kind not in ("auto", "none", "any"):
        raise invalid("tool_choice.type", 'must be "auto", "none", "any" or "tool"')
    return "required" if kind == "any" else kind


def _usage(job: Job) -> dict[str, Any]:
    return {
        "input_tokens": job.prompt_tokens - job.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": job.cached_tokens,
        "output_tokens": job.completion_tokens,
    }


def _stop(last: Delta) -> dict[str, Any]:
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": _STOPS.get(finish_reason(last) or "", "end_turn"), "stop_sequence": None}


async def _collect(reply: MessagesReply, job: Job) -> list[bytes]:
    answer, last = AnswerText(), None
    async for delta in job.deltas():
        for one in delta.events:
            answer.add(one)
        last = delta
    content: list[dict[str, Any]] = []
    if reasoning := answer.reasoning.getvalue():
        content.append({"type": "thinking", "thinking": reasoning, "signature": SIGNATURE})
    if text := answer.content.getvalue():
        content.append({"type": "text", "text": text})
    for call in answer.calls:
        arguments = call_arguments(call.arguments.getvalue())
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return [encode(reply.message(job, content, last))]


async def _stream(reply: MessagesReply, job: Job) -> AsyncGenerator[bytes]:
    blocks = _Blocks()
    try:
        last = None
        async for delta in job.deltas():
            if last is None:  # the first token tells how much of the prompt was cached
                yield named_event({"type": "message_start", "message": reply.message(job, [])})
            for one in delta.events:
                for found in blocks.add(one):
                    yield named_event(found)
            last = delta
        assert last is not None
        for found in blocks.close():
            yield named_event(found)
        yield named_event({"type": "message_delta", "delta": _stop(last), "usage": _usage(job)})
        yield named_event({"type": "message_stop"})
    except ApiError as error:
        yield named_event(error.anthropic())


class _Blocks:
    """The content blocks of a stream: each run of events of one kind is a block."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the block that is open

    def add(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Return the stream's events for an event of the answer."""
        kind = "call" if event.call >= 0 else event.kind
        if event.kind == "call" or kind != self._kind:
            yield from self.close()
            self._index += 1
            self._kind = kind
            yield {"type": "content_block_start", "index": self._index, "content_block": _begin(event)}
        if event.kind == "content":
            yield self._delta({"type": "text_delta", "text": event.text})
        elif event.kind == "reasoning":
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif event.kind == "arguments":
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Return the events at the end of the block that is open."""
        if self._kind == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _begin(event: AnswerEvent) -> dict[str, Any]:
    if event.kind == "content":
        return {"type": "text", "text": ""}
    if event.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": new_call_id(), "name": event.text, "input": {}}
