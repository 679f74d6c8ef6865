"""Answers of all families that are made to have calls or content of a form: what is written is read again."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from jswa.grammar.compiler import Grammars
from jswa.grammar.forms import AnswerFamily, ToolError, forced_calls, shaped_content, strict_calls
from jswa.grammar.matching.llg import Matcher
from jswa.grammar.schema import SchemaError
from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import AnswerTemplate, compile_template, shipped
from jswa.text.tokenizer import Tokenizer
from jswa.types import StructuredOutputsParams
from tests.support.text.grammar import allowed_by, follow
from tests.support.text.transcripts import TRANSCRIPTS, calls_of, pieces_of, read, template_of, text_of, tokenizer_of

PLACE = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "note": {"type": ["string", "null"]}},
    "required": ["x"],
    "additionalProperties": False,
}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"enum": ["c", "f"]},
        "exact": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "at": {"$ref": "#/$defs/place"},
        "code": {"type": "string", "minLength": 1, "maxLength": 4},
    },
    "required": ["city", "names"],
    "$defs": {"place": PLACE},
}
WEATHER = {"name": "get_weather", "parameters": ARGUMENTS}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
ENDS = ("<|return|>", "<|call|>", "<turn|>", "<end_of_turn>", "<|im_end|>", "[|endofturn|]", "<|eot|>")
# Tokens of each family; those of hermes' last transcript lack the ones of calls.
SPECIAL = {one.family: one.special for one in reversed(TRANSCRIPTS)} | {"olmo3": ("<|im_end|>", "<think>", "</think>")}
WATCHED = ("glm", "harmony", "gemma4", "function_gemma", "hermes", "qwen_xml", "mistral", "command")
REASONS = ("glm", "harmony", "gemma4", "hermes", "qwen_xml", "olmo3", "mistral", "command")
CLOSERS = ["\n</parameter>\n", "</think>", '"}', "\n</function>\n</tool_call>"]


class Model:
    """Tokenizer, template and grammars of a family."""

    def __init__(self, name: str, special: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer_of(special)
        self.template: AnswerTemplate = template_of(name, self.tokenizer)
        ends = [token for text in ENDS if (token := self.tokenizer.backend.token_to_id(text)) is not None]
        self.grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size, ends, self.template.delimiters)
        vocabulary = self.grammars.vocabulary
        self.family = AnswerFamily(self.template.writes, vocabulary.special, frozenset(vocabulary.end_ids))

    def matcher(self, text: str) -> Matcher:
        return self.grammars.add(text).matcher()

    def write(self, text: str, seed: int) -> list[int]:
        """Return the tokens of a random answer that follows a grammar."""
        ids = follow(self.matcher(text), self.tokenizer, random.Random(seed), closers=CLOSERS, most=2_000)
        matcher = self.matcher(text)
        assert matcher.accept(ids)
        assert matcher.finished or set(allowed_by(matcher)) & set(self.grammars.vocabulary.end_ids)
        return ids

    def answer(self, ids: list[int], *, prefix: str = "", tools: Sequence[Any] = TOOLS) -> tuple[Any, str, str]:
        """Return calls, content and reasoning of an answer."""
        parser = AnswerParser(self.template, prefix, tools)
        events = read(parser, list(pieces_of(self.tokenizer, self.template, ids)))
        return calls_of(events), text_of(events, "content"), text_of(events, "reasoning")


@pytest.fixture(scope="module", params=sorted(SPECIAL))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Model:
    return Model(name, SPECIAL[name])


def check_calls(calls: tuple[tuple[str, str], ...]) -> None:
    for name, arguments in calls:
        schema = {"get_weather": ARGUMENTS, "get_time": TIME["parameters"]}[name]
        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))


def test_all_families_are_known(name: str) -> None:
    assert sorted(SPECIAL) == sorted(shipped())
    assert shipped()[name]["writes"]["calls"]


@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_read_as_calls(model: Model, parallel: bool) -> None:
    text = forced_calls(model.family, [WEATHER, TIME], "may", parallel=parallel)
    numbers = set()
    for seed in range(5):
        calls, content, _ = model.answer(model.write(text, seed))
        check_calls(calls)
        assert content.strip() == ""
        numbers.add(len(calls))
    assert min(numbers) >= 1
    assert parallel or numbers == {1}


def test_a_named_tool_is_the_only_one(model: Model) -> None:
    text = forced_calls(model.family, [TIME], "done", parallel=False)
    for seed in range(2):
        calls, _, reasoning = model.answer(model.write(text, seed))
        assert calls == (("get_time", "{}"),)
        assert reasoning == ""


def test_strict_tools_leave_the_choice(name: str, model: Model) -> None:
    if name not in WATCHED:
        with pytest.raises(SchemaError, match="begin with no token"):
            strict_calls(model.family, [WEATHER, TIME], "may", parallel=True)
        return
    text = strict_calls(model.family, [WEATHER, TIME], "may", parallel=True)
    called = 0
    for seed in range(6):
        calls, _, _ = model.answer(model.write(text, seed))
        check_calls(calls)
        called += bool(calls)
    assert 0 < called < 6


def test_content_of_a_form_is_read_as_content(model: Model) -> None:
    text = shaped_content(model.family, StructuredOutputsParams(json=ARGUMENTS), "may")
    for seed in range(4):
        _, content, _ = model.answer(model.write(text, seed), tools=())
        jsonschema.Draft202012Validator(ARGUMENTS).validate(json.loads(content))


@pytest.mark.parametrize("spec", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes" | "no"'}])
def test_other_forms_of_content(model: Model, spec: dict[str, Any]) -> None:
    text = shaped_content(model.family, StructuredOutputsParams(**spec), "may")
    assert {model.answer(model.write(text, seed), tools=())[1] for seed in range(8)} == {"yes", "no"}


def test_reasoning_is_part_of_the_grammar(name: str, model: Model) -> None:
    """It may come, or is over, or goes on: then it has to end first."""
    spec = StructuredOutputsParams(choice=["yes"])
    told = {
        model.answer(model.write(shaped_content(model.family, spec, "may"), seed), tools=())[2] for seed in range(12)
    }
    assert (len(told) > 1) == (name in REASONS)
    if name not in REASONS:
        return
    begin = model.template.writes.reasoning.begin  # type: ignore[union-attr]
    ids = model.write(shaped_content(model.family, spec, "open"), 1)
    whole = model.tokenizer.encode(begin, add_special_tokens=False).tolist() + ids
    _, content, _ = model.answer(whole, tools=())
    assert content == "yes"


def test_the_families_own_calls_are_allowed(name: str, model: Model) -> None:
    """What models of the family have written, if they have the order of the schema."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "get_weather", "parameters": city}]
    grammar = forced_calls(model.family, tools, "may", parallel=True)
    typical = {
        "harmony": "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}',
        "gemma4": '<|channel>thought\nSo.\n<channel|><|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>',
        "function_gemma": "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
        "gemma3": '[get_weather(city="Oslo")]',
        "glm": "<think>So.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        "hermes": '<think>\nSo.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}'
        "\n</tool_call>",
        "qwen_xml": "<think>\nSo.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"
        "</parameter>\n</function>\n</tool_call>",
        "olmo3": '<function_calls>get_weather(city="Oslo")</function_calls>',
        "mistral": '[THINK]So.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        "llama4": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "command": '<|START_THINKING|>So.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
        '"get_weather", "parameters": {"city": "Oslo"}}\n]<|END_ACTION|>',
    }[name]
    matcher = model.matcher(grammar)
    assert matcher.accept(model.tokenizer.encode(typical, add_special_tokens=False).tolist()), matcher.error
    assert matcher.finished or set(allowed_by(matcher)) & set(model.grammars.vocabulary.end_ids)


@pytest.mark.parametrize(
    ("parameters", "pointer"),
    [
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "/properties/a/format"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}]}}}, "/properties/a/oneOf"),
        ({"properties": {"a": {"enum": ['<|"|>']}}}, "/properties/a/enum"),
        ({"properties": {"a": {"$ref": "https://x"}}}, "/properties/a/$ref"),
        (
            {"properties": {"a": {"type": "object", "required": ["b"], "properties": {"c": {}}}}},
            "/properties/a/required",
        ),
    ],
)
def test_a_tool_that_cannot_be_written_is_named(parameters: dict[str, Any], pointer: str) -> None:
    model = Model("gemma4", SPECIAL["gemma4"])
    with pytest.raises(ToolError) as found:
        forced_calls(model.family, [TIME, {"name": "f", "parameters": parameters}], "may", parallel=True)
    assert (found.value.index, found.value.pointer) == (1, pointer)


def test_a_name_that_is_no_pythons_is_refused() -> None:
    model = Model("gemma3", SPECIAL["gemma3"])
    with pytest.raises(ToolError, match="cannot be written"):
        forced_calls(model.family, [{"name": "get-time"}], "may", parallel=True)


def test_a_template_of_ones_own_tells_by_its_delimiters() -> None:
    """Or says it, or forced calls are refused."""
    tokenizer: Tokenizer = tokenizer_of(("<call>", "</call>", "<end>"))
    call: dict[str, Any] = {
        "open": "<call>",
        "close": "</call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    base: dict[str, Any] = {"version": 1, "start_anchor": "A", "fields": {"tool_calls": call, "content": {}}}
    writes = compile_template(base, tokenizer).writes
    assert writes.calls is not None
    assert writes.calls.text == '<call>{"name": "{name}", "arguments": {arguments}}</call>'
    pattern = {**base, "fields": {"tool_calls": {**call, "open_pattern": "<call>"}, "content": {}}}
    del pattern["fields"]["tool_calls"]["open"]
    unknown = compile_template(pattern, tokenizer).writes
    with pytest.raises(SchemaError, match="does not say how calls are written"):
        forced_calls(AnswerFamily(unknown, {}, frozenset()), [TIME], "may", parallel=True)
    wrongs: list[Any] = [
        {"calls": {"text": "x"}},
        {"talk": {}},
        {"calls": {"text": "{arguments}", "values": "yaml"}},
        1,
    ]
    for wrong in wrongs:
        with pytest.raises((ValueError, TypeError), match="writes"):
            compile_template({**base, "writes": wrong}, tokenizer)


def test_constants_and_any_values_in_python() -> None:
    model = Model("gemma3", SPECIAL["gemma3"])
    schema: dict[str, Any] = {
        "properties": {"a": {"enum": ["x'\"", None, True, [1, {"k": "v"}]]}, "b": {}},
        "required": ["a", "b"],
    }
    tool = {"name": "get_time", "parameters": schema}
    text = forced_calls(model.family, [tool], "may", parallel=False)
    for seed in range(12):
        ((_, arguments),), _, _ = model.answer(model.write(text, seed), tools=[{"function": tool}])
        assert json.loads(arguments)["a"] in schema["properties"]["a"]["enum"]
    assert re.search("False|True|None", text)
