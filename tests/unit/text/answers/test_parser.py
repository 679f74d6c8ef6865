"""Answers of all families: the same events wherever the text is cut, and text that is no answer is not lost."""

import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from jswa.errors import ConfigError
from jswa.text.answers.parser import AnswerParser, reasoning_behind
from jswa.text.answers.template import compile_template, find_template
from jswa.text.assembler import MARK
from jswa.types import AnswerEvent
from tests.support.text.transcripts import (
    TRANSCRIPTS,
    Transcript,
    calls_of,
    merged,
    pieces_of,
    read,
    template_of,
    text_of,
    tokenizer_of,
)

NAMES = [f"{index}-{one.family}" for index, one in enumerate(TRANSCRIPTS)]
# But in families whose calls, or lenient forms of them, have no tokens.
SPELLED = [
    one
    for one in TRANSCRIPTS
    if one.family not in ("gemma3", "llama4") and not re.search("<function_calls>|<function=", one.text)
]
BY_NAME = pytest.mark.parametrize("one", TRANSCRIPTS, ids=NAMES)


def pieces(one: Transcript) -> list[str]:
    """Return the marked text of a transcript, a piece for each token."""
    tokenizer = tokenizer_of(one.special)
    ids = tokenizer.encode(one.text, add_special_tokens=False).tolist()
    return list(pieces_of(tokenizer, template_of(one.family, tokenizer), ids))


def parser_of(one: Transcript, *, tools: bool = True, parallel: bool = True) -> AnswerParser:
    """Return a parser behind the transcript's prompt."""
    template = template_of(one.family, tokenizer_of(one.special))
    return AnswerParser(template, template.prefix(one.prompt), one.tools if tools else (), parallel=parallel)


@BY_NAME
def test_an_answer_is_read(one: Transcript) -> None:
    """Reasoning, content and calls are those that the family means."""
    events = read(parser_of(one), pieces(one))
    assert (text_of(events, "content"), text_of(events, "reasoning"), calls_of(events)) == (
        one.content, one.reasoning, one.calls,
    )  # fmt: skip


@BY_NAME
def test_the_events_do_not_depend_on_the_cuts(one: Transcript) -> None:
    """A text in one piece, in characters, in tokens, and cut once at every place gives the same events."""
    tokens = pieces(one)
    expected = read(parser_of(one), tokens)
    units = [unit for piece in tokens for unit in re.findall(f"{MARK}.+|[^{MARK}]", piece, re.DOTALL)]
    assert read(parser_of(one), units) == expected
    for at in range(len(units) + 1):
        assert read(parser_of(one), ["".join(units[:at]), "".join(units[at:])]) == expected


@BY_NAME
def test_a_cut_answer_is_a_beginning_of_the_whole_one(one: Transcript) -> None:
    """An answer that ends anywhere never raises; what it has of each text is a beginning, or a call that was cut."""
    tokens = pieces(one)
    whole = read(parser_of(one), tokens)
    for end in range(len(tokens)):
        events = read(parser_of(one), tokens[:end])
        assert text_of(whole, "reasoning").startswith(text_of(events, "reasoning").rstrip())
        cut = calls_of(events)
        assert [name for name, _ in cut] == [name for name, _ in calls_of(whole)][: len(cut)]
        for (_, arguments), (_, full) in zip(cut[:-1], calls_of(whole), strict=False):
            assert arguments == full


@pytest.mark.parametrize("one", SPELLED, ids=[f"{i}-{one.family}" for i, one in enumerate(SPELLED)])
def test_a_delimiter_spelled_with_ordinary_tokens_is_text(one: Transcript) -> None:
    """Only the tokens themselves delimit: a model may write about `<|channel|>`."""
    tokenizer = tokenizer_of(one.special)
    ids = [token for character in one.text for token in tokenizer.encode(character, add_special_tokens=False).tolist()]
    template = template_of(one.family, tokenizer)
    prompt = re.sub(r"(<think>|<\|channel>).*", "", one.prompt, flags=re.DOTALL)
    events = read(AnswerParser(template, template.prefix(prompt), one.tools), list(pieces_of(tokenizer, template, ids)))
    assert [event.kind for event in events] == ["content"]
    assert events[0].text.strip() == one.text.strip()


@BY_NAME
def test_calls_are_content_without_tools(one: Transcript) -> None:
    """A request without tools gets no calls."""
    events = read(parser_of(one, tools=False), pieces(one))
    assert not [event for event in events if event.kind not in ("content", "reasoning")]
    for name, _ in one.calls:
        assert one.family in ("harmony", "gemma4", "function_gemma", "mistral", "qwen_xml") or name in text_of(
            events, "content"
        )


def test_only_one_call_if_calls_are_not_parallel() -> None:
    """The answer is done at the end of its first call."""
    one = next(one for one in TRANSCRIPTS if len(one.calls) == 2)
    parser = parser_of(one, parallel=False)
    events: list[AnswerEvent] = []
    for piece in pieces(one):
        assert not parser.done
        events += parser.feed(piece)
        if parser.done:
            break
    assert calls_of(merged(events)) == one.calls[:1]


BROKEN = [
    ("hermes", "<tool_call>{broken</tool_call>", (), "<tool_call>{broken</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": </tool_call>', (("f", '{"a": '),), ""),
    ("hermes", '<tool_call>{"name": 7}</tool_call>ok', (), '<tool_call>{"name": 7}</tool_call>ok'),
    ("hermes", '<tool_call>{"name": "f"}}</tool_call>', (("f", "{}"),), ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', (("f", '{"a": 1}'),), ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', (("f", "{}"),), ""),
    ("hermes", '<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>', (("f", '{"name": "x"}'),), ""),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', (("f", '{"a": 1}'),), ""),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}</tool_call>',
        (("f", '{"a": 1}'),),
        "",
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f", "arguments": {}}</tool_call>',
        (("f", '{"a": 1}'),),
        "",
    ),
    ("gemma4", "<|tool_call>call:f{a:oops<tool_call|>", (("f", '{"a": "oops"}'),), ""),
    ("gemma4", "<|tool_call>call:f{a:oops", (("f", '{"a": "oops'),), ""),
    ("gemma4", "<|tool_call>call:f{oops}<tool_call|> x", (), "call:f{oops} x"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>not json<|call|>", (("f", "not json"),), ""),
    ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", (("f", "{}"),), ""),
    ("harmony", "Hello<|end|>", (), "Hello"),
    ("olmo3", "<function_calls>get weather</function_calls>", (), "<function_calls>get weather</function_calls>"),
    ("olmo3", "<function_calls>f(1)</function_calls>", (), "<function_calls>f(1)</function_calls>"),
    ("command", "<|START_ACTION|>nothing<|END_ACTION|>", (), "nothing"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{oops", (("f", "{oops"),), ""),
    ("qwen_xml", "<tool_call>\n<function=f>\nx</function></tool_call>", (("f", "{}"),), "\nx"),
]


@pytest.mark.parametrize(("family", "text", "calls", "content"), BROKEN)
def test_a_broken_call_is_not_lost(family: str, text: str, calls: tuple[tuple[str, str], ...], content: str) -> None:
    """Arguments that are not JSON are passed on as they are; what is no call is content."""
    one = next(one for one in TRANSCRIPTS if one.family == family)
    tokenizer = tokenizer_of(one.special)
    template = template_of(family, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    events = read(
        AnswerParser(template, template.prefix(one.prompt), one.tools), list(pieces_of(tokenizer, template, ids))
    )
    assert (calls_of(events), text_of(events, "content")) == (calls, content)


@given(st.data())
def test_any_text_is_read_without_an_error(data: st.DataObject) -> None:
    """Delimiters in any order with any text between give events, the same ones whatever the cuts."""
    one = data.draw(st.sampled_from(TRANSCRIPTS))
    words = (
        *one.special,
        "{",
        "}",
        '"name": ',
        '"f"',
        "\\",
        "call:f",
        "commentary",
        " to=functions.f",
        "f(a=1)",
        "\n",
        "[",
        "é",
    )
    units = data.draw(st.lists(st.sampled_from(words), max_size=12))
    tokenizer = tokenizer_of(one.special)
    template = template_of(one.family, tokenizer)
    ids = tokenizer.encode("".join(units), add_special_tokens=False).tolist()
    tokens = list(pieces_of(tokenizer, template, ids)) if ids else []
    events = read(AnswerParser(template, template.prefix(one.prompt), one.tools), tokens)
    assert read(AnswerParser(template, template.prefix(one.prompt), one.tools), ["".join(tokens)]) == events
    calls_of(events)


def test_text_of_the_prompt_is_not_repeated() -> None:
    """A message that goes on gives its new text only, and white space at the end of the prompt stays there."""
    one = next(one for one in TRANSCRIPTS if one.family == "hermes")
    template = template_of("hermes", tokenizer_of(one.special))
    events = read(AnswerParser(template, template.prefix(one.prompt + "It is "), one.tools), ["42"])
    assert events == [AnswerEvent("content", "42")]


FOREIGN = {  # as a checkpoint may bring it: fields are stripped unless they say otherwise
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "repeats": True, "join": "; "},
        "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                       "transform": {"function": {"name": "{content.fn}", "arguments": "{content.args}"}}},
        "content": {"close": "<|im_end|>"},
    },
}  # fmt: skip


@given(st.lists(st.sampled_from(["a", " ", "\n", "b c", " d\n\n"]), max_size=9), st.integers(0, 2))
def test_a_checkpoints_own_template_is_read_as_transformers_reads_it(words: list[str], calls: int) -> None:
    """Fields are stripped, as they stream; several are joined."""
    call = '<tool_call>{"fn": "f", "args": {"x": 1}}</tool_call>'
    text = "".join(["<think>", *words, "</think>", *words[:4], call * calls, "<think> x </think>\n"])
    tokenizer = tokenizer_of(("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"))
    template = compile_template(FOREIGN, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    events = read(AnswerParser(template, "", [{"name": "f"}]), list(pieces_of(tokenizer, template, ids)))
    found = parse_response(text, FOREIGN, prefix="")
    assert text_of(events, "reasoning") == found["thinking"]
    assert (
        calls_of(events)
        == (("f", '{"x": 1}'),) * calls
        == tuple(
            (one["function"]["name"], json.dumps(one["function"]["arguments"])) for one in found.get("tool_calls", ())
        )
    )


def test_a_template_is_found_by_its_name_by_its_file_or_not_at_all(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"))
    (file := tmp_path / "own.json").write_text(json.dumps(FOREIGN))
    for wanted, fields in (
        ("hermes", {"content", "tool_calls", "reasoning_content"}),
        (str(file), {*FOREIGN["fields"]}),
    ):
        found = find_template(tmp_path, tokenizer, "", wanted)
        assert found is not None
        assert {name for name, field in found.fields.items() if not field.guarded} == fields
    assert find_template(tmp_path, tokenizer, "", "none") is None
    assert find_template(tmp_path, tokenizer, "a template of no known family") is None
    with pytest.raises(ConfigError, match="response_template"):
        find_template(tmp_path, tokenizer, "", str(tmp_path / "absent.json"))


def test_without_a_template_all_text_is_content() -> None:
    """So an answer has one form for its readers, whatever the model."""
    assert read(AnswerParser(None), ["a", " b"]) == [AnswerEvent("content", "a b")]


def kinds(events: Sequence[AnswerEvent]) -> list[str]:
    """Return the kinds of events."""
    return [event.kind for event in events]


def test_arguments_stream_where_the_syntax_is_json() -> None:
    """The name comes first, then the arguments as they are written."""
    one = next(one for one in TRANSCRIPTS if one.family == "hermes")
    parser = parser_of(one)
    seen = [parser.feed(piece) for piece in pieces(one)]
    streamed = [event.text for events in seen for event in events if event.kind == "arguments" and event.call == 0]
    assert len(streamed) > 10
    assert all(len(text) < 3 for text in streamed)
    assert kinds([event for events in seen for event in events]).index("call") > 0


def kept(parser: AnswerParser) -> int:
    """Return the characters that the search for delimiters holds."""
    return len(vars(vars(parser)["_cutter"])["_search"].rest)


@pytest.mark.parametrize("one", [next(t for t in TRANSCRIPTS if t.family == name) for name in ("harmony", "gemma4")])
def test_a_long_answer_is_not_kept(one: Transcript) -> None:
    """Reading a token takes as long at the end of an answer as at its begin."""
    tokenizer = tokenizer_of(one.special)
    template = template_of(one.family, tokenizer)
    ids = tokenizer.encode(one.text, add_special_tokens=False).tolist()
    pieces = list(pieces_of(tokenizer, template, ids))
    parser = AnswerParser(template, one.prompt, one.tools)
    at = next(index for index, piece in enumerate(pieces) if piece == one.reasoning[0])
    long = "word " * 4000
    events = read(parser, [*pieces[: at + 1], *([long[:5]] * 4000)])
    assert kept(parser) == 0
    assert text_of(events, "reasoning") == one.reasoning[0] + long
    events = read(AnswerParser(template, one.prompt, one.tools), [*pieces[:at], *([long[:5]] * 4000), *pieces[at:]])
    assert text_of(events, "reasoning") == long + one.reasoning
    assert (text_of(events, "content"), calls_of(events)) == (one.content, one.calls)


def test_long_arguments_are_kept_until_they_are_read() -> None:
    """gemma-4's calls are read at their end."""
    one = next(t for t in TRANSCRIPTS if t.family == "gemma4")
    long = "word " * 1000
    ids = tokenizer_of(one.special).encode(one.text.replace("Os{", long), add_special_tokens=False).tolist()
    template = template_of(one.family, tokenizer_of(one.special))
    events = read(AnswerParser(template, "", one.tools), list(pieces_of(tokenizer_of(one.special), template, ids)))
    assert calls_of(events)[0] == ("get_weather", one.calls[0][1].replace("Os{", long))


def test_python_calls_are_not_kept_twice() -> None:
    """Calls that are read at their end are kept by their reader only."""
    one = next(t for t in TRANSCRIPTS if t.family == "olmo3")
    tokenizer = tokenizer_of(one.special)
    template = template_of(one.family, tokenizer)
    text = "<function_calls>f(a='" + "word " * 1000 + "')</function_calls>"
    pieces = list(pieces_of(tokenizer, template, tokenizer.encode(text, add_special_tokens=False).tolist()))
    parser, most, events = AnswerParser(template, "", one.tools), 0, list[AnswerEvent]()
    for piece in pieces:
        events += parser.feed(piece)
        most = max(most, kept(parser))
    assert most < 20
    assert calls_of(merged([*events, *parser.finish()])) == (("f", json.dumps({"a": "word " * 1000})),)


HERMES = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
GEMMA = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")


@pytest.mark.parametrize(
    ("family", "special", "prompt", "state"),
    [
        ("hermes", HERMES, "<|im_start|>assistant\n", "may"),
        ("hermes", HERMES, "<|im_start|>assistant\n<think>\n", "open"),
        ("hermes", HERMES, "<|im_start|>assistant\n<think>", "open"),
        ("hermes", HERMES, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "done"),
        ("harmony", HARMONY, "<|start|>user<|message|>hi<|end|><|start|>assistant", "may"),
        ("harmony", HARMONY, "<|start|>assistant<|channel|>analysis<|message|>", "open"),
        ("gemma4", GEMMA, "<|turn>model\n", "may"),
        ("gemma4", GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", "done"),
        ("llama4", (), "hello", "may"),
    ],
)
def test_a_prompt_tells_whether_the_answer_reasons(
    family: str, special: tuple[str, ...], prompt: str, state: str
) -> None:
    template = template_of(family, tokenizer_of(special))
    assert reasoning_behind(template, template.prefix(prompt)) == state
    assert reasoning_behind(None, "") == "may"


def test_a_reference_to_the_type_of_an_argument_is_followed() -> None:
    """Tags have text, which is cast to the type."""
    place = {"type": "object", "properties": {"x": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/p"}}, "$defs": {"p": place}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    template = template_of("qwen_xml", tokenizer_of(("<tool_call>", "</tool_call>")))
    text = '<tool_call>\n<function=f>\n<parameter=at>\n{"x": 3}\n</parameter>\n</function>\n</tool_call>'
    parser = AnswerParser(template, "", [tool])
    assert calls_of(
        read(parser, [text.replace("<tool_call>", f"{MARK}<tool_call>").replace("</tool_", f"{MARK}</tool_")])
    )[0] == ("f", '{"at": {"x": 3}}')


@BY_NAME
def test_a_template_goes_to_other_processes(one: Transcript) -> None:
    """Front ends of a server get it pickled, and read the same."""
    template = template_of(one.family, tokenizer_of(one.special))
    sent = pickle.loads(pickle.dumps(template))  # noqa: S301 - its own bytes
    assert sent.writes == template.writes
    assert read(AnswerParser(sent), pieces(one)) == read(AnswerParser(template), pieces(one))
