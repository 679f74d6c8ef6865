"""The grammar of a chat's answer: reasoning, then content of a form, or calls of tools that are forced or strict."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jswa.errors import InvalidSampling
from jswa.grammar.compiler import Grammars
from jswa.grammar.forms import (
    Family,
    Reasoning,
    ToolError,
    content_or_calls,
    forced_calls,
    shaped_content,
    strict_calls,
)
from jswa.grammar.schema import SchemaError
from jswa.text.answers.parser import Answering, reasoning_behind
from jswa.types import StructuredOutputsParams

from ..api.schemas import ChatRequest
from ..api.structured import Form
from ..core.fairness import Key
from ..core.off_loop import made
from ..core.service import Service
from ..http.errors import ApiError, invalid, unsupported
from .prompts import Prompt

_CHOICES = 'must be "none", "auto", "required" or a tool of the request'


class Choice(NamedTuple):
    """The calls that an answer may have.

    Attributes:
        tools: the functions that may be called, with their places in the request; None: all of them, in any way.
        forced: at least one of them must be called.
        parallel: several calls may follow each other.
    """

    tools: Sequence[tuple[int, Mapping[str, Any]]] | None = None
    forced: bool = False
    parallel: bool = True


def choice_of(body: ChatRequest) -> Choice:
    """Return what `tool_choice` asks for. Raises ApiError."""
    asked = body.tool_choice
    functions = [(index, tool["function"]) for index, tool in enumerate(body.tools or ())]
    parallel = body.parallel_tool_calls is not False
    if asked in (None, "none", "auto"):
        watched = asked != "none" and any(function.get("strict") is True for _, function in functions)
        return Choice(functions if watched else None, parallel=parallel)
    if not functions:
        raise invalid("tool_choice", "needs tools")
    if asked == "required":
        return Choice(functions, True, parallel)
    names = _names(asked)
    chosen = [one for one in functions if one[1]["name"] in names]
    if len({function["name"] for _, function in chosen}) < len(names):
        raise invalid("tool_choice", f"names {names[0][:100]!r}, which is not one of the tools")
    return Choice(chosen, True, parallel and asked.get("type") == "allowed_tools")


async def answer_form(
    service: Service, body: ChatRequest, form: Form | None, answering: Answering, prompt: Prompt, key: Key
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
    tools = () if body.tool_choice == "none" else [tool["function"] for tool in body.tools or ()]
    work = partial(_compiled, answering=answering, form=form, choice=choice, tools=tools, reasoning=reasoning)
    return await service.compiled(work, key, "tool_choice" if form is None else form.field)


def _reasoning(answering: Answering, prompt: str) -> Reasoning:
    return reasoning_behind(answering.template, answering.prefix(prompt))


def _compiled(
    grammars: Grammars,
    *,
    answering: Answering,
    form: Form | None,
    choice: Choice,
    tools: Sequence[Mapping[str, Any]],
    reasoning: Reasoning,
) -> StructuredOutputsParams | None:
    """Compile the grammar of an answer, in a helper thread. Raises ApiError."""
    try:
        text = _text(grammars, answering, form, choice, tools, reasoning)
        if text is None:
            return None
        spec = StructuredOutputsParams(json_object=True) if form is None else form.spec
        grammars.compile(spec, text)
    except ToolError as error:
        index = error.index if choice.tools is None else choice.tools[error.index][0]
        raise invalid(f"tools[{index}].function.parameters", str(error)) from error
    except SchemaError as error:
        raise invalid("tool_choice" if form is None else form.field, str(error)) from error
    except InvalidSampling as error:
        raise _named(grammars, form, choice, error) from error
    return StructuredOutputsParams(grammar=text)


def _text(
    grammars: Grammars,
    answering: Answering,
    form: Form | None,
    choice: Choice,
    tools: Sequence[Mapping[str, Any]],
    reasoning: Reasoning,
) -> str | None:
    """Return the grammar of an answer; None if it cannot be watched. Raises SchemaError or InvalidSampling."""
    vocabulary, template = grammars.vocabulary, answering.template
    ends = frozenset(vocabulary.end_ids)
    family = None if template is None else Family(template.writes, vocabulary.special, ends)
    if family is not None and choice.forced:
        assert choice.tools is not None
        chosen = [function for _, function in choice.tools]
        return forced_calls(family, chosen, reasoning, parallel=choice.parallel)
    open_tools = [tool if tool.get("strict") is True else {"name": tool["name"]} for tool in tools]
    if form is not None and (family is None or not tools):
        return shaped_content(family, form.spec, reasoning)
    assert family is not None
    if form is not None:
        return content_or_calls(family, form.spec, open_tools, reasoning, parallel=choice.parallel)
    return strict_calls(family, open_tools, reasoning, parallel=choice.parallel)


def _named(grammars: Grammars, form: Form | None, choice: Choice, error: InvalidSampling) -> ApiError:
    """Return the error of a grammar that cannot be compiled, with the place in the schema that is at fault."""
    for index, function in choice.tools or ():
        fault = grammars.fault(function.get("parameters") or {})
        if fault is not None:
            return invalid(f"tools[{index}].function.parameters", str(fault))
    if form is not None:
        form.compiled(grammars)
    if not error.field.startswith("structured_outputs."):
        return unsupported("tool_choice" if form is None else form.field, error.limit)
    return invalid("tool_choice" if form is None else form.field, error.limit)


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
