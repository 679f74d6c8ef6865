"""Calls in other forms than the family's: read for known tools with fitting arguments, and otherwise content."""

import json
from typing import Any

import pytest

from jswa.text.answers.forms.fits import fits
from jswa.text.answers.parser import AnswerParser
from jswa.types import AnswerEvent, StructuredOutputsParams
from tests.support.text.transcripts import TRANSCRIPTS, calls_of, pieces_of, read, template_of, text_of, tokenizer_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {**PARAMETERS, "required": ["city"]}}}]
OBJECT = '{"name": "get", "arguments": {"city": "Oslo"}}'
OSLO = (("get", '{"city": "Oslo"}'),)
FUNCTION = "<function=get>\n<parameter=city>\nOslo\n</parameter>\n</function>"


def events_of(family: str, text: str, form: StructuredOutputsParams | None = None) -> list[AnswerEvent]:
    """Return the events of an answer, token by token; as a whole it must give the same."""
    special = {mark: None for one in TRANSCRIPTS if one.family == family for mark in one.special}
    tokenizer = tokenizer_of(tuple(special))
    template = template_of(family, tokenizer)
    pieces = list(pieces_of(tokenizer, template, tokenizer.encode(text, add_special_tokens=False).tolist()))
    events = read(AnswerParser(template, "", TOOLS, form=form), pieces)
    assert read(AnswerParser(template, "", TOOLS, form=form), ["".join(pieces)]) == events
    return events


@pytest.mark.parametrize(
    ("family", "text", "content"),
    [
        *((family, OBJECT, "") for family in ("hermes", "qwen_xml", "mistral", "gemma3", "gemma4", "olmo3", "llama4",
                                              "command", "glm", "function_gemma")),
        ("hermes", f"I look.\n\n{OBJECT}", "I look."),
        ("hermes", f"{OBJECT}\n</tool_call>", ""),
        ("hermes", f"<think>Hm.</think>\n\n{OBJECT}", ""),
        ("hermes", f"So:\n```json\n{OBJECT}\n```\nThere.", "So:\n\nThere."),
        ("hermes", f"```\n[{OBJECT}]\n```", ""),
        ("hermes", '{"name": "get", "parameters": {"city": "Oslo"}}', ""),
        ("hermes", '{"type": "function", "id": "1", "name": "get", "arguments": "{\\"city\\": \\"Oslo\\"}"}', ""),
        ("command", '[{"tool_call_id": "0", "tool_name": "get", "parameters": {"city": "Oslo"}}]', ""),
        ("qwen_xml", f"I look.\n\n{FUNCTION}", "I look."),
        ("qwen_xml", f"{FUNCTION}\n</tool_call>", ""),
        ("qwen_xml", '<tool_call>\n<function=get>\n{"city": "Oslo"}\n</function>\n</tool_call>', ""),
        ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>", ""),
        ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=city>\nOslo\n</function>\n</tool_call>", ""),
        ("gemma4", 'call:get{city:<|"|>Oslo<|"|>}<tool_call|>', ""),
        ("olmo3", "get(city='Oslo')", ""),
        ("gemma3", '```json\n{"name": "get", "parameters": {"city": "Oslo"}}\n```', ""),
        ("llama4", f"I look. {OBJECT}", "I look."),
    ],
)  # fmt: skip
def test_a_call_in_another_form(family: str, text: str, content: str) -> None:
    events = events_of(family, text)
    assert (calls_of(events), text_of(events, "content")) == (OSLO, content)


def test_a_list_of_calls() -> None:
    events = events_of("hermes", f'[{OBJECT}, {{"name": "get", "arguments": {{"city": "Rome", "days": 2}}}}]')
    assert calls_of(events) == (*OSLO, ("get", '{"city": "Rome", "days": 2}'))


@pytest.mark.parametrize("end", ["\n</function>\n</tool_call>", "\n</function>", ""])
def test_several_functions_in_one_call(end: str) -> None:
    """Each has its own arguments. The end of the last one may be missing."""
    text = f"<tool_call>\n{FUNCTION}\n<function=get>\n<parameter=city>\nRome\n</parameter>{end}"
    assert calls_of(events_of("qwen_xml", text)) == (*OSLO, ("get", '{"city": "Rome"}'))


@pytest.mark.parametrize("family", ["hermes", "llama4", "gemma3", "qwen_xml", "mistral"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "get", "age": 3}',
        '{"name": "get"}',
        '{"name": "other", "arguments": {"city": "Oslo"}}',
        '{"name": "get", "arguments": {}}',
        '{"name": "get", "arguments": {"city": 3}}',
        '{"name": "get", "arguments": {"city": "Oslo", "days": 1.5}}',
        '{"name": "get", "arguments": {"city": "Oslo", "country": "NO"}}',
        '{"name": "get", "arguments": {"city": "Oslo"}, "note": "mine"}',
        '{"name": "get", "arguments": {"city": "Oslo"',
        f"[{OBJECT}, 3]",
        f'[{OBJECT}, {{"name": "get", "arguments": {{"city": 3}}}}]',
        f"{OBJECT} is how I would call it.",
        '```json\n{"name": "Bob", "age": 3}\n```',
        "get(city='Oslo', x=1)",
        "other(city='Oslo')",
    ],
)
def test_what_fits_no_tool_is_content(family: str, text: str) -> None:
    events = events_of(family, text)
    assert [(event.kind, event.text) for event in events] == [("content", text)]


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "gemma4"])
def test_no_other_form_is_read_where_a_form_was_asked_for(family: str) -> None:
    for text in (OBJECT, FUNCTION):
        assert not calls_of(events_of(family, text, StructuredOutputsParams(json_object=True)))


def test_what_the_asked_schema_allows_is_content() -> None:
    """Calls of Llama 4 have no token: with a response format, an object of its schema is the answer."""
    schema = {"type": "object", "properties": {"name": {}, "arguments": {}}, "required": ["name"]}
    assert not calls_of(events_of("llama4", OBJECT, StructuredOutputsParams(json=json.dumps(schema))))
    other = {**schema, "required": ["total"]}
    assert calls_of(events_of("llama4", OBJECT, StructuredOutputsParams(json=other))) == OSLO


def test_a_call_of_the_family_ends_what_may_be_one() -> None:
    events = events_of("hermes", f'{{"name": "get", "age": 3}}\n<tool_call>{OBJECT}</tool_call>')
    assert (calls_of(events), text_of(events, "content")) == (OSLO, '{"name": "get", "age": 3}')


def test_an_answer_that_names_no_tool_streams() -> None:
    """It is held back up to the name."""
    template = template_of("hermes", tokenizer_of(("<tool_call>", "</tool_call>")))
    parser = AnswerParser(template, "", TOOLS)
    assert parser.feed('{"name": "get') == []
    assert parser.feed('ter", "age"') == [AnswerEvent("content", '{"name": "getter", "age"')]
    assert parser.feed(": 3") == [AnswerEvent("content", ": 3")]


@pytest.mark.parametrize(
    ("schema", "value", "fit"),
    [
        ({}, {"a": 1}, True), ({"type": "object"}, [], False), (None, {}, True), (None, [], False),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 3.0}, True),
        ({"properties": {"a": {"type": "integer"}}}, {"a": True}, False),
        ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": None}, True),
        ({"properties": {"a": {"enum": [1, "x"]}}}, {"a": True}, False),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]}}},
         {"a": ["x"]}, False),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": 2}}}, {"a": 3}, False),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, {"a": 3}, True),
        ({"properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}, {"a": "b"}, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, {"b": 3}, False),
        ({"properties": {"a": {}}, "patternProperties": {"x": {}}}, {"b": 3}, True),
        ({"$ref": "#"}, {}, False), ({"properties": 3, "required": 4, "type": 5, "enum": 6, "anyOf": 7}, {}, True),
    ],
)  # fmt: skip
def test_a_value_fits_or_does_not(schema: Any, value: Any, fit: bool) -> None:
    """Expressions are not matched: their time has no bound. A circle of references allows nothing."""
    assert fits(value, schema) is fit


def test_what_takes_too_many_comparisons_does_not_fit() -> None:
    """A list of constants is compared with each value of another list."""
    schema = {"properties": {"a": {"type": "array", "items": {"enum": list(range(1_000))}}}}
    assert fits({"a": [999] * 90}, schema)
    assert not fits({"a": [999] * 1_000_000}, schema)
