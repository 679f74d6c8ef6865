"""Conversations in the form of OpenAI's Responses API, as messages of a chat.

Reasoning, text and calls that follow each other are one message of the assistant, as the model has written them.
"""

from collections.abc import Sequence
from typing import Any

from ..http import limits
from ..http.errors import invalid, unsupported
from .parts import content_of, text_of

Messages = list[dict[str, Any]]
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_IMAGES = ("input_image",)


def messages_of(given: Any) -> Messages:
    """Return the messages of an `input`: a text, or a list of items. Raises ApiError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input", "must be a string or a list of items")
    if len(given) > limits.MAX_MESSAGES:
        raise invalid("input", f"has {len(given)} items, at most {limits.MAX_MESSAGES} are allowed")
    messages: Messages = []
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise invalid(f"input[{index}]", "must be an object")
        _add(messages, item, f"input[{index}]")
    return messages


def with_instructions(instructions: str | None, messages: Messages) -> Messages:
    """Return messages with the instructions in front; all that the operator says first is one system message.

    Most chat templates take one system message, and as the first message only.
    """
    said = [] if not instructions else [instructions]
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        said.append(messages[count]["content"])
        count += 1
    return [*([{"role": "system", "content": "\n\n".join(said)}] if said else []), *messages[count:]]


def turns_of(messages: Messages) -> tuple[int, list[int]]:
    """Return how many messages of the operator come first, and where the turns of the user begin after the first."""
    roles = [one["role"] for one in messages]
    first = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return first, [index for index in range(first + 1, len(roles)) if roles[index] == "user"]


def tools_of(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the function tools in the form of a chat.

    Tools that the server would have to run are left out, as Codex offers one with every request. Raises ApiError if
    there are no others.
    """
    kept = own_tools(tools)
    if tools and not kept:
        raise unsupported("tools[0].type", 'must be "function": tools that the server would run are missing')
    return [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in kept]


def own_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tools that the client runs."""
    return [tool for tool in tools if isinstance(tool, dict) and tool.get("type") == "function"]


def output_items(message: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a whole message of the assistant as output items. `names`: an id for each item, as many as needed."""
    items: list[dict[str, Any]] = []
    if message.get("reasoning"):
        items.append(reasoning_item(names[0], message["reasoning"]))
    if message.get("content"):
        items.append(message_item(names[1], message["content"]))
    for name, call in zip(names[2:], message.get("tool_calls", ()), strict=False):
        items.append(call_item(name, call["id"], call["function"]["name"], call["function"]["arguments"]))
    return items


def reasoning_item(name: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """Return an output item with reasoning; without a text, the item as it begins."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": status}


def message_item(name: str, text: str | None, status: str = "completed") -> dict[str, Any]:
    """Return an output item with a message; without a text, the item as it begins."""
    content = [] if text is None else [text_part(text)]
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(name: str, call_id: str, function: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    """Return an output item with a call of a function."""
    return {
        "type": "function_call", "id": f"fc_{name}", "call_id": call_id, "name": function, "arguments": arguments,
        "status": status,
    }  # fmt: skip


def _add(messages: Messages, item: dict[str, Any], param: str) -> None:
    """Add an item to the messages."""
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message" and item.get("role") != "assistant":
        images = _IMAGES if item.get("role") == "user" else ()
        content = content_of(item.get("content"), f"{param}.content", _TEXTS, images)
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "message":
        _assistant(messages, "content")["content"] = text_of(item.get("content"), f"{param}.content", _TEXTS)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if parts:  # a client that was given encrypted reasoning only has no text to send back
            _assistant(messages, "reasoning_content")["reasoning_content"] = text_of(parts, f"{param}.content", _TEXTS)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages, "tool_calls").setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = content_of(item.get("output"), f"{param}.output", _TEXTS, _IMAGES)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise unsupported(f"{param}.type", "must be message, reasoning, function_call or function_call_output")


def _assistant(messages: Messages, part: str) -> dict[str, Any]:
    """Return the assistant's message that a part belongs to: the last one, if the part may follow what it has."""
    order = ("reasoning_content", "content", "tool_calls")
    if messages and messages[-1]["role"] == "assistant":
        has = [order.index(name) for name in order if name in messages[-1]]
        if part == "tool_calls" or not has or max(has) < order.index(part):
            return messages[-1]
    messages.append({"role": "assistant"})
    return messages[-1]
