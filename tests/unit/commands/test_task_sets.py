"""Task sets: reading them, refusing malformed ones by name, and scoring answers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jswa.commands.task_sets import FOLDER, Item, is_correct, parse_json, read_set, read_sets, same, satisfies
from jswa.errors import TaskSetError

GOOD: dict[str, Any] = {"task": "t", "distance": 32, "prompt": "What?", "answer": "7", "score": "exact"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {
    "task": "t", "distance": None, "tools": [TOOL], "messages": [{"role": "user", "content": "Hi"}], "score": "call",
    "answer": '{"name": "f", "arguments": {"a": 1}}',
}  # fmt: skip
JSON: dict[str, Any] = {**GOOD, "score": "json", "answer": "", "schema": {"type": "object"}}


def written(folder: Path, *lines: object, name: str = "t") -> Path:
    """Write a set of these lines, objects or raw text."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_all_kinds_of_lines_are_read(tmp_path: Path) -> None:
    """Blank lines between them are skipped but counted."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    chat = {"task": "t", "distance": None, "messages": messages, "answer": "Mia", "score": "exact"}
    first, second, third, fourth = read_set(written(tmp_path, GOOD, "  ", chat, JSON, CALL))
    assert first == Item("t", 32, "What?", (), "7", "exact", {}, 1)
    assert (second.prompt, second.messages, second.distance, second.line) == (None, messages, None, 3)
    assert third.schema == {"type": "object"}
    assert fourth.tools == [TOOL]


def test_the_shipped_sets_are_well_formed() -> None:
    """All can be read; a fact to remember is inside the window of 64 tokens, or 2, 8 or 32 windows away."""
    sets = read_sets(FOLDER)
    assert {"passkey", "kv", "chat", "arithmetic", "copy", "json", "stories"} <= set(sets)
    for name in ("passkey", "kv", "chat"):
        assert {item.distance for item in sets[name]} == {32, 128, 512, 2048}
    for item in (item for items in sets.values() for item in items):
        assert item.score == "bits" or is_correct(item, item.answer + "\n" * (item.score == "exact"))


def test_tasks_select_sets_and_the_limit_counts_per_distance(tmp_path: Path) -> None:
    """The limit applies to each task and distance on its own."""
    for name in ("a", "b"):
        written(tmp_path, *({**GOOD, "task": name, "distance": d} for d in (1, 1, 1, 2, None)), name=name)
    assert list(read_sets(tmp_path)) == ["a", "b"]
    cut = read_sets(tmp_path, ["b"], 2)
    assert [item.distance for item in cut["b"]] == [1, 1, 2, None]
    with pytest.raises(TaskSetError, match=r"tasks = 'c': must be one of a, b"):
        read_sets(tmp_path, ["c"])
    with pytest.raises(TaskSetError, match="must be a folder with task sets"):
        read_sets(tmp_path / "none")


DEEP = json.loads("[" * 200 + "]" * 200)
BAD: list[tuple[object, str]] = [
    ("{", "line"),
    ("[1]", "line"),
    ('{"task": "t", "task": "t"}', "line"),
    ("[" * 100_000, "line"),
    ('{"x": ' + "9" * 10_000 + "}", "line"),
    ({**GOOD, "task": "u"}, "task"),
    ({**GOOD, "more": 1}, "more"),
    ({**GOOD, "score": "good"}, "score"),
    ({**GOOD, "score": ["exact"]}, "score"),
    ({**GOOD, "distance": -1}, "distance"),
    ({**GOOD, "distance": True}, "distance"),
    ({**GOOD, "distance": 1.0}, "distance"),
    ({**GOOD, "distance": 2**31}, "distance"),
    ({k: v for k, v in GOOD.items() if k != "distance"}, "distance"),
    ({**GOOD, "prompt": ""}, "prompt"),
    ({**GOOD, "prompt": 3}, "prompt"),
    ({**GOOD, "prompt": "\ud800"}, "prompt"),
    ({**GOOD, "messages": []}, "prompt"),
    ({k: v for k, v in GOOD.items() if k != "prompt"}, "prompt"),
    ({**GOOD, "answer": " 7"}, "answer"),
    ({**GOOD, "answer": "7\n8"}, "answer"),
    ({**GOOD, "answer": ""}, "answer"),
    ({**GOOD, "answer": 7}, "answer"),
    ({**GOOD, "answer": DEEP}, "answer"),
    ({**GOOD, "schema": {}}, "schema"),
    ({**GOOD, "score": "bits"}, "answer"),
    ({**JSON, "answer": "{"}, "answer"),
    ({**JSON, "answer": "NaN"}, "answer"),
    ({**JSON, "answer": "[" * 33 + "]" * 33}, "answer"),
    ({**JSON, "answer": "[" * 100_000}, "answer"),
    ({k: v for k, v in JSON.items() if k != "schema"}, "schema"),
    ({**JSON, "schema": []}, "schema"),
    ({**JSON, "schema": {"type": "set"}}, "schema.type"),
    ({**JSON, "schema": {"type": ["object"]}}, "schema.type"),
    ({**JSON, "schema": {"minimum": 3}}, "schema.minimum"),
    ({**JSON, "schema": {"required": "a"}}, "schema.required"),
    ({**JSON, "schema": {"enum": []}}, "schema.enum"),
    ({**JSON, "schema": {"additionalProperties": {}}}, "schema.additionalProperties"),
    ({**JSON, "schema": {"properties": {"a": {"properties": {"b": 3}}}}}, "schema.properties.a.properties.b"),
    ({**JSON, "schema": {"enum": [DEEP]}}, "schema"),
    ({**GOOD, "tools": [TOOL]}, "tools"),
    ({**CALL, "tools": []}, "tools"),
    ({**CALL, "tools": [TOOL, {"name": "f"}]}, "tools"),
    ({**CALL, "tools": [{"function": {"name": "\ud800"}}]}, "tools"),
    ({**CALL, "tools": DEEP}, "tools"),
    ({k: v for k, v in CALL.items() if k != "tools"}, "tools"),
    ({**CALL, "answer": "f(a=1)"}, "answer"),
    ({**CALL, "answer": '{"name": "f"}'}, "answer"),
    ({**CALL, "answer": "[]"}, "answer"),
    ({**CALL, "schema": {}}, "schema"),
    ({k: v for k, v in CALL.items() if k != "messages"} | {"prompt": "Hi"}, "prompt"),
]
MESSAGES: list[object] = ["x", [], ["x"], [{"role": "user"}], [{"role": "user", "content": 3}], [{**GOOD}]]


@pytest.mark.parametrize(("line", "field"), BAD)
def test_a_malformed_line_is_refused_by_file_line_and_field(line: object, field: str, tmp_path: Path) -> None:
    """Also if the line is too deep or too long to print."""
    path = written(tmp_path, JSON if isinstance(line, dict) and line.get("score") == "json" else GOOD, line)
    with pytest.raises(TaskSetError) as caught:
        read_set(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 2, field)
    assert str(caught.value).startswith(f"{path}, line 2: {field} = ")
    assert len(str(caught.value)) < len(str(path)) + 500


@pytest.mark.parametrize("messages", MESSAGES)
def test_malformed_messages_are_refused(messages: object, tmp_path: Path) -> None:
    """Messages must be objects with two strings."""
    line = {k: v for k, v in GOOD.items() if k != "prompt"} | {"messages": messages}
    with pytest.raises(TaskSetError, match="line 1: messages = "):
        read_set(written(tmp_path, line))


def test_files_that_are_not_sets_are_refused(tmp_path: Path) -> None:
    """A file that is empty, absent, a folder, a pipe, not UTF-8, or that mixes bits with other scores."""
    with pytest.raises(TaskSetError, match="items = 0"):
        read_set(written(tmp_path, " "))
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\n")
    for name in ("absent", "folder", "pipe", "bytes"):
        with pytest.raises(TaskSetError, match=name):
            read_set(tmp_path / f"{name}.jsonl")
    with pytest.raises(TaskSetError, match="line 2: score = 'bits'"):
        read_set(written(tmp_path, GOOD, {**GOOD, "score": "bits", "answer": ""}))


def item(score: Any, answer: str, schema: dict[str, Any] | None = None) -> Item:
    """An item with this score and answer."""
    return Item("t", None, "What?", (), answer, score, schema or {}, 1)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("7", True), ("  7\nand more", True), ("\n\n7 \r\n", True), ("7 ", True), ("77", False), ("7.", False),
        ("it is 7", False), ("", False), ("\n", False),
    ],
)  # fmt: skip
def test_exact_compares_the_first_line(text: str, right: bool) -> None:
    """White space around the line is ignored; everything else counts."""
    assert is_correct(item("exact", "7"), text) == right


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "size": {"enum": ["small", "big", 1]}, "in": {"required": ["x"]}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"age": 3}', True), (' {"age": 3.0, "size": 1.0}\n', True), ('{"age": 3, "in": {"x": null}}', True),
        ('{"age": 3} and', False), ('{"age": 3', False), ('{"age": 3.5}', False), ('{"age": true}', False),
        ('{"age": "3"}', False), ('{"size": "big"}', False), ('{"age": 3, "size": true}', False),
        ('{"age": 3, "more": 1}', False), ('{"age": 3, "in": {}}', False), ("[]", False), ("", False),
        ('{"age": NaN}', False), ("[" * 100_000, False), ('{"age": ' + "9" * 5_000 + "}", False),
    ],
)  # fmt: skip
def test_json_must_be_the_whole_text_and_satisfy_the_schema(text: str, right: bool) -> None:
    """Any text is correct or not; none raises an exception."""
    assert is_correct(item("json", "", SCHEMA), text) == right


def test_json_is_compared_with_the_answer_by_value() -> None:
    """The order of keys and white space do not matter."""
    asked = item("json", '{"a": [1, {"b": null}], "c": false}')
    assert is_correct(asked, '{"c":false,"a":[1.0,{"b":null}]}')
    assert not is_correct(asked, '{"c":0,"a":[1.0,{"b":null}]}')
    assert not is_correct(asked, '{"c":false,"a":[1]}')


def test_a_call_is_compared_by_value() -> None:
    """There is one, or none if the answer is empty."""
    asked, none = item("call", '{"name": "f", "arguments": {"a": 1}}'), item("call", "")
    assert is_correct(asked, '{"arguments": {"a": 1.0}, "name": "f"}')
    for text in ('{"name": "g", "arguments": {"a": 1}}', '[{"name": "f", "arguments": {"a": 1}}]', '{"name": "f"', ""):
        assert not is_correct(asked, text)
        assert is_correct(none, text) == (text == "")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("object", [{}]), ("array", [[]]), ("string", [""]), ("number", [1, 1.5]), ("integer", [1, 2.0]),
        ("boolean", [True]), ("null", [None]),
    ],
)  # fmt: skip
def test_a_type_accepts_its_own_values_only(kind: str, values: list[Any]) -> None:
    """For example, true is not a number."""
    for value in [{}, [], "", 1, 1.5, 2.0, True, None]:
        expected = any(type(one) is type(value) for one in values) and (kind != "integer" or value != 1.5)
        assert satisfies(value, {"type": kind}) == (expected or (kind == "number" and type(value) in (int, float)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values)
def test_same_is_an_equivalence_of_json_values(one: Any, other: Any) -> None:
    """It survives writing and reading, and holds if the texts with sorted keys are equal."""
    again = parse_json(json.dumps(one))
    assert same(one, again)
    assert same(again, one)
    assert same(one, other) == same(other, one)
    if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        assert same(one, other)
