"""Make a conversation fit a chat template: what the template leaves out or refuses goes to where it has a place."""

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .arguments import as_json, text_arguments

Shows = Callable[[str], bool]  # whether the template writes all texts of a probe
_OPERATOR = ("system", "developer")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # what all templates take as an id


def fitted(messages: Sequence[Mapping[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Return a conversation that the template writes as a whole, as far as it can write it at all.

    * A developer message becomes a system message.
    * A later system message is joined to the first one, and the first one to the first message of the user.
    * A result has the id of a call before it, or is a message of the user.
    * Calls come one by one, each with its result after it; text beside a call comes before it. Their ids have nine
      letters and digits. Their arguments are JSON in a text.
    * Calls become JSON in the assistant's content, and their results messages of the user.
    * Messages of one role in a row are joined, and between a result and the user the assistant says nothing.

    Each of these is done only where the template does not show the message as it came. Arguments are objects already.
    """
    found = [_cleaned(one) for one in messages]
    if any(one.get("tool_calls") or one["role"] == "tool" for one in found):
        found = _called(found, shows)
    return _in_turns(_placed(found, shows), shows)


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without empty fields. A refusal becomes part of the assistant's content."""
    found = {key: value for key, value in message.items() if value is not None}
    refusal = found.pop("refusal", None)
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    if found["role"] in ("assistant", "tool"):
        found["content"] = found.get("content") or ""
        if isinstance(refusal, str) and refusal:
            found["content"] = _joined(found["content"], refusal)
    return found


def _placed(messages: list[dict[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Return messages in which the operator's stand where the template shows them."""
    found: list[dict[str, Any]] = []
    early: list[Any] = []  # contents that belong to the first message
    for one in messages:
        role, later = one["role"], "later " if found or early else ""
        if role == "developer" and not shows(f"{later}developer"):
            role = "system"
        if role in _OPERATOR and later and not shows(f"later {role}"):
            early.append(one.get("content", ""))
        else:
            found.append({**one, "role": role})
    if early:
        begins = bool(found) and found[0]["role"] in _OPERATOR
        first = found.pop(0) if begins else {"role": "system", "content": ""}
        for content in early:
            first["content"] = _joined(first.get("content", ""), content)
        found.insert(0, first)
    if found and found[0]["role"] == "system" and not shows(_system_probe(found)):
        return _without_system(found)
    return found


def _system_probe(messages: list[dict[str, Any]]) -> str:
    """Return the probe of a system message in front of such a conversation."""
    if not any(one["role"] == "user" for one in messages):
        return "system alone"
    ends = {"tool": "system before a result", "assistant": "system before an answer"}
    return ends.get(messages[-1]["role"], "system")


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first one, which is the system's, is joined to the first one of the user."""
    system, *others = messages
    content = system.get("content", "")
    for index, one in enumerate(others):
        if one["role"] == "user":
            others[index] = {**one, "content": _joined(content, one.get("content", ""))}
            return others
    return [{"role": "user", "content": content}, *others]


def _called(messages: list[dict[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Return messages with calls and results as the template shows them."""
    written = shows("calls")
    if not written and not shows("calls with arguments as text"):
        return [_as_text(one) for one in messages]
    messages = _matched(messages, shows)
    if any(len(one.get("tool_calls", ())) > 1 for one in messages) and not shows("several calls"):
        messages = _singly(messages)
    if any(one.get("tool_calls") and one.get("content") for one in messages) and not shows("text beside a call"):
        messages = _apart(messages) if shows("text before a call") else messages
    ids = [str(call.get("id")) for one in messages for call in _calls(one)]
    ids += [str(one["tool_call_id"]) for one in messages if "tool_call_id" in one]
    if not all(map(_CALL_ID.fullmatch, ids)) and not shows("long ids"):
        messages = [_renamed(one) for one in messages]
    return messages if written else [_with_arguments(one) for one in messages]


def _matched(messages: list[dict[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Return messages in which each result follows its call.

    One whose id is no call's gets that of the next call without a result. If there is none, it is the user's message.
    """
    found: list[dict[str, Any]] = []
    ids: list[Any] = []  # of the calls before
    missing: list[Any] = []  # those of them that no result names
    for index, one in enumerate(messages):
        if one["role"] != "tool":
            ids = [call.get("id") for call in _calls(one)]
            given = [result.get("tool_call_id") for result in _results_after(messages, index)]
            missing = [name for name in ids if name not in given]
        elif one.get("tool_call_id") not in ids:
            if missing and not shows("result of another id"):
                one = {**one, "tool_call_id": missing.pop(0)}
            elif not missing and not shows("result of no call"):
                one = _as_text(one)
        found.append(one)
    return found


def _results_after(messages: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Return the results that follow a message."""
    return list(itertools.takewhile(lambda one: one["role"] == "tool", messages[index + 1 :]))


def _in_turns(messages: list[dict[str, Any]], shows: Shows) -> list[dict[str, Any]]:
    """Return messages in the order of roles that the template takes."""
    found: list[dict[str, Any]] = []
    for one in messages:
        role, last = one["role"], found[-1] if found else {"role": ""}
        if role == "assistant" and not one.get("tool_calls") and not one.get("content"):
            one = {**one, "content": _nothing(shows)}
        in_a_row = role == last["role"] in ("user", "assistant") and not last.get("tool_calls")
        if in_a_row and not shows(f"{role}s in a row"):
            both = [name for name in (*_REASONING, "content") if name in last and name in one]
            found[-1] = {**last, **one, **{name: _joined(last[name], one[name]) for name in both}}
            continue
        after_call = last["role"] == "tool" or bool(last.get("tool_calls"))
        if role == "user" and after_call and not shows("user after a result"):
            found.append({"role": "assistant", "content": _nothing(shows)})
        found.append(one)
    return found


def _nothing(shows: Shows) -> str:
    """Return the shortest content that the template takes of an assistant."""
    return "" if shows("empty answer") else " "


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are JSON in its content; a result is a message of the user."""
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"]}
    if not message.get("tool_calls"):
        return message
    functions = [call.get("function", {}) for call in _calls(message)]
    lines = [as_json({"name": one.get("name"), "arguments": one.get("arguments")}) for one in functions]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": _joined(message["content"], "\n".join(lines), "\n")}


def _singly(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with one call each, and the results of a call after it."""
    found: list[dict[str, Any]] = []
    left = list(messages)
    while left:
        one = left.pop(0)
        calls, results = _calls(one), list[dict[str, Any]]()
        if len(calls) < 2:
            found.append(one)
            continue
        while left and left[0]["role"] == "tool":
            results.append(left.pop(0))
        for index, call in enumerate(calls):
            begin = one if index == 0 else {"role": "assistant", "content": ""}
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result not in own]
            found += [{**begin, "tool_calls": [call]}, *own]
        found += results
    return found


def _apart(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with text in a message before the calls."""
    found: list[dict[str, Any]] = []
    for one in messages:
        if one.get("tool_calls") and one.get("content"):
            found.append({key: value for key, value in one.items() if key != "tool_calls"})
            one = {"role": "assistant", "content": "", "tool_calls": one["tool_calls"]}
        found.append(one)
    return found


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with ids of calls that all templates take; equal ids stay equal."""

    def renamed(given: Any) -> str:
        name = str(given)
        return name if _CALL_ID.fullmatch(name) else hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:9]

    found = {**message}
    if "tool_call_id" in found:
        found["tool_call_id"] = renamed(found["tool_call_id"])
    if "tool_calls" in found:
        found["tool_calls"] = [{**call, "id": renamed(call.get("id"))} for call in _calls(found)]
    return found


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON in a text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": text_arguments(call["function"].get("arguments"))}}
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls}


def _calls(message: Mapping[str, Any]) -> list[Any]:
    return list(message.get("tool_calls") or ())


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Return two contents as one; each is a text, or a list of parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [
        part for one in (first, second) for part in ([{"type": "text", "text": one}] if isinstance(one, str) else one)
    ]
