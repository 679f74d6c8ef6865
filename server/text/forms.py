"""The grammar of a chat's answer: reasoning, then content of a form, or calls of tools that are forced or strict."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jswa.grammar.asked import Asked, ChatAnswer
from jswa.grammar.forms import Reasoning
from jswa.text.answers.parser import Answering, reasoning_behind
from jswa.types import StructuredOutputsParams

from ..api.schemas import ChatRequest
from ..api.structured import AskedForm
from ..core.fairness import Key
from ..core.off_loop import made
from ..core.service import Service
from ..http.errors import invalid, unsupported
from .prompts import Prompt

_CHOICES = 'must be "none", "auto", "required" or a tool of the request'


class ToolChoice(NamedTuple):
    """The calls that an answer may have.

    Attributes:
        tools: the functions that may be called, with their places in the request; None: all of them, in any way.
        forced: at least one of them must be called.
        parallel: several calls may follow each other.
    """

    tools: Sequence[tuple[int, Mapping[str, Any]]] | None = None
    forced: bool = False
    parallel: bool = True


def choice_of(body: ChatRequest) -> ToolChoice:
    """Return what `tool_choice` asks for. Raises ApiError."""
    asked = body.tool_choice
    functions = [(index, tool["function"]) for index, tool in enumerate(body.tools or ())]
    parallel = body.parallel_tool_calls is not False
    if asked in (None, "none", "auto"):
        watched = asked != "none" and any(function.get("strict") is True for _, function in functions)
        return ToolChoice(functions if watched else None, parallel=parallel)
    if not functions:
        raise invalid("tool_choice", "needs tools")
    if asked == "required":
        return ToolChoice(functions, True, parallel)
    names = _names(asked)
    chosen = [one for one in functions if one[1]["name"] in names]
    if len({function["name"] for _, function in chosen}) < len(names):
        raise invalid("tool_choice", f"names {names[0][:100]!r}, which is not one of the tools")
    return ToolChoice(chosen, True, parallel and asked.get("type") == "allowed_tools")


async def answer_form(
    service: Service, body: ChatRequest, form: AskedForm | None, answering: Answering, prompt: Prompt, key: Key
) -> StructuredOutputsParams | None:
    """Return the form of a chat's answers, compiled; None if they may be anything. Raises ApiError."""
    choice = choice_of(body)
    if form is None and choice.tools is None:
        return None
    shown = prompt.text or ""
    behind = partial(_reasoning, answering, shown)
    reasoning = await made(behind, len(shown), partial(service.helpers.run, key))
    if reasoning == "may" and body.continue_final_message:
        reasoning = "done"
    template = answering.template
    writes = None if template is None else template.writes
    field = "tool_choice" if form is None else form.field
    if choice.forced:
        assert choice.tools is not None
        tools = choice.tools
    else:
        functions = [] if body.tool_choice == "none" else [tool["function"] for tool in body.tools or ()]
        tools = [(i, one if one.get("strict") is True else {"name": one["name"]}) for i, one in enumerate(functions)]
    chat = ChatAnswer(writes, [one for _, one in tools], choice.forced, choice.parallel, reasoning)
    asked = Asked(None if form is None or choice.forced else form.spec, chat)
    return await service.compiled(asked, key, field, [f"tools[{i}].function.parameters" for i, _ in tools])


def _reasoning(answering: Answering, prompt: str) -> Reasoning:
    return reasoning_behind(answering.template, answering.prefix(prompt))


def _names(asked: Any) -> list[str]:
    """Return the names of the tools in a `tool_choice`. Raises ApiError."""
    if not isinstance(asked, dict):
        raise invalid("tool_choice", _CHOICES)
    if asked.get("type") == "allowed_tools":
        about = asked.get("allowed_tools") or asked
        if about.get("mode") != "required":
            raise unsupported("tool_choice.mode", 'only "required" is supported for allowed_tools')
        found = [_name(tool) for tool in about.get("tools") or ()]
    else:
        found = [_name(asked)]
    names = [name for name in found if name is not None]
    if not names or len(names) < len(found):
        raise invalid("tool_choice", _CHOICES)
    return names


def _name(tool: Any) -> str | None:
    if not isinstance(tool, dict):
        return None
    name = (tool["function"] if isinstance(tool.get("function"), dict) else tool).get("name")
    return name if isinstance(name, str) else None
