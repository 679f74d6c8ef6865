"""The content of messages that OpenAI's protocols send: a string, or a list of parts."""

from collections.abc import Sequence
from typing import Any

from ..http import limits
from ..http.errors import invalid, unsupported


def text_of(content: Any, param: str, kinds: Sequence[str]) -> str:
    """Return the text of a content. Its parts are joined by line ends, as in vLLM. Raises ApiError.

    Args:
        param: where the content stands in the request.
        kinds: types of parts that are text. A refusal, which an earlier answer may be, is text too.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(param, "must be a string or a list of parts")
    if len(content) > limits.MAX_PARTS:
        raise invalid(param, f"has {len(content)} parts, at most {limits.MAX_PARTS} are allowed")
    return "\n".join(_part(part, f"{param}[{index}]", kinds) for index, part in enumerate(content))


def _part(part: Any, param: str, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "refusal" and kind not in kinds:
        raise unsupported(f"{param}.type", f"only parts of type {', '.join(kinds)} are supported")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise invalid(f"{param}.{key}", "must be a string")
    return text
