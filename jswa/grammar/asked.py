"""What a request asks its answers to be: a value that can go to another process, its grammar's text, and its fault.

An `Asked` becomes the text of a grammar (`text_of`), and that a `Grammar` (`compile_text`). Where either fails,
`refusal` finds what is at fault in what was asked.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jswa.grammar.forms import (
    AnswerFamily,
    Reasoning,
    ToolError,
    content_or_calls,
    forced_calls,
    shaped_content,
    strict_calls,
)
from jswa.grammar.matching.llg import GrammarError, ParserLimits, explain
from jswa.grammar.schema import SchemaError, check_schema, locate, read_json
from jswa.grammar.texts import SPACED, UNFORCED, grammar_text, json_options, schema_grammar
from jswa.text.answers.writes import Writes
from jswa.types import StructuredOutputsParams

_IN_JSON = json.dumps(UNFORCED)[1:-1]  # among several grammars
# Of a grammar that a client writes, which may be ambiguous: a row of 500 items takes 0.1 s.
_NARROW = {"max_items_in_row": 300, "step_max_items": 5_000}


@dataclass(frozen=True)
class ChatAnswer:
    """A chat's answer, which may reason, and call tools.

    Attributes:
        writes: how the model writes answers; None: the whole text is content.
        tools: functions in OpenAI's form. Those that are not watched have no `parameters`.
        forced: at least one of the tools must be called, and nothing else may be said.
        parallel: several calls may follow each other.
        reasoning: whether the answer may begin to reason, is reasoning already, or has ended.
    """

    writes: Writes | None
    tools: Sequence[Mapping[str, Any]] = ()
    forced: bool = False
    parallel: bool = True
    reasoning: Reasoning = "done"


@dataclass(frozen=True)
class Asked:
    """The form of a whole text, or of the content of a chat's answer. At least one of the attributes is given."""

    spec: StructuredOutputsParams | None = None
    chat: ChatAnswer | None = None


class Refusal(NamedTuple):
    """Why a form is refused, and the place among the tools of the one that is at fault, if one is."""

    reason: str
    tool: int | None = None


def text_of(asked: Asked, special: Mapping[str, int], ends: Collection[int]) -> str:
    """Return the text of the grammar that a request asks for. Raises SchemaError, or ToolError for one of the tools.

    Args:
        special: ids of the vocabulary's special tokens by their text.
        ends: tokens that end a text.
    """
    spec, chat = asked.spec, asked.chat
    if chat is None:
        assert spec is not None
        return grammar_text(spec, special)
    family = None if chat.writes is None else AnswerFamily(chat.writes, special, frozenset(ends))
    if spec is not None and (family is None or not chat.tools):
        return shaped_content(family, spec, chat.reasoning)
    assert family is not None
    if chat.forced:
        return forced_calls(family, chat.tools, chat.reasoning, parallel=chat.parallel)
    if spec is not None:
        return content_or_calls(family, spec, chat.tools, chat.reasoning, parallel=chat.parallel)
    return strict_calls(family, chat.tools, chat.reasoning, parallel=chat.parallel)


def limits_of(text: str, limits: ParserLimits) -> ParserLimits:
    """Return the limits of a grammar: narrow ones if a client wrote a part of it in Lark or GBNF."""
    return limits._replace(**_NARROW) if UNFORCED in text or _IN_JSON in text else limits


def refusal(
    asked: Asked, error: SchemaError | GrammarError, special: Mapping[str, int], limits: ParserLimits
) -> Refusal:
    """Return why a form is refused whose text, or whose grammar, failed with an error."""
    if isinstance(error, SchemaError):
        return Refusal(str(error), error.index if isinstance(error, ToolError) else None)
    for index, tool in enumerate(() if asked.chat is None else asked.chat.tools):
        fault = schema_fault(tool.get("parameters") or {}, limits)
        if fault is not None:
            return Refusal(str(fault), index)
    return Refusal(str(error) if asked.spec is None else form_fault(asked.spec, str(error), special, limits))


def form_fault(spec: StructuredOutputsParams, reason: str, special: Mapping[str, int], limits: ParserLimits) -> str:
    """Return why a form cannot be compiled, with the place in its schema, if it has one.

    Args:
        reason: why the grammar cannot be compiled that the form is a part of.
    """
    if spec.json is None:
        return explain(grammar_text(spec, special), limits) or reason
    spaces = json_options(spec)
    schema = check_schema(read_json(spec.json))
    return str(locate(schema, reason, lambda part: explain(schema_grammar(part, spaces), limits)))


def schema_fault(schema: Any, limits: ParserLimits) -> SchemaError | None:
    """Return why a schema cannot be compiled, and its place; None if it can."""
    try:
        checked = check_schema(read_json(schema))
        reason = explain(schema_grammar(checked, SPACED), limits)
    except SchemaError as error:
        return error
    if reason is None:
        return None
    return locate(checked, reason, lambda part: explain(schema_grammar(part, SPACED), limits))
