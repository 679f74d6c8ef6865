"""Grammars of whole answers of a model family: reasoning, and then content of some form, or tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jswa.grammar.schema import SchemaError, check_schema, read_json
from jswa.grammar.size.limits import SchemaCounts
from jswa.grammar.texts import ANY_TEXT, SPACED, grammar_behind, literal, schema_rule
from jswa.grammar.values import Rules
from jswa.text.answers.writes import CallText, Region, Writes
from jswa.types import StructuredOutputsParams

Reasoning = Literal["may", "open", "done"]  # whether an answer may begin to reason, is reasoning already, or has ended
_SPACE = "/[ \\n]{0,2}/"
_HOLES = re.compile(r"(\{(?:space|name|arguments|number)\})")


class AnswerFamily(NamedTuple):
    """What the grammars of one model's answers are made of.

    Attributes:
        writes: how answers are written.
        special: ids of the vocabulary's special tokens by their text.
        ends: tokens that end a text, which a grammar does not name.
    """

    writes: Writes
    special: Mapping[str, int]
    ends: frozenset[int]


class ToolError(SchemaError):
    """A tool cannot be forced: `index` is its place in the list, `pointer` the place in its parameters."""

    def __init__(self, index: int, pointer: str, reason: str) -> None:
        super().__init__(pointer, reason)
        self.index = index


def forced_calls(
    family: AnswerFamily, tools: Sequence[Mapping[str, Any]], reasoning: Reasoning, *, parallel: bool
) -> str:
    """Return the grammar, in Lark, of answers that call some of these tools, and say nothing besides.

    Args:
        tools: functions in OpenAI's form, `name` and `parameters`.
        parallel: whether there may be several calls.

    Raises SchemaError if the family's calls cannot be forced, ToolError if one of the tools cannot.
    """
    lines = _calls(family, tools, parallel=parallel)
    return "\n".join([f"start: {_thoughts(family, reasoning, lines)} calls", *lines])


def strict_calls(
    family: AnswerFamily, tools: Sequence[Mapping[str, Any]], reasoning: Reasoning, *, parallel: bool
) -> str:
    """Return the grammar of answers that may have content, and whose calls are right.

    Raises SchemaError and ToolError as `forced_calls` does.
    """
    if not _is_told_by_a_token(family):
        raise SchemaError("", "the model's calls begin with no token of their own: they can be forced, but not watched")
    lines = _calls(family, tools, parallel=parallel)
    thoughts = _thoughts(family, reasoning, lines)
    before, content = family.writes.preamble, family.writes.content
    text = f"{_text(family, content.begin)} {ANY_TEXT} {_text(family, content.end, last=True)}"
    if before is not None:
        lines.append(f"preamble: {_text(family, before.begin)} {ANY_TEXT} {_text(family, before.end)}")
        thoughts = f"{thoughts} preamble{'*' if before.repeats else '?'}"
    rest = f"({text} | calls)" if content.begin else f"{ANY_TEXT} calls?"
    return "\n".join([f"start: {thoughts} {rest}", *lines])


def content_or_calls(
    family: AnswerFamily,
    spec: StructuredOutputsParams,
    tools: Sequence[Mapping[str, Any]],
    reasoning: Reasoning,
    *,
    parallel: bool,
) -> str:
    """Return the grammar of answers that have content of a form, or else calls.

    Raises SchemaError and ToolError as `forced_calls` does.
    """
    lines = _calls(family, tools, parallel=parallel)
    content = family.writes.content
    thoughts = _thoughts(family, reasoning, lines)
    begin, end = _text(family, content.begin), _text(family, content.end, last=True)
    return grammar_behind(f"{thoughts} (calls | {begin}", spec, f"{end})", lines)


def shaped_content(family: AnswerFamily | None, spec: StructuredOutputsParams, reasoning: Reasoning) -> str:
    """Return the grammar of answers whose content has a form, behind any reasoning. Raises SchemaError.

    Args:
        family: None: the whole answer is content.
    """
    if family is None:
        return grammar_behind("", spec, "", [])
    content, lines = family.writes.content, list[str]()
    thoughts = _thoughts(family, reasoning, lines)
    begin, end = _text(family, content.begin), _text(family, content.end, last=True)
    return grammar_behind(f"{thoughts} {begin}", spec, end, lines)


def _thoughts(family: AnswerFamily, reasoning: Reasoning, lines: list[str]) -> str:
    """Return the rule of the reasoning before the rest of an answer; add the rules that it needs."""
    region = family.writes.reasoning
    if region is None or reasoning == "done":
        return ""
    lines.append(f"thought: {_inside(family, region, lines)}")
    opened = f"{_text(family, region.begin)} thought"
    again = f"({opened})*" if region.repeats else f"({opened})?"
    # A family whose delimiter is no token in this vocabulary does not reason.
    may_begin = region.begin.split("{")[0] and _begins_with_token(family, region.begin)
    if reasoning == "open":
        return f"thought {again if region.repeats and may_begin else ''}"
    return again if may_begin else ""


def _inside(family: AnswerFamily, region: Region, lines: list[str]) -> str:
    """Return the rule of free text up to the end of its region."""
    if _begins_with_token(family, region.end):
        return f"{ANY_TEXT} {_text(family, region.end)}"
    head, *tail = _HOLES.split(region.end, maxsplit=1)
    lines.append(f"ended[suffix={json.dumps(head)}]: {ANY_TEXT}")
    return f"ended {_text(family, ''.join(tail))}"


def _calls(family: AnswerFamily, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> list[str]:
    form = family.writes.calls
    if form is None:
        raise SchemaError("", "the response template does not say how calls are written (`writes`)")
    rules, counts = Rules(form, family.special), SchemaCounts()
    lines = []
    for index, tool in enumerate(tools):
        try:
            lines.append(f"call_{index}: {_call(family, form, tool, rules, counts)}")
        except SchemaError as error:
            raise ToolError(index, error.pointer, error.reason) from error
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    more = f" ({_text(family, form.between)} call)*" if parallel and not form.single else ""
    begin, end = _text(family, form.begin), _text(family, form.end, last=True)
    return [f"calls: {begin} call{more} {end}", *lines, *rules.lines]


def _call(family: AnswerFamily, form: CallText, tool: Mapping[str, Any], rules: Rules, counts: SchemaCounts) -> str:
    """Return the rule of a call of one tool."""
    name = str(tool["name"])
    fits = name.isidentifier() if form.values == "python" else re.fullmatch(r"[\w.-]+", name)
    if not fits:
        raise SchemaError("", f"the name {name[:60]!r} cannot be written in the model's form of calls")
    schema = check_schema(read_json(_closed(tool.get("parameters") or {}), counts), counts)
    arguments = schema_rule(schema, SPACED) if form.values == "json" else rules.arguments(schema)
    return _text(family, form.text.replace("{name}", name), arguments=arguments)


def _closed(schema: Any) -> Mapping[str, Any]:
    """Return the schema of arguments: an object, which has no other arguments than those it lists, if it lists any."""
    if not isinstance(schema, Mapping):
        raise SchemaError("", "must be an object")
    whole = {"type": "object", **schema}
    if schema.get("properties") and not schema.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf"}:
        whole["additionalProperties"] = False
    return whole


def _text(family: AnswerFamily, text: str, *, arguments: str = "", last: bool = False) -> str:
    """Return a text with holes as part of a rule. `last`: nothing follows it, so that tokens that end it are left."""
    holes = {"{space}": _SPACE, "{arguments}": arguments, "{number}": "/[0-9]{1,3}/"}
    parts = [holes[part] if part in holes else literal(part, family.special) for part in _HOLES.split(text) if part]
    if last and parts:
        ends = {f"<[{token}]>" for token in family.ends}
        words = parts[-1].split(" ")
        while words and words[-1] in ends:
            words.pop()
        parts[-1] = " ".join(words)
    return " ".join(parts)


def _begins_with_token(family: AnswerFamily, text: str) -> bool:
    return any(text.startswith(token) for token in family.special)


def _is_told_by_a_token(family: AnswerFamily) -> bool:
    """Whether calls begin with a token that no other text has."""
    form = family.writes.calls
    return form is not None and _begins_with_token(family, form.begin or form.text)
