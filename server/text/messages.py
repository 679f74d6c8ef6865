"""Conversations: checks of their messages, and their prompt by the chat template."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from jswa.text.answers.parser import Answering
from jswa.text.answers.probe import UNKNOWN_CALLS
from jswa.text.guard import guard

from ..api.schemas import ROLES, ChatRequest
from ..core.off_loop import made
from ..core.service import Service
from ..http import limits
from ..http.errors import from_validation, invalid, unsupported
from ..media.album import Album
from .parts import ImagePart, content_of, images_in
from .prompts import Prompt, encode_chat, with_pictures

# Arguments of the renderer, and templates, which requests may not set.
_NOT_VARIABLES = (
    "self", "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
)  # fmt: skip
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("functions", (None, []), "are not supported"),
    ("function_call", (None, "none", "auto"), 'only "none" is supported'),
    ("modalities", (None, [], ["text"]), 'only ["text"] is supported'),
    ("audio", (None,), "is not supported"),
    ("web_search_options", (None,), "is not supported"),
    ("documents", (None, []), "are not supported"),
    ("chat_template", (None,), "is not supported: a request cannot set the template"),
    ("echo", (None, False), "is not supported for chats"),
)


async def chat_prompt(body: ChatRequest, album: Album) -> Prompt:
    """Return the prompt of a conversation. Raises ApiError.

    Args:
        album: of the request: its key and its pictures.
    """
    refuse_unsupported_chat(body)
    service, key = album.service, album.key
    run = partial(service.helpers.run, key)
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    parts = images_in(messages)
    if parts:
        _refuse_with_images(body)
        _check_results(messages)
    tools = check_tools(body.tools or ())
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _NOT_VARIABLES or not name.isidentifier():
            raise invalid("chat_template_kwargs", f"{name[:40]!r} cannot be a variable of the template")
    if body.reasoning_effort == "none":
        variables = {"enable_thinking": False, "thinking": False, **variables}
    elif body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.verbosity is not None:
        variables.setdefault("verbosity", body.verbosity)
    variables["add_generation_prompt"] = body.add_generation_prompt is not False
    variables["continue_final_message"] = bool(body.continue_final_message)
    if tools:
        variables["tools"] = tools
    if service.renderer is None or service.tokenizer is None:
        raise unsupported("messages", "the model has no chat template; start the server with --chat-template")
    pictures, images = await album.pictures(parts), service.engine.images
    mark = None if images is None else service.tokenizer.backend.id_to_token(images.tokens.image)
    shown = [_shown(message) for message in messages]
    guarded = await made(partial(guard, shown, service.tokenizer, mark), _size(messages), run)
    text = await service.renderer.render(guarded, variables, key)
    # The template writes all special tokens itself, so none are added unless the request says so.
    longest = service.max_model_len if body.truncate_prompt_tokens is None else None
    special = bool(body.add_special_tokens)
    prompt = await encode_chat(text, service.tokenizer, run, special=special, longest=longest)
    return with_pictures(prompt, pictures, images) if pictures and images is not None else prompt


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """Return the chat that a request of another protocol asks for. Raises ApiError."""
    try:
        return ChatRequest(**fields)
    except ValidationError as error:
        raise from_validation([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error


def answering(service: Service, body: ChatRequest) -> Answering:
    """Return how the answers of a chat are read: with `tool_choice` "none", and without tools, calls are content.

    Raises ApiError if calls cannot be read.
    """
    tools = body.tools if body.tool_choice != "none" else None
    if tools and (service.answer_template is None or not service.answer_template.reads_calls):
        raise unsupported("tools", UNKNOWN_CALLS)
    return Answering(service.answer_template, tools or (), parallel=body.parallel_tool_calls is not False)


def check_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools of a chat. Raises ApiError for a tool that is none."""
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function":
            raise unsupported(f"{param}.type", 'must be "function": other tools are not supported')
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"{param}.function.name", "must be a string")
        if not isinstance(function.get("parameters") or {}, dict):
            raise invalid(f"{param}.function.parameters", "must be a JSON schema")
    return list(tools)


def refuse_unsupported_chat(body: ChatRequest) -> None:
    """Refuse a field that asks for a feature that the server does not have. Raises ApiError."""
    for name, accepted, message in _ONLY:
        if getattr(body, name) not in accepted:
            raise unsupported(name, message)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs = true")
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")


def _message(message: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a message whose content is text, or has images.

    The process of the template makes objects of the calls' arguments.
    """
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    message = {key: value for key, value in message.items() if value is not None}
    answers = role in ("assistant", "tool")  # whose content may be empty: an answer that is a call, a result of nothing
    if message.get("content") == [] and not answers:
        raise invalid(f"{param}.content", "must have at least one part")
    if "content" in message:
        images = ("image_url",) if role in ("user", "tool") else ()
        message["content"] = content_of(message["content"], f"{param}.content", ("text",), images)
    elif not answers:
        raise invalid(f"{param}.content", "is missing")
    for name in ("function_call", "audio"):
        if name in message:
            raise unsupported(f"{param}.{name}", "is not supported: send tool_calls, and texts")
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], f"{param}.tool_calls")
    return message


def _check_calls(calls: Any, param: str) -> None:
    """Check the earlier tool calls of a message. Their arguments may be anything, as models write them."""
    if not isinstance(calls, list) or len(calls) > limits.MAX_TOOLS or not all(isinstance(c, dict) for c in calls):
        raise invalid(param, f"must be a list of at most {limits.MAX_TOOLS} objects")
    for index, call in enumerate(calls):
        if not isinstance(call.get("function"), dict):
            raise invalid(f"{param}[{index}].function", "must be an object")
        if not isinstance(call["function"].get("name"), str):
            raise invalid(f"{param}[{index}].function.name", "must be a string")


def _refuse_with_images(body: ChatRequest) -> None:
    """Refuse what is not supported for prompts with images. Raises ApiError."""
    if body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "is not supported for prompts with images")
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "is not supported for prompts with images: it could cut one")


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Refuse results of tools that a template may put into another order, if several have images. Raises ApiError."""
    ids, found = list[Any](), list[Any]()  # of the last calls, and of their results with images
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            ids, found = [call.get("id") for call in message.get("tool_calls", ())], []
        elif isinstance(message.get("content"), list):
            found.append(message.get("tool_call_id"))
            calls = iter(ids)
            if len(found) > 1 and not all(one in calls for one in found):
                limit = "several results with images must name calls before them, in the order of these"
                raise invalid(f"messages[{index}].tool_call_id", limit)


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if isinstance(one, ImagePart) else one for one in content]}


def _size(messages: list[dict[str, Any]]) -> int:
    """Return the characters of the messages' texts."""
    contents = [message.get("content", "") for message in messages]
    lists = [part for one in contents if isinstance(one, list) for part in one if not isinstance(part, ImagePart)]
    return sum(len(one) for one in contents) + sum(len(part["text"]) for part in lists)
