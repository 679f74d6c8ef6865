"""What a chat template takes: short conversations, and whether it writes all of their texts.

Templates differ in what they take, and many leave out without a word what they do not know: a developer message, a
second system message, text beside a call. What they take is seen from what they write.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import as_json

_TEXTS = tuple(f"48151623{number}" for number in range(42, 48))  # digits, which no template changes, or writes itself


def _probe_call(text: str, name: str = "abcdefghi", *, as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {"x": text}
    return {
        "id": name, "type": "function",
        "function": {"name": "look_up", "arguments": as_json(arguments) if as_text else arguments},
    }  # fmt: skip


def _said(role: str, number: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": _TEXTS[number], **more}


def _result(number: int, name: str = "abcdefghi") -> dict[str, Any]:
    return _said("tool", number, tool_call_id=name)


def _probes() -> dict[str, list[dict[str, Any]]]:
    """Return the conversations by what they ask of a template."""
    user, call = _said("user", 0), _probe_call(_TEXTS[1])
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    late = [_said("system", 1), user, _said("assistant", 2)]
    end = [_result(2), _said("assistant", 3), _said("user", 4)]
    text_call, long = _probe_call(_TEXTS[1], as_text=True), "call_0123456789abcdefghij"
    two = [call, _probe_call(_TEXTS[2], "abcdefghj")]
    return {
        "plain": [user],
        "system": [_said("system", 1), user],
        "system alone": [_said("system", 1)],
        "system before a result": [_said("system", 3), user, calling, _result(2)],
        "system before an answer": [_said("system", 1), user, _said("assistant", 2)],
        "developer": [_said("developer", 1), user],
        "later system": [*late, _said("system", 3), _said("user", 4)],
        "later developer": [*late, _said("developer", 3), _said("user", 4)],
        "calls": [user, calling, *end],
        "calls with arguments as text": [user, {**calling, "tool_calls": [text_call]}, *end],
        "several calls": [user, {**calling, "tool_calls": two}, _result(3), _result(4, "abcdefghj")],
        "text beside a call": [user, _said("assistant", 5, tool_calls=[call]), *end],
        "text before a call": [user, _said("assistant", 5), calling, *end],
        "long ids": [user, {**calling, "tool_calls": [_probe_call(_TEXTS[1], long)]}, _result(2, long)],
        "result of no call": [user, _result(5), _said("assistant", 1), *end],
        "result of another id": [user, calling, _result(2, "abcdefghj"), *end[1:]],
        "user after a result": [user, calling, _result(2), _said("user", 3)],
        "users in a row": [user, _said("user", 1)],
        "assistants in a row": [user, _said("assistant", 1), _said("assistant", 2), _said("user", 3)],
        "empty answer": [user, {"role": "assistant", "content": ""}, _said("user", 1)],
    }


PROBES: Mapping[str, Sequence[Mapping[str, Any]]] = _probes()
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up", "description": "Look up x.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}  # fmt: skip


def writes_all(text: str, probe: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a rendered probe has all of its texts."""
    wanted = as_json(probe)
    return all(one in text for one in _TEXTS if one in wanted)
