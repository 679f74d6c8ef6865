"""The time that an answer takes to read grows with its length, not faster: whatever the text, the template, the pieces.

A test compares the time of a text with that of one four times as long, which is sixteen times as much where it is
quadratic.
"""

import time
from typing import Any

import pytest

from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import AnswerTemplate, compile_template, shipped
from jswa.text.assembler import MARK
from tests.support.nights import sample
from tests.support.text.transcripts import TOOLS, TRANSCRIPTS, read, text_of, tokenizer_of

UNITS = ["\n", " ", "<", '"', "'", "[", "{", "(", "\\", '\\"', "-", "9", "x", ",", "a:", "{}", "[]", '{"a":', "'',",
         "\u2028", "<parameter=a>", "</parameter>", "<parameter=a>x</parameter>\n", "<param", "<|", "``", "f(a=1)\n",
         "f(", MARK, '{"name": "f"}', '"name": "f",', " \n<", "call:f{", "1,", "a=", "\n\n</",
         "<t>", ">", "=", "<parameter=", "\n<function=f>", "```\n", "</tool_call>",
         '{"name": "f", "arguments": {}}\n']  # fmt: skip
# Texts that open a region of calls, by template.
HEADS = {
    "command": MARK + '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": ',
    "function_gemma": MARK + "<start_function_call>call:f{a:",
    "gemma3": "```tool_code\n[f(a=",
    "gemma4": MARK + "<|tool_call>call:f{a:" + MARK + '<|"|>',
    "glm": MARK + "<tool_call>f" + MARK + "<arg_key>a" + MARK + "</arg_key>" + MARK + "<arg_value>",
    "harmony": MARK + "<|channel|>commentary to=functions.f" + MARK + "<|message|>",
    "hermes": MARK + '<tool_call>\n{"name": "f", "arguments": ',
    "llama4": '{"name": "f", "parameters": ',
    "mistral": MARK + "[TOOL_CALLS]f" + MARK + "[ARGS]",
    "olmo3": "<function_calls>f(a=",
    "qwen_xml": MARK + "<tool_call>\n<function=f>\n<parameter=a>",
}


def given(*, opening: str, closing: str = "</t>", **content: Any) -> dict[str, Any]:
    """Return a template of a checkpoint."""
    calls = {"open_pattern": opening, "close_pattern": closing, "repeats": True, **content}
    calls.setdefault("transform", {"function": {"name": "f", "arguments": "{content}"}})
    return {"start_anchor": "<a>", "fields": {"tool_calls": calls, "content": {}}}


GIVEN = {
    "space": given(opening=r"\s*<t>\s*", closing=r"\s*</t>\s*|(?=\s*<t>)"),
    "nested": given(opening=r"(?:\s*\s*)+<t>", closing=r"(?:x+x+)+</t>"),
    "lazy": given(opening=r"<t>.*?>", closing=r".*?</t>"),
    "greedy": given(opening=r"<t>(?:.*>)?", closing=r"<(?:/t>)?|x(?:.*</t>)?"),
    "ahead": given(opening=r"(?=\s*<)", closing=r"(?=\s*<)"),
    "ends": given(opening=r"<t>|x+\Z|\A\s+", closing=r"\s*$"),
    "tags": given(opening="<t>", content="xml-inline",
                  content_args={"tag_pattern": r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</\w+>", "merge_duplicates": True}),
    "tags2": given(opening="<t>", content="xml-inline",
                   content_args={"tag_pattern": r"(?P<key>\s*)<(?P<value>(?:.*<)?)", "value_parser": {"name": "json"}}),
    "lines": given(opening="<t>", content="kv-lines",
                   content_args={"line_sep": ",", "value_parser": {"name": "kv-lines"}}),
    "int": given(opening="<t>", content="int"),
    "quotes": given(opening="<t>", content="json", content_args={"string_delims": [["<", ">"], ["'", "'"]]}),
    "python": given(opening="<t>", content="pythonic"),
}  # fmt: skip


def template_of(name: str) -> AnswerTemplate:
    """Return a shipped template, or a given one."""
    special = [text for one in TRANSCRIPTS if one.family == name for text in one.special]
    return compile_template(GIVEN.get(name) or shipped()[name], tokenizer_of(tuple(dict.fromkeys(special))))


def text_of_length(head: str, unit: str, length: int) -> list[str]:
    """Return a text in pieces of about four characters; a mark begins no piece's second half."""
    size = max(4 // len(unit), 1)
    return [head] * bool(head) + [unit * size] * (length // (size * len(unit)))


def seconds(template: AnswerTemplate, pieces: list[str]) -> float:
    """Return the time of this thread that reading takes."""
    parser = AnswerParser(template, "", TOOLS)
    begin = time.thread_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return time.thread_time() - begin


def grows(template: AnswerTemplate, head: str, unit: str, *, whole: bool) -> float:
    """Return how much longer a text takes that is four times as long: the least of several tries."""
    texts = [text_of_length(head, unit, length) for length in (1500, 6000)]
    short, long = (["".join(text)] if whole else text for text in texts)
    least = float("inf")
    for _ in range(8):
        least = min(least, seconds(template, long) / seconds(template, short))
        if least < 7:
            break
    return least


@pytest.mark.parametrize("part", sample("0123", 4))
@pytest.mark.parametrize("name", [*shipped(), *GIVEN])
def test_four_times_the_text_takes_about_four_times_the_time(name: str, part: str) -> None:
    template = template_of(name)
    for head in ("", HEADS.get(name, "<t>")):
        for unit in UNITS[int(part) :: 4]:
            for whole in (False, True):
                assert grows(template, head, unit, whole=whole) < 10, (head, unit, whole)


def test_delimiters_that_are_too_ambiguous_lose_no_text() -> None:
    """What closes the region is known at the text's end only, again and again: from some place on, all is content."""
    fields = {"thinking": {"open": "<t>", "close_pattern": "x(?:.*</t>)?", "repeats": True, "join": ""}, "content": {}}
    template = compile_template({"start_anchor": "<a>", "fields": fields}, tokenizer_of(()))
    text = "<t>" + "axb<t>" * 5000
    events = read(AnswerParser(template), [text])
    assert read(AnswerParser(template), [text[at : at + 4] for at in range(0, len(text), 4)]) == events
    content, reasoning = text_of(events, "content"), text_of(events, "reasoning")
    assert content.count("<t>") > 100
    assert reasoning.count("a") > 5
    assert [(content + reasoning).count(letter) for letter in "ab"] == [5000, 5000]


@pytest.mark.parametrize("size", [1, 4, 1 << 20])
def test_so_many_regions_are_cut_and_the_rest_is_content(size: int) -> None:
    """Each region costs something, so there is a limit; it is the same however the text is cut."""
    template = compile_template(
        {
            "start_anchor": "<a>",
            "fields": {"thinking": {"open": "<t>", "close": "</t>", "repeats": True}, "content": {}},
        },
        tokenizer_of(()),
    )
    text = "<t>a</t>b" * 1_500
    events = read(AnswerParser(template), [text[at : at + size] for at in range(0, len(text), size)])
    assert text_of(events, "reasoning") == "a" * 1_024
    assert text_of(events, "content") == "b" * 1_024 + "<t>a</t>b" * 476


@pytest.mark.parametrize(
    "field",
    [{"opening": "(a+"}, {"opening": r"(x)\1"}, {"opening": "[ab]*a[ab]{20}"}, {"opening": "t", "closing": "x**"}],
)
def test_a_template_whose_delimiters_no_automaton_finds_is_refused(field: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="pattern"):
        compile_template(given(**field), tokenizer_of(()))


def test_a_prompt_is_searched_once_for_the_begin_of_the_answer() -> None:
    """It is the client's. What is too ambiguous to be found in it is not found."""
    spec = {"start_anchor_pattern": "x(?:.*y)?", "fields": {"content": {}}}
    template = compile_template(spec, tokenizer_of(()))
    assert template.prefix("abxcdxe") == "e"
    assert template.prefix("x" * 50_000) != ""
