"""The forms of calls: the same pieces whatever the cuts, no text lost, and odd texts read without harm."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jswa.text.answers.forms.casts import Casts
from jswa.text.answers.forms.contents import field_reader, value_reader
from jswa.text.answers.forms.objects import ObjectsReader
from jswa.text.answers.forms.pieces import Piece
from jswa.text.answers.forms.pythonic import python_calls
from jswa.text.answers.parser import AnswerParser
from jswa.text.answers.template import compile_template
from jswa.text.assembler import MARK
from tests.support.text.transcripts import TOOLS, calls_of, read, template_of, tokenizer_of

PARTS = ["{", "}", "[", "]", '"', "\\", ":", ",", " ", "x", '"name"', '"name": "f"', '"arguments": ', "{}",
         '{"name": "f"}', "'", '"parameters": {"a": 1}', '"name": "\\ud83d"', "null", "\n", '"a,b"',
         "[1, 2]", "{:}"]  # fmt: skip


def short(value: object) -> str:
    """Return the name of a case."""
    return repr(value)[:40]


def objects(texts: Sequence[str]) -> list[Piece]:
    """Return what a reader of objects tells of a region in some pieces, with neighbours of one kind joined."""
    reader, found = ObjectsReader(("name",), "arguments", "<"), list[Piece]()
    for one in [piece for text in texts for piece in reader.feed(text)] + list(reader.finish(">")):
        if found and one[0] == found[-1][0] and one[0] in ("content", "arguments"):
            found[-1] = one[0], found[-1][1] + one[1]
        else:
            found.append(one)
    return found


@given(st.lists(st.sampled_from(PARTS), max_size=12))
@example(['{"name": "f", "arguments": ', "{}", "{}", "''"])
def test_objects_are_read_the_same_whatever_the_cuts(parts: list[str]) -> None:
    text = "".join(parts)
    found = objects([text])
    assert objects(parts) == found
    assert objects(list(text)) == found
    if all(kind == "content" for kind, _ in found):
        assert "".join(shown for _, shown in found) == f"<{text}>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("f(a=" + "9" * 60_000 + ", b=2e721, c=-0x1F, d=1_0, e=.5)",
         [("f", '{"a": ' + "9" * 60_000 + ', "b": 2e721, "c": -31, "d": 10, "e": 0.5}')]),
        ("[send(from='me'), g.h()]", [("send", '{"from": "me"}'), ("g.h", "{}")]),
        ("f(a='x' \"y\\n\", b=r'\\d', c='''t''')\ng(d={'k': [1, (2,), (3)], 4: null})  # both",
         [("f", '{"a": "xy\\n", "b": "\\\\d", "c": "t"}'), ("g", '{"d": {"k": [1, [2], 3], "4": null}}')]),
        ("f(a=" + "[" * 99 + "]" * 99 + ")", [("f", '{"a": ' + "[" * 99 + "]" * 99 + "}")]),
        ("f(**{'a=b': 1}, c=2)", [("f", '{"a=b": 1, "c": 2}')]),
        *((text, None) for text in (
            "f(1)", "f(a=x)", "f(a=1) g()", "f(a=1, a=2)", "f(a='x)", "f(a={1, 2})", "f(a={[1]: 2})",
            "f(a=" + "[" * 60_000,
            "f(a=" + "-" * 60_000 + "1)", "f(a=1j)", "f(a=b'x')", "f(a=1)\n,", "f", "", "f(a=1e999999, b=1_0e999)",
            "f(a=" + "[" * 200 + "]" * 200 + ")", "f(**{[]: 1})", "f(a=1, **{'a': 2})", "f(a='\\U00110000')")),
    ],
    ids=short,
)  # fmt: skip
def test_calls_in_python_are_read_as_they_are_written(text: str, calls: list[tuple[str, str]] | None) -> None:
    """Numbers stay as they are written, names may be words of Python, and what is nested too deeply is no call."""
    assert python_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{user-id:<q>u<q>,Basic LLM:{$ref:1}}", {"user-id": "u", "Basic LLM": {"$ref": 1}}),
        ('{ a : 1 , "b:c" : <q>{"x": }<q> }', {"a": 1, "b:c": '{"x": }'}),
        ("{a:<q>never ends", "{a:<q>never ends"),
        ('{a:"never ends', {"a": '"never ends'}),
        ("[" * 60_000, "[" * 60_000),
        ("9" * 60_000, "9" * 60_000),
    ],
    ids=short,
)
def test_json_with_bare_keys(text: str, value: Any) -> None:
    """What is no such JSON, nested too deeply, or a number of too many digits stays text."""
    assert value_reader("json", {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]})(text) == value


def test_values_of_other_kinds() -> None:
    tags = {"tag_pattern": r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</\w+>", "value_parser": {"name": "int"}}
    assert value_reader("xml-inline", tags)("<a> 1 </a>x<b>2</b><a>3</a>") == {"a": 3, "b": 2}
    assert value_reader("xml-inline", {**tags, "merge_duplicates": True})("<a>1</a><b>2</b><a>3</a>") == {
        "a": [1, 3],
        "b": 2,
    }
    assert value_reader("kv-lines", {})(" a : 1\n\nb:2:3\nc") == {"a": "1", "b": "2:3"}
    assert value_reader("bool", {})(" True ") is True
    whole = field_reader({"content": "text", "transform": {"name": "{name}", "all": ["{content}", "x"]}})
    assert whole(" y ", {"name": "f"}) == {"name": "f", "all": ["y", "x"]}


def test_each_object_of_a_list_is_transformed_and_nothing_else() -> None:
    each = field_reader({"content": "json", "transform": {"name": "{fn}"}, "transform_each": True})
    assert each('[{"fn": "f"}, {"fn": "g"}]', {}) == [{"name": "f"}, {"name": "g"}]
    for text in ('[{"fn": "f"}, 2]', '{"fn": "f"}', "[[]]"):
        with pytest.raises(ValueError, match="no list of objects"):
            each(text, {})


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("json", {"string_delims": [["", "x"]]}), ("json", {"string_delims": [[1, "x"]]}),
        ("json", {"string_delims": [["x", 1]]}),
        ("xml-inline", {}),
        ("xml-inline", {"tag_pattern": r"(a)\1"}), ("xml-inline", {"tag_pattern": 7}), ("kv-lines", {"line_sep": ""}),
        ("kv-lines", {"kv_sep": 5}), ("kv-lines", {"value_parser": {"name": "no such"}}), ("no such", {}),
        ("kv-lines", {"value_parser": 5}),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_content_are_refused(kind: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        value_reader(kind, arguments)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3.0", 3), ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"nullable": True}, "null", None),
        ({"type": ["boolean", "null"]}, " None ", None), ({"type": "number"}, "1e999", "1e999"),
        ({"anyOf": [{"type": "array"}, {"type": "number"}]}, "2.50", 2.5),
        ({"type": ["integer", "boolean"]}, "true", True), ({"type": ["object", "null"]}, "null", None),
        ({"$ref": "#/$defs/a"}, '{"x": 1}', {"x": 1}), ({"type": "object"}, "[" * 60_000, "[" * 60_000),
        ({"anyOf": 5, "type": 7, "oneOf": {"type": "null"}}, "null", "null"),
    ],
    ids=short,
)  # fmt: skip
def test_arguments_that_are_texts_are_cast(schema: dict[str, Any], text: str, value: Any) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"a": {"type": "object"}}}
    casts = Casts([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    cast = casts.cast([{"function": {"name": "f", "arguments": {"a": text, "b": "1"}}}])
    assert cast == [{"function": {"name": "f", "arguments": {"a": value, "b": "1"}}}]


def test_half_a_surrogate_pair_reaches_no_client() -> None:
    """It cannot be encoded: arguments have it escaped, as JSON can."""
    qwen = template_of("qwen_xml", tokenizer_of(()))
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "object"}}}}}]
    text = '<tool_call><function=f><parameter=a>{"x": "\\ud83d"}</parameter></function></tool_call>'
    events = read(AnswerParser(qwen, "", tools), [text])
    assert calls_of(events) == (("f", '{"a": {"x": "\\ud83d"}}'),)
    gemma = template_of("gemma4", tokenizer_of(("<|tool_call>", "<tool_call|>", '<|"|>')))
    events = read(AnswerParser(gemma, "", TOOLS), [f'{MARK}<|tool_call>call:f{{a:{MARK}<|"|>x'])
    json.dumps(calls_of(events), ensure_ascii=False).encode()
    text = r"""<function_calls>f(a="\ud800é\udc00", b={"\U0000d800": 1})</function_calls>"""
    events = read(AnswerParser(template_of("olmo3", tokenizer_of(())), "", TOOLS), [text])
    assert calls_of(events) == (("f", r"""{"a": "\ud800é\udc00", "b": {"\ud800": 1}}"""),)


def test_a_name_that_an_opening_delimiter_has_is_free_of_marks() -> None:
    calls = {
        "open_pattern": "<t>(?P<name>[^>]+)!",
        "close": "<q>",
        "content": "json",
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    template = compile_template({"start_anchor": "<a>", "fields": {"tool_calls": calls}}, tokenizer_of(("<q>",)))
    assert calls_of(read(AnswerParser(template, "", TOOLS), [f"<t>f{MARK}<q!{{}}{MARK}<q>"])) == (("f<q", "{}"),)


def test_a_call_that_the_prompt_has_is_not_counted() -> None:
    """The first call that the model writes is the first that the client sees."""
    hermes = template_of("hermes", tokenizer_of(("<tool_call>", "</tool_call>")))
    call = f'{MARK}<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}{MARK}</tool_call>'
    assert calls_of(read(AnswerParser(hermes, call, TOOLS), [call])) == (("f", '{"a": 1}'),)
    cut = call.index("1}")
    assert calls_of(read(AnswerParser(hermes, call + call[:cut], TOOLS), [call[cut:]])) == (("f", "1}"),)


def test_templates_with_too_much_are_refused() -> None:
    fields = {f"f{index}": {"open": f"<{index}>"} for index in range(40)}
    with pytest.raises(ValueError, match="fields"):
        compile_template({"start_anchor": "<a>", "fields": fields}, tokenizer_of(()))
    with pytest.raises(ValueError, match="open must have"):
        compile_template({"start_anchor": "<a>", "fields": {"f": {"open": "x" * 300}}}, tokenizer_of(()))
