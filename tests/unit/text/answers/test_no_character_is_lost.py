"""Any text is an answer: each of its words is read once, in content, reasoning or a call, whatever the pieces."""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import AnswerTemplate, shipped
from jswa.text.assembler import MARK
from jswa.types import AnswerEvent, StructuredOutputsParams
from tests.support.text.transcripts import TRANSCRIPTS, calls_of, read, template_of, text_of, tokenizer_of

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
SYNTAX = ("{", "}", "[", "]", '"', "'", ":", ",", "=", "(", ")", "\\", "\n", " ", "\n\n", "```", "```json\n",
          '{"name": "f", "arguments": {"a": "', '"}}', '"name": "f"', '"arguments": ', "call:f{", "a:", "f(a='", "')",
          "[f(", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<tool_call>", "</tool_call>",
          "<|python_start|>", "commentary to=functions.f", "json", "final", "analysis", "thought\n", "<function_calls>",
          "</function_calls>", "é", "\u2028")  # fmt: skip
WORD = re.compile(r"w\d+w")
FORMS = (None, StructuredOutputsParams(json_object=True))


def template_for(family: str) -> tuple[AnswerTemplate, tuple[str, ...]]:
    """Return the template of a family, and the marks of all its transcripts."""
    special = {mark: None for one in TRANSCRIPTS if one.family == family for mark in one.special}
    return template_of(family, tokenizer_of(tuple(special))), tuple(special)


@st.composite
def answers(draw: st.DrawFn, family: str) -> list[str]:
    """Draw the pieces of an answer, each a token's: marks of the family, syntax of all, and words that come once."""
    _, marks = template_for(family)
    choices = st.sampled_from([*(MARK + mark for mark in marks), *marks, *SYNTAX, "w"])
    return [f"w{index}w" if piece == "w" else piece for index, piece in enumerate(draw(st.lists(choices, max_size=30)))]


def parsed(family: str, pieces: Sequence[str], tools: bool, form: StructuredOutputsParams | None) -> list[AnswerEvent]:
    """Return the events of an answer."""
    template, _ = template_for(family)
    return read(AnswerParser(template, "", TOOLS if tools else (), form=form), pieces)


@pytest.mark.parametrize("family", sorted(shipped()))
def test_each_word_is_read_once(family: str) -> None:
    @given(answers(family), st.booleans(), st.sampled_from(FORMS))
    @example([MARK + "<tool_call>", "w0w", "{", "w1w", MARK + "</tool_call>"], True, None)
    def holds(pieces: list[str], tools: bool, form: StructuredOutputsParams | None) -> None:
        events = parsed(family, pieces, tools, form)
        shown = "".join(event.text for event in events)
        assert sorted(WORD.findall(shown)) == sorted(WORD.findall("".join(pieces)))
        assert MARK not in shown
        shown.encode()
        assert parsed(family, ["".join(pieces)], tools, form) == events

    holds()


@pytest.mark.parametrize("family", sorted({*shipped()} - {"harmony", "command"}))  # whose content has headers
def test_an_answer_without_calls_is_its_text(family: str) -> None:
    """All of it, white space too, but for special tokens and delimiters of reasoning."""
    template, marks = template_for(family)
    special = {template.delimiters[token] for token in template.delimiters.keys() & template.hidden}
    kept = [mark for mark in marks if "think" not in mark.lower() and "channel" not in mark]

    @given(st.data())
    def holds(data: st.DataObject) -> None:
        choices = st.sampled_from([*(MARK + mark for mark in kept), *SYNTAX, "w"])
        pieces = data.draw(st.lists(choices, max_size=20))
        events = parsed(family, pieces, True, None)
        if calls_of(events):
            return
        said = "".join("" if one[1:] in special and one[0] == MARK else one.removeprefix(MARK) for one in pieces)
        ends = {"<end_of_turn>", "<turn|>", "<|eot|>", "<|eom|>"}
        assert text_of(events, "content") == said or ends & set(marks)

    holds()


CODE = "    if x:\n        return '</tool_call>'\n\n"
WRITTEN = [
    ("hermes", f'{MARK}<tool_call>\n{{"name": "f", "arguments": {{"a": {json.dumps(CODE)}, "b": 1.10}}}}\n'
     f"{MARK}</tool_call>", {"a": CODE, "b": 1.1}),
    ("gemma4", f'{MARK}<|tool_call>call:f{{a:{MARK}<|"|>{CODE}{MARK}<|"|>,b:9007199254740993}}{MARK}<tool_call|>',
     {"a": CODE, "b": 9007199254740993}),
    ("qwen_xml", f"{MARK}<tool_call>\n<function=f>\n<parameter=a>\n{CODE}\n</parameter>\n<parameter=b>\n[1]\n"
     f"</parameter>\n</function>\n{MARK}</tool_call>", {"a": CODE, "b": "[1]"}),
    ("glm", f"{MARK}<tool_call>f{MARK}<arg_key>a{MARK}</arg_key>\n{MARK}<arg_value>{CODE}{MARK}</arg_value>\n"
     f"{MARK}</tool_call>", {"a": CODE}),
    ("olmo3", f"{MARK}<function_calls>f(a={json.dumps(CODE)}, b=None){MARK}</function_calls>", {"a": CODE, "b": None}),
    ("function_gemma", f"{MARK}<start_function_call>call:f{{a:{MARK}<escape>{CODE}{MARK}<escape>}}"
     f"{MARK}<end_function_call>", {"a": CODE}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "arguments"), WRITTEN, ids=[one[0] for one in WRITTEN])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_values_are_as_they_were_written(family: str, text: str, arguments: dict[str, object], size: int) -> None:
    """White space, delimiters in strings, digits of numbers; text around a call is content."""
    units = re.findall(f"{MARK}<[^>]*>|[^{MARK}]", f"Before.{text}", re.DOTALL)
    pieces = ["".join(units[at : at + size]) for at in range(0, len(units), size)]
    events = parsed(family, pieces, True, None)
    ((name, written),) = calls_of(events)
    assert (name, json.loads(written), text_of(events, "content")) == ("f", arguments, "Before.")
