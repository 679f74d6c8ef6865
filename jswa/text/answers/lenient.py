"""Forms of calls that models write beside that of their family, as other servers read them too.

They are calls only of tools that the request has, with arguments that fit, and only where no form was asked for.
"""

from collections.abc import Mapping
from typing import Any

_OBJECT = r'(?=(?:\[\s*)?\{\s*"(?:type|id|name|arguments|parameters|tool_name|tool_call_id)"\s*:)'
_JSON: Mapping[str, Any] = {
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
# Objects that begin the answer or a line, and such in a fence.
LENIENT: Mapping[str, Mapping[str, Any]] = {
    "tool_calls_bare": {"open_pattern": rf"(?:\A|\n)\s*{_OBJECT}", **_JSON},
    "tool_calls_fenced": {"open_pattern": rf"```\w*\s*{_OBJECT}", "close_pattern": r"\s*```", **_JSON},
}
