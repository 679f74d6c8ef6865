"""Conversations: checks of their messages, and their prompt by the chat template."""

import json
from functools import partial
from typing import Any

from ..api.schemas import ROLES, ChatRequest
from ..core.fairness import Key
from ..core.service import Service
from ..http import limits
from ..http.errors import invalid, unsupported
from .prompts import Prompt, encode

# Arguments of the renderer, and templates, which requests may not set.
_NOT_VARIABLES = (
    "self", "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
)  # fmt: skip
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tool_choice", (None, "none", "auto"), 'only "none" is supported'),
    ("functions", (None, []), "are not supported"),
    ("function_call", (None, "none", "auto"), 'only "none" is supported'),
    ("modalities", (None, [], ["text"]), 'only ["text"] is supported'),
    ("audio", (None,), "is not supported"),
    ("web_search_options", (None,), "is not supported"),
    ("documents", (None, []), "are not supported"),
    ("chat_template", (None,), "is not supported: a request cannot set the template"),
    ("echo", (None, False), "is not supported for chats"),
)


async def chat_prompt(service: Service, body: ChatRequest, key: Key) -> Prompt:
    """Return the prompt of a conversation. Raises ApiError."""
    refuse_unsupported_chat(body)
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _NOT_VARIABLES or not name.isidentifier():
            raise invalid("chat_template_kwargs", f"{name[:40]!r} cannot be a variable of the template")
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    variables["add_generation_prompt"] = body.add_generation_prompt is not False
    variables["continue_final_message"] = bool(body.continue_final_message)
    if body.tools:
        variables["tools"] = body.tools
    if service.renderer is None:
        raise unsupported("messages", "the model has no chat template; start the server with --chat-template")
    text = await service.renderer.render(messages, variables, key)
    # The template writes all special tokens itself, so none are added unless the request says so.
    longest = service.max_model_len if body.truncate_prompt_tokens is None else None
    run = partial(service.helpers.run, key)
    (prompt,) = await encode([text], service.tokenizer, run, special=bool(body.add_special_tokens), longest=longest)
    return prompt


def refuse_unsupported_chat(body: ChatRequest) -> None:
    """Refuse a field that asks for a feature that the server does not have. Raises ApiError."""
    if body.tools and body.tool_choice != "none":
        raise unsupported(
            "tools", 'tool calls are not supported; with tool_choice "none" the tools are shown to the model'
        )
    for name, accepted, message in _ONLY:
        if getattr(body, name) not in accepted:
            raise unsupported(name, message)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs = true")
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")


def _message(message: dict[str, Any], param: str) -> dict[str, Any]:
    if message.get("role") not in ROLES:
        raise invalid(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    message = {key: value for key, value in message.items() if value is not None}
    if "content" in message:
        message["content"] = _content(message["content"], f"{param}.content")
    elif not message.get("tool_calls"):
        raise invalid(f"{param}.content", "is missing")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{param}.tool_calls")
    return message


def _content(content: Any, param: str) -> str:
    """Return the text of a content. Its parts are joined by line ends, as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(param, "must be a string or a list of parts")
    if len(content) > limits.MAX_PARTS:
        raise invalid(param, f"has {len(content)} parts, at most {limits.MAX_PARTS} are allowed")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise unsupported(f"{param}[{index}].type", "only parts of type text are supported")
        if not isinstance(part.get(kind), str):
            raise invalid(f"{param}[{index}].{kind}", "must be a string")
        texts.append(part[kind])
    return "\n".join(texts)


def _tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    """Return the earlier tool calls of a message, with their arguments as objects, which templates expect."""
    if not isinstance(calls, list) or len(calls) > limits.MAX_TOOLS or not all(isinstance(c, dict) for c in calls):
        raise invalid(param, f"must be a list of at most {limits.MAX_TOOLS} objects")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{param}[{index}].function", "must be an object")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise invalid(f"{param}[{index}].function.arguments", "must be JSON") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
