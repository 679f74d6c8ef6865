"""Conversations in the form of Anthropic's Messages API, as messages of a chat."""

import re
from collections.abc import Sequence
from typing import Any

from jswa.text.history.arguments import text_arguments

from ..http import limits
from ..http.errors import invalid, unsupported
from .parts import Content, ImagePart, joined

Messages = list[dict[str, Any]]
_MEDIA = re.compile(r"image/[a-z0-9.+-]{1,64}")


def messages_of(system: Any, given: Sequence[Any]) -> Messages:
    """Return the messages of a request. Raises ApiError."""
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(given):
        param = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise invalid(f"{param}.role", 'must be "user" or "assistant"')
        blocks = _blocks(message.get("content"), f"{param}.content")
        if message["role"] == "assistant":
            messages.append(_assistant(blocks, f"{param}.content"))
        else:
            messages += _user(message["role"], blocks, f"{param}.content")
    return messages


def tools_of(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the tools that the client runs in the form of a chat.

    Tools that the server would have to run are left out. Raises ApiError if there are no others.
    """
    found = []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            continue
        about = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
            "strict": tool.get("strict"),
        }
        found.append(
            {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}
        )
    if tools and not found:
        raise unsupported("tools[0].type", 'must be "custom": tools that the server would run are missing')
    return found


def _user(role: str, blocks: list[dict[str, Any]], param: str) -> Messages:
    """Return the messages for a user's blocks: each result of a tool, and then the text."""
    messages: Messages = []
    parts = []
    for index, block in enumerate(blocks):
        where = f"{param}[{index}]"
        if block.get("type") == "tool_result":
            content = _result(block, f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            parts.append(_block_part(block, where) if role == "user" else _block_text(block, where))
    return messages + ([{"role": role, "content": joined(parts)}] if parts or not messages else [])


def _result(block: dict[str, Any], param: str) -> Content:
    """Return the content of a tool's result. Templates know no mark of a failure, so the text says it."""
    blocks = _blocks(block.get("content") or "", param)
    parts = [_block_part(one, f"{param}[{index}]") for index, one in enumerate(blocks)]
    found = joined(parts)
    if not block.get("is_error"):
        return found
    if isinstance(found, list):
        return joined(["Error", *parts])
    if found.lower().startswith("error"):
        return found
    return f"Error: {found}" if found else "Error"


def _assistant(blocks: list[dict[str, Any]], param: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise invalid(f"{param}[{index}].name", "must be a string")
            function = {"name": block["name"], "arguments": text_arguments(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, f"{param}[{index}]"))
    if texts or not (thoughts or calls):
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _blocks(content: Any, param: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(param, "must be a string or a list of blocks")
    if len(content) > limits.MAX_PARTS:
        raise invalid(param, f"has {len(content)} blocks, at most {limits.MAX_PARTS} are allowed")
    return content


def _text(content: Any, param: str) -> str:
    blocks = _blocks(content, param)
    return "\n".join(_block_text(block, f"{param}[{index}]") for index, block in enumerate(blocks))


def _block_text(block: dict[str, Any], param: str) -> str:
    if block.get("type") != "text":
        kinds = "only text, thinking, tool_use, tool_result and images of the user and of results are supported"
        raise unsupported(f"{param}.type", kinds)
    if not isinstance(block.get("text"), str):
        raise invalid(f"{param}.text", "must be a string")
    text: str = block["text"]
    return text


def _block_part(block: dict[str, Any], param: str) -> str | ImagePart:
    """Return the text of a block, or its image. Raises ApiError."""
    if block.get("type") != "image":
        return _block_text(block, param)
    source, where = block.get("source"), f"{param}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise unsupported(f"{where}.type", 'must be "base64" or "url"')
    name = "data" if kind == "base64" else "url"
    found = source.get(name)
    if not isinstance(found, str):
        raise invalid(f"{where}.{name}", "must be a string")
    if kind == "url":
        return ImagePart(found, param, f"{where}.url")
    media = source.get("media_type")
    if not isinstance(media, str) or not _MEDIA.fullmatch(media):
        raise invalid(f"{where}.media_type", 'must be the type of an image, such as "image/jpeg"')
    return ImagePart(f"data:{media};base64,{found}", param, f"{where}.data")
